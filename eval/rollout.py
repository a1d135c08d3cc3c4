"""Acceptance by decoding: the engine answers, and its rounds are counted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drafters.method import Drafter
from drafters.target import Target
from drafters.types import Example
from eval.replay import Counts
from serve.engine import Engine
from serve.types import Answer, Request


def rollout(
    target: Target,
    drafter: Drafter,
    examples: Iterable[Example],
    n: int,
    *,
    max_new_tokens: int | None = None,
    slots: int = 1,
) -> Iterator[tuple[Example, Answer, Counts]]:
    """Decode each example's prompt greedily with ``n`` drafts a round and count the rounds.

    Without ``max_new_tokens`` an answer may be as long as the stored one, so that the two can be compared.
    """
    examples = list(examples)
    requests = []
    for index, example in enumerate(examples):
        first = example.mask.index(True)
        room = max_new_tokens or len(example.ids) - first
        requests.append(Request(example.ids[:first], room, name=str(index)))
    capacity = max(len(r.prompt) + r.max_new_tokens for r in requests) + n
    engine = Engine(target, drafter, n, slots=slots, capacity=capacity)
    for answer in engine.run(requests):
        counts = Counts(n)
        for done in answer.rounds:
            counts.add_round(done.accepted, done.emitted)
        yield examples[int(answer.request.name)], answer, counts
