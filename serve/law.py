"""What a request asks of the target's law: temperature, truncation, penalties, bias.

Plain decoding and verification take their law from here alone, so that drafts change nothing but the
speed. Order, as in vLLM: logit bias, repetition penalty, frequency and presence penalties, temperature,
min-p, top-k, top-p (transformers puts min-p last). Boundaries are vLLM's too: ties with the k-th token
stay; the token that crosses the mass of top-p stays, and of tokens that tie there the lower ids.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXTREME = 1e6  # of temperatures and penalties: beyond it float32 overflows before anybody profits


@dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens. Neutral values leave the target's law as it is.

    ``temperature=0`` is greedy: a point mass on the best token after penalties and bias. ``top_k=0`` keeps
    all tokens. ``repetition_penalty`` divides positive logits of tokens that stand in prompt or answer and
    multiplies negative ones (Keskar et al. 2019); ``presence_penalty`` and ``frequency_penalty`` are
    subtracted for tokens of the answer alone, once and once per occurrence (OpenAI). ``seed`` and a
    token's position alone decide what is drawn.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        """``ValueError`` naming the key, the value and what to write."""
        bias = self.logit_bias
        checks = {
            "temperature": (_within(self.temperature, 0, EXTREME), f"0 (greedy) to {EXTREME:g}"),
            "top_k": (_whole(self.top_k), "0 (all tokens) or the number of tokens to keep"),
            "top_p": (_within(self.top_p, 0, 1) and self.top_p > 0, "a mass above 0, at most 1"),
            "min_p": (_within(self.min_p, 0, 1), "a share of the best token's probability, from 0 to 1"),
            "repetition_penalty": (
                _within(self.repetition_penalty, 1 / EXTREME, EXTREME),
                f"a number from {1 / EXTREME:g} to {EXTREME:g}; 1 is none",
            ),
            "presence_penalty": (_within(self.presence_penalty, -2, 2), "a number from -2 to 2"),
            "frequency_penalty": (_within(self.frequency_penalty, -2, 2), "a number from -2 to 2"),
            "logit_bias": (
                all(map(_whole, bias)) and all(_within(b, -100, 100) for b in bias.values()),
                "biases from -100 to 100 by token id",
            ),
            "seed": (isinstance(self.seed, int), "a whole number"),
        }
        for key, (fine, remedy) in checks.items():
            if not fine:
                raise ValueError(f"{key}={getattr(self, key)!r}: give {remedy}")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # below it, as vLLM, since float32 cannot divide by it

    @property
    def needs_history(self) -> bool:
        """Whether the law depends on which tokens stand before it, beside through the target."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def adjusts(self) -> bool:
        """Whether the best token need not be the target's own."""
        return self.needs_history or bool(self.logit_bias)


def _within(value: float, low: float, high: float) -> bool:
    """Whether it is a number (NaN is none) of that range."""
    return isinstance(value, int | float) and low <= value <= high


def _whole(value: int) -> bool:
    return isinstance(value, int) and value >= 0


def adjusted(
    logits_JV: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], drafts: Sequence[int]
) -> Tensor:
    """Logits after bias and penalties; row j stands after ``prompt``, ``answer`` and the first j drafts."""
    logits_JV = logits_JV.float()
    if not sampling.adjusts:
        return logits_JV
    logits_JV = logits_JV.clone()
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits_JV.device)
        logits_JV[:, ids] += logits_JV.new_tensor(list(sampling.logit_bias.values()))
    if sampling.needs_history:
        asked, counts = set(prompt), Counter(answer)
        for j, logits_V in enumerate(logits_JV):
            counts.update(drafts[j - 1 : j] if j else [])
            _penalise(logits_V, sampling, asked, counts)
    return logits_JV


def _penalise(logits_V: Tensor, sampling: Sampling, asked: set[int], counts: Counter[int]) -> None:
    device = logits_V.device
    if sampling.repetition_penalty != 1:
        ids = torch.tensor(sorted(asked | counts.keys()), dtype=torch.long, device=device)
        found = logits_V[ids]
        penalty = sampling.repetition_penalty
        logits_V[ids] = torch.where(found > 0, found / penalty, found * penalty)
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(counts), device=device)
        times = logits_V.new_tensor(list(counts.values()))
        logits_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times


def law(logits_JV: Tensor, sampling: Sampling) -> Tensor:
    """The law ``[J, V]`` that tokens are drawn from, of adjusted logits; float32, rows sum to 1.

    Errors: ``ValueError`` for logits that are no law: NaN, or nothing above minus infinity.
    """
    logits_JV = logits_JV.float().clamp(max=torch.finfo(torch.float32).max)  # of infinities none is left over
    best_J1, chosen_J1 = logits_JV.max(-1, keepdim=True)
    if not bool((best_J1 > -math.inf).all()):
        raise ValueError(
            "the target's logits are NaN, or all minus infinity; load it with hardware.dtype=float32 or "
            "bfloat16 (float16 overflows), and check its weights"
        )
    if sampling.greedy:
        return torch.zeros_like(logits_JV).scatter_(1, chosen_J1, 1.0)
    logits_JV = (logits_JV - best_J1) / sampling.temperature  # the best is 0: no temperature overflows
    if sampling.min_p > 0:
        logits_JV = logits_JV.masked_fill(logits_JV < math.log(sampling.min_p), -math.inf)
    if 0 < sampling.top_k < logits_JV.shape[-1]:
        least_J1 = logits_JV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_JV = logits_JV.masked_fill(logits_JV < least_J1, -math.inf)
    laws_JV = torch.softmax(logits_JV, dim=-1)
    if sampling.top_p < 1:
        sorted_JV, order_JV = laws_JV.sort(dim=-1, descending=True, stable=True)
        before_JV = sorted_JV.cumsum(-1) - sorted_JV
        sorted_JV = sorted_JV.masked_fill(before_JV >= sampling.top_p, 0.0)
        laws_JV = torch.zeros_like(laws_JV).scatter_(1, order_JV, sorted_JV)
        laws_JV = laws_JV / laws_JV.sum(-1, keepdim=True)
    return laws_JV


def uniforms(seed: int, purpose: str, position: int, num: int) -> list[float]:
    """Draws that depend on a request's seed and a position alone; each purpose has its own."""
    stream = random.Random(f"{seed}/{purpose}/{position}")
    return [stream.random() for _ in range(num)]
