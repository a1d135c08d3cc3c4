"""One resumable iterator of batches, cached or live: a pure function of the step number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count

import torch

from data.capture import Source
from data.mix import Mix, chosen
from data.pack import pack, plan
from drafters.types import Batch, Example

NO_WEIGHTS: Mapping[str, float] = {}


class Stream:
    """Optimizer step i of a run, for any i: nothing to save, nothing to restore.

    Each epoch is a shuffle of all examples, packed to ``budget`` tokens; with ``weights`` a round of
    ``data/mix.py``, as many documents drawn by weight. A step takes the next ``packs`` of them, wherever
    the epoch ends. Rank r of w computes packs r, r + w, ... of a step, so that the number of ranks changes
    nothing about what a step learns from.
    """

    def __init__(
        self, examples: Sequence[Example], source: Source, *, budget: int, packs: int, seed: int,
        weights: Mapping[str, float] = NO_WEIGHTS, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        if not examples:
            raise ValueError(
                "no rows to train on; `python -m data task=inspect` shows why rows were left out"
            )
        if packs % world:
            raise ValueError(f"train.packs={packs}: must be a multiple of the {world} ranks")
        self.examples, self.source = chosen(examples, weights), source
        self.mix = Mix(self.examples, weights, seed) if weights else None
        self.budget, self.packs, self.seed = budget, packs, seed
        self.rank, self.world = rank, world
        self.lengths = [len(example.ids) for example in self.examples]
        self.supervised = [sum(example.mask) for example in self.examples]
        self._starts = [0]  # index of the first pack of each epoch
        self._epoch = lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> list[list[int]]:
        if self.mix is not None:
            order = self.mix.order(epoch)
            packs = plan([self.lengths[at] for at in order], self.budget, range(len(order)))
            packs.sort(key=lambda places: sum(places) / len(places))  # planning closes long documents first
            return [[order[place] for place in places] for places in packs]
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

    def steps_of(self, tokens: int) -> int:
        """The fewest optimizer steps whose documents have that many supervised tokens."""
        for step in count():
            if tokens <= 0:
                return step
            tokens -= sum(self.supervised[at] for at in self._documents(step))
        raise AssertionError("documents without end")

    def seen(self, steps: int) -> dict[str, dict[str, dict[str, int]]]:
        """What the first steps learn from: documents, tokens and supervised tokens by domain and source."""
        out: dict[str, dict[str, dict[str, int]]] = {}
        for step in range(steps):
            for at in self._documents(step):
                none = {"documents": 0, "tokens": 0, "supervised_tokens": 0}
                example = self.examples[at]
                sums = out.setdefault(example.domain, {}).setdefault(example.source, none)
                sums["documents"] += 1
                sums["tokens"] += self.lengths[at]
                sums["supervised_tokens"] += self.supervised[at]
        return {domain: dict(sorted(sources.items())) for domain, sources in sorted(out.items())}

    def epoch_of(self, step: int) -> float:
        """How many epochs, or rounds of a mix, are over when ``step`` begins."""
        at = step * self.packs
        epoch = self._find(at)
        return epoch + (at - self._starts[epoch]) / len(self._epoch(epoch))

    def step(self, index: int) -> list[Batch]:
        """This rank's packs of optimizer step ``index``."""
        return [self._pack(index * self.packs + at) for at in range(self.rank, self.packs, self.world)]

    def _pack(self, index: int) -> Batch:
        examples = [self.examples[at] for at in self._group(index)]
        return pack(examples, self.source(examples))

    def _group(self, pack_index: int) -> list[int]:
        epoch = self._find(pack_index)
        return self._epoch(epoch)[pack_index - self._starts[epoch]]

    def _documents(self, step: int) -> list[int]:
        """Indices of the documents of all ranks."""
        first = step * self.packs
        return [at for pack_index in range(first, first + self.packs) for at in self._group(pack_index)]

    def _start(self, epoch: int) -> int:
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + len(self._epoch(len(self._starts) - 1)))
        return self._starts[epoch]

    def _find(self, pack_index: int) -> int:
        """The epoch that a pack belongs to."""
        while self._starts[-1] <= pack_index:
            self._start(len(self._starts))
        return bisect_right(self._starts, pack_index) - 1


def seen_table(seen: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """``Stream.seen`` for a terminal: a line a domain and source."""
    total = sum(sums["supervised_tokens"] for sources in seen.values() for sums in sources.values())
    lines = [
        f"{'learned from':14s} {'source':20s} {'documents':>9s} {'tokens':>10s} {'supervised':>10s}  share"
    ]
    for domain, sources in seen.items():
        for source, sums in sources.items():
            counts = f"{sums['documents']:9d} {sums['tokens']:10d} {sums['supervised_tokens']:10d}"
            share = sums["supervised_tokens"] / max(1, total)
            lines.append(f"{domain:14s} {source:20s} {counts} {share:6.1%}")
    return "\n".join(lines)
