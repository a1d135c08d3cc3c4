"""Multipack: documents of any length into rows of a token budget, with their boundaries kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.types import Batch, Example, States


def plan(lengths: Sequence[int], budget: int, order: Sequence[int]) -> list[list[int]]:
    """Groups of document indices whose lengths sum to at most ``budget`` tokens.

    First fit over the given (shuffled) order, with a bounded number of open groups, so that groups stay
    random mixtures; a document longer than the budget stands alone. Every index is in one group.
    """
    open_groups: list[tuple[list[int], int]] = []
    closed: list[list[int]] = []
    for index in order:
        size = lengths[index]
        for at, (group, used) in enumerate(open_groups):
            if used + size <= budget:
                group.append(index)
                open_groups[at] = (group, used + size)
                break
        else:
            open_groups.append(([index], size))
            if len(open_groups) > 8:
                fullest = max(range(len(open_groups)), key=lambda at: open_groups[at][1])
                closed.append(open_groups.pop(fullest)[0])
    return closed + [group for group, _ in open_groups]


def pack(examples: Sequence[Example], states: Sequence[States]) -> Batch:
    """One row that holds the documents one after another; ``states`` are ``[1, T, L, D]`` each."""
    lengths = [len(example.ids) for example in examples]
    for example, state in zip(examples, states, strict=True):
        assert state.layers_BTLD.shape[:2] == (1, len(example.ids)), (
            example.name,
            state.layers_BTLD.shape,
        )
    last = None
    if all(state.last_BTD is not None for state in states):
        last = torch.cat([state.last() for state in states], dim=1)
    return Batch(
        tokens_BT=torch.tensor([[i for example in examples for i in example.ids]]),
        mask_BT=torch.tensor([[m for example in examples for m in example.mask]], dtype=torch.bool),
        doc_BT=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None],
        position_BT=torch.cat([torch.arange(length) for length in lengths])[None],
        states=States(torch.cat([state.layers_BTLD for state in states], dim=1), last),
        names=[example.name for example in examples],
    )
