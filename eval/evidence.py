"""What an export records of itself, so that an edited directory is noticed even where it still loads.

Under ``foredraft.evidence`` in config.json stand

- ``drafts``: the likeliest drafts and their logits after token ids drawn from a seed, no user's text: a
  directory can be published. They say whether it still *computes* what was exported.
- ``fields``, ``tensors``: a digest of every field that changes what is computed, and of every tensor. They
  say *which* was changed, and notice what no draft showed.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from data.capture import capture
from data.pack import pack
from drafters import checkpoint
from drafters.method import Drafter
from drafters.types import Batch, Example

SEED = 20_000
LENGTH = 256  # tokens of the row that drafts are recorded on
ANCHORS = 4
# Largest change of a recorded logit, as a share of the largest. The target of another machine adds in
# another order; in bfloat16 its states differ in the third digit.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
# Notes of a run that change after the export, or change nothing in what is computed.
FREE = ("speculators_version", "speculators_config.verifier.", "foredraft.")
OWN = ("foredraft.layer_ids", "foredraft.dtype", "foredraft.training_context", "foredraft.target.")


def record(directory: Path, drafter: Drafter) -> None:
    """Add the evidence to the directory that ``drafter`` was read from; it is fp32 afterwards."""
    held = load_file(directory / "model.safetensors")
    found = checkpoint.read_config(directory)
    checkpoint.note(
        directory,
        evidence={
            "drafts": drafts_of(drafter),
            "fields": {key: digest(value) for key, value in _fields(found).items()},
            "tensors": {name: tensor_digest(value) for name, value in sorted(held.items())},
        },
    )


@torch.inference_mode()
def drafts_of(drafter: Drafter) -> dict[str, Any]:
    """The likeliest drafts, ``[A][K]``, with their logits, and the confidence of each anchor's first.

    Each draft is given the row's own tokens before it, so that a tie of two logits changes one alone.
    """
    batch, anchors_A = _row(drafter)
    num = drafter.max_drafts
    logits_AK, ids_AK = drafter.float().path_logits(batch, anchors_A, num).max(-1)
    out = {"ids": drafter.to_target_ids(ids_AK).tolist(), "logits": logits_AK.tolist()}
    confidence_A = _confidence(drafter, batch, anchors_A)
    return out if confidence_A is None else {**out, "confidence": confidence_A.tolist()}


@torch.inference_mode()
def difference(recorded: dict[str, Any], drafter: Drafter) -> float:
    """How far the drafter's logits of the recorded drafts, and its confidences, are from those recorded.

    A share of the largest logit, or of a confidence of 1. Infinite for another number of drafts, or for
    drafts that it cannot make.
    """
    batch, anchors_A = _row(drafter)
    then_AK = torch.tensor(recorded["logits"], device=anchors_A.device)
    ids_AK = torch.tensor(recorded["ids"], device=anchors_A.device)
    if then_AK.shape != (len(anchors_A), drafter.max_drafts):
        return float("inf")
    if drafter.vocab is not None:
        ids_AK = drafter.vocab.draft_id_V.to(ids_AK.device)[ids_AK]
    if bool((ids_AK < 0).any()):
        return float("inf")
    logits_AKN = drafter.float().path_logits(batch, anchors_A, drafter.max_drafts)
    now_AK = logits_AKN.gather(-1, ids_AK[..., None])[..., 0]
    worst = float((now_AK - then_AK).abs().max() / then_AK.abs().max())
    confidence_A = _confidence(drafter, batch, anchors_A)
    if (confidence_A is None) != ("confidence" not in recorded):
        return float("inf")
    if confidence_A is None:
        return worst
    then_A = torch.tensor(recorded["confidence"], device=anchors_A.device)
    return max(worst, float((confidence_A - then_A).abs().max()))


def check_form(found: dict[str, Any], vocab_size: int) -> None:
    """``ValueError`` naming the part of the record that is not there, or not as an export writes it.

    ``found`` is a config.json, whose target has ``vocab_size`` tokens.
    """
    own = found.get("foredraft", {})
    if "evidence" not in own:
        return
    if own.get("dtype") not in TOLERANCE:
        raise ValueError(f"foredraft.dtype={own.get('dtype')!r}: write one of {', '.join(TOLERANCE)}")
    for part in ("drafts", "fields", "tensors"):
        if not isinstance(own["evidence"].get(part), dict):
            raise ValueError(f"foredraft.evidence.{part}: no object stands there; export the run again")
    drafts = own["evidence"]["drafts"]
    shapes = [_rows(drafts.get(name), kind) for name, kind in (("ids", int), ("logits", float))]
    if None in shapes or shapes[0] != shapes[1]:
        raise ValueError("foredraft.evidence.drafts: ids and logits are no two tables of one shape")
    if not all(0 <= id < vocab_size for row in drafts["ids"] for id in row):
        raise ValueError(f"foredraft.evidence.drafts.ids: not all are between 0 and {vocab_size - 1}")
    if "confidence" in drafts and _rows([drafts["confidence"]], float) is None:
        raise ValueError("foredraft.evidence.drafts.confidence: no list of numbers")


def _rows(table: Any, kind: type) -> tuple[int, int] | None:
    """The shape of a table of numbers, ``None`` where it is none."""
    if not isinstance(table, list) or not table or not all(isinstance(row, list) for row in table):
        return None
    if not all(type(value) is kind for row in table for value in row):
        return None
    (length, *others) = {len(row) for row in table}
    return None if others else (len(table), length)


def changed(directory: Path, found: dict[str, Any]) -> list[str]:
    """Fields and tensors that are not as they were recorded, by name; none without a record."""
    evidence = found.get("foredraft", {}).get("evidence")
    if evidence is None:
        return []
    now = {key: digest(value) for key, value in _fields(found).items()}
    names = _other(evidence["fields"], now)
    try:
        held = load_file(directory / "model.safetensors")
    except (SafetensorError, OSError):
        return [*names, "model.safetensors"]
    return names + _other(evidence["tensors"], {name: tensor_digest(value) for name, value in held.items()})


def tensor_digest(value: Tensor) -> str:
    """Over dtype, shape and bytes."""
    head = f"{value.dtype} {tuple(value.shape)} ".encode()
    return _short(head + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def digest(value: Any) -> str:
    """Over a value of config.json."""
    return _short(json.dumps(value, sort_keys=True).encode())


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _other(then: dict[str, str], now: dict[str, str]) -> list[str]:
    return [key for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)]


def _fields(found: dict[str, Any]) -> dict[str, Any]:
    """Those that change what is computed, by dotted key."""
    return {
        key: value
        for key, value in checkpoint.flat(found).items()
        if key.startswith(OWN) or not key.startswith(FREE)
    }


def _row(drafter: Drafter) -> tuple[Batch, Tensor]:
    """The row in fp32, and anchors from its first quarter to its end."""
    target, num = drafter.target, drafter.max_drafts
    draw = random.Random(SEED)
    length = min(LENGTH, target.config.max_position_embeddings)
    ids = [int(draw.random() * target.vocab_size) for _ in range(length)]
    row = Example(ids, [True] * length, "random", "row of the evidence")
    batch = pack([row], capture(target, [row], drafter.layer_ids, with_last=False))
    last = length - 1 - num  # so that every draft's predecessors are in the row
    anchors_A = torch.tensor(sorted({max(1, last * (at + 1) // ANCHORS) for at in range(ANCHORS)}))
    return batch.to(target.device, torch.float32), anchors_A.to(target.device)


def _confidence(drafter: Drafter, batch: Batch, anchors_A: Tensor) -> Tensor | None:
    """Of each anchor's first draft, uncalibrated: temperatures may be fitted again after the export."""
    known, drafter.temperatures = drafter.temperatures, None
    try:
        confidence_AK = drafter.drafts(batch, anchors_A, drafter.max_drafts).confidence_BK
    finally:
        drafter.temperatures = known
    return None if confidence_AK is None else confidence_AK[:, 0]
