"""Multipack: every document once, within the budget, with its borders and positions kept."""

from __future__ import annotations

import random

import pytest
import torch

from data.pack import pack, plan
from drafters.types import Example, States
from tests import tiny


@pytest.mark.parametrize("seed", range(5))
def test_every_document_is_in_one_group_and_no_group_is_over_the_budget(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(200)]
    order = draw.sample(range(200), 200)
    groups = plan(lengths, 100, order)
    assert sorted(index for group in groups for index in group) == list(range(200))
    assert all(sum(lengths[index] for index in group) <= 100 for group in groups)


def test_packing_wastes_little():
    draw = random.Random(0)
    lengths = [draw.randint(5, 60) for _ in range(400)]
    assert sum(lengths) > 0.9 * 100 * len(plan(lengths, 100, range(400)))


def test_documents_fill_the_budget_to_the_last_token():
    assert plan([60, 40, 100, 1], 100, range(4)) == [[0, 1], [2], [3]]


def test_a_document_longer_than_the_budget_stands_alone():
    groups = plan([30, 250, 30], 100, range(3))
    assert [1] in groups
    assert [0, 2] in groups


def documents() -> tuple[list[Example], list[States]]:
    """Ids with an end token (1) inside, and states that say which document and position they are of."""
    examples = [
        Example([10, 1, 12], [False, True, True], "chat", "a"),
        Example([20], [True], "chat", "b"),
        Example([30, 1, 1, 33], [False, False, True, False], "code", "c"),
    ]
    states = []
    for at, example in enumerate(examples):
        value_T = 100.0 * at + torch.arange(len(example.ids))
        states.append(
            States(value_T[None, :, None, None].repeat(1, 1, 2, 3), -value_T[None, :, None].repeat(1, 1, 3))
        )
    return examples, states


def test_borders_come_from_lengths_and_not_from_end_tokens():
    batch = pack(*documents())
    assert batch.tokens_BT.tolist() == [[10, 1, 12, 20, 30, 1, 1, 33]]
    assert batch.doc_BT.tolist() == [[0, 0, 0, 1, 2, 2, 2, 2]]
    assert batch.position_BT.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert batch.mask_BT.int().tolist() == [[0, 1, 1, 1, 0, 0, 1, 0]]
    assert batch.names == ["a", "b", "c"]


def test_states_stay_beside_their_tokens():
    batch = pack(*documents())
    want = 100.0 * batch.doc_BT + batch.position_BT
    assert torch.equal(batch.states.layers_BTLD[0, :, 1, 2], want[0])
    assert torch.equal(batch.states.last_BTD[0, :, 0], -want[0])


def test_states_of_another_length_are_never_packed():
    examples, states = documents()
    with pytest.raises(AssertionError, match="b"):
        pack(examples, [states[0], states[0], states[2]])


def test_a_pack_without_last_states_has_none():
    examples, states = documents()
    assert pack(examples, [States(state.layers_BTLD) for state in states]).states.last_BTD is None


def test_packed_documents_have_the_states_of_each_alone():
    from data.capture import capture

    target = tiny.target()
    examples = [tiny.example(length, 2, seed) for seed, length in enumerate((7, 12, 9))]
    together = capture(target, examples, [0, 3], with_last=True)
    for example, state in zip(examples, together, strict=True):
        (alone,) = capture(target, [example], [0, 3], with_last=True)
        assert torch.allclose(state.layers_BTLD, alone.layers_BTLD, atol=1e-4)
        assert torch.allclose(state.last_BTD, alone.last_BTD, atol=1e-4)
