"""What a disk store really holds: its states beside those that the target gives now.

Nothing is written, renamed or captured anew. States are compared with the output of every layer, and with
those of the positions before and after, so that a store of other layers or of shifted positions is known for
what it is, and not only as wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.store import Spec, checksum, document_key
from drafters.target import Target
from drafters.types import Example

DOCUMENTS = 8  # of the run's, that are compared
TOKENS = 128  # of each: what comes later changes no state before it
SAME = 0.1  # relative error of a token's state, in the median: other kernels and bfloat16 stay far below
LARGEST = torch.finfo(torch.float16).max
LAST, EMBEDDING = "last", "the embedding"
SHIFTS = (0, 1, -1)


@dataclass
class Stored:
    """A store of a run.

    ``broken``: files and documents that cannot be read whole. ``narrow``: places beyond what float16 holds.
    ``errors`` of a kept layer, or of ``LAST``, against each output of the target and each shift: the median
    over tokens. ``agree``: the share of answer tokens that the head reads off the stored last states.
    """

    directory: Path
    spec: Spec
    documents: int = 0  # of the run's that it holds
    broken: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)
    largest: float = 0.0  # the largest number of a state as the target gives it
    errors: dict[int | str, dict[tuple[int | str, int], float]] = field(default_factory=dict)
    agree: float | None = None

    def found(self, kept: int | str) -> tuple[int | str, int] | None:
        """The output and shift that a kept layer, or ``LAST``, really is; ``None`` where it is none."""
        errors = self.errors[kept]
        nearest = min(errors, key=lambda place: errors[place])
        if errors[kept, 0] <= 2 * errors[nearest] + 1e-3:
            nearest = kept, 0
        return nearest if errors[nearest] <= SAME else None


@torch.inference_mode()
def examine(directory: Path, spec: Spec, target: Target, examples: Sequence[Example]) -> Stored:
    """Read every header of a store, and compare some of the run's documents with the target's states."""
    out = Stored(directory, spec)
    where: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as shard:
                where |= {name.rpartition(".")[0]: path for name in shard.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            out.broken.append(f"{path.name}: {error}")
    own = {document_key(e.ids): e for e in examples if document_key(e.ids) in where}
    out.documents = len(own)
    errors: dict[int | str, dict[tuple[int | str, int], list[Tensor]]] = {}
    right = total = 0
    for key, example in list(own.items())[:: max(1, len(own) // DOCUMENTS)][:DOCUMENTS]:
        parts = _read(where[key], key, spec, example, out)
        if parts is None:
            continue
        live = _live(target, example)
        for kept, value_TD in parts.items():
            _note_narrow(out, f"{example.name}, {_named(kept)}", value_TD, live[kept])
            places = errors.setdefault(kept, {})
            for place, error_T in _errors(value_TD, live):
                places.setdefault(place, []).append(error_T)
        out.largest = max(out.largest, *(float(x.abs().max()) for x in live.values()))
        if LAST in parts:
            right, total = right + _agreeing(target, parts[LAST], example), total + sum(example.mask[1:])
    out.errors = {
        kept: {place: float(torch.cat(some).median()) for place, some in places.items()}
        for kept, places in errors.items()
    }
    out.agree = right / total if total else None
    return out


def _read(path: Path, key: str, spec: Spec, example: Example, out: Stored) -> dict[int | str, Tensor] | None:
    """The states of a document by layer id, ``None`` (and a line in ``broken``) where they are not whole."""
    names = ("ids", "layers", "last") if spec.with_last else ("ids", "layers")
    where = f"{path.name}, {example.name}"
    try:
        with safe_open(path, framework="pt") as shard:
            held = {name: shard.get_tensor(f"{key}.{name}") for name in names}
            sums = json.loads((shard.metadata() or {}).get("crc32", "{}"))
    except (SafetensorError, OSError) as error:
        out.broken.append(f"{where}: {error}")
        return None
    for name, value in held.items():
        if len(value) != len(example.ids):
            out.broken.append(f"{where}: {name} of {len(value)} tokens, the document has {len(example.ids)}")
            return None
        if sums.get(f"{key}.{name}", checksum(value)) != checksum(value):
            out.broken.append(f"{where}: {name} has another checksum than when it was written")
            return None
    if held["ids"].tolist() != example.ids:
        out.broken.append(f"{where}: states of other tokens")
        return None
    for name in names[1:]:
        zero_T = (held[name] == 0).all(-1).reshape(len(held[name]), -1).any(1)
        if bool(zero_T.any()):
            out.broken.append(f"{where}: {name} is zero at {int(zero_T.sum())} of {len(zero_T)} tokens")
            return None
    parts: dict[int | str, Tensor] = dict(zip(spec.layer_ids, held["layers"].unbind(1), strict=True))
    return parts | ({LAST: held["last"]} if spec.with_last else {})


def _live(target: Target, example: Example) -> dict[int | str, Tensor]:
    """Every output of the target over the first tokens of a document."""
    tokens_1T = torch.tensor([example.ids[:TOKENS]], device=target.device)
    states = target.states(tokens_1T, range(target.num_layers))
    out: dict[int | str, Tensor] = dict(enumerate(states.layers_BTLD[0].float().cpu().unbind(1)))
    last_TD, embedded_TD = states.last()[0], target.embed(tokens_1T)[0]
    return out | {LAST: last_TD.float().cpu(), EMBEDDING: embedded_TD.float().cpu()}


def _errors(
    value_TD: Tensor, live: dict[int | str, Tensor]
) -> Iterator[tuple[tuple[int | str, int], Tensor]]:
    """Relative error of each token against every output, from the same and the neighbouring positions."""
    value_TD = value_TD[:TOKENS].float().nan_to_num(0.0, LARGEST, -LARGEST)
    num = len(value_TD)
    for name, there_TD in live.items():
        for shift in SHIFTS:
            mine = value_TD[max(0, -shift) : num - max(0, shift)]
            theirs = there_TD[max(0, shift) : num - max(0, -shift)]
            if len(mine):
                yield (name, shift), (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-9)


def _note_narrow(out: Stored, where: str, value_TD: Tensor, live_TD: Tensor) -> None:
    """Numbers that are not finite, and those cut off at float16's largest where the target's go beyond."""
    value_TD = value_TD[:TOKENS].float()
    cut_TD = (value_TD.abs() >= LARGEST) & (live_TD.abs() > 1.01 * value_TD.abs())
    bad_TD = ~value_TD.isfinite() | cut_TD
    if bool(bad_TD.any()):
        at = int(bad_TD.any(1).nonzero()[0])
        real = float(live_TD[at][bad_TD[at]].abs().max())
        out.narrow.append(
            f"{where}, token {at}: {float(value_TD[at].abs().max()):g}, the target has {real:g}"
        )


def _agreeing(target: Target, last_TD: Tensor, example: Example) -> int:
    """Answer tokens that the head reads off the stored last states."""
    says_T = target.head(last_TD.to(target.device, target.dtype)).argmax(-1).cpu()[:-1]
    mask_T, ids_T = torch.tensor(example.mask[1:]), torch.tensor(example.ids[1:])
    return int(((says_T == ids_T) & mask_T).sum())


def _named(kept: int | str) -> str:
    return f"layer {kept}" if isinstance(kept, int) else f"{kept} state"
