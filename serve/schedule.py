"""How many drafts to ask for, and how many of them to verify: per round, for the whole batch.

Three questions, one set of costs. ``prefixes``: of drafts with confidences, which ones are worth the target's
time. ``drafts``: without looking at the drafts, the N with the most tokens a second at this load, from
acceptance so far. ``Ledger``: drafting may lose only so much against plain decoding within a minute; beyond
that it stops, whatever the other two believe. Where drafts are looked up before a trained drafter is asked,
N is that drafter's alone: a copy costs nothing to draft and is accepted by other odds.

All are lossless. Drafts that are point masses (greedy ones, n-grams, suffixes: all of this engine's) are
functions of the past, and so is everything computed from them, their own confidence too: nothing random is
conditioned on, and the best prefixes are searched over the whole cost table, dents and all (``budget``).
Where drafts are drawn from laws, no decision about draft j may look at draft j: confidences are computed from
the past and drafts 1 to j-1, and admission ends where tokens a second first fall (``admit``).

Time is the sum of the seconds heard: minutes of decoding, so that an idle server forgets nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from drafters.types import Proposal
from serve.costs import Costs
from serve.estimates import Copies, Ledger, Pace, Survival, conditional_from
from serve.lookup import Lookup
from serve.proposers import Combined
from serve.types import Proposer

WINDOW = 60.0  # seconds over which losses against plain decoding are bounded: 3 % of them, never more
WINDOW_ROUNDS = 200  # plain rounds that a window lasts where they take longer: a few must not decide
DRAFTING_LIMIT = 0.022  # of a window is what may be lost in it
PROBING_LIMIT = 0.025  # the same, for a look at whether drafting pays again
LEAST_LIMIT = 0.005  # what is left of these where plain rounds already lose because a proposer hears of them
PROBE = 0.1  # seconds that such a look takes, or one round
SHARE = 0.02  # of the time may be spent on looks that gain nothing
WAITS = (1.0, 32.0)  # seconds between looks: the first, doubled after each that finds nothing up to the last
PLAIN_EVERY = 2.0  # seconds between plain rounds while drafting: what drafting is compared with
PLAIN_SHARE = 0.01  # of the time may be spent on them
MEMORY = 100.0  # drafted rows that acceptance is estimated from, older ones fade
OTHERS = 4  # times as long lasts what was heard of copies while the trained drafter did otherwise
PROBE_MEMORY = 8.0  # the same in a look: what has changed must be seen from a few
MARGIN = 1.02  # how much faster another N must be to be changed to


# Which drafts to verify --------------------------------------------------------------------------

Slot = tuple[float, int, int]  # minus the survival, so that it sorts; j, from 1; row


def admit(survival: Sequence[Sequence[float]], seconds: Callable[[int], float]) -> list[int]:
    """The number of drafts of each row to verify: DSpark's Algorithm 1.

    ``survival[r][j - 1]`` estimates that drafts 1 to j of row r are all accepted; it never grows with j.
    ``seconds(tokens)`` is the time of a round that verifies so many, anchors included. Drafts are admitted by
    survival, ties by smaller j, then by row, for as long as expected tokens a second grow. The first that
    does not raise them ends it: a later one could be reached only by having looked at what this one is.
    """
    slots, rows = _ordered(survival), len(survival)
    admitted, best = 0, 0.0
    for taken, rate in enumerate(_rates(slots, rows, seconds)):
        if rate <= best:
            break
        admitted, best = taken, rate
    return _prefixes(slots[:admitted], rows)


def budget(survival: Sequence[Sequence[float]], seconds: Callable[[int], float]) -> int:
    """How many drafts in all have the most tokens a second, wherever that is.

    Lossless only for drafts that are point masses.
    """
    rates = list(_rates(_ordered(survival), len(survival), seconds))
    return max(range(len(rates)), key=rates.__getitem__)


def spend(survival: Sequence[Sequence[float]], total: int) -> list[int]:
    """The ``total`` drafts that are likeliest to survive, as a number of drafts for each row."""
    return _prefixes(_ordered(survival)[:total], len(survival))


def _ordered(survival: Sequence[Sequence[float]]) -> list[Slot]:
    return sorted((-a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row, 1) if a > 0)


def _rates(slots: Sequence[Slot], rows: int, seconds: Callable[[int], float]) -> Iterator[float]:
    """Expected tokens a second with none, one, two, ... of the slots verified."""
    expected = accumulate((-minus for minus, _, _ in slots), initial=float(rows))
    return (tokens / seconds(rows + taken) for taken, tokens in enumerate(expected))


def _prefixes(slots: Sequence[Slot], rows: int) -> list[int]:
    lengths = [0] * rows
    for _, j, row in slots:
        lengths[row] = j
    return lengths


# The schedule ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """For a log or a metrics page: the N of now, and since the start, plain rounds and drafts verified."""

    drafts: int  # 0 where it is plain decoding, or lookups alone
    plain_share: float  # of all rounds, those that asked for no drafts
    verified: float  # drafts verified for a row, in the mean of rounds that asked for some


@dataclass
class Look:
    """Rounds that try drafting while it rests: seconds spent and lost, tokens gained."""

    beside: float  # tokens a second expected without it
    spent: float = 0.0
    lost: float = 0.0
    tokens: int = 0


class Schedule:
    """Asked by an engine each round: ``drafts``, then ``prefixes``, then ``heard``.

    ``most`` is the largest N to ask for; ``tau_by_n`` what a drafter directory states of acceptance.
    ``copies``: before a trained drafter, so many drafts a row may be looked up, which N does not bound; N = 0
    then is lookups alone. A plain round is N = ``None``.
    """

    def __init__(
        self, costs: Costs, most: int, tau_by_n: Mapping[int, float] | None = None, copies: int = 0
    ) -> None:
        self.costs, self.most, self.copies = costs, most, copies
        self._drafting_ns = range(0 if copies else 1, most + 1)
        self._trained_ns = range(1, most + 1)
        self.n: int | None = most if self._drafting_ns else None
        self._accepted = Survival(conditional_from(tau_by_n or {}, most))  # of drafts that were verified
        self._reached = Survival([1.0] * most)  # whether one is verified, where those before were accepted
        self._given = Survival([1.0] * most)  # the same, whatever became of those before
        self._copies = {False: Copies(), True: Copies()}  # whether a trained drafter drafts the other rows
        self._plain, self._drafting = Pace(), Pace()
        self._ledger = Ledger()
        self._asked: int | None = None
        self._plain_due, self._look_due, self._wait = 0.0, WAITS[0], WAITS[0]
        self._look: Look | None = None  # that is under way
        self._prefixes: list[int] = []
        self._copied: list[bool] = []
        self._rounds = self._plain_rounds = self._rows = self._verified = 0

    # What the engine asks ----------------------------------------------------------------------

    def drafts(self, rows: int) -> int | None:
        """N to ask the proposer for; ``None``: nothing this round."""
        rates = self._tokens_a_second(rows)
        self._choose(rates)
        now = self._ledger.now
        drafting = self.n is not None and self._affordable(rows, self.n, DRAFTING_LIMIT)
        usual = self.n if drafting and now < self._plain_due else None
        if drafting and (self.n or not self._trained_ns):
            self._look, self._wait, self._look_due = None, WAITS[0], now + WAITS[0]
            self._asked = usual
            return usual
        # The trained drafter rests, beside lookups or beside plain decoding.
        looked_at = max(self._trained_ns or self._drafting_ns, key=rates.__getitem__, default=None)
        if (
            self._look is None
            and now >= self._look_due
            and looked_at is not None
            and self._affordable(rows, looked_at, PROBING_LIMIT)
        ):
            self._look = Look(rates[self.n])
        self._asked = usual if self._look is None else looked_at
        return self._asked

    def prefixes(self, proposal: Proposal, rows: int) -> list[int]:
        """How many drafts of each row to verify."""
        lengths = proposal.lengths or [proposal.tokens_BK.shape[1]] * rows
        self._copied = proposal.copied or [False] * rows
        self._prefixes = self._worth_verifying(proposal, lengths)
        return self._prefixes

    def _worth_verifying(self, proposal: Proposal, lengths: list[int]) -> list[int]:
        if proposal.confidence_BK is None:
            return lengths
        rows = len(lengths)
        confidence = proposal.confidence_BK.double().clamp(0, 1).tolist()
        survival = [list(accumulate(row[:n], mul)) for row, n in zip(confidence, lengths, strict=True)]
        drafting = self._draft_seconds(rows, self._copied)

        def seconds(tokens: int) -> float:
            return drafting + self.costs.step(rows, tokens)

        if proposal.laws_BKV is not None:
            return admit(survival, seconds)
        return spend(survival, budget(survival, seconds))

    def heard(self, drafted: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        """What became of the round: drafts verified and accepted for each row, and its seconds."""
        rows = len(drafted)
        self._rounds += 1
        if self._asked is None:
            self._plain_rounds += 1
            self._ledger.add(self._plain.hear(seconds, self.costs.step(rows, rows)), 0.0, self._window(rows))
            self._plain_due = self._ledger.now + max(PLAIN_EVERY, seconds / PLAIN_SHARE)
            return
        self._rows += rows
        self._verified += sum(drafted)
        table = self._draft_seconds(rows, self._copied) + self.costs.step(rows, rows + sum(drafted))
        seconds = self._drafting.hear(seconds, table)
        lost = self._risk(rows, seconds) - sum(accepted) * self._plain_seconds(rows) / rows
        self._ledger.add(seconds, lost, self._window(rows))
        self._learn(drafted, accepted, MEMORY if self._look is None else PROBE_MEMORY)
        if self._look is not None:
            self._looked(self._look, seconds, lost, rows + sum(accepted))

    def _learn(self, drafted: Sequence[int], accepted: Sequence[int], memory: float) -> None:
        """What became of copies, and of the trained drafter's drafts, each for itself."""
        asked = self._asked
        assert asked is not None, "a plain round teaches nothing"
        rows = list(zip(self._copied, drafted, self._prefixes, accepted, strict=True))
        if self.copies:
            copies = [(num, stood) for copied, num, _, stood in rows if copied and num]
            self._copies[asked > 0].hear(copies, len(rows), memory)
            # What rests is believed to have become like what is seen, in time.
            self._copies[asked == 0].hear(copies, len(rows), OTHERS * memory)
        own = [(num, chosen, stood) for copied, num, chosen, stood in rows if not copied]
        if not asked or not own:
            return
        nums, stood = [num for num, _, _ in own], [stood for _, _, stood in own]
        # Where an answer ends before its drafts do, nothing is known of those that its room cut off.
        known = [num if num < chosen else asked for num, chosen, _ in own]
        reached = [min(num, 1 + passed) for num, passed in zip(known, stood, strict=True)]
        self._accepted.hear(stood, nums, memory)
        self._reached.hear(nums, reached, memory)
        self._given.hear(nums, known, memory)

    @property
    def summary(self) -> Summary:
        return Summary(
            self.n or 0, self._plain_rounds / max(1, self._rounds), self._verified / max(1, self._rows)
        )

    # Small steps -------------------------------------------------------------------------------

    def _looked(self, look: Look, seconds: float, lost: float, tokens: int) -> None:
        """End a look that has had its time: look on while it gains, else later, and later each time.

        A gain over plain decoding; beside lookups alone, over what they give.
        """
        look.spent, look.lost, look.tokens = look.spent + seconds, look.lost + lost, look.tokens + tokens
        if look.spent < PROBE:
            return
        self._look, self._look_due = None, self._ledger.now
        if look.lost >= 0 if self.n is None else look.tokens <= look.beside * look.spent:
            self._look_due += max(self._wait, look.spent / SHARE)
            self._wait = min(2 * self._wait, WAITS[1])

    def _choose(self, rates: Mapping[int | None, float]) -> None:
        """Stay at N, unless another is faster by a margin, or plain decoding is faster at all."""
        best = max(rates, key=rates.__getitem__)
        if rates[best] > MARGIN * rates[self.n] or rates[self.n] < rates[None]:
            self.n = best

    def _tokens_a_second(self, rows: int) -> dict[int | None, float]:
        """To expect at this load, by N."""
        rates: dict[int | None, float] = {None: rows / (self._plain.ratio * self.costs.step(rows, rows))}
        gained = map(mul, self._reached.upto(), self._accepted.upto())
        tokens = accumulate(gained, initial=0.0), accumulate(self._given.upto(), initial=0.0)
        for n, (accepted, given) in enumerate(zip(*tokens, strict=True)):
            if n not in self._drafting_ns:
                continue
            step = self.costs.step(rows, rows * (1 + given))
            draft = self.costs.draft(rows, n)
            if self.copies:
                copies = self._copies[n > 0]
                share, copied = copies.share, self.costs.step(rows, rows * (1 + copies.verified))
                accepted = share * copies.accepted + (1 - share) * accepted
                step = share * copied + (1 - share) * step
                draft *= 1 - share**rows  # the drafter is asked unless all rows copy
            rates[n] = rows * (1 + accepted) / (self._drafting_pace * (draft + step))
        return rates

    def _draft_seconds(self, rows: int, copied: Sequence[bool]) -> float:
        """What the drafts of this round cost; those that are looked up nothing."""
        return 0.0 if copied and all(copied) else self.costs.draft(rows, self._asked or 0)

    def _affordable(self, rows: int, n: int, limit: float) -> bool:
        """Whether a round in which nothing is accepted keeps losses within the limit, or is the first."""
        most = self.costs.draft(rows, n) + self.costs.step(rows, rows * (1 + max(n, self.copies)))
        risk = self._risk(rows, self._drafting_pace * most)
        limit = max(limit - self._listening(rows), LEAST_LIMIT)
        return self._ledger.worst <= 0 or self._ledger.worst + risk <= limit * self._window(rows)

    def _risk(self, rows: int, seconds: float) -> float:
        """What a round loses if nothing is accepted, beyond what plain rounds lose in its seconds."""
        return seconds * (1 - self._listening(rows)) - self._plain_seconds(rows)

    def _window(self, rows: int) -> float:
        return max(WINDOW, WINDOW_ROUNDS * self._plain_seconds(rows))

    def _plain_seconds(self, rows: int) -> float:
        """Of a round where nobody could draft, at the machine's pace of now."""
        return self._plain.ratio * self.costs.plain(rows)

    def _listening(self, rows: int) -> float:
        """The share of a plain round that is lost because the proposer must hear of it.

        All of a window may be plain rounds: it is taken off what drafting may lose.
        """
        return 1 - self.costs.plain(rows) / self.costs.step(rows, rows)

    @property
    def _drafting_pace(self) -> float:
        return (self._drafting if self._drafting.rounds else self._plain).ratio


def schedule_of(proposer: Proposer, costs: Costs, tau_by_n: Mapping[int, float]) -> Schedule:
    """The schedule of a proposer (a combination: built ``apart``); ``tau_by_n`` is its trained drafter's."""
    if isinstance(proposer, Combined):
        assert proposer.apart, "a schedule bounds the trained drafter of a combination alone"
        return Schedule(costs, proposer.n, tau_by_n, proposer.first.max_drafts)
    return Schedule(costs, proposer.max_drafts, {} if isinstance(proposer, Lookup) else tau_by_n)
