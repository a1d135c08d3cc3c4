"""What a round costs on this machine: seconds of a target step and of drafting, measured once and kept.

These are tables over the number of rows and over tokens (drafts) a row, measured on the real pieces, made
monotone, and read between their points by lines. A step counts what it costs to let the proposer listen
(kept layers, its own keys and values); plain decoding is measured beside it, without any proposer.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from drafters import machine
from drafters.target import Target
from serve.engine import Engine
from serve.proposers import Combined
from serve.types import Proposer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kept = TypeVar("Kept")  # costs, of one kind or another


@dataclass(frozen=True)
class Table:
    """Seconds at ``rows`` x ``columns``, both ascending, by lines between points.

    They go on with the last slope beyond the last column, and in proportion to the rows beyond the last row.
    More rows, or more a row, never cost less. Errors: ``ValueError`` for what is no such table.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        axes = all(axis and list(axis) == sorted({*axis}) for axis in (self.rows, self.columns))
        shape = len(self.seconds) == len(self.rows) and {len(r) for r in self.seconds} == {len(self.columns)}
        if not axes or not shape:
            raise ValueError(f"no table: {self.rows} x {self.columns} for {self.seconds}")
        falls = [pair for line in self._lines() for pair in pairwise(line) if pair[1] < pair[0]]
        if falls or not all(0 < value < math.inf for row in self.seconds for value in row):
            raise ValueError(f"seconds must be positive and must not fall with more work: {self.seconds}")

    @classmethod
    def fit(cls, found: Mapping[tuple[int, int], float]) -> Table:
        """The monotone table nearest to measured seconds by (rows, column).

        Each value is the mean of the largest at most as much work, and the smallest at least as much: an
        upper and a lower monotone envelope, so that one high point does not make all later ones free.
        """
        rows, columns = (sorted(set(axis)) for axis in zip(*found, strict=True))

        def envelope(r: int, c: int) -> float:
            upper = max(s for (i, j), s in found.items() if i <= r and j <= c)
            lower = min(s for (i, j), s in found.items() if i >= r and j >= c)
            return (upper + lower) / 2

        return cls(tuple(rows), tuple(columns), tuple(tuple(envelope(r, c) for c in columns) for r in rows))

    def at(self, rows: float, column: float) -> float:
        """Seconds; below the first point they are those of the first."""
        most = self.rows[-1]
        (r, up), (c, right) = _locate(self.rows, min(rows, most)), _locate(self.columns, column)
        # Lines that go on beyond the last column may cross: fewer rows never cost more.
        values = list(accumulate((_blend(line, c, right) for line in self.seconds[: r + 2]), max))
        return _blend(values, r, up) * max(1.0, rows / most)

    def _lines(self) -> list[Sequence[float]]:
        return [*self.seconds, *zip(*self.seconds, strict=True)]


def _locate(points: Sequence[int], x: float) -> tuple[int, float]:
    """The segment to read ``x`` from and how far into it; above 1 beyond the last point."""
    if len(points) == 1 or x <= points[0]:
        return 0, 0.0
    at = min(bisect_right(points, x), len(points) - 1) - 1
    return at, (x - points[at]) / (points[at + 1] - points[at])


def _blend(line: Sequence[float], at: int, weight: float) -> float:
    return line[at] + weight * (line[at + 1] - line[at]) if weight else line[at]


@dataclass(frozen=True)
class Costs:
    """Seconds of a round's two parts: ``steps`` by tokens a row, ``drafting`` by drafts a row.

    ``alone`` are steps of one token a row in an engine without the proposer.
    """

    steps: Table
    drafting: Table
    alone: Table

    def plain(self, rows: int) -> float:
        """One round of plain decoding, where nobody could draft."""
        return min(self.alone.at(rows, 1), self.steps.at(rows, 1))

    def step(self, rows: int, tokens: float) -> float:
        """One pass of the target over ``tokens`` in all: the anchors of all rows, and drafts."""
        return self.steps.at(rows, tokens / rows)

    def draft(self, rows: int, n: int) -> float:
        """Proposing ``n`` drafts for every row."""
        return self.drafting.at(rows, n) if n else 0.0

    def round(self, rows: int, n: int) -> float:
        """Drafting ``n`` a row, and a step over all of them."""
        return self.draft(rows, n) + self.step(rows, rows * (1 + n))

    def fastest(self, tau_by_n: Mapping[int, float]) -> int:
        """The N with the most tokens a second for one request, of those whose tau is known; 0: plain."""
        rates = {0: 1 / self.plain(1), **{n: tau / self.round(1, n) for n, tau in tau_by_n.items()}}
        return max(sorted(rates), key=rates.__getitem__)

    @classmethod
    def read(cls, found: dict[str, Any]) -> Costs:
        """The inverse of ``dataclasses.asdict``, by way of JSON. Errors: as of ``Table``, or its keys."""
        return cls(*(read_table(found[part]) for part in ("steps", "drafting", "alone")))


def read_table(found: dict[str, Any]) -> Table:
    """The inverse of ``dataclasses.asdict``, by way of JSON. Errors: as of ``Table``, or its keys."""
    seconds = tuple(tuple(map(float, row)) for row in found["seconds"])
    return Table(tuple(map(int, found["rows"])), tuple(map(int, found["columns"])), seconds)


Timed = Callable[[int, int], float]  # does the work of so many rows and tokens (drafts) a row: its seconds


def measure(
    step: Timed, draft: Timed, plain: Timed, rows: Sequence[int], ns: Sequence[int], repeats: int = 5
) -> Costs:
    """Costs from steps and drafting with a proposer, and ``plain`` steps of one token a row without.

    Medians of ``repeats`` after one turn that warms up. All points take turns, so that whatever slows the
    machine slows them alike. ``ns`` are numbers of drafts from 1.
    """
    Found = dict[tuple[int, int], list[float]]
    steps: Found = {(r, 1 + n): [] for r in rows for n in (0, *ns)}
    drafts: Found = {(r, n): [] for r in rows for n in ns}
    alone: Found = {(r, 1): [] for r in rows}
    for _ in range(repeats + 1):
        for run, found in ((step, steps), (draft, drafts), (plain, alone)):
            for point, seconds in found.items():
                seconds.append(run(*point))
    medians = [{p: statistics.median(s[1:]) for p, s in found.items()} for found in (steps, drafts, alone)]
    return Costs(*map(Table.fit, medians))


def spread(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``: points that suffice to measure costs up to it."""
    return sorted({2**i for i in range(most.bit_length())} | {most}) if most else []


# On an engine ------------------------------------------------------------------------------------


def pieces(
    target: Target, proposer: Proposer | None, slots: int, calls: int, context: int = 128, equal: bool = False
) -> tuple[Timed, Timed]:
    """``step`` and ``draft`` for ``measure``: what an engine does in a round, ``context`` tokens in a slot.

    Rows that verify drafts have unequal numbers of them, as lookups and confidences leave rows, with the mean
    that was asked for, unless they are to be ``equal``. Each step keeps one token, so there is room for so
    many ``calls``. Not measured: prompts that are read.
    """
    spare = 1 if proposer is None else 2 + proposer.max_drafts
    engine = Engine(target, proposer, slots=slots, capacity=context + calls + spare)
    # No token comes twice, and the anchor does not come at all, as far as there are others: lookups find
    # nothing, and a combination pays for its trained drafter.
    fresh = torch.arange(context + calls + 1, device=target.device) % target.vocab_size
    prompt, anchors = fresh[:context].expand(slots, -1), fresh[-1:].expand(slots)
    later = iter(fresh[context:-1].tolist())
    with torch.inference_mode():  # one slot is read; in the target's cache of others, zeros cost the same
        read = engine.forward(range(1), prompt[:1])
        for slot in range(slots):
            engine.keep(range(slot, slot + 1), read.states, prompt[:1], [context])

    @torch.inference_mode()
    def step(rows: int, tokens: int) -> float:
        counts = [tokens] * rows
        if rows > 1 and tokens > 1 and not equal:
            counts[0], counts[-1] = tokens + 1, tokens - 1
        fed = torch.full((rows, max(counts)), next(later), device=target.device)
        start = perf_counter()
        ran = engine.forward(range(rows), fed, counts)
        best_P = target.head(ran.last_PD).argmax(-1)
        engine.keep(ran.rows, ran.states, ran.tokens_BJ, [1] * rows)
        best_P.tolist()  # waits for the device
        return perf_counter() - start

    @torch.inference_mode()
    def draft(rows: int, n: int) -> float:
        start = perf_counter()
        engine.propose(range(rows), anchors[:rows], n).tokens_BK.tolist()
        return perf_counter() - start

    return step, draft


def costs_for(target: Target, proposer: Proposer, slots: int) -> Costs:
    """What rounds of up to ``slots`` requests cost with this proposer on this machine: kept, or measured."""
    rows, ns, repeats = spread(slots), spread(proposer.max_drafts), 3

    def measured() -> Costs:
        calls = (repeats + 1) * len(rows) * (1 + len(ns))
        step, draft = pieces(target, proposer, slots, calls)
        plain, _ = pieces(target, None, slots, calls)
        return measure(step, draft, plain, rows, ns, repeats)

    return kept(key_of(target, proposer, slots), measured, Costs.read)


# Kept between starts -----------------------------------------------------------------------------


def kept(
    key: Mapping[str, Any], measured: Callable[[], DataclassInstance], read: Callable[[dict[str, Any]], Kept]
) -> Kept:
    """The costs of this key from the cache directory, else measured now and written there."""
    return machine.kept("costs", key, lambda: asdict(measured()), read)


def key_of(target: Target, proposer: Proposer, slots: int) -> dict[str, Any]:
    """What costs depend on: the machine, the target, the sizes of the proposer, how many rows there are."""
    return {
        "version": 4,  # of how costs are measured
        **machine.of_speed(target.device),
        "dtype": str(target.dtype),
        "target": target.signature,
        "copies": target.keeps_copies,
        "attention": target.config._attn_implementation,
        "proposer": sizes_of(proposer),
        "slots": slots,
    }


def sizes_of(proposer: Proposer) -> str:
    """What its costs depend on, as a line of text."""
    return json.dumps(_sizes(proposer))


def _sizes(proposer: Proposer) -> list[Any]:
    """Kind, drafts, shapes of weights; of a combination, those of its parts."""
    own = [type(proposer).__name__, proposer.max_drafts]
    if isinstance(proposer, Combined):
        return [*own, proposer.trust, proposer.n, _sizes(proposer.first), _sizes(proposer.second)]
    weights = proposer.state_dict() if isinstance(proposer, nn.Module) else {}
    shapes = [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in weights.items()]
    return [*own, hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]]
