"""States from the target: live, in memory and on disk are the same, and bad ones never reach a loss."""

from __future__ import annotations

import pytest
import torch

import data.capture
from data.capture import StatesConfig, capture, check_ids, open_store, source
from drafters.types import Example, States
from tests import tiny

LAYERS = [0, 2, 4]
ROWS = [tiny.example(length, 3, seed) for seed, length in enumerate((9, 17, 12, 17, 5))]


@pytest.fixture(scope="module")
def target():
    return tiny.target()


def config(tmp_path, keep: str = "memory", **more) -> StatesConfig:
    return StatesConfig(keep=keep, directory=str(tmp_path), batch_tokens=40, **more)


def spoiled(row: Example, value: float):
    """``capture`` whose states of that row are ``value``."""

    def spoil(target, examples, *more):
        out = capture(target, examples, *more)
        return [
            States(torch.full_like(s.layers_BTLD, value), s.last_BTD) if e.ids == row.ids else s
            for e, s in zip(examples, out, strict=True)
        ]

    return spoil


def counted(monkeypatch) -> list[str]:
    """Names of the rows that the target is run over from now on."""
    seen: list[str] = []

    def count(target, examples, *more):
        seen.extend(example.name for example in examples)
        return capture(target, examples, *more)

    monkeypatch.setattr(data.capture, "capture", count)
    return seen


def test_a_captured_layer_is_its_output_and_last_is_what_the_head_reads(target):
    for row, state in zip(ROWS, capture(target, ROWS, LAYERS, with_last=True), strict=True):
        out = target.model(torch.tensor([row.ids]), output_hidden_states=True)
        assert state.layers_BTLD.shape == (1, len(row.ids), 3, 32)
        for at, k in enumerate(LAYERS[:-1]):
            assert torch.allclose(state.layers_BTLD[:, :, at], out.hidden_states[k + 1], atol=1e-4)
        assert torch.allclose(state.last_BTD, out.hidden_states[-1], atol=1e-4)
        assert not torch.allclose(state.layers_BTLD[:, :, -1], out.hidden_states[-1], atol=1e-2)


def test_live_memory_and_disk_agree(target, tmp_path):
    found = {}
    for keep in ("online", "memory", "disk"):
        read, usable = source(config(tmp_path, keep), target, ROWS, LAYERS, with_last=True)
        assert usable == ROWS
        found[keep] = read(ROWS[1:4])
    for live, held, stored in zip(*found.values(), strict=True):
        assert torch.equal(held.layers_BTLD, stored.layers_BTLD)
        assert torch.equal(held.last_BTD, stored.last_BTD)
        assert torch.allclose(live.layers_BTLD, held.layers_BTLD, atol=1e-4)
        assert torch.allclose(live.last_BTD, held.last_BTD, atol=1e-4)


@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_last_states_are_kept_only_where_they_are_asked_for(target, tmp_path, keep):
    read, _ = source(config(tmp_path, keep), target, ROWS, LAYERS, with_last=False)
    assert all(state.last_BTD is None for state in read(ROWS))


def test_a_second_capture_runs_the_target_over_what_is_missing_only(target, tmp_path, monkeypatch):
    source(config(tmp_path, "disk"), target, ROWS[:3], LAYERS, with_last=True)
    seen = counted(monkeypatch)
    source(config(tmp_path, "disk"), target, ROWS, LAYERS, with_last=True)
    assert sorted(seen) == ["row 3", "row 4"]


def test_ranks_share_what_is_captured_to_disk(target, tmp_path, monkeypatch):
    """Rank 1 has written its share by the time the barrier lets rank 0 go on."""
    seen, of_rank = counted(monkeypatch), []

    def barrier() -> None:
        of_rank.append(sorted(seen))
        data.capture._store(config(tmp_path, "disk"), target, ROWS[1::2], LAYERS, True)

    read, usable = source(
        config(tmp_path, "disk"), target, ROWS, LAYERS, with_last=True, rank=0, world=2, barrier=barrier
    )
    assert of_rank == [["row 0", "row 2", "row 4"]]
    assert sorted(seen) == [row.name for row in ROWS]
    assert usable == ROWS
    assert len(read(ROWS)) == len(ROWS)


def test_every_rank_knows_what_another_refused(target, tmp_path, monkeypatch):
    monkeypatch.setattr(data.capture, "capture", spoiled(ROWS[1], 0.0))
    with pytest.raises(ValueError, match=r"1 of 5 rows were refused.*row 1: layers: all-zero"):
        source(config(tmp_path, "disk"), target, ROWS, LAYERS, with_last=True, rank=0, world=2)


def test_live_states_are_made_in_passes_of_batch_tokens(target, tmp_path, monkeypatch):
    passes = []

    def count(target, examples, *more):
        passes.append(len(examples) * max(len(example.ids) for example in examples))
        return capture(target, examples, *more)

    monkeypatch.setattr(data.capture, "capture", count)
    read, _ = source(config(tmp_path, "online"), target, ROWS, LAYERS, with_last=True)
    found = read(ROWS)
    assert [state.layers_BTLD.shape[1] for state in found] == [len(row.ids) for row in ROWS]
    assert len(passes) > 1
    assert max(passes) <= 40


def test_more_states_than_memory_holds_are_refused_before_any_is_made(target, tmp_path, monkeypatch):
    seen = counted(monkeypatch)
    needed = 60 * 4 * 32 * 4  # tokens, three layers and the last state, hidden size, bytes
    monkeypatch.setattr(data.capture, "free_memory", lambda: needed - 1)
    with pytest.raises(ValueError, match=r"states\.keep=memory: .* 5 documents .*keep=disk or states"):
        source(config(tmp_path), target, ROWS, LAYERS, with_last=True)
    assert seen == []
    monkeypatch.setattr(data.capture, "free_memory", lambda: needed)
    source(config(tmp_path), target, [*ROWS, ROWS[0]], LAYERS, with_last=True)
    assert len(seen) == 5


def test_a_capture_that_was_killed_goes_on_where_it_was(target, tmp_path, monkeypatch):
    def killed(target, examples, *more):
        if ROWS[1] in examples:
            raise KeyboardInterrupt
        return capture(target, examples, *more)

    monkeypatch.setattr(data.capture, "capture", killed)
    with pytest.raises(KeyboardInterrupt):
        source(config(tmp_path, "disk"), target, ROWS, LAYERS, with_last=True)
    held = len(open_store(config(tmp_path, "disk"), target, LAYERS, True))
    assert 0 < held < len(ROWS)
    seen = counted(monkeypatch)
    read, _ = source(config(tmp_path, "disk"), target, ROWS, LAYERS, with_last=True)
    assert len(seen) == len(ROWS) - held
    assert len(read(ROWS)) == len(ROWS)


def test_a_truncated_file_is_captured_again(target, tmp_path, monkeypatch):
    want, _ = source(config(tmp_path, "disk"), target, ROWS, LAYERS, with_last=True)
    want = [state.layers_BTLD.clone() for state in want(ROWS)]  # those read are views of the file
    shards = sorted(
        open_store(config(tmp_path, "disk"), target, LAYERS, True).directory.glob("*.safetensors")
    )
    shards[0].write_bytes(shards[0].read_bytes()[:-100])
    seen = counted(monkeypatch)
    read, _ = source(config(tmp_path, "disk"), target, ROWS, LAYERS, with_last=True)
    assert 0 < len(seen) < len(ROWS)
    for state, layers_BTLD in zip(read(ROWS), want, strict=True):
        assert torch.allclose(state.layers_BTLD, layers_BTLD, atol=1e-4)


def test_a_stored_state_that_rotted_stops_the_run_naming_row_and_remedy(target, tmp_path):
    read, _ = source(config(tmp_path, "disk"), target, ROWS, LAYERS, with_last=True)
    for shard in open_store(config(tmp_path, "disk"), target, LAYERS, True).directory.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-64] + bytes(64))
    with pytest.raises(
        ValueError, match=r"row \d: stored states cannot be used: .*checksum.*delete that file"
    ):
        read(ROWS)


@pytest.mark.parametrize("keep", ["memory", "disk"])
@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "NaN or infinite"), (0.0, "all-zero state")])
def test_refused_states_stop_the_run_naming_the_row(target, tmp_path, monkeypatch, keep, value, reason):
    monkeypatch.setattr(data.capture, "capture", spoiled(ROWS[2], value))
    with pytest.raises(ValueError, match=rf"1 of 5 rows were refused.*row 2: layers: {reason}.*dtype"):
        source(config(tmp_path, keep), target, ROWS, LAYERS, with_last=True)
    if keep == "disk":
        assert len(open_store(config(tmp_path, keep), target, LAYERS, True)) == 4


@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "NaN or infinite"), (0.0, "all-zero state")])
def test_refused_live_states_stop_the_run_naming_the_row(target, tmp_path, monkeypatch, value, reason):
    read, _ = source(config(tmp_path, "online"), target, ROWS, LAYERS, with_last=True)
    monkeypatch.setattr(data.capture, "capture", spoiled(ROWS[2], value))
    with pytest.raises(ValueError, match=f"row 2: the target's states cannot be used: layers: {reason}"):
        read(ROWS)


@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_within_max_bad_a_refused_row_is_left_out_and_named(target, tmp_path, monkeypatch, capsys, keep):
    monkeypatch.setattr(data.capture, "capture", spoiled(ROWS[2], 0.0))
    _, usable = source(config(tmp_path, keep, max_bad=0.2), target, ROWS, LAYERS, with_last=True)
    assert usable == [ROWS[0], ROWS[1], ROWS[3], ROWS[4]]
    assert "row 2: layers: all-zero state" in capsys.readouterr().out


@pytest.mark.parametrize("bad", [-1, 265, 10**6])
def test_an_id_outside_the_vocabulary_is_an_error_naming_row_and_remedy(target, tmp_path, bad):
    vocab = target.vocab_size
    assert vocab == 265
    rows = [ROWS[0], Example([5, bad, 6], [False, True, True], "chat", "file.jsonl:7")]
    want = rf"file\.jsonl:7: token id {bad} is outside the target.s vocabulary of 265.*remove its answers or"
    with pytest.raises(ValueError, match=want):
        check_ids(rows, vocab)
    for keep in ("online", "memory", "disk"):
        with pytest.raises(ValueError, match=want):
            source(config(tmp_path, keep), target, rows, LAYERS, with_last=True)
    check_ids(ROWS, vocab)


def test_an_unknown_place_to_keep_states_is_an_error_that_lists_those_there_are():
    with pytest.raises(ValueError, match=r"states\.keep=cloud: write memory, disk or online"):
        StatesConfig(keep="cloud")
