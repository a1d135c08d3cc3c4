"""One resumable iterator of batches, cached or live: a pure function of the step number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from data.capture import Source
from data.pack import pack, plan
from drafters.types import Batch, Example


class Stream:
    """Optimizer step i of a run, for any i: nothing to save, nothing to restore.

    Each epoch is a shuffle of all examples, packed to ``budget`` tokens; a step takes the next
    ``packs`` of them, wherever the epoch ends. Rank r of w computes packs r, r + w, ... of a step, so
    that the number of ranks changes nothing about what a step learns from.
    """

    def __init__(
        self, examples: Sequence[Example], source: Source, *, budget: int, packs: int, seed: int,
        rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        if not examples:
            raise ValueError(
                "no rows to train on; `python -m data task=inspect` shows why rows were left out"
            )
        if packs % world:
            raise ValueError(f"train.packs={packs}: must be a multiple of the {world} ranks")
        self.examples, self.source = list(examples), source
        self.budget, self.packs, self.seed = budget, packs, seed
        self.rank, self.world = rank, world
        self.lengths = [len(example.ids) for example in self.examples]
        self._starts = [0]  # index of the first pack of each epoch
        self._epoch = lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return plan(
            self.lengths,
            self.budget,
            torch.randperm(len(self.lengths), generator=generator).tolist(),
        )

    def steps(self, epochs: float) -> int:
        """Optimizer steps in that many epochs, counted from the real packs."""
        whole = int(epochs)
        packs = self._start(whole) + int((epochs - whole) * len(self._epoch(whole)))
        return max(1, packs // self.packs)

    def epoch_of(self, step: int) -> float:
        """How many times the data has been seen when ``step`` begins."""
        at = step * self.packs
        epoch = self._find(at)
        return epoch + (at - self._starts[epoch]) / len(self._epoch(epoch))

    def step(self, index: int) -> list[Batch]:
        """This rank's packs of optimizer step ``index``."""
        return [self._pack(index * self.packs + at) for at in range(self.rank, self.packs, self.world)]

    def _pack(self, index: int) -> Batch:
        epoch = self._find(index)
        examples = [self.examples[at] for at in self._epoch(epoch)[index - self._starts[epoch]]]
        return pack(examples, self.source(examples))

    def _start(self, epoch: int) -> int:
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        return self._starts[epoch]

    def _find(self, pack_index: int) -> int:
        """The epoch that a pack belongs to."""
        epoch = 0
        while self._start(epoch + 1) <= pack_index:
            epoch += 1
        return epoch
