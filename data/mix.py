"""A mix: how often each domain is drawn, so that it has its share of what is learned from.

``data.weights`` are shares of supervised tokens, since a drafter learns from those alone. Domains differ in
how many of them a document has, so documents are drawn by weight / mean: with weights w_d and means m_d a
round of R documents has in expectation

    r_d = R (w_d / m_d) / sum_j (w_j / m_j)

documents of d, and so r_d m_d supervised tokens, which go as w_d.

Round e takes the documents from floor(e r_d + u_d) to floor((e + 1) r_d + u_d) of the endless row of shuffles
of d. u_d is drawn once from [0, 1), so the expectation is exact and no round is off by more than a document
(systematic sampling). Within a round the documents of a domain stand at even distances, each at a random
place of its own stretch, so that a run which ends within a round has its shares too. A small domain repeats,
and every document of it is seen before one is seen again.
"""

from __future__ import annotations

import difflib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor

from drafters.types import Example


def chosen(examples: Sequence[Example], weights: Mapping[str, float]) -> list[Example]:
    """The documents that weights draw from, all of them without weights.

    Errors: ``ValueError`` for a name that no document belongs to.
    """
    named = members(examples, weights)
    return [examples[at] for at in sorted(sum(named.values(), []))] if weights else list(examples)


def members(examples: Sequence[Example], weights: Mapping[str, float]) -> dict[str, list[int]]:
    """Indices of the documents by the name that they are weighted under: a source before its domain."""
    found: dict[str, list[int]] = {name: [] for name in sorted(weights)}
    for at, example in enumerate(examples):
        name = _name(example, weights)
        if name is not None:
            found[name].append(at)
    for name, some in found.items():
        if not some:
            domains, sources = (Counter(getattr(e, key) for e in examples) for key in ("domain", "source"))
            near = difflib.get_close_matches(name, [*domains, *sources], 1)
            raise ValueError(
                f"data.weights: there is no row to train on for {name}; rows by domain: {_counted(domains)}; "
                f"by source: {_counted(sources)}." + (f" Did you mean {near[0]}?" if near else "")
            )
    return found


def _name(example: Example, weights: Mapping[str, float]) -> str | None:
    return next((name for name in (example.source, example.domain) if name in weights), None)


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(names.items())[:12])


@dataclass(frozen=True)
class Mix:
    """The rounds of a weighted run: a pure function of seed and round number, with as many documents in a
    round as there are, up to rounding."""

    examples: Sequence[Example]
    weights: Mapping[str, float]
    seed: int

    @cached_property
    def _members(self) -> dict[str, list[int]]:
        return members(self.examples, self.weights)

    @cached_property
    def rates(self) -> dict[str, float]:
        """Documents of each name in a round, in expectation."""
        supervised = [sum(example.mask) for example in self.examples]
        drawn = {
            name: self.weights[name] * len(some) / sum(supervised[at] for at in some)
            for name, some in self._members.items()
        }
        return {name: len(self.examples) * each / sum(drawn.values()) for name, each in drawn.items()}

    def order(self, round: int) -> list[int]:
        """Indices of the documents of a round, mixed evenly."""
        placed: list[tuple[float, int]] = []
        for name, rate in self.rates.items():
            shift = random.Random(f"{self.seed}/{name}").random()
            first, last = floor(round * rate + shift), floor((round + 1) * rate + shift)
            some, drawn = self._members[name], []
            for cycle in range(first // len(some), -(-last // len(some))):
                shuffled = random.Random(f"{self.seed}/{name}/{cycle}").sample(some, len(some))
                start = cycle * len(some)
                drawn += shuffled[max(0, first - start) : max(0, last - start)]
            place = random.Random(f"{self.seed}/{name}/{round}/places").random
            placed += [((number + place()) / len(drawn), at) for number, at in enumerate(drawn)]
        return [at for _, at in sorted(placed)]
