"""Stand-ins for the engine's partners: drafts by a function, a target that speaks a script."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
import transformers

from drafters.target import Target
from drafters.types import Proposal, States


@dataclass
class Paths:
    """A serving state that only remembers the true tokens of each slot."""

    tokens: list[list[int]]

    def drop(self, slots: list[int]) -> None:
        for slot in slots:
            self.tokens[slot] = []

    def move(self, source: int, target: int) -> None:
        self.tokens[target], self.tokens[source] = self.tokens[source], []


@dataclass
class Drafts:
    """``make(path, n)`` gives the drafts after a path, and the laws they were drawn from or ``None``."""

    make: callable
    max_drafts: int = 4
    layer_ids: list[int] = field(default_factory=lambda: [0])

    def begin(self, slots: int, _capacity: int) -> Paths:
        return Paths([[] for _ in range(slots)])

    def advance(self, state: Paths, rows: range, states: States, tokens_BJ, kept: list[int]) -> None:
        for row, tokens, num in zip(rows, tokens_BJ.tolist(), kept, strict=True):
            state.tokens[row] += tokens[:num]

    def answering(self, state: Paths, slot: int) -> None:
        pass

    def propose(self, state: Paths, rows: range, anchors_B, n: int) -> Proposal:
        made = [
            self.make([*state.tokens[row], anchor], n)
            for row, anchor in zip(rows, anchors_B.tolist(), strict=True)
        ]
        tokens_BK = torch.tensor([tokens for tokens, _ in made])
        laws = [law for _, law in made]
        return Proposal(tokens_BK, None if laws[0] is None else torch.stack(laws))


def oracle(of: Target, right: callable) -> Drafts:
    """Drafts of which the first ``right(path)`` are the target's own and all others are wrong."""
    known: dict[tuple, list[int]] = {}

    def make(path: list[int], n: int):
        if len(known.get(tuple(path), [])) < n:
            ids = list(path)
            for _ in range(n):
                logits = of.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
                ids.append(int(logits.argmax()))
            known[tuple(path)] = ids[len(path) :]
        good = right(path)
        return [
            t if k < good else (t + 1) % of.vocab_size for k, t in enumerate(known[tuple(path)][:n])
        ], None

    return Drafts(make)


class Script:
    """A target whose greedy token at position t is ``says[t]``, whatever it reads."""

    num_layers, device, dtype, attention_windows = 1, "cpu", torch.float32, {"full_attention": None}
    model = transformers.PreTrainedModel
    config = transformers.PreTrainedConfig()
    vocab_size, tokenizer = 128, None

    def __init__(self, says: list[int], stop_ids: tuple[int, ...]) -> None:
        self.says, self.stop_ids = says, stop_ids

    def states(self, tokens_BT, _layer_ids, *, position_BT, **_) -> States:
        says = torch.tensor([*self.says, *[0] * 100])
        last_BTD = torch.nn.functional.one_hot(says[position_BT + 1], 128).float()
        return States(last_BTD[:, :, None], last_BTD)

    def head(self, last: torch.Tensor) -> torch.Tensor:
        return last


class Chance:
    """A schedule that asks for and verifies any number of drafts, each row its own."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self.most, self.chance, self.rounds = most, random.Random(seed), []

    def drafts(self, rows: int) -> int | None:
        return self.chance.randint(0, self.most) or None

    def prefixes(self, proposal: Proposal, rows: int) -> list[int]:
        most = proposal.lengths or [proposal.tokens_BK.shape[1]] * rows
        return [self.chance.randint(0, num) for num in most]

    def heard(self, drafted: list[int], accepted: list[int], seconds: float) -> None:
        self.rounds.append((drafted, accepted, seconds))
