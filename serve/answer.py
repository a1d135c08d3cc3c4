"""Answer one prompt by draft and verify, beside plain decoding of the same engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from data.chat import Renderer, template_of
from drafters import checkpoint
from drafters.checkpoint import read_config
from drafters.method import Drafter
from drafters.target import Target, load
from serve.costs import costs_for
from serve.engine import Engine
from serve.law import Sampling
from serve.proposers import ProposerConfig
from serve.types import Answer, Request

if TYPE_CHECKING:
    from recipes.schema import Run


@dataclass
class ServeConfig(ProposerConfig):
    """``serve.*``"""

    schedule: bool = True  # over HTTP, where serve.n is not given: choose the number of drafts every round
    max_new_tokens: int = 256  # of one prompt that is answered
    temperature: float = 0.0
    compare: bool = True  # also decode plainly, and compare ids and speed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens < 1 or not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"serve.max_new_tokens={self.max_new_tokens}, serve.temperature={self.temperature}: "
                "give at least 1 token, and a temperature of 0 (greedy) or more"
            )


def loaded(run: Run) -> tuple[Target, Drafter | None, Renderer]:
    """Target, drafter and what renders prompts; what can be refused early is, before the target is loaded."""
    directory = None if run.drafter is None else Path(run.drafter)
    hardware = run.hardware if directory is None else checkpoint.hardware_for(directory, run.hardware)
    template = template_of(run.data.chat_template)
    target = load(run.target, hardware)
    drafter = None if directory is None else checkpoint.read(directory, target)
    if directory is not None and (weights := checkpoint.other_weights(directory, target)):
        print(
            f"{directory} was trained on other weights ({weights}) than those of {run.target}: "
            "the text stays right, but expect fewer drafts to pass",
            file=sys.stderr,
        )
    render = Renderer(target.tokenizer, template, target.stop_ids, dict(run.data.template_settings))
    return target, drafter, render


@dataclass(frozen=True)
class Timed:
    """An answer and the seconds of its decoding; the prefill and what listeners do are left out."""

    answer: Answer
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (len(self.answer.tokens) - 1) / self.seconds if self.seconds else 0.0


def decode(
    engine: Engine, prompt: list[int], config: ServeConfig, seed: int, on_token: Callable | None = None
) -> Timed:
    """One request through an engine."""
    request = Request(prompt, config.max_new_tokens, Sampling(config.temperature, seed=seed), text=True)
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


def capacity_for(target: Target, prompt: list[int], config: ServeConfig) -> int:
    """Slots of a cache for this request. Errors: ``ValueError`` when the target's context is too short."""
    need, most = len(prompt) + config.max_new_tokens, target.config.max_position_embeddings
    if need > most:
        raise ValueError(
            f"{len(prompt)} prompt tokens and serve.max_new_tokens={config.max_new_tokens} exceed the "
            f"target's context of {most}; shorten the prompt or lower serve.max_new_tokens"
        )
    return need


def drafts_for(target: Target, drafter: Drafter, directory: Path, n: int | None) -> int:
    """``n`` where it is given; else the fastest N by the tau that the drafter directory states."""
    if n is not None:
        return n
    known = known_taus(directory)
    return costs_for(target, drafter, 1).fastest(known) if known else drafter.max_drafts


def known_taus(directory: Path) -> dict[int, float]:
    """Tau by N as it was measured when the drafter was exported; empty where nobody did."""
    found = read_config(directory).get("foredraft", {}).get("tau_by_n") or {}
    return {int(n): tau for n, tau in found.items()}
