"""Stored states: named by content, whole or absent, and never other than what was captured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import data.store
from data.store import BadStates, Spec, Store, check_states, document_key
from drafters.types import Example, States
from tests import tiny

SPEC = Spec({"weights": "abc"}, (0, 2), "float32", True)


def states(example: Example, seed: int = 0, dtype: torch.dtype = torch.float32) -> States:
    generator = torch.Generator().manual_seed(seed)
    num = len(example.ids)
    layers = torch.randn(1, num, 2, 8, generator=generator)
    return States(layers.to(dtype), torch.randn(1, num, 8, generator=generator).to(dtype))


ROWS = [tiny.example(10 + at, 4, seed=at) for at in range(3)]
STATES = [states(row, at) for at, row in enumerate(ROWS)]


def filled(root: Path, spec: Spec = SPEC) -> Store:
    store = Store(root, spec)
    store.write(ROWS, STATES)
    return store


def shard(store: Store) -> Path:
    (path,) = store.directory.glob("*.safetensors")
    return path


def equal(one: States, other: States) -> bool:
    return torch.equal(one.layers_BTLD, other.layers_BTLD) and torch.equal(one.last_BTD, other.last_BTD)


def test_what_was_written_is_read_back_to_the_bit_by_this_store_and_the_next(tmp_path):
    for store in (filled(tmp_path), Store(tmp_path, SPEC)):
        assert len(store) == 3
        assert all(equal(store.read(row), state) for row, state in zip(ROWS, STATES, strict=True))


def test_bfloat16_survives(tmp_path):
    store, kept = Store(tmp_path, replace(SPEC, dtype="bfloat16")), states(ROWS[0], dtype=torch.bfloat16)
    store.write(ROWS[:1], [kept])
    assert store.read(ROWS[0]).layers_BTLD.dtype == torch.bfloat16
    assert equal(store.read(ROWS[0]), kept)


def test_documents_are_found_by_their_ids_whatever_row_they_stand_in(tmp_path):
    store = filled(tmp_path)
    same = Example(list(ROWS[1].ids), [True] * len(ROWS[1].ids), "code", "another file:7")
    assert equal(store.read(same), STATES[1])
    assert document_key([*ROWS[1].ids, 9]) not in store
    assert document_key(ROWS[1].ids[::-1]) not in store


@pytest.mark.parametrize(
    "other",
    [
        replace(SPEC, target={"weights": "abd"}),
        replace(SPEC, layer_ids=(0, 3)),
        replace(SPEC, dtype="bfloat16"),
        replace(SPEC, with_last=False),
    ],
)
def test_states_of_another_target_layers_or_dtype_are_another_store(tmp_path, other):
    filled(tmp_path)
    assert len(Store(tmp_path, other)) == 0


@pytest.mark.parametrize("damage", ["truncated", "trailing bytes", "no header", "empty"])
def test_a_damaged_file_is_set_aside_and_its_documents_are_missing(tmp_path, damage):
    path = shard(filled(tmp_path))
    whole = path.read_bytes()
    path.write_bytes(
        {"truncated": whole[:-8], "trailing bytes": whole + bytes(8), "no header": whole[:20], "empty": b""}[
            damage
        ]
    )
    store = Store(tmp_path, SPEC)
    assert len(store) == 0
    assert store.damaged == [path.name]
    assert not path.exists()
    store.write(ROWS, STATES)  # captured again under the same name
    assert equal(Store(tmp_path, SPEC).read(ROWS[2]), STATES[2])


def test_changed_bytes_are_refused_by_their_checksum(tmp_path):
    path = shard(filled(tmp_path))
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(bytes(raw))
    reasons = [refusal(Store(tmp_path, SPEC), row) for row in ROWS]
    (only,) = [reason for reason in reasons if reason]
    assert re.fullmatch(rf"\w+: checksum differs in {path.name}", only)


def refusal(store: Store, row: Example) -> str | None:
    try:
        store.read(row)
    except BadStates as reason:
        return str(reason)
    return None


def test_a_file_whose_ids_are_not_its_names_is_refused(tmp_path):
    store = filled(tmp_path)
    tensors, key = load_file(shard(store)), document_key(ROWS[0].ids)
    tensors[f"{key}.ids"][2] += 1
    sums = {name: data.store.checksum(value) for name, value in tensors.items()}
    save_file(tensors, shard(store), metadata={"crc32": json.dumps(sums)})
    with pytest.raises(BadStates, match="token ids differ at index 2"):
        Store(tmp_path, SPEC).read(ROWS[0])


def test_a_half_written_file_is_never_used(tmp_path, monkeypatch):
    def killed(tensors, path, metadata):
        save_file(tensors, path, metadata=metadata)
        raise KeyboardInterrupt

    monkeypatch.setattr(data.store, "save_file", killed)
    store = Store(tmp_path, SPEC)
    with pytest.raises(KeyboardInterrupt):
        store.write(ROWS, STATES)
    assert len(store) == len(Store(tmp_path, SPEC)) == 0
    assert not list(store.directory.glob("*.safetensors"))


def test_two_processes_write_one_document_under_names_of_their_own(tmp_path, monkeypatch):
    written = []

    def save(tensors, path, metadata):
        written.append(path.name)
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(data.store, "save_file", save)
    for process in (1, 2):
        monkeypatch.setattr(data.store.os, "getpid", lambda number=process: number)
        filled(tmp_path)
    assert len(set(written)) == 2
    assert len(list(filled(tmp_path).directory.iterdir())) == 2  # the manifest and one shard


def test_a_store_can_be_made_again_over_itself(tmp_path):
    filled(tmp_path)
    assert len(list(filled(tmp_path).directory.glob("*.safetensors"))) == 1


# What is refused -------------------------------------------------------------------------------------


def made(value: float | None = None, at: tuple = (), num: int = 4) -> States:
    found = states(tiny.example(num, 1))
    if value is not None:
        found.layers_BTLD[at] = value
    return found


IDS = [11, 12, 13, 14]


@pytest.mark.parametrize(
    ("given", "held", "reason"),
    [
        (made(float("nan"), (0, 2, 1, 3)), None, "layers: NaN or infinite"),
        (made(float("inf"), (0, 2, 1, 3)), None, "layers: NaN or infinite"),
        (made(0.0, (0, 2, 1)), None, "layers: all-zero state at token 2"),
        (made(0.0), None, "layers: all-zero state at token 0"),
        (made(num=3), None, "layers: 3 states for 4 tokens"),
        (made(), [11, 12, 99, 14], "token ids differ at index 2"),
        (States(made().layers_BTLD, torch.zeros(1, 4, 8)), None, "last: all-zero state at token 0"),
        (States(made().layers_BTLD, made().last_BTD[:, :3]), None, "last: 3 states for 4 tokens"),
    ],
)
def test_states_that_must_not_be_trained_on_are_refused_with_a_reason(given, held, reason):
    with pytest.raises(BadStates, match=reason):
        check_states(IDS, given, None if held is None else torch.tensor(held))


def test_states_of_no_tokens_are_refused():
    with pytest.raises(BadStates, match="empty"):
        check_states([], States(torch.zeros(1, 0, 2, 8)))


def test_good_states_with_zeros_in_them_are_accepted():
    check_states(IDS, made(0.0, (0, 2, 1, slice(0, 7))), torch.tensor(IDS))
