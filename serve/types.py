"""The nouns of serving: what is asked and answered, and the two partners that an engine may have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from drafters.types import Proposal, States
from serve.law import Sampling, Scored
from serve.text import Text


class Proposer(Protocol):
    """What the engine asks of drafters, trained or not. Every ``Drafter`` is one."""

    layer_ids: list[int]

    @property
    def max_drafts(self) -> int: ...

    def begin(self, slots: int, capacity: int) -> Any: ...

    def advance(
        self, state: Any, rows: range, states: States, tokens_BJ: Tensor, kept: list[int]
    ) -> None: ...

    def answering(self, state: Any, slot: int) -> None: ...

    def propose(self, state: Any, rows: range, anchors_B: Tensor, n: int) -> Proposal: ...


class Schedule(Protocol):
    """How many drafts to ask for and to verify, decided anew each round (``serve/schedule.py``).

    ``drafts`` is ``None`` for a plain round: nobody is asked, not even for what could be looked up.
    """

    def drafts(self, rows: int) -> int | None: ...

    def prefixes(self, proposal: Proposal, rows: int) -> list[int]: ...

    def heard(self, drafted: list[int], accepted: list[int], seconds: float) -> None: ...


@dataclass
class Request:
    """One prompt to answer, and what ends the answer.

    ``stop`` are strings that end it and are not part of its text; ``stop_ids`` are token ids beside the
    target's own, which ``ignore_eos`` switches off. ``logprobs=n`` asks for the log probability of each
    token and of the n likeliest, under the target's law as it is, before temperature and penalties.
    ``text`` asks for the text as it grows.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    text: bool = False
    name: str = ""


@dataclass(frozen=True)
class Round:
    """Drafts verified and accepted, and tokens emitted; ``accepted`` counts emitted drafts only."""

    drafted: int
    accepted: int
    emitted: int


@dataclass(eq=False)
class Answer:
    """Emitted ids, the stop token included; ``finish`` is stop, length or abort."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: str | None = None
    text: Text | None = None
    logprobs: list[Scored] = field(default_factory=list)
    prefilled: int = 0  # prompt tokens that the target has read
    told: int = 0  # tokens that the listener has heard of
    on_token: Callable[[Answer, list[int]], None] | None = None

    @property
    def tau(self) -> float:
        """Tokens committed per target pass; the token of the prefill is neither."""
        return sum(r.emitted for r in self.rounds) / max(1, len(self.rounds))

    @property
    def room(self) -> int:
        return self.request.max_new_tokens - len(self.tokens)
