"""The gate: no drafter directory gets its name before it is proven to be the drafter that was trained.

The written directory is read back as ``serve/`` reads it and held beside the trained drafter: settings,
tensors, stored fields, draft logits, served drafts, acceptance. ``train/check.py`` asks the same of a
directory alone, without the trained drafter in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from data.pack import pack
from drafters import checkpoint
from drafters.method import Drafter
from drafters.types import Batch, Example, States
from eval import evidence, replay

ROWS = 2  # held-out answers that drafts and acceptance are compared on
LONGEST = 4096  # tokens of the row that stands for long positions
ROUNDING = 1e-5  # of the largest logit: what the order of additions may change in fp32
FREE = (  # what may be stored otherwise without changing what is computed
    "architectures", "speculators_version", "speculators_config.", "embed_requires_grad",
    "foredraft.version", "foredraft.dtype", "foredraft.vllm.",
)  # fmt: skip


def deliver(drafter: Drafter, out: Path, notes: dict[str, Any], held: Sequence[replay.Path]) -> None:
    """Write a drafter directory that has passed the gate, with evidence of what it is.

    The drafter computes in fp32 afterwards. Errors: ``ValueError``; then there is no directory.
    """
    checkpoint.write(drafter, out, notes, check=lambda written: gate(drafter, written, held))


def gate(drafter: Drafter, written: Path, held: Sequence[replay.Path]) -> None:
    """Refuse a written directory whose drafter is not ``drafter``; record evidence of one that is.

    Errors: ``ValueError`` naming the field, tensor or row, and the size of the difference.
    """
    some = [path for path in held if path.length > 0][:ROWS]
    assert some, "no held-out answer to compare drafts on"
    try:
        again = checkpoint.read(written, drafter.target)
        compare_settings(drafter, again)
        compare_tensors(drafter, written)
        compare_fields(checkpoint.read_config(written), drafter)
        for path in (*some, long_row(held, checkpoint.read_config(written))):
            compare_drafts(drafter, again, path)
        compare_acceptance(drafter, again, some)
        evidence.record(written, again)
    except ValueError as error:
        raise ValueError(f"export refused: {error}") from error


# Settings, tensors, fields ------------------------------------------------------------------------------

SETTINGS = ("layer_ids", "mask_token", "max_drafts", "vocabulary", "temperatures")


def _settings(drafter: Drafter) -> tuple[Any, ...]:
    kept = None if drafter.vocab is None else drafter.vocab.kept_N.tolist()
    return drafter.layer_ids, drafter.mask_token, drafter.max_drafts, kept, drafter.temperatures


def compare_settings(drafter: Drafter, again: Drafter) -> None:
    """What is read back does the same with its tensors."""
    for name, one, other in zip(SETTINGS, _settings(drafter), _settings(again), strict=True):
        if one != other:
            raise ValueError(f"{name} is {one}, read back {other}")


def compare_tensors(drafter: Drafter, written: Path) -> None:
    """The file holds the trained tensors, bit for bit."""
    stored = load_file(written / "model.safetensors")
    for name, value in checkpoint.tensors(drafter).items():
        if value.dtype != stored[name].dtype:
            raise ValueError(f"{name} is {value.dtype}, in the file {stored[name].dtype}")
        if not torch.equal(value, stored[name]):
            size = (value.double() - stored[name].double()).abs().max()
            raise ValueError(f"{name} differs from the trained tensor, by up to {size:.2g}")


def compare_fields(stored: dict[str, Any], drafter: Drafter) -> list[str]:
    """Every stored field against the one that this drafter and this target would be written with.

    Returns the fields that are not stored, which none but our own directories must have all of.
    Errors: ``ValueError`` for the first that contradicts them.
    """
    target, found = drafter.target, checkpoint.flat(stored)
    checkpoint.check_drafts(stored, drafter)
    wanted = {
        key: value
        for key, value in checkpoint.flat(checkpoint.config(drafter, {})).items()
        if not key.startswith(FREE)
    }
    if found.get("target_hidden_size") == target.hidden_size:
        wanted["target_hidden_size"] = target.hidden_size
    for key in sorted(wanted.keys() & found.keys()):
        if found[key] != wanted[key]:
            raise ValueError(f"{key}={found[key]!r}, but this drafter of {target.name} has {wanted[key]!r}")
    _check_notes(stored.get("foredraft", {}), drafter)
    return sorted(wanted.keys() - found.keys())


def _check_notes(own: dict[str, Any], drafter: Drafter) -> None:
    """What stands under ``foredraft`` and is no mirror of the drafter."""
    context = own.get("training_context")
    if context is not None and not (isinstance(context, int) and context > 0):
        raise ValueError(f"foredraft.training_context={context!r}: this is no number of tokens")


# Drafts and acceptance ------------------------------------------------------------------------------------


def compare_drafts(drafter: Drafter, again: Drafter, path: replay.Path) -> None:
    """Draft logits of two drafters, and what the second one serves, at first, middle and last anchor."""
    worst = logit_difference(drafter, again, path)
    if not worst <= ROUNDING:
        raise ValueError(f"draft logits of {path.example.name} differ by {worst:.2g} of the largest")
    worst = serving_difference(drafter, again, path)
    if not worst <= ROUNDING:
        raise ValueError(
            f"drafts served in {path.example.name} are not those of training, whose logits are higher by "
            f"{worst:.2g} of the largest"
        )


def compare_acceptance(drafter: Drafter, again: Drafter, paths: Sequence[replay.Path]) -> None:
    """Acceptance counts of two drafters on the same answers."""
    num = drafter.max_drafts
    both = (replay.score(one, paths, [num]) for one in (drafter, again))
    for path, one, other in zip(paths, *both, strict=True):
        if one != other:
            raise ValueError(
                f"acceptance on {path.example.name}: {one[num].survived} of {one[num].rounds} rounds, "
                f"read back {other[num].survived} of {other[num].rounds}"
            )


def long_row(held: Sequence[replay.Path], stored: dict[str, Any]) -> replay.Path:
    """Held-out answers end to end, up to the training context: long positions without another target pass.

    The states of a joined answer are those it has alone; two drafters that agree, agree on any states.
    """
    longest = min(stored["foredraft"].get("training_context", LONGEST), LONGEST)
    taken: list[replay.Path] = []
    while sum(len(path.example.ids) for path in taken) < longest and len(taken) < len(held):
        taken.append(held[len(taken)])
    batch = pack([path.example for path in taken], [path.states for path in taken])
    ids = batch.tokens_BT[0, :longest].tolist()
    first = min(taken[0].first, len(ids) - 1)
    mask = [False] * first + [True] * (len(ids) - first)
    row = Example(ids, mask, "joined", f"{len(taken)} held-out answers joined to {len(ids)} tokens")
    states: States = batch.states[:, : len(ids)]
    return replace(taken[0], example=row, states=states, first=first, length=len(ids) - first)


def _anchors(drafter: Drafter, path: replay.Path) -> tuple[Batch, Tensor]:
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
