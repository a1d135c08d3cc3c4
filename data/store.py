"""Captured states on disk: content-addressed, checked on the way in and on the way out.

A store belongs to one target, one list of layer ids and one dtype; its folder is named by a hash over
them. Documents are named by a hash of their ids, so that any data set over the same target shares a
store and a resumed capture makes only what is missing. Shards are safetensors files written to a
temporary name and renamed; what a shard holds is read from its own header, so no index can go stale.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.types import Example, States


class BadStates(Exception):
    """States that must not be trained on; the message is the reason they are counted under."""


def document_key(ids: Sequence[int]) -> str:
    """The name of a document in every store: a hash of its ids."""
    return hashlib.sha256(torch.tensor(ids, dtype=torch.int64).numpy().tobytes()).hexdigest()[:24]


def check_states(ids: Sequence[int], states: States, held_ids: Tensor | None = None) -> None:
    """Refuse states that are short, of other tokens, not finite, or zero: ``BadStates`` says which."""
    named = {"layers": states.layers_BTLD[0]}
    if states.last_BTD is not None:
        named["last"] = states.last_BTD[0]
    if not ids:
        raise BadStates("empty: no tokens")
    for name, value in named.items():
        if len(value) != len(ids):
            raise BadStates(f"{name}: {len(value)} states for {len(ids)} tokens")
    if held_ids is not None and held_ids.tolist() != list(ids):
        at = next(i for i, (a, b) in enumerate(zip(held_ids.tolist(), ids, strict=True)) if a != b)
        raise BadStates(f"token ids differ at index {at}")
    for name, value in named.items():
        if not bool(torch.isfinite(value).all()):
            raise BadStates(f"{name}: NaN or infinite states")
        largest_TL = value.abs().amax(-1).reshape(len(ids), -1)
        if not bool((largest_TL > 0).all()):
            at = int((largest_TL == 0).any(1).nonzero()[0])
            raise BadStates(f"{name}: all-zero state at token {at}")


@dataclass(frozen=True)
class Spec:
    """What the states of a store are."""

    target: dict
    layer_ids: tuple[int, ...]
    dtype: str
    with_last: bool

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(vars(self), sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """``root/<spec key>/``: ``manifest.json`` and numbered shards.

    Damaged shards (short, overlong, unreadable) are renamed to ``*.damaged`` and their documents are
    captured again. ``read`` raises ``BadStates`` when the bytes no longer match their checksum.
    """

    def __init__(self, root: Path, spec: Spec) -> None:
        self.spec = spec
        self.directory = root / spec.key
        self.directory.mkdir(parents=True, exist_ok=True)
        self.damaged: list[str] = []
        self._where: dict[str, Path] = {}
        self._write_manifest()
        for shard in sorted(self.directory.glob("*.safetensors")):
            self._open_shard(shard)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def __len__(self) -> int:
        return len(self._where)

    def read(self, example: Example) -> States:
        key = document_key(example.ids)
        with safe_open(self._where[key], framework="pt") as shard:
            parts = {name: shard.get_tensor(f"{key}.{name}") for name in self._parts}
            sums = json.loads(shard.metadata()["crc32"])
        for name, value in parts.items():
            if checksum(value) != sums[f"{key}.{name}"]:
                raise BadStates(f"{name}: checksum differs in {self._where[key].name}")
        last = parts["last"][None] if self.spec.with_last else None
        states = States(parts["layers"][None], last)
        check_states(example.ids, states, parts["ids"])
        return states

    def write(self, examples: Sequence[Example], states: Sequence[States]) -> None:
        """One more shard, whole or not at all."""
        tensors: dict[str, Tensor] = {}
        for example, state in zip(examples, states, strict=True):
            key = document_key(example.ids)
            tensors[f"{key}.ids"] = torch.tensor(example.ids)
            tensors[f"{key}.layers"] = state.layers_BTLD[0].contiguous()
            if self.spec.with_last:
                tensors[f"{key}.last"] = state.last()[0].contiguous()
        sums = json.dumps({name: checksum(value) for name, value in tensors.items()})
        content = hashlib.sha256("".join(tensors).encode()).hexdigest()[:16]
        path = self.directory / f"{content}.safetensors"
        scratch = _scratch(path)
        save_file(tensors, scratch, metadata={"crc32": sums})
        os.replace(scratch, path)
        self._open_shard(path)

    @property
    def _parts(self) -> tuple[str, ...]:
        return ("ids", "layers", "last") if self.spec.with_last else ("ids", "layers")

    def _write_manifest(self) -> None:
        path = self.directory / "manifest.json"
        text = json.dumps(vars(self.spec), indent=2, sort_keys=True)
        scratch = _scratch(path)
        scratch.write_text(text)
        os.replace(scratch, path)

    def _open_shard(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as shard:
                keys = {name.rpartition(".")[0] for name in shard.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            with suppress(FileNotFoundError):  # another rank was first
                path.rename(path.with_suffix(".damaged"))
            self.damaged.append(path.name)
            return
        self._where.update(dict.fromkeys(keys, path))


def _scratch(path: Path) -> Path:
    """A temporary name of this process's own: several ranks write to one store."""
    return path.with_suffix(f".{os.getpid()}.tmp")


def checksum(value: Tensor) -> int:
    """What a tensor of a shard is known again by."""
    return zlib.crc32(value.contiguous().view(torch.uint8).numpy().data)
