"""What proposers that need no training share: they look drafts up in the text of each request.

A *history* is what one request has said so far: its prompt, then its answer, in whatever structure finds an
earlier occurrence of the newest tokens. It grows by the true tokens and is asked for drafts after the
anchor, which it has not been given yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from drafters.types import Proposal, States


class History(Protocol):
    """The tokens of one request, ready to be searched."""

    def extend(self, tokens: list[int]) -> None:
        """Append tokens that the target has processed."""

    def answering(self) -> None:
        """The prompt is complete: what comes now is the answer."""

    def drafts(self, anchor: int, n: int) -> tuple[list[int], list[float]]:
        """Up to ``n`` drafts after the anchor, and the probability of each given those before it.

        A proposer without ``has_confidence`` leaves the probabilities out.
        """

    def close(self) -> None:
        """The request has left."""


@dataclass
class LookupState:
    """A history a slot; ``begin`` makes an empty one."""

    begin: Callable[[], History]
    slots: int
    histories: list[History] = field(init=False)

    def __post_init__(self) -> None:
        self.histories = [self.begin() for _ in range(self.slots)]

    def drop(self, slots: list[int]) -> None:
        """The requests in these slots have left; their histories start again empty."""
        for slot in slots:
            self.histories[slot].close()
            self.histories[slot] = self.begin()

    def move(self, source: int, target: int) -> None:
        """Put one slot's request into another, empty slot."""
        self.histories[target], self.histories[source] = self.histories[source], self.histories[target]


class Lookup:
    """The verbs of a proposer over histories. It reads tokens only, none of the target's states."""

    has_confidence: ClassVar[bool] = False

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.layer_ids: list[int] = []

    def begin(self, slots: int, capacity: int) -> LookupState:
        """An empty history a slot; they need no room set aside, whatever the capacity."""
        raise NotImplementedError

    def advance(
        self, state: LookupState, rows: range, states: States | None, tokens_BJ: Tensor, kept: list[int]
    ) -> None:
        """Extend slots ``rows`` by the first ``kept[i]`` tokens of each."""
        for row, tokens, num in zip(rows, tokens_BJ.tolist(), kept, strict=True):
            state.histories[row].extend(tokens[:num])

    def answering(self, state: LookupState, slot: int) -> None:
        """The prompt of this slot is complete."""
        state.histories[slot].answering()

    def propose(self, state: LookupState, rows: range, anchors_B: Tensor, n: int) -> Proposal:
        """At most ``n`` drafts a row, point masses; a row with nothing to copy has none."""
        anchors = anchors_B.tolist()
        found = [state.histories[row].drafts(anchor, n) for row, anchor in zip(rows, anchors, strict=True)]
        lengths = [len(drafts) for drafts, _ in found]
        most = max(lengths)
        tokens_BK = torch.tensor([drafts + [0] * (most - len(drafts)) for drafts, _ in found])
        tokens_BK = tokens_BK.to(anchors_B)
        if not self.has_confidence:
            return Proposal(tokens_BK, lengths=lengths)
        confidence_BK = torch.tensor([sure + [0.0] * (most - len(sure)) for _, sure in found])
        return Proposal(tokens_BK, None, confidence_BK.to(anchors_B.device), lengths)
