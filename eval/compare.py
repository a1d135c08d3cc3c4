"""Runs side by side on the same conversations: what a change of data or method did to acceptance.

Conversations are paired by what was asked: a difference of two taus is resampled over pairs, so that what
makes a conversation easy for both does not widen its interval. The first run is the one that the others are
compared with. The cost of drafting is measured here, so that one machine timed all runs.
"""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from drafters import checkpoint
from drafters.files import replace_file
from drafters.method import Drafter
from drafters.target import Target
from eval import mix, report
from eval.report import Scored, as_png, html_table, image, interval, page, resampled
from eval.runs import SAME, Compared, common_ns
from serve.costs import pieces

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Cost:
    """Trainable parameters, and seconds at batch 1: of one plain target step, of drafting by N."""

    parameters: int
    target_seconds: float
    seconds_by_n: dict[int, float]


def measure(target: Target, run: Compared, ns: Sequence[int]) -> Cost:
    """What a run's drafter costs on this machine."""
    drafter = checkpoint.read(run.drafter, target)
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    seconds = {n: drafting_seconds(target, drafter, n) for n in ns}
    return Cost(parameters, plain_seconds(target), seconds)


def plain_seconds(target: Target, repeats: int = 9) -> float:
    """Median seconds of a round of plain decoding at batch 1."""
    step, _ = pieces(target, None, 1, repeats + 1)
    return statistics.median([step(1, 1) for _ in range(repeats + 1)][1:])


@torch.inference_mode()
def drafting_seconds(target: Target, drafter: Drafter, n: int, context: int = 128, repeats: int = 5) -> float:
    """Median seconds of proposing n drafts at batch 1, and of taking in one state of the target."""
    tokens_BT = torch.ones(1, context, dtype=torch.long, device=target.device)
    states = target.states(tokens_BT, drafter.layer_ids)
    rows, state = range(1), drafter.begin(1, context + repeats + n + 2)
    drafter.advance(state, rows, states, tokens_BT, [context])
    seconds = []
    for _ in range(repeats + 1):
        begun = perf_counter()
        drafter.propose(state, rows, tokens_BT[:, 0], n).tokens_BK.tolist()
        drafter.advance(state, rows, states[:, :1], tokens_BT[:, :1], [1])
        seconds.append(perf_counter() - begun)
    return statistics.median(seconds[1:])


# Comparing --------------------------------------------------------------------------------------


def build(
    runs: Sequence[Compared], costs: Sequence[Cost], seed: int, traffic: Mapping[str, float]
) -> dict[str, Any]:
    """compare.json: the runs' figures on the conversations, and differences from the first run.

    ``mix`` is ``None`` where all runs drew their rows alike. Errors: ``ValueError`` when no conversation
    made a round in all runs.
    """
    first, ns = runs[0], common_ns(runs)
    keys = [key for key in sorted(first.rows) if all(run.rows[key].by_n[ns[-1]].rounds for run in runs)]
    if not keys:
        raise ValueError(f"runs {', '.join(run.name for run in runs)}: no conversation made a round in all")
    domain_of = {key: first.rows[key].domain for key in keys}
    domains = {name: [key for key in keys if domain_of[key] == name] for name in first.report["domains"]}
    by_domain = {**{name: some for name, some in domains.items() if some}, "overall": keys}
    scored = [
        {
            domain: [replace(run.rows[key], by_n={n: run.rows[key].by_n[n] for n in ns}) for key in some]
            for domain, some in by_domain.items()
        }
        for run in runs
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "target": first.report["target"],
        **{key: first.report[key] for key in SAME},
        "prompts": len(keys),
        "ns": ns,
        "seed": seed,
        "runs": {
            run.name: _figures(run, cost, some, seed)
            for run, cost, some in zip(runs, costs, scored, strict=True)
        },
        "differences": [
            {"run": run.name, "from": first.name, **line}
            for run, some in zip(runs[1:], scored[1:], strict=True)
            for line in _differences(scored[0], some, seed)
        ],
        "notes": [
            note
            for run, some in zip(runs[1:], scored[1:], strict=True)
            for note in _notes(first, run, scored[0]["overall"], some["overall"])
        ],
        "mix": mix.build(runs, scored, traffic, seed) if mix.differ(runs) else None,
    }


def _figures(run: Compared, cost: Cost, scored: Mapping[str, list[Scored]], seed: int) -> dict[str, Any]:
    ns = sorted(cost.seconds_by_n)
    rows = {domain: report.summarise(some, ns[-1], seed) for domain, some in scored.items()}
    return {
        "directory": str(run.directory),
        "method": run.report["method"],
        "dtype": run.report["dtype"],
        "trainable_parameters": cost.parameters,
        **{f"trained_{key}": value for key, value in run.trained.items()},
        "target_step_seconds": round(cost.target_seconds, 6),
        "drafting_seconds": {str(n): round(cost.seconds_by_n[n], 6) for n in ns},
        "drafting_cost": {str(n): round(cost.seconds_by_n[n] / cost.target_seconds, 4) for n in ns},
        "domains": {domain: row for domain, row in rows.items() if domain != "overall"},
        "overall": rows["overall"],
    }


def _differences(
    first: Mapping[str, list[Scored]], other: Mapping[str, list[Scored]], seed: int
) -> Iterator[dict[str, Any]]:
    """Tau of ``other`` less that of ``first``, with 95 % intervals over pairs of conversations."""
    for domain in first:
        for n in sorted(first[domain][0].by_n):
            before, after = ([one.by_n[n] for one in run[domain]] for run in (first, other))
            tau = reduce(add, after).tau - reduce(add, before).tau
            ci95 = interval(resampled(after, seed=seed) - resampled(before, seed=seed))
            yield {"domain": domain, "n": n, "tau": round(tau, 4), "ci95": ci95}


def _notes(
    first: Compared, other: Compared, before: Sequence[Scored], after: Sequence[Scored]
) -> Iterator[str]:
    """What is not alike, though it can be compared."""
    pair = f"{first.name} and {other.name}"
    unit = (
        "supervised_tokens" if all("supervised_tokens" in run.trained for run in (first, other)) else "tokens"
    )
    less, more = sorted(run.trained[unit] for run in (first, other))
    if more > 1.01 * less:
        tokens = f"{first.trained[unit]:,} and {other.trained[unit]:,}"
        yield f"{pair} were trained on {tokens} {unit.replace('_', ' ')}: tau differs by that too"
    if first.report["dtype"] != other.report["dtype"]:
        yield f"{pair} were scored in {first.report['dtype']} and {other.report['dtype']}"
    n = max(before[0].by_n)
    if odd := sum(a.by_n[n].tokens != b.by_n[n].tokens for a, b in zip(before, after, strict=True)):
        yield f"{pair} were scored on answers of different lengths to {odd} of {len(before)} prompts"


# Showing ----------------------------------------------------------------------------------------


def rows_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a run by domain, ``overall`` last."""
    return {**run["domains"], "overall": run["overall"]}


def facts(result: Mapping[str, Any]) -> list[list[object]]:
    """A line a fact, a column a run."""
    runs, most = result["runs"].values(), str(result["ns"][-1])
    return [
        ["method", *(run["method"] for run in runs)],
        ["trainable parameters", *(f"{run['trainable_parameters']:,}" for run in runs)],
        ["training steps", *(f"{run['trained_steps']:,}" for run in runs)],
        ["training tokens", *(f"{run['trained_tokens']:,}" for run in runs)],
        ["training seconds", *(f"{run['trained_seconds']:,}" for run in runs)],
        [f"drafting N={most}, in target steps", *(f"{run['drafting_cost'][most]:.3f}" for run in runs)],
    ]


def taus(result: Mapping[str, Any], ns: Sequence[int]) -> list[list[object]]:
    """A line a domain and N: tau of each run, then each difference from the first with its interval."""
    lines: list[list[object]] = []
    changes = {(line["run"], line["domain"], line["n"]): line for line in result["differences"]}
    first, *others = result["runs"]
    for domain in rows_of(result["runs"][first]):
        for n in ns:
            row: list[object] = [domain, n]
            row += [f"{rows_of(run)[domain]['tau_by_n'][str(n)]:.3f}" for run in result["runs"].values()]
            for name in others:
                change = changes[name, domain, n]
                row.append("{:+.3f} ({:+.3f} to {:+.3f})".format(change["tau"], *change["ci95"]))
            lines.append(row)
    return lines


def _head(result: Mapping[str, Any]) -> list[str]:
    first, *others = result["runs"]
    return ["domain", "N", first, *others, *(f"{name} less {first}" for name in others)]


def table(result: Mapping[str, Any]) -> str:
    """For a terminal: tau at the largest N and what each run cost, in columns."""
    names = list(result["runs"])
    blocks: list[list[Sequence[object]]] = [
        [_head(result), *taus(result, result["ns"][-1:])],
        [["", *names], *facts(result)],
    ]
    lines = [line for block in blocks for line in report.columns(block)]
    lines += [f"note: {note}" for note in result["notes"]]
    if found := result["mix"]:
        for title, block in mix.tables(found):
            lines += ["", title, *report.columns(block)]
        lines += ["", *mix.remarks(found)]
    return "\n".join(lines)


def write(result: Mapping[str, Any], directory: Path) -> None:
    """``compare.json`` and ``compare.html`` (opens offline), each renamed into place."""
    directory.mkdir(parents=True, exist_ok=True)
    survival = [
        [domain, name, *(f"{x:.3f}" for x in rows_of(run)[domain]["survival"])]
        for domain in rows_of(next(iter(result["runs"].values())))
        for name, run in result["runs"].items()
    ]
    most = result["ns"][-1]
    parts = [
        "<h1>Runs side by side</h1>",
        f"<p>{report.READ_AS}\nIntervals of differences hold 95 % of resamples of paired conversations.</p>",
        *(f"<p>Note: {html.escape(note)}.</p>" for note in result["notes"]),
        *(mix.html(result["mix"]) if result["mix"] else []),
        html_table(["", *result["runs"]], facts(result)),
        image(draw(result), "tau over N and survival over position, a column a domain"),
        html_table(_head(result), taus(result, result["ns"])),
        f"<h2>Survival at N = {most}</h2>",
        html_table(["domain", "run", *range(1, most + 1)], survival),
        html_table(
            [], [(k, v) for k, v in result.items() if k not in ("runs", "differences", "notes", "mix")]
        ),
    ]
    replace_file(directory / "compare.json", json.dumps(result, indent=2).encode())
    replace_file(directory / "compare.html", page("Runs side by side", *parts).encode())


def draw(result: Mapping[str, Any]) -> bytes:
    """Tau over N above survival over position, a column a domain, a line a run, as PNG."""
    from matplotlib.figure import Figure

    domains = list(rows_of(next(iter(result["runs"].values()))))
    figure = Figure(figsize=(max(6.0, 2.6 * len(domains)), 5.4), layout="constrained")
    axes = figure.subplots(2, len(domains), squeeze=False, sharey="row")
    for column, domain in enumerate(domains):
        above, below = axes[:, column]
        for name, run in result["runs"].items():
            row = rows_of(run)[domain]
            above.plot(result["ns"], list(row["tau_by_n"].values()), marker="o", label=name)
            below.plot(range(1, len(row["survival"]) + 1), row["survival"], marker="o", label=name)
        above.set(title=domain, xlabel="drafts a round (N)")
        below.set(xlabel="draft position", ylim=(0, 1))
        for each in (above, below):
            each.grid(alpha=0.3)
            each.xaxis.get_major_locator().set_params(integer=True)
    axes[0, 0].set(ylabel="tau")
    axes[1, 0].set(ylabel=f"survival at N = {result['ns'][-1]}")
    lines = axes[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=2, frameon=False)
    return as_png(figure)
