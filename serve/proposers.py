"""Who proposes: nobody, a table of n-grams, a suffix tree, a trained drafter, or one before the other.

``proposer=suffix+dspark`` looks drafts up first. The trained drafter is asked when a row's are too few, and
not at all in rounds in which every row has enough; it hears of every true token either way.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.method import Drafter, all_methods
from drafters.types import Proposal, States
from serve.lookup import Lookup
from serve.ngram import Ngram, NgramConfig
from serve.suffix import Suffix, SuffixConfig
from serve.types import Proposer

UNTRAINED = ("none", "ngram", "suffix")  # names that need no drafter


@dataclass
class ProposerConfig:
    """``serve.*`` of the proposers."""

    ngram: NgramConfig = field(default_factory=NgramConfig)
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    trust: int = 4  # drafts of a row, below which a combination takes the trained drafter's
    # Drafts a round; None: what measured costs ask for. In a combination those of the trained drafter, 0 for
    # the lookup alone.
    n: int | None = None

    def __post_init__(self) -> None:
        if self.trust < 1:
            raise ValueError(f"serve.trust={self.trust}: give at least 1 draft")
        if self.n is not None and self.n < 0:
            raise ValueError(f"serve.n={self.n}: give 0 (no drafts) or more, or null")


def build(
    name: str | None, drafter: Drafter | None, config: ProposerConfig, apart: bool = False
) -> Proposer | None:
    """The proposer of a name; ``None`` decodes plainly. Without a name: the drafter, where there is one.

    ``apart``: of a combination (``Combined``), for a schedule.

    Errors: ``ValueError`` for a name that is not known, a method that is not the drafter's, or one without
    a drafter.
    """
    if name is not None and name not in known_names():
        raise ValueError(f"proposer={name}: {_remedy(name)}")
    lookups: dict[str, Lookup] = {"ngram": Ngram(config.ngram), "suffix": Suffix(config.suffix)}
    first, _, method = (name or "").rpartition("+")
    if name == "none" or method in lookups:
        alone = lookups.get(method)
        _check_n(config.n, f"{name}", alone.max_drafts if alone else 0)
        return alone
    second = drafter if name is None else _trained(name, method, drafter)
    if second is not None:
        _check_n(config.n, f"this {second.config.name}", second.max_drafts)
    if not first or second is None:
        return second
    return Combined(lookups[first], second, config.trust, config.n, apart)


def _check_n(n: int | None, whose: str, most: int) -> None:
    if n is not None and n > most:
        raise ValueError(f"serve.n={n}: {whose} makes at most {most} drafts a round; give 0 to {most}")


def drafts_asked(proposer: Proposer | None, n: int | None) -> int | None:
    """``num_drafts`` of an engine: ``n``, but for a combination, where it bounds the trained drafter."""
    return None if isinstance(proposer, Combined) else n


def known_names() -> list[str]:
    """All that ``build`` knows, for the methods of this installation."""
    cheap, methods = ["ngram", "suffix"], sorted(all_methods())
    return ["none", *cheap, *methods, *(f"{one}+{other}" for one in cheap for other in methods)]


def _remedy(name: str) -> str:
    single = [known for known in known_names() if "+" not in known]
    nearest = difflib.get_close_matches(name, known_names(), n=1)
    close = f" Did you mean {nearest[0]}?" if nearest else ""
    return f"write one of {', '.join(single)}, or ngram+ or suffix+ before a method.{close}"


def _trained(name: str, method: str, drafter: Drafter | None) -> Drafter:
    if drafter is None:
        raise ValueError(f"proposer={name}: this needs a trained drafter; name its directory, drafter=DIR")
    if drafter.config.name != method:
        raise ValueError(
            f"proposer={name}: the drafter in drafter= is {drafter.config.name}; write "
            f"{name.replace(method, drafter.config.name)}, or name a {method} directory"
        )
    return drafter


# One before the other ---------------------------------------------------------------------------------


@dataclass
class CombinedState:
    """The states of both."""

    first: Any
    second: Any

    def drop(self, slots: list[int]) -> None:
        """Forget what the slots hold."""
        self.first.drop(slots)
        self.second.drop(slots)

    def move(self, source: int, target: int) -> None:
        """Put one slot's request into another slot."""
        self.first.move(source, target)
        self.second.move(source, target)


class Combined:
    """Drafts of ``first`` for rows where it has enough of them, else of ``second``.

    Enough are ``trust`` drafts, or all that ``first`` ever makes, however few are asked for: it is asked for
    so many all the same. All drafts are point masses; they come with confidences where both proposers have
    them. ``apart``: the drafts asked for are those of ``second``, which may be none; what is looked up costs
    nothing to draft, and is bounded by ``first`` alone. This is what a schedule decides over.
    """

    def __init__(
        self, first: Lookup, second: Drafter, trust: int, n: int | None = None, apart: bool = False
    ) -> None:
        self.first, self.second, self.trust, self.apart = first, second, trust, apart
        self.enough = min(trust, first.max_drafts)
        self.n = second.max_drafts if n is None else min(n, second.max_drafts)
        self.layer_ids = second.layer_ids
        self.max_drafts = max(first.max_drafts, self.n)
        self.has_confidence = first.has_confidence and second.has_confidence

    def begin(self, slots: int, capacity: int) -> CombinedState:
        """Empty states of both."""
        return CombinedState(self.first.begin(slots, capacity), self.second.begin(slots, capacity))

    def advance(
        self, state: CombinedState, rows: range, states: States, tokens_BJ: Tensor, kept: list[int]
    ) -> None:
        """Both extend their slots, whosever the drafts were."""
        self.first.advance(state.first, rows, states, tokens_BJ, kept)
        self.second.advance(state.second, rows, states, tokens_BJ, kept)

    def answering(self, state: CombinedState, slot: int) -> None:
        """Both hear where an answer begins."""
        self.first.answering(state.first, slot)
        self.second.answering(state.second, slot)

    def propose(self, state: CombinedState, rows: range, anchors_B: Tensor, n: int) -> Proposal:
        """Up to ``n`` drafts a row (``apart``: of ``second``); those of ``second`` are its own N at most."""
        most = self.first.max_drafts if self.apart else n
        cheap = self.first.propose(state.first, rows, anchors_B, max(most, self.enough))
        enough, trained = [num >= self.enough for num in _lengths(cheap)], min(n, self.n)
        if all(enough) or trained == 0:
            return self._cut(cheap, most, [True] * len(rows))
        costly = self.second.propose(state.second, rows, anchors_B, trained)
        return self._cut(chosen(enough, cheap, costly, self.has_confidence), max(most, trained), enough)

    def _cut(self, proposal: Proposal, n: int, copied: list[bool]) -> Proposal:
        """The first ``n`` drafts of each row."""
        confidence_BK = proposal.confidence_BK if self.has_confidence else None
        return Proposal(
            proposal.tokens_BK[:, :n],
            None,
            None if confidence_BK is None else confidence_BK[:, :n],
            [min(num, n) for num in _lengths(proposal)],
            copied,
        )


def chosen(first: list[bool], one: Proposal, other: Proposal, with_confidence: bool) -> Proposal:
    """Row by row, the drafts of ``one`` where ``first`` says so, else those of ``other``."""
    pairs = zip(first, _lengths(one), _lengths(other), strict=True)
    lengths = [mine if wanted else theirs for wanted, mine, theirs in pairs]
    most = max(lengths)
    first_B1 = torch.tensor(first, device=one.tokens_BK.device)[:, None]

    def merge(one_BK: Tensor, other_BK: Tensor) -> Tensor:
        one_BK, other_BK = (F.pad(each, (0, most))[:, :most] for each in (one_BK, other_BK))
        return torch.where(first_B1, one_BK, other_BK)

    confidence_BK = None
    if with_confidence:
        assert one.confidence_BK is not None, one
        assert other.confidence_BK is not None, other
        confidence_BK = merge(one.confidence_BK, other.confidence_BK)
    return Proposal(merge(one.tokens_BK, other.tokens_BK), None, confidence_BK, lengths)


def _lengths(proposal: Proposal) -> list[int]:
    rows, most = proposal.tokens_BK.shape
    return [most] * rows if proposal.lengths is None else proposal.lengths
