"""What a run leaves: the drafter directory, read back and compared before it gets its name; a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from data.pack import pack
from drafters import checkpoint as directory_format
from drafters.files import replace_file
from drafters.method import Drafter
from drafters.target import EMBEDDED
from drafters.types import Batch
from eval import calibrate, replay, report
from eval.evaluate import evaluate
from train import checkpoint
from train.directory import commit, versions
from train.loop import Job, best, evaluating
from train.rows import Loaded

if TYPE_CHECKING:
    from recipes.schema import Run


def export(run: Run, job: Job, loaded: Loaded, progress: checkpoint.Progress) -> None:
    """The best weights as ``drafter/``, read back and compared before it gets that name."""
    drafter = job.drafter
    drafter.load_state_dict(load_file(best(job.directory, progress.best_step)))
    notes = {
        "recipe": run.method.name,
        "trained_steps": progress.best_step,
        "held_out_tau": progress.best_tau,
        "data_key": loaded.data_key,
        "versions": versions(),
        "commit": commit(),
    }
    out = job.directory / "drafter"
    with evaluating(drafter):
        directory_format.write(drafter, out, notes, check=lambda at: gate(drafter, at, loaded, job.held))


def gate(drafter: Drafter, written: Path, loaded: Loaded, held: Sequence[replay.Path]) -> None:
    """Refuse a written directory whose drafter is not the trained one: shape, tensors, logits, drafts.

    Logits at first, middle and last anchors of held-out answers are equal to 1e-5 of the largest in fp32;
    what the drafter serves there, from states that arrive as they do in serving, are its own drafts.
    """
    again = directory_format.read(written, loaded.target)
    for name, one, other in zip(SHAPE, _shape(drafter), _shape(again), strict=True):
        if one != other:
            raise ValueError(f"export refused: {name} is {one}, after reading {written} back {other}")
    trained, stored = drafter.state_dict(), again.state_dict()
    for name, value in trained.items():
        if not torch.equal(value.cpu(), stored[name].cpu()):
            raise ValueError(
                f"export refused: {name} differs from the trained tensor after reading {written} back"
            )
    for path in held[:2]:
        worst = logit_difference(drafter, again, path)
        if not worst <= 1e-5:
            raise ValueError(
                f"export refused: draft logits of {path.example.name} differ by {worst:.2g} of the largest"
            )
        worst = serving_difference(drafter, again, path)
        if not worst <= 1e-5:
            raise ValueError(
                f"export refused: drafts served in {path.example.name} are not those of training, whose "
                f"logits are higher by {worst:.2g} of the largest"
            )


SHAPE = ("layer_ids", "mask_token", "max_drafts", "vocabulary")


def _shape(drafter: Drafter) -> tuple[Any, ...]:
    kept = None if drafter.vocab is None else drafter.vocab.kept_N.tolist()
    return drafter.layer_ids, drafter.mask_token, drafter.max_drafts, kept


def _anchors(drafter: Drafter, path: replay.Path) -> tuple[Batch, torch.Tensor]:
    """A held-out answer in fp32, and its first, middle and last anchor."""
    device = drafter.target.device
    last = path.first + max(path.length, 1) - 1
    anchors_A = torch.tensor(sorted({path.first, (path.first + last) // 2, last}), device=device)
    return pack([path.example], [path.states]).to(device, torch.float32), anchors_A


@torch.inference_mode()
def logit_difference(one: Drafter, other: Drafter, path: replay.Path) -> float:
    """The largest difference between two drafters' draft logits, as a share of the largest logit."""
    batch, anchors_A = _anchors(one, path)
    logits = [d.float().draft_logits(batch, anchors_A, d.max_drafts) for d in (one, other)]
    return float((logits[0] - logits[1]).abs().max() / logits[0].abs().max())


@torch.inference_mode()
def serving_difference(one: Drafter, other: Drafter, path: replay.Path) -> float:
    """How far the logits, in ``one``, of what ``other`` serves are below those of ``one``'s own drafts.

    A share of the largest logit: 0 where the drafts are the same, rounding where two logits tie.
    """
    batch, anchors_A = _anchors(one, path)
    num = one.max_drafts
    state, done, served = other.begin(1, len(path.example.ids) + num), 0, []
    for anchor in anchors_A.tolist():
        new = slice(done, anchor)
        other.advance(state, range(1), batch.states[:, new], batch.tokens_BT[:, new], [anchor - done])
        served.append(other.propose(state, range(1), batch.tokens_BT[0, [anchor]], num).tokens_BK)
        done = anchor
    served_AK = torch.cat(served)
    if torch.equal(served_AK, one.drafts(batch, anchors_A, num).tokens_BK):
        return 0.0
    logits_AKN = one.draft_logits(batch, anchors_A, num)
    ids_AK = served_AK if one.vocab is None else one.vocab.draft_id_V.to(served_AK.device)[served_AK]
    below_AK = logits_AKN.amax(-1) - logits_AKN.gather(-1, ids_AK[..., None])[..., 0]
    return float(below_AK.max() / logits_AKN.abs().max())


def write_report(run: Run, job: Job, loaded: Loaded) -> None:
    """Acceptance of the exported directory, read back, on all held-out rows; tau goes into its config."""
    drafter = job.directory / "drafter"
    again = directory_format.read(drafter, loaded.target)
    found = evaluate(loaded.target, again, loaded.held, run.eval, run.seed)
    found = {"target": found["target"], "drafter": str(drafter), **found}
    directory_format.note(drafter, tau_by_n=found["overall"]["tau_by_n"])
    replace_file(drafter / "README.md", card(run, found).encode())
    report.write(found, job.directory / "report")
    print(report.table(found))
    if again.has_confidence:
        judged = [path for path in job.held if path.length > 1]
        if len(judged) < 2:
            print("confidences stay uncalibrated: that takes two held-out answers, see train.eval_rows")
        else:
            print(
                calibrate.table(
                    calibrate.keep(again, drafter, judged, job.directory / "report" / calibrate.FILE)
                )
            )
    print(f"report: {job.directory / 'report' / 'report.html'}")


def card(run: Run, found: dict[str, Any]) -> str:
    """README.md of a drafter directory: what it is for, what it accepts, how to serve it."""
    most = found["max_n"]
    lines = [
        f"# A {found['method']} drafter for {run.target}",
        "",
        f"Trained by Foredraft {directory_format.own_version()}. Held-out answers of the target,",
        f"temperature {found['temperature']}, N = {most}:",
        "",
        "| domain | prompts | tau | 95 % interval | survival by position |",
        "|---|---|---|---|---|",
    ]
    for name, row in [*found["domains"].items(), ("overall", found["overall"])]:
        low, high = row["tau_ci95"]
        curve = " ".join(f"{x:.3f}" for x in row["survival"])
        lines.append(f"| {name} | {row['prompts']} | {row['tau']:.3f} | {low:.3f} to {high:.3f} | {curve} |")
    lines += ["", "```", f"python -m serve target={run.target} drafter=DIR prompt_file=question.txt"]
    vllm = directory_format.read_config(Path(found["drafter"]))["foredraft"]["vllm"]
    if vllm["servable"]:
        target = "TARGET" if run.target == EMBEDDED else run.target
        speculative = json.dumps({"method": found["method"], "model": "DIR", "num_speculative_tokens": most})
        lines.append(f"vllm serve {target} --speculative-config '{speculative}'")
    lines.append("```")
    if not vllm["servable"]:
        lines += ["", f"Not for vLLM: {vllm['why']}."]
    elif run.target == EMBEDDED:
        lines += ["", "TARGET: the directory that `drafters.target.embedded_directory()` returns."]
    return "\n".join(lines) + "\n"
