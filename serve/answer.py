"""Answer one prompt by draft and verify, beside plain decoding of the same engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from drafters.checkpoint import read_config
from drafters.method import Drafter
from drafters.target import Target
from serve.engine import Answer, Engine, Request
from serve.law import Sampling


@dataclass
class ServeConfig:
    """``serve.*``"""

    n: int | None = None  # drafts a round; None: what measured costs and the drafter's acceptance ask for
    max_new_tokens: int = 256
    temperature: float = 0.0
    compare: bool = True  # also decode plainly, and compare ids and speed

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"serve.max_new_tokens={self.max_new_tokens}, serve.temperature={self.temperature}: "
                "give at least 1 token, and a temperature of 0 (greedy) or more"
            )


@dataclass(frozen=True)
class Timed:
    """An answer and the seconds of its decoding; the prefill and what listeners do are left out."""

    answer: Answer
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (len(self.answer.tokens) - 1) / self.seconds if self.seconds else 0.0


def decode(engine: Engine, prompt: list[int], config: ServeConfig, on_token: Callable | None = None) -> Timed:
    """One request through an engine."""
    request = Request(prompt, config.max_new_tokens, Sampling(config.temperature))
    heard_at: list[float] = []
    seconds = 0.0

    def heard(answer: Answer, tokens: list[int]) -> None:
        nonlocal seconds
        if heard_at:
            seconds += perf_counter() - heard_at[-1]
        if on_token:
            on_token(answer, tokens)
        heard_at.append(perf_counter())

    (answer,) = engine.run([request], heard)
    return Timed(answer, seconds)


def capacity_for(target: Target, prompt: list[int], config: ServeConfig, num_drafts: int) -> int:
    """Slots of a cache for this request. Errors: ``ValueError`` when the target's context is too short."""
    need = len(prompt) + config.max_new_tokens + num_drafts
    most = target.config.max_position_embeddings
    if need - num_drafts > most:
        raise ValueError(
            f"{len(prompt)} prompt tokens and serve.max_new_tokens={config.max_new_tokens} exceed the "
            f"target's context of {most}; shorten the prompt or lower serve.max_new_tokens"
        )
    return need


def drafts_for(target: Target, drafter: Drafter, directory: Path, config: ServeConfig) -> int:
    """``serve.n`` where it is given; else the fastest N by the tau that the drafter directory states."""
    if config.n is not None:
        return config.n
    known = read_config(directory).get("foredraft", {}).get("tau_by_n")
    return pick_drafts(target, drafter, known) if known else drafter.max_drafts


def pick_drafts(target: Target, drafter: Drafter, tau_by_n: Mapping[str, float]) -> int:
    """The N with the most tokens a second on this machine: measured costs over known acceptance."""
    costs = round_seconds(target, drafter, [0, *(int(n) for n in tau_by_n)])
    return best_drafts(costs, {int(n): tau for n, tau in tau_by_n.items()})


def best_drafts(seconds: Mapping[int, float], taus: Mapping[int, float]) -> int:
    """The N with the most tokens a second, of those whose cost and tau are both known.

    0 means that plain decoding, one token a pass, is the fastest.
    """
    taus = {**taus, 0: 1.0}
    return max((n for n in sorted(seconds) if n in taus), key=lambda n: taus[n] / seconds[n])


@torch.inference_mode()
def round_seconds(
    target: Target, drafter: Drafter, ns: Sequence[int], context: int = 128, repeats: int = 9
) -> dict[int, float]:
    """Median seconds of a round for each n: draft n, run the target over them and the anchor, keep one.

    All n take turns, so that whatever slows the machine slows them alike.
    """
    rows, prompt = range(1), torch.full((1, context), 1, device=target.device)
    anchor = prompt[0, :1]
    engines: dict[int, Engine] = {}
    seconds: dict[int, list[float]] = {n: [] for n in ns}
    for n in ns:
        engine = engines[n] = Engine(target, drafter, n, capacity=context + repeats + n + 2)
        ran = engine.forward(rows, prompt)
        engine.keep(rows, ran.states, prompt, [context])
    for _ in range(repeats + 1):
        for n, engine in engines.items():
            start = perf_counter()
            proposal = engine.propose(rows, anchor, engine.num_drafts)
            tokens = torch.cat([anchor[:, None], proposal.tokens_BK], dim=1)
            ran = engine.forward(rows, tokens)
            target.head(ran.last_PD).argmax(-1).tolist()
            engine.keep(rows, ran.states, tokens, [1])
            seconds[n].append(perf_counter() - start)
    return {n: statistics.median(times[1:]) for n, times in seconds.items()}
