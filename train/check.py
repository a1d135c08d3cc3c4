"""``python -m train task=check``: what the gate asks, of anybody's drafter directory as it lies there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from data.examples import renderer
from drafters import checkpoint, formats
from drafters.files import replace_file
from drafters.method import Drafter
from drafters.target import Target, load
from drafters.types import Example
from eval import evidence, replay
from eval.evaluate import held_out
from eval.rollout import rollout
from serve.tasks import ROUNDING
from train.gate import compare_drafts, compare_fields

if TYPE_CHECKING:
    from recipes.schema import Run

ROWS = 5  # held-out answers that are looked at
DECODED = 32  # tokens of each that are decoded step by step


@dataclass(frozen=True)
class Finding:
    """One check; ``possible`` is false where the directory or the machine leaves nothing to compare with."""

    check: str
    found: str
    possible: bool = True

    def __str__(self) -> str:
        return f"{'passed' if self.possible else 'not possible':14s}{self.check}: {self.found}"


def check(run: Run) -> None:
    """Check ``drafter=`` against ``target=`` on held-out rows of ``data.path``; findings go to ``out=`` too.

    Errors: ``ValueError`` naming what is wrong and, in a directory of ours, what was changed since.
    """
    if run.drafter is None:
        raise ValueError("drafter: name a drafter directory, for example drafter=runs/demo/drafter")
    directory = Path(run.drafter)
    target = load(run.target, checkpoint.hardware_for(directory, run.hardware))
    settings = replace(run.eval, per_domain=run.eval.per_domain or 1, temperature=0.0)
    with TemporaryDirectory() as scratch:  # answers that have to be made first
        render = renderer(run.data, target.tokenizer, target.stop_ids)
        rows = held_out(run.data, target, render, settings, Path(scratch))
    findings = examine(directory, target, rows[:ROWS])
    print("\n".join(map(str, findings)))
    if run.out is not None:
        text = json.dumps([asdict(finding) for finding in findings], indent=2) + "\n"
        replace_file(Path(run.out), text.encode())


def examine(directory: Path, target: Target, rows: Sequence[Example]) -> list[Finding]:
    """Every check, in order. Errors: ``ValueError`` of the first that fails."""
    found = checkpoint.read_config(directory)
    evidence.check_form(found, target.vocab_size)
    try:
        return list(_findings(directory, found, target, rows))
    except ValueError as error:
        changed = evidence.changed(directory, found)
        since = f"; changed since the export: {', '.join(changed)}" if changed else ""
        raise ValueError(f"{error}{since}") from error


def _findings(
    directory: Path, found: dict[str, Any], target: Target, rows: Sequence[Example]
) -> Iterator[Finding]:
    drafter = checkpoint.read(directory, target)
    held = formats.load_tensors(directory)
    dtypes = ", ".join(sorted({str(v.dtype).removeprefix("torch.") for v in drafter.state_dict().values()}))
    yield Finding("tensors", f"{len(held)}, all named, shaped and finite; the drafter computes in {dtypes}")
    missing = []
    if "speculators_model_type" in found:  # a directory of another layout is compared where it is read
        missing = compare_fields(found, drafter)
    yield Finding("fields", "none contradicts the tensors or the target")
    if missing:
        yield Finding("fields that are not stored", ", ".join(missing), possible=False)
    yield from _recorded_drafts(found, drafter)
    _refuse_mask_token(drafter, rows)
    paths = [path for path in replay.paths(target, rows, drafter.layer_ids) if path.length > 1]
    if not paths:
        yield Finding(
            "drafts and acceptance", "the target leaves every answer at once; give others", possible=False
        )
    else:
        for path in paths:
            compare_drafts(drafter, drafter, path)
        yield Finding("drafts", f"served as in training, in {len(paths)} held-out answers")
        yield _decoded(drafter, paths)
    yield from _unchanged(directory, found)


def _recorded_drafts(found: dict[str, Any], drafter: Drafter) -> Iterator[Finding]:
    """The drafts that the export recorded come out again."""
    own = found.get("foredraft", {})
    if "evidence" not in own:
        yield Finding("recorded drafts", "the directory was written without evidence", possible=False)
        return
    dtypes = {own["dtype"], str(drafter.target.dtype).removeprefix("torch.")}
    limit = max(evidence.TOLERANCE[dtype] for dtype in dtypes)
    worst = evidence.difference(own["evidence"]["drafts"], drafter)
    if not worst <= limit:
        raise ValueError(f"drafts recorded at export are not reproduced: their logits differ by {worst:.2g}")
    yield Finding("recorded drafts", f"reproduced to {worst:.1g}")


def _refuse_mask_token(drafter: Drafter, rows: Sequence[Example]) -> None:
    token = drafter.mask_token
    for row in rows:
        first = row.mask.index(True)
        if token in row.ids[first:]:
            raise ValueError(f"mask_token_id={token}: the answer of {row.name} holds it, so it marks no gap")


def _decoded(drafter: Drafter, paths: Sequence[replay.Path]) -> Finding:
    """Rounds of replay and of decoding step by step: the same in fp32, but where the target's choices tie."""
    num, target, equal = drafter.max_drafts, drafter.target, 0
    for whole in paths:
        path = replace(whole, length=min(whole.length, DECODED))
        end = path.first + path.length
        row = replace(path.example, ids=path.example.ids[:end], mask=path.example.mask[:end])
        (by_n,) = replay.score(drafter, [path], [num])
        ((_, answer, counts),) = rollout(target, drafter, [row], num)
        same = answer.tokens == path.tokens and counts == by_n[num]
        equal += same
        exact = target.dtype == torch.float32 and path.margin is not None and path.margin > ROUNDING
        if exact and not same:
            raise ValueError(
                f"acceptance in {row.name}: decoding step by step makes {counts.rounds} rounds, "
                f"{counts.survived} survive, replay {by_n[num].rounds}, {by_n[num].survived}"
            )
    return Finding("acceptance", f"decoding step by step is as replayed in {equal} of {len(paths)} answers")


def _unchanged(directory: Path, found: dict[str, Any]) -> Iterator[Finding]:
    """The last line: digests of what no check above can tell from the original."""
    if "evidence" not in found.get("foredraft", {}):
        yield Finding("digests", "the directory was written without evidence", possible=False)
        return
    if evidence.changed(directory, found):
        raise ValueError(f"drafter={directory} is not as it was exported")
    yield Finding("digests", "fields and tensors are those of the export")
