"""``drafter/README.md``: what a drafter is for, what it accepts, how to serve it, where it comes from."""

from __future__ import annotations

import json
from typing import Any

from drafters.target import EMBEDDED

COUNTING = (
    "tau is the number of tokens committed a target pass, the bonus token included, pooled over rounds; the "
    "token of the prefill is neither a round nor part of it. Survival at k is the share of rounds in which "
    "drafts 1 to k were all accepted. Intervals: bootstrap over conversations. Answers that leave the "
    "target's own greedy path are cut there."
)


def card(target: str, report: dict[str, Any], facts: dict[str, Any]) -> str:
    """The card of a drafter of ``target=``, from its report and what stands under ``foredraft``."""
    parts = [
        f"# A {report['method']} drafter for {target}",
        _acceptance(report),
        serving(target, report, facts["vllm"]),
        _origin(target, facts),
        "## Licence\n\nFill in before you publish:\n\n- of these weights:\n- of the target, and whether it "
        "allows this use of its outputs:\n- of the training prompts:",
    ]
    return "\n\n".join(parts) + "\n"


def _acceptance(report: dict[str, Any]) -> str:
    lines = [
        "## Acceptance",
        "",
        f"Held-out answers of the target, temperature {report['temperature']}, N = {report['max_n']}, target "
        f"in {report['dtype']}, {report['off_path']} answers off its path.",
        "",
        "| domain | prompts | tau | 95 % interval | survival by position |",
        "|---|---|---|---|---|",
    ]
    for name, row in [*report["domains"].items(), ("overall", report["overall"])]:
        low, high = row["tau_ci95"]
        curve = " ".join(f"{x:.3f}" for x in row["survival"])
        lines.append(f"| {name} | {row['prompts']} | {row['tau']:.3f} | {low:.3f} to {high:.3f} | {curve} |")
    return "\n".join([*lines, "", COUNTING])


def serving(target: str, report: dict[str, Any], vllm: dict[str, Any]) -> str:
    """The commands, for here and for vLLM, or why vLLM cannot."""
    lines = ["## Serving", "", "```", f"python -m serve target={target} drafter=DIR prompt_file=question.txt"]
    if vllm["servable"]:
        named = "TARGET" if target == EMBEDDED else target
        speculative = {"method": report["method"], "model": "DIR", "num_speculative_tokens": report["max_n"]}
        lines.append(f"vllm serve {named} --speculative-config '{json.dumps(speculative)}'")
    lines.append("```")
    if not vllm["servable"]:
        lines += ["", f"Not for vLLM: {vllm['why']}."]
    elif target == EMBEDDED:
        lines += ["", "TARGET: the directory that `drafters.target.embedded_directory()` returns."]
    command = f"python -m train task=check target={target} drafter=DIR"
    lines += ["", f"`{command}` says whether it is still as exported."]
    return "\n".join(lines)


def _origin(target: str, facts: dict[str, Any]) -> str:
    data, weights = facts["data"], facts["target"]["weights"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    rows = {
        "target": f"{target}, weights {weights}, tokenizer {facts['target']['tokenizer']}",
        "kept layers": f"outputs of {facts['layer_ids']}, counted from 0",
        "recipe": f"{facts['recipe']}, the weights of step {facts['trained_steps']}",
        "training data": f"{data['file']}: {data['train_rows']} rows, {data['training_tokens']} supervised "
        f"tokens, training context {facts['training_context']}",
        "held out": f"{data['held_out_rows']} answers",
        "data hash": f"{data['key']}, over ids and loss masks of both",
        "versions": versions,
        "commit": facts["commit"],
    }
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    return "\n".join(["## Origin", "", "| | |", "|---|---|", *lines])
