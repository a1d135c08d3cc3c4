"""What a request asks of the target's law: temperature, truncation, penalties, bias.

Plain decoding and verification take their law from here alone, so that drafts change nothing but the
speed. Order, as in vLLM: logit bias, repetition penalty, frequency and presence penalties, temperature,
min-p, top-k, top-p.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
        checks = {
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (all tokens) or the number of tokens to keep"),
            "top_p": (0 < self.top_p <= 1, "a mass above 0, at most 1"),
            "min_p": (0 <= self.min_p <= 1, "a share of the best token's probability, from 0 to 1"),
            "repetition_penalty": (0 < self.repetition_penalty < math.inf, "a number above 0; 1 is none"),
            "presence_penalty": (abs(self.presence_penalty) <= 2, "a number from -2 to 2"),
            "frequency_penalty": (abs(self.frequency_penalty) <= 2, "a number from -2 to 2"),
            "logit_bias": (
                all(abs(bias) <= 100 for bias in self.logit_bias.values()),
                "biases from -100 to 100 by token id",
            ),
        }
        for key, (fine, remedy) in checks.items():
            if not fine:
                raise ValueError(f"{key}={getattr(self, key)}: give {remedy}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the law depends on which tokens stand before it, beside through the target."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def adjusts(self) -> bool:
        """Whether the best token need not be the target's own."""
        return self.needs_history or bool(self.logit_bias)


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
        for j, logits_V in enumerate(logits_JV):
            _penalise(logits_V, sampling, prompt, [*answer, *drafts[:j]])
    return logits_JV


def _penalise(logits_V: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> None:
    device = logits_V.device
    if sampling.repetition_penalty != 1:
        ids = torch.tensor(sorted({*prompt, *answer}), device=device)
        found = logits_V[ids]
        penalty = sampling.repetition_penalty
        logits_V[ids] = torch.where(found > 0, found / penalty, found * penalty)
    counts = Counter(answer)
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(counts), device=device)
        times = logits_V.new_tensor(list(counts.values()))
        logits_V[ids] -= sampling.presence_penalty + sampling.frequency_penalty * times


def law(logits_JV: Tensor, sampling: Sampling) -> Tensor:
    """The law ``[J, V]`` that tokens are drawn from, of adjusted logits; float32, rows sum to 1."""
    if sampling.greedy:
        best_J1 = logits_JV.argmax(-1, keepdim=True)
        return torch.zeros_like(logits_JV).scatter_(1, best_J1, 1.0)
    logits_JV = logits_JV / sampling.temperature
    if sampling.min_p > 0:
        floor_J1 = logits_JV.max(-1, keepdim=True).values + math.log(sampling.min_p)
        logits_JV = logits_JV.masked_fill(logits_JV < floor_J1, -math.inf)
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
