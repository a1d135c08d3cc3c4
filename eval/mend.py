"""A drafter directory that is refused: the one change that makes it readable says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters import checkpoint, formats
from drafters.block import BlockConfig, choose_mask_token
from drafters.method import Drafter, all_methods
from drafters.shape import draft_shape
from drafters.target import Target
from eval import evidence

WEIGHTS = "model.safetensors"
ROPE = ("rope_parameters", "rope_theta", "rope_scaling")  # under their new name, and the old ones


@dataclass(frozen=True)
class Mend:
    """One change to config.json or to the tensors, and the check whose fault it mends."""

    check: str
    found: str
    remedy: str
    config: dict[str, Any]
    tensors: dict[str, Tensor] | None = None  # None: as they are


@dataclass(frozen=True)
class Opened:
    """The drafter of a directory; ``refusal`` is why it cannot be read as it lies, ``mend`` what helped."""

    drafter: Drafter | None
    refusal: str | None = None
    mend: Mend | None = None


def open_drafter(directory: Path, target: Target) -> Opened:
    """Read a directory as it lies, else with one change: one that makes the recorded drafts, or the first."""
    try:
        return Opened(checkpoint.read(directory, target).float())
    except ValueError as error:
        refusal = str(error)
    try:
        found, tensors = checkpoint.read_config(directory), formats.load_tensors(directory)
    except ValueError:
        return Opened(None, refusal)
    recorded = drafts_recorded(found)
    first = None
    for mend in _mends(found, tensors, target):
        drafter = _read(mend, directory, target)
        if drafter is not None and recorded is not None and reproduces(recorded, found, drafter):
            return Opened(drafter, refusal, mend)
        if drafter is not None and first is None:
            first = Opened(drafter, refusal, mend)
    return first or Opened(None, refusal)


def drafts_recorded(found: dict[str, Any]) -> dict[str, Any] | None:
    """The drafts that an export recorded in its config.json, where it did."""
    return found.get("foredraft", {}).get("evidence", {}).get("drafts")


def reproduces(recorded: dict[str, Any], found: dict[str, Any], drafter: Drafter) -> bool:
    """Whether a drafter still makes the drafts that the export recorded."""
    dtypes = {found["foredraft"]["dtype"], str(drafter.target.dtype).removeprefix("torch.")}
    limit = max(evidence.TOLERANCE[dtype] for dtype in dtypes)
    return evidence.difference(recorded, drafter) <= limit


def _read(mend: Mend, directory: Path, target: Target) -> Drafter | None:
    with TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(mend.config))
        if mend.tensors is None:
            for path in directory.resolve().iterdir():
                if path.name != "config.json":
                    (Path(scratch) / path.name).symlink_to(path)
        else:
            save_file(mend.tensors, Path(scratch) / WEIGHTS)
        try:
            return checkpoint.read(Path(scratch), target).float()
        except ValueError:
            return None


def _mends(found: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Iterator[Mend]:
    """Every change that applies."""
    yield from _vocabulary(found, tensors, target)
    for of in (_layer_ids, _rope, _layout, _mask_token):
        with suppress(KeyError):  # a field that this change needs is not there, or of another layout
            yield from of(found, target)


def _layer_ids(found: dict[str, Any], target: Target) -> Iterator[Mend]:
    key, own = all_methods()[found["speculators_model_type"]].layer_ids_key, found["foredraft"]["layer_ids"]
    theirs = found[key]
    told = f"{key}={theirs}, outputs {[k - 1 for k in theirs]}, but foredraft.layer_ids={own}"
    remedy = "put back the ids that the drafter was trained with, or export the run again"
    yield Mend("layer ids", told, remedy, found | {key: [k + 1 for k in own]})
    other = found["foredraft"] | {"layer_ids": [k - 1 for k in theirs]}
    yield Mend("layer ids", told, remedy, found | {"foredraft": other})


def _rope(found: dict[str, Any], target: Target) -> Iterator[Mend]:
    ours = "transformer_layer_config" in found
    layers = found["transformer_layer_config"] if ours else found
    right = draft_shape(target, layers["num_hidden_layers"], layers.get("sliding_window")).rope_parameters
    stored = {name: layers[name] for name in ROPE if name in layers}
    mended = {key: value for key, value in layers.items() if key not in ROPE} | {"rope_parameters": right}
    yield Mend(
        "rope",
        f"config.json has {stored or 'no rope_parameters'}, the target's are {right}",
        "put the target's rope_parameters into config.json, or export the run again",
        found | {"transformer_layer_config": mended} if ours else mended,
    )


def _layout(found: dict[str, Any], target: Target) -> Iterator[Mend]:
    flag = found["sample_from_anchor"]
    try:
        num = found["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return
    yield Mend(
        "layout",
        f"sample_from_anchor={flag} of block_size={found['block_size']} does not make "
        f"speculative_tokens={num}, {not flag} does",
        f"write sample_from_anchor={str(not flag).lower()}, or export the run again",
        found | {"sample_from_anchor": not flag},
    )


def _vocabulary(found: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Iterator[Mend]:
    if "d2t" not in tensors:
        return
    d2t_N, num = tensors["d2t"].long(), len(tensors["d2t"])
    yield Mend(
        "vocabulary map",
        f"d2t holds absolute target ids ({d2t_N[:3].tolist()} ...), not offsets",
        "store target id - draft id: d2t - arange(len(d2t))",
        found,
        tensors | {"d2t": d2t_N - torch.arange(num)},
    )
    rows = enumerate(_beginnings(target.head_weight_VD))  # kept ids ascend: one walk finds them all
    wanted = _beginnings(tensors.get("lm_head.weight", torch.empty(0)))
    known = [at for want in wanted for at in islice((at for at, row in rows if row == want), 1)]
    if len(known) == num:
        kept_N = torch.tensor(known)
        t2d_V = torch.zeros(target.vocab_size, dtype=torch.bool)
        t2d_V[kept_N] = True
        yield Mend(
            "vocabulary",
            "d2t and t2d name other tokens than the rows of lm_head.weight: a map of another run",
            "put back d2t and t2d of this drafter's own export",
            found,
            tensors | {"d2t": kept_N - torch.arange(num), "t2d": t2d_V},
        )


def _beginnings(weight_ND: Tensor) -> list[tuple[float, ...]]:
    """What tells the rows of a head apart, in the coarser dtype that it may have been loaded in."""
    return [tuple(row) for row in weight_ND[..., :16].bfloat16().tolist()]


def _mask_token(found: dict[str, Any], target: Target) -> Iterator[Mend]:
    ours = "mask_token_id" in found
    token = (found if ours else found["dflash_config"])["mask_token_id"]
    was = found.get("foredraft", {}).get("evidence", {}).get("fields", {}).get("mask_token_id")
    known = [i for i in range(target.vocab_size) if evidence.digest(i) == was]
    for right in known or [choose_mask_token(BlockConfig(), target)]:
        put = {"mask_token_id": right}
        yield Mend(
            "mask token",
            f"mask_token_id={token} starts, ends or pads text of the target"
            + (f"; at the export it was {right}" if known else ""),
            "name the token that the drafter was trained with, one that no answer holds",
            found | (put if ours else {"dflash_config": found["dflash_config"] | put}),
        )
