"""What a request asks of the target's law, temperature, truncation, penalties, bias, and draws from it.

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
from itertools import islice

import torch
from torch import Tensor

NO_LAW = (
    "the target's logits are NaN, or all minus infinity; load it with hardware.dtype=float32 or bfloat16 "
    "(float16 overflows), and check its weights"
)
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


# Laws ----------------------------------------------------------------------------------------------------


def law(logits_JV: Tensor, sampling: Sampling) -> Tensor:
    """The law ``[J, V]`` that tokens are drawn from, of adjusted logits; float32, rows sum to 1.

    Errors: ``ValueError`` for logits that are no law: NaN, or nothing above minus infinity.
    """
    return laws(logits_JV, [sampling] * len(logits_JV))


def laws(logits_PV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """``law``, each row with a sampling of its own. Bits of a row do not depend on the other rows."""
    logits_PV = logits_PV.float()
    best_P1 = logits_PV.amax(-1, keepdim=True)
    if not bool(best_P1.isfinite().all()):
        logits_PV = logits_PV.clamp(max=torch.finfo(torch.float32).max)  # of infinities none is left over
        best_P1 = logits_PV.amax(-1, keepdim=True)
        if not bool((best_P1 > -math.inf).all()):
            raise ValueError(NO_LAW)
    greedy = [at for at, each in enumerate(samplings) if each.greedy]
    heats = [1.0 if each.greedy else each.temperature for each in samplings]
    shares = [each.min_p for each in samplings]
    laws_PV = logits_PV
    if set(heats) != {1.0} or any(shares):  # softmax alone would do the same subtraction
        laws_PV = (logits_PV - best_P1) / _column(heats, best_P1)  # the best is 0: no temperature overflows
    if any(shares):
        least = [math.log(share) if share else -math.inf for share in shares]
        laws_PV = laws_PV.masked_fill(laws_PV < _column(least, best_P1), -math.inf)
    laws_PV = torch.softmax(_top_k(laws_PV, [each.top_k for each in samplings]), dim=-1)
    if cut := [at for at, each in enumerate(samplings) if each.top_p < 1 and not each.greedy]:
        laws_PV[cut] = _nucleus(laws_PV[cut], _column([samplings[at].top_p for at in cut], best_P1))
    if greedy:
        laws_PV[greedy] = torch.zeros_like(laws_PV[greedy]).scatter_(1, best(logits_PV[greedy])[:, None], 1.0)
    return laws_PV


def _column(values: list[float], like: Tensor) -> Tensor:
    return like.new_tensor(values)[:, None]


def _top_k(logits_PV: Tensor, ks: list[int]) -> Tensor:
    """Minus infinity below the k-th of each row; 0 keeps all."""
    vocab = logits_PV.shape[-1]
    ks = [k if 0 < k < vocab else 0 for k in ks]
    if not any(ks):
        return logits_PV
    top_PK = logits_PV.topk(max(ks), dim=-1).values
    least_P1 = top_PK.gather(1, torch.tensor(ks, device=top_PK.device)[:, None].sub(1).clamp(min=0))
    least_P1 = least_P1.masked_fill(least_P1.new_tensor(ks)[:, None] == 0, -math.inf)
    return logits_PV.masked_fill(logits_PV < least_P1, -math.inf)


def _nucleus(laws_PV: Tensor, mass_P1: Tensor) -> Tensor:
    """The likeliest tokens of each row, up to the one that crosses its mass; of ties the lower ids.

    Only what is not rare is sorted: all tokens below that are together half of what may be left out.
    """
    rare_P1 = (1 - mass_P1) / (2 * laws_PV.shape[-1])
    row_N, id_N = (laws_PV >= rare_P1).nonzero(as_tuple=True)
    num_P = row_N.bincount(minlength=len(laws_PV))
    at_N = torch.arange(len(row_N), device=row_N.device) - (num_P.cumsum(0) - num_P)[row_N]
    values_PK = laws_PV.new_zeros(len(laws_PV), int(num_P.max()))
    values_PK[row_N, at_N] = laws_PV[row_N, id_N]
    sorted_PK, order_PK = values_PK.sort(dim=-1, descending=True, stable=True)
    before_PK = sorted_PK.cumsum(-1) - sorted_PK
    beyond_PK = before_PK >= mass_P1
    beyond_PK[:, 0] = False  # a mass that is 0 in float32 keeps the best token too
    sorted_PK = sorted_PK.masked_fill(beyond_PK, 0.0)
    kept_PK = torch.zeros_like(values_PK).scatter_(1, order_PK, sorted_PK)
    laws_PV = torch.zeros_like(laws_PV)
    laws_PV[row_N, id_N] = kept_PK[row_N, at_N]
    return laws_PV / laws_PV.sum(-1, keepdim=True)


# Tokens --------------------------------------------------------------------------------------------------


def choose(
    logits: Sequence[Tensor], samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[list[int]]:
    """The tokens that requests choose: the best where they are greedy, else drawn from their law.

    ``logits[i]`` are adjusted ones of request i, ``[J, V]``, for its positions from ``positions[i]`` on. A
    CPU takes one request after another, while its rows are in the cache, a GPU all of them in one pass.
    """
    size = 1 if logits[0].device.type == "cpu" else len(logits)
    chosen: list[list[int]] = []
    for at in range(0, len(logits), size):
        part = slice(at, at + size)
        chosen += _chosen(logits[part], samplings[part], positions[part])
    return chosen


def _chosen(
    logits: Sequence[Tensor], samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[list[int]]:
    counts = [len(logits_JV) for logits_JV in logits]
    logits_PV = torch.cat(list(logits)) if len(logits) > 1 else logits[0]
    if all(each.greedy for each in samplings):
        tokens = best(logits_PV).tolist()
    else:
        rows = [
            (each, position + j)
            for each, position, count in zip(samplings, positions, counts, strict=True)
            for j in range(count)
        ]
        drawn = [uniforms(each.seed, "next", position, 1)[0] for each, position in rows]
        tokens = draw(laws(logits_PV, [each for each, _ in rows]), drawn)
    rest = iter(tokens)
    return [list(islice(rest, count)) for count in counts]


def best(logits_PV: Tensor) -> Tensor:
    """The likeliest token of each row. Errors: ``ValueError`` where a logit is not a number."""
    most_P, best_P = logits_PV.max(-1)
    if bool(most_P.isnan().any()):
        raise ValueError(NO_LAW)
    return best_P


def draw(laws_PV: Tensor, drawn: Sequence[float]) -> list[int]:
    """A token from each law, with a uniform each."""
    cumulative_PV = laws_PV.double().cumsum(-1)
    below_P1 = _column(list(drawn), cumulative_PV) * cumulative_PV[:, -1:]
    at_P = torch.searchsorted(cumulative_PV, below_P1, right=True).squeeze(1)
    return at_P.clamp(max=laws_PV.shape[-1] - 1).tolist()


def uniforms(seed: int, purpose: str, position: int, num: int) -> list[float]:
    """Draws that depend on a request's seed and a position alone; each purpose has its own."""
    stream = random.Random(f"{seed}/{purpose}/{position}")
    return [stream.random() for _ in range(num)]


@dataclass(frozen=True)
class Scored:
    """The log probability of an emitted token, and the likeliest ids with theirs."""

    logprob: float
    top: list[tuple[int, float]]


def scored(logits_V: Tensor, token: int, num: int) -> Scored:
    """Of a token and the ``num`` likeliest, under the target's law as it is."""
    logprobs_V = logits_V.float().log_softmax(-1)
    values, ids = logprobs_V.topk(num)
    return Scored(float(logprobs_V[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))
