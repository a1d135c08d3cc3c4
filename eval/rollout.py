"""Acceptance by decoding: the engine answers, with any proposer, and its rounds are counted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from drafters.method import Drafter
from drafters.target import Target
from drafters.types import Example
from eval.replay import Counts, answers
from serve.engine import Engine
from serve.law import Sampling
from serve.types import Answer, Proposer, Request


def rollout(
    target: Target,
    proposer: Proposer | None,
    examples: Iterable[Example],
    n: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int | None = None,
    slots: int = 1,
) -> Iterator[tuple[Example, Answer, Counts]]:
    """Decode the prompt of each answer with ``n`` drafts a round and count the rounds; turns are split.

    Answers come as they finish. Each draws by ``request_seed``, so that what else is decoded changes none.
    Without ``max_new_tokens`` an answer may be as long as the stored one, so that the two can be compared;
    with it, as long as the target's context has room for.
    """
    examples = list(answers(examples))
    context = target.config.max_position_embeddings
    requests = []
    for index, example in enumerate(examples):
        prompt = example.ids[: example.mask.index(True)]
        stored = len(example.ids) - len(prompt)
        room = stored if max_new_tokens is None else min(max_new_tokens, context - len(prompt))
        sampling = Sampling(temperature, seed=request_seed(seed, example.name))
        requests.append(Request(prompt, room, sampling, name=str(index)))
    capacity = max(len(r.prompt) + r.max_new_tokens for r in requests) + n
    engine = Engine(target, proposer, n, slots=slots, capacity=capacity)
    for answer in engine.run(requests):
        yield examples[int(answer.request.name)], answer, counted(answer, n, isinstance(proposer, Drafter))


def counted(answer: Answer, n: int, always: bool) -> Counts:
    """The rounds of an answer; ``always`` says that each proposed ``n`` drafts."""
    counts = Counts(n, proposed=None if always else [0] * n)
    for done in answer.rounds:
        counts.add_round(done.accepted, done.emitted, done.drafted)
    return counts


def request_seed(seed: int, name: str) -> int:
    """What the request of this name draws from: the seed and the name alone."""
    return int(hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()[:8], 16)
