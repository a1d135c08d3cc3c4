"""What a schedule believes of rounds to come, from those that were: acceptance, copies, pace, losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

PRIOR = 0.8  # acceptance of a draft before anything is known: high, so that drafting is tried


class Survival:
    """The share of rows that passed the first k of their trials, for every k: pooled, older rounds fade.

    A position of which little is known is believed to be like the one before it, so that longer drafts are
    tried again when shorter ones do well.
    """

    def __init__(self, conditional: Sequence[float], weight: float = 8.0) -> None:
        self._weight = weight
        self._tried = [weight] * len(conditional)
        self._passed = [weight * share for share in conditional]

    def hear(self, passed: Sequence[int], tried: Sequence[int], memory: float) -> None:
        """Row r passed the first ``passed[r]`` of ``tried[r]``; where there are more, it failed the next."""
        fade = (1 - 1 / memory) ** sum(number > 0 for number in tried)
        self._tried = [weight * fade for weight in self._tried]
        self._passed = [weight * fade for weight in self._passed]
        for number, most in zip(passed, tried, strict=True):
            for k in range(min(number + 1, most)):
                self._tried[k] += 1
                self._passed[k] += k < number

    def upto(self) -> list[float]:
        """Survival at 1, 2, ..."""
        before, shares = 0.0, []
        for k, (tried, passed) in enumerate(zip(self._tried, self._passed, strict=True)):
            weight = self._weight if k else 0.0
            before = (passed + weight * before) / (tried + weight)
            shares.append(before)
        return list(accumulate(shares, mul))


class Copies:
    """Rows whose drafts were looked up: their share of all, and drafts verified and accepted in each.

    Old rounds fade, as in ``Survival``; at first one row in four copies, nearly all of it right.
    """

    def __init__(self, weight: float = 8.0) -> None:
        self._rows, self._copied, self._verified, self._accepted = weight, weight / 4, weight, 0.9 * weight

    def hear(self, copies: Sequence[tuple[int, int]], rows: int, memory: float) -> None:
        """Of ``rows``, those that copied drafts: how many were verified and accepted in each."""
        fade = (1 - 1 / memory) ** rows
        self._rows = fade * self._rows + rows
        self._copied = fade * self._copied + len(copies)
        self._verified = fade * self._verified + sum(verified for verified, _ in copies)
        self._accepted = fade * self._accepted + sum(accepted for _, accepted in copies)

    @property
    def share(self) -> float:
        return self._copied / self._rows

    @property
    def verified(self) -> float:
        """In the mean of rows that copied."""
        return self._verified / max(self._copied, 1e-9)

    @property
    def accepted(self) -> float:
        return self._accepted / max(self._copied, 1e-9)


def conditional_from(tau_by_n: Mapping[int, float], most: int) -> list[float]:
    """Acceptance of drafts 1 to ``most`` given those before, from tau by N; the last known one goes on."""
    taus = {0: 1.0, **tau_by_n}
    shares: list[float] = []
    survived = 1.0
    for k in range(1, most + 1):
        if k in taus and k - 1 in taus and survived > 0:
            gain = min(max(taus[k] - taus[k - 1], 0.0), survived)
            shares.append(gain / survived)
            survived = gain
        else:
            shares.append(shares[-1] if shares else PRIOR)
            survived *= shares[-1]
    return shares


class Pace:
    """Measured seconds over those of the cost table, in the mean of the last rounds.

    A hiccup of the machine counts as four times what was expected, at most.
    """

    def __init__(self) -> None:
        self.ratio, self.rounds = 1.0, 0

    def hear(self, measured: float, table: float) -> float:
        """The measured seconds, without what is a hiccup."""
        ratio = min(max(measured / table, self.ratio / 4), self.ratio * 4)
        self.rounds += 1
        self.ratio += (ratio - self.ratio) / min(self.rounds, 8)
        return ratio * table


class Ledger:
    """Seconds lost against the plain rounds of this engine; gains are losses below 0."""

    def __init__(self) -> None:
        self.now = self._lost = 0.0
        self._lows = deque(
            [(0.0, 0.0)]
        )  # (time, lost in all), both ascending: where a worst stretch may begin

    def add(self, seconds: float, lost: float, window: float) -> None:
        """A round, and how much longer it took than plain decoding takes for its tokens."""
        self.now += seconds
        self._lost += lost
        while self._lows and self._lows[-1][1] >= self._lost:
            self._lows.pop()
        self._lows.append((self.now, self._lost))
        while self._lows[0][0] < self.now - window:
            self._lows.popleft()

    @property
    def worst(self) -> float:
        """The most that was lost in any stretch of the last window that ends now."""
        return self._lost - self._lows[0][1]
