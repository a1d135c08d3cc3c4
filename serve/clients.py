"""Closed loop: so many clients in one process, each with one request at a time, and when each was heard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from serve.engine import Engine
from serve.types import Answer, Request


@dataclass(frozen=True)
class Cell:
    """What is asked: prompts of a kind, at a temperature, by so many clients."""

    kind: str
    temperature: float
    concurrency: int


@dataclass
class Heard:
    """An answer, and when it was asked for, began and ended."""

    answer: Answer
    asked: float
    first: float = 0.0
    last: float = 0.0

    @property
    def to_first(self) -> float:
        return self.first - self.asked

    @property
    def per_token(self) -> float | None:
        """Seconds of each token after the first; ``None`` where there is none."""
        after = len(self.answer.tokens) - 1
        return (self.last - self.first) / after if after else None


@dataclass
class Measured:
    """Answers of one or more measurements, and the seconds they took."""

    heard: list[Heard] = field(default_factory=list)
    seconds: float = 0.0


def closed_loop(
    engine: Engine, requests: Sequence[Request], clients: int, done: Callable[[], object] = lambda: None
) -> Measured:
    """So many clients ask one request after the other until none is left. Answers in the order of asking."""
    left, out = iter(requests), Measured()

    def ask() -> None:
        request = next(left, None)
        if request is None:
            return
        mine = Heard(engine.submit(request, lambda answer, tokens: hear(mine)), perf_counter())
        out.heard.append(mine)

    def hear(mine: Heard) -> None:
        mine.last = perf_counter()
        mine.first = mine.first or mine.last

    start = perf_counter()
    for _ in range(clients):
        ask()
    while engine.busy:
        for _answer in engine.step():
            ask()
            done()
    out.seconds = perf_counter() - start
    return out
