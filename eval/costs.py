"""What rounds and prompts cost on this machine, by requests, drafts and context: measured, read or kept.

The tables of the first context are those of the server's schedule (serve/costs.py): measured on the engine,
made monotone, read between their points by lines. A longer context adds what it costs more at the ends of
rows and drafts, and lines between these; between contexts costs follow lines too, since attention to a
context costs in proportion to its length. Few tokens a pass cost the reading of the weights, many their
arithmetic, and the tables hold whatever steps the kernels have in between.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from tqdm import tqdm

from drafters.target import Target
from serve import costs
from serve.costs import Costs, Table, spread
from serve.engine import Engine
from serve.types import Proposer, Request

REPEATS = 3
CONTEXTS = (128, 512)  # tokens in a slot
PROMPTS = (16, 64, 256, 512)  # lengths that reading a prompt is timed at; an engine reads 512 tokens at once,
# so that longer ones go on with the last slope


@dataclass(frozen=True)
class CostModel:
    """Seconds of rounds at each of ``contexts``; of ``reading`` a prompt with the proposer, and without."""

    contexts: tuple[int, ...]
    rounds: tuple[Costs, ...]
    reading: Table
    reading_alone: Table
    target: str  # its signature
    dtype: str
    proposer: str  # its sizes
    machine: str

    def __post_init__(self) -> None:
        assert len(self.contexts) == len(self.rounds), self.contexts
        assert list(self.contexts) == sorted({*self.contexts}), self.contexts

    def round(self, rows: int, n: int, context: float) -> float:
        """Drafting ``n`` for every row and verifying them, ``context`` tokens in a slot; 0: a plain round."""
        return self._at(context, [one.round(rows, n) if n else one.plain(rows) for one in self.rounds])

    def prompt(self, tokens: float, n: int) -> float:
        """Reading one prompt, where drafts will follow or none."""
        return (self.reading if n else self.reading_alone).at(1, tokens)

    def _at(self, context: float, seconds: Sequence[float]) -> float:
        """By a line between two contexts, beyond the last with its slope; a longer one is never cheaper."""
        seconds = list(accumulate(seconds, max))
        if len(seconds) == 1 or context <= self.contexts[0]:
            return seconds[0]
        pairs = list(zip(pairwise(self.contexts), pairwise(seconds), strict=True))
        (left, right), (less, more) = next((p for p in pairs if context <= p[0][1]), pairs[-1])
        return less + (more - less) * (context - left) / (right - left)

    @classmethod
    def read(cls, found: dict[str, Any]) -> CostModel:
        """The inverse of ``dataclasses.asdict``, by way of JSON. Errors: as of ``Costs.read``."""
        return cls(
            tuple(map(int, found["contexts"])),
            tuple(map(Costs.read, found["rounds"])),
            costs.read_table(found["reading"]),
            costs.read_table(found["reading_alone"]),
            *(str(found[fact]) for fact in ("target", "dtype", "proposer", "machine")),
        )


def from_file(path: Path, name: str, target: Target, proposer: Proposer) -> CostModel:
    """The costs of a drafter that a plan left in a file.

    Errors: ``ValueError`` for a file without them, or one of another target, dtype or size of drafter.
    """
    try:
        found = CostModel.read(json.loads(path.read_text())[name])
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(
            f"plan.costs={path}: no costs of {name} ({error!r}); name a plan's costs.json, or leave it out"
        ) from error
    for key, theirs, ours in (
        ("target", found.target, target.signature),
        ("dtype", found.dtype, str(target.dtype)),
        ("drafter", found.proposer, costs.sizes_of(proposer)),
    ):
        if theirs != ours:
            raise ValueError(
                f"plan.costs={path} was measured with {key} {theirs}, this is {ours}; leave plan.costs out"
            )
    return found


def cost_model(
    target: Target, proposer: Proposer, slots: int, ns: Sequence[int], contexts: Sequence[int]
) -> CostModel:
    """Costs of up to ``slots`` requests with this proposer on this machine: kept, or measured now."""
    key = {**costs.key_of(target, proposer, slots), "ns": list(ns), "contexts": list(contexts)}
    return costs.kept(key, lambda: measure(target, proposer, slots, ns, contexts), CostModel.read)


def measure(
    target: Target, proposer: Proposer, slots: int, ns: Sequence[int], contexts: Sequence[int]
) -> CostModel:
    """Time rounds at every context, with equal numbers of drafts in all rows, and the reading of prompts.

    At the first context for all ``ns`` and loads; at the others at the ends of both alone: a longer context
    costs more attention, which grows with rows and tokens by lines and has none of the steps of products.
    """
    every, ends = (spread(slots), ns), (sorted({1, slots}), sorted({ns[0], ns[-1]}))
    found: list[Costs] = []
    for context in tqdm(contexts, desc="costs by context"):
        rows, some = ends if found else every
        calls = (REPEATS + 1) * len(rows) * (1 + len(some))
        begin = max(1, context - calls // 2)  # every step keeps a token
        step, draft = costs.pieces(target, proposer, slots, calls, begin, equal=True)
        plain, _ = costs.pieces(target, None, slots, calls, begin)
        measured = costs.measure(step, draft, plain, rows, some, REPEATS)
        found.append(lengthened(found[0], measured) if found else measured)
    key = costs.key_of(target, proposer, slots)
    return CostModel(
        tuple(contexts),
        tuple(found),
        _reading(target, proposer),
        _reading(target, None),
        *(key[fact] for fact in ("target", "dtype", "proposer", "machine")),
    )


def lengthened(short: Costs, some: Costs) -> Costs:
    """Costs at a longer context: those of the short one, and by lines what some points cost more."""
    tables = []
    for name in ("steps", "drafting", "alone"):
        full, few = getattr(short, name), getattr(some, name)
        points = [(r, c) for r in few.rows for c in few.columns]
        more = Table.fit({point: max(few.at(*point) - full.at(*point), 1e-9) for point in points})
        grid = [(r, c) for r in full.rows for c in full.columns]
        tables.append(Table.fit({point: full.at(*point) + more.at(*point) for point in grid}))
    return Costs(*tables)


def _reading(target: Target, proposer: Proposer | None) -> Table:
    """Median seconds of a prompt, from its arrival to its first token."""
    engine = Engine(target, proposer, capacity=PROMPTS[-1] + 2 + (proposer.max_drafts if proposer else 0))
    ids = (torch.arange(PROMPTS[-1]) % target.vocab_size).tolist()
    seconds: dict[tuple[int, int], list[float]] = {(1, tokens): [] for tokens in PROMPTS}
    for _ in range(REPEATS + 1):
        for (_, tokens), some in seconds.items():
            start = perf_counter()
            list(engine.run([Request(ids[:tokens], 1)]))
            some.append(perf_counter() - start)
    return Table.fit({point: statistics.median(some[1:]) for point, some in seconds.items()})
