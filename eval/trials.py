"""Trials: does another reading of the data, or another setting of the drafter, explain the answers better?

A trial scores the same answers under one changed assumption. Two figures decide, both paired by row: the
log-probability of the answers' tokens, which sees small differences, and how many tokens are hit, which is
what a user gains. The intervals are bootstraps over rows, wide enough for some thirty trials at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SAMPLES = 2000
LOW = 0.005  # quantile of the bootstrap that has to lie above 0


@dataclass(frozen=True)
class Limit:
    """The gains whose product makes another assumption the right one, and not just another."""

    nats: float  # log-probability a token
    hits: float  # tokens hit a place


@dataclass(frozen=True)
class Trial:
    """Sums by row under one assumption, which belongs to the check of that name.

    ``log_R`` over ``weight_R`` is the log-probability of a token, ``hit_R`` over ``place_R`` the tokens hit:
    of an answer those that the target would choose, of an anchor the drafts accepted.
    """

    check: str
    name: str
    limit: Limit
    log_R: np.ndarray
    weight_R: np.ndarray
    hit_R: np.ndarray
    place_R: np.ndarray
    reproduces: bool | None = None  # the drafts recorded at export; ``None``: not known, or not asked

    @property
    def nats(self) -> float:
        """Log-probability of a token."""
        return float(self.log_R.sum() / self.weight_R.sum())

    @property
    def hits(self) -> float:
        """Tokens hit a place."""
        return float(self.hit_R.sum() / self.place_R.sum())


def explains(as_is: Trial, other: Trial, seed: int = 0) -> bool:
    """Whether ``other`` is surely better in both figures, and by its limit."""
    nats, hits = other.nats - as_is.nats, other.hits - as_is.hits
    if min(nats, hits) <= 0 or nats * hits < other.limit.nats * other.limit.hits:
        return False
    picks = np.random.default_rng(seed).integers(0, len(as_is.log_R), (SAMPLES, len(as_is.log_R)))
    for sums, counts in (("log_R", "weight_R"), ("hit_R", "place_R")):
        before, after = (
            getattr(one, sums)[picks].sum(1) / np.maximum(getattr(one, counts)[picks].sum(1), 1e-9)
            for one in (as_is, other)
        )
        if np.quantile(after - before, LOW) <= 0:
            return False
    return True


def best(as_is: Trial, others: Sequence[Trial]) -> Trial | None:
    """The one assumption that explains the answers best, ``None`` where that is the present one.

    Where the present drafter does not make the drafts recorded at its export, one that does needs no answers.
    """
    if as_is.reproduces is False and (same := [one for one in others if one.reproduces]):
        return max(same, key=lambda one: one.nats)
    better = [one for one in others if explains(as_is, one)]
    return max(better, key=lambda one: one.nats, default=None)
