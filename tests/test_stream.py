"""Batches are a pure function of the step: nothing to save, nothing that ranks or restarts change."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from data.stream import Stream
from drafters.types import States
from tests import tiny

ROWS = [tiny.example(10 + 3 * at, 4, seed=at) for at in range(16)]


def states(examples) -> list[States]:
    return [States(torch.tensor(e.ids).float()[None, :, None, None]) for e in examples]


def stream(seed: int = 0, packs: int = 2, rows=ROWS, **more) -> Stream:
    return Stream(rows, states, budget=60, packs=packs, seed=seed, **more)


def names(batches) -> list[list[str]]:
    return [batch.names for batch in batches]


def test_a_step_is_the_same_whatever_was_asked_before():
    read_on, jumped = stream(), stream()
    wanted = [names(read_on.step(at)) for at in range(20)]
    assert names(jumped.step(17)) == wanted[17]
    assert [names(jumped.step(at)) for at in (3, 17, 0)] == [wanted[3], wanted[17], wanted[0]]


def test_a_resumed_run_sees_the_same_tokens_and_states():
    before, after = stream().step(7), stream().step(7)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.tokens_BT, other.tokens_BT)
        assert torch.equal(one.states.layers_BTLD, other.states.layers_BTLD)
        assert torch.equal(one.states.layers_BTLD[0, :, 0, 0], one.tokens_BT[0].float())


def test_every_epoch_holds_every_row_once_in_another_order():
    whole = stream(packs=1)
    size = whole.steps(1)
    assert whole.epoch_of(size) == pytest.approx(1.0)
    epochs = []
    for epoch in range(3):
        start, end = round_to(whole, epoch), round_to(whole, epoch + 1)
        packs = [names(whole.step(at))[0] for at in range(start, end)]
        assert Counter(sum(packs, [])) == Counter(row.name for row in ROWS)
        epochs.append(packs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def round_to(of: Stream, epoch: int) -> int:
    """The first step that begins in ``epoch``, for one pack a step."""
    return next(at for at in range(100) if of.epoch_of(at) >= epoch)


def test_a_step_takes_its_packs_across_the_end_of_an_epoch():
    one, four = stream(packs=1), stream(packs=4)
    assert len(one._epoch(0)) % 4, "the epoch must end inside a step"
    apart = [names(one.step(at))[0] for at in range(16)]
    assert [pack for at in range(4) for pack in names(four.step(at))] == apart


def test_another_seed_is_another_order():
    assert names(stream(seed=0).step(0)) != names(stream(seed=1).step(0))


def test_no_pack_is_over_the_budget():
    assert all(batch.tokens_BT.shape[1] <= 60 for at in range(10) for batch in stream().step(at))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_out_the_packs_of_a_step(world):
    alone = names(stream(packs=4).step(5))
    shared = [names(stream(packs=4, rank=rank, world=world).step(5)) for rank in range(world)]
    assert [shared[at % world][at // world] for at in range(4)] == alone


def test_steps_are_counted_from_real_packs():
    found = stream(packs=2)
    packs = len(found._epoch(0)) + len(found._epoch(1))
    assert found.steps(2) == packs // 2
    assert found.epoch_of(found.steps(2)) == pytest.approx(2, abs=2 / len(found._epoch(1)))
    assert found.steps(0.5) == max(1, int(0.5 * len(found._epoch(0))) // 2)
    assert stream(packs=64).steps(1) == 1


def test_no_rows_and_packs_that_ranks_cannot_share_are_errors_that_say_what_to_do():
    with pytest.raises(ValueError, match="no rows to train on.*task=inspect"):
        stream(rows=[])
    with pytest.raises(ValueError, match=r"train\.packs=2: must be a multiple of the 4 ranks"):
        stream(world=4)
