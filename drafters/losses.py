"""Losses over the vocabulary, per position, as weighted sums; chunked so that logits never pile up.

With ``s`` the drafter's logits, q = softmax(s), p the target's law at the same position, p~ that law
renormalised on a reduced draft vocabulary, and alpha = sum_v min(p(v), q(v)) the acceptance probability:

    ce      -log q(x)                                x the token that was really produced
    kl      sum_v p~(v) log(p~(v) / q(v))
    l1      sum_v |p(v) - q(v)|                      twice the total variation
    nla     -log alpha                               LK losses
    hybrid  lambda kl + (1 - lambda) (1 - alpha)     LK losses; lambda = exp(-3 alpha), not differentiated

``feature`` has no law: it draws hidden states to the target's own (``feature_distance``).

Gradients with respect to s: ce and kl give q - p~. With g_j = sign(q_j - p_j), l1 gives
q_j (g_j - sum_v q_v g_v). With b_j = 1[q_j < p_j], -alpha gives -q_j (b_j - sum_v q_v b_v).
``plain`` is the reference. ``chunked`` computes loss and gradient of a chunk of positions together
and keeps only the gradient of the hidden states; a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SOFT = ("kl", "l1", "nla", "hybrid")
HYBRID_RATE = 3.0  # eta of the LK losses' hybrid


@dataclass
class LossWeights:
    """How much of each term; terms with weight 0 are not computed."""

    ce: float = 1.0
    kl: float = 0.0
    l1: float = 0.0
    nla: float = 0.0
    hybrid: float = 0.0
    feature: float = 0.0  # hidden states drawn to the target's own, see feature_distance

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"loss.{name}={value}: a loss weight is a number of at least 0")
        if not any(vars(self).values()):
            raise ValueError("loss: every weight is 0; give at least one term, for example loss.ce=1")

    @property
    def soft(self) -> bool:
        """Whether a term needs the target's law."""
        return any(getattr(self, name) > 0 for name in SOFT)

    @property
    def needs_last(self) -> bool:
        """Whether a term needs the target's last states."""
        return self.soft or self.feature > 0

    @property
    def acceptance(self) -> bool:
        """Whether a term needs the law as it is, with the mass that a reduced vocabulary leaves out."""
        return self.l1 > 0 or self.nla > 0 or self.hybrid > 0


@dataclass(frozen=True)
class Law:
    """The target's law over the draft vocabulary: p~ ``[P, N]``, and the mass of p that lies there.

    p is ``soft_PN * mass_P1``; without a mass only p~ is known.
    """

    soft_PN: Tensor
    mass_P1: Tensor | None


@dataclass(frozen=True)
class Teacher:
    """The target's law at the labels: ``last_PD`` through the head.

    ``head(last)`` gives logits over the whole vocabulary. Where the draft vocabulary is a reduced one,
    ``kept_N`` picks it, and ``kept_head(last)`` gives its logits alone, which is enough for p~.
    """

    last_PD: Tensor
    head: Callable[[Tensor], Tensor]
    kept_N: Tensor | None = None
    kept_head: Callable[[Tensor], Tensor] | None = None

    def law(self, rows: slice, whole: bool) -> Law:
        """In fp32; ``whole``: with the mass. No law is divided by a mass, which may underflow to 0."""
        last_PD = self.last_PD[rows]
        if self.kept_N is None:
            soft_PN = torch.softmax(self.head(last_PD).float(), dim=-1)
            return Law(soft_PN, torch.ones_like(soft_PN[:, :1]) if whole else None)
        if not whole and self.kept_head is not None:
            return Law(torch.softmax(self.kept_head(last_PD).float(), dim=-1), None)
        logits_PV = self.head(last_PD).float()
        kept_PN = logits_PV[:, self.kept_N]
        soft_PN = torch.softmax(kept_PN, dim=-1)
        if not whole:
            return Law(soft_PN, None)
        mass_P1 = (kept_PN.logsumexp(-1, keepdim=True) - logits_PV.logsumexp(-1, keepdim=True)).exp()
        return Law(soft_PN, mass_P1)


@dataclass(frozen=True)
class Lengths:
    """Weights of a block's positions by what they add to the accepted length, times their own.

    w_j = sum_{m >= j} prod_{i <= m} hit_i, not differentiated: with it the gradient of sum_j w_j (-log hit_j)
    is that of minus the expected accepted length. ``dpace`` takes (1 - smooth) q(x) + smooth as a hit
    (D-PACE); ``expected`` the acceptance probability itself, smoothed alike (an own variant).
    ``block``: positions a block, one block after another.
    """

    kind: str
    block: int
    smooth: float

    def __call__(self, hit_P: Tensor, weights_P: Tensor) -> Tensor:
        hit_AK = hit_P.unflatten(0, (-1, self.block))
        counts_AK = (weights_P != 0).to(hit_P.dtype).unflatten(0, (-1, self.block))
        reach_AK = (hit_AK * (1 - self.smooth) + self.smooth).cumprod(1) * counts_AK
        return weights_P * reach_AK.flip(1).cumsum(1).flip(1).flatten()


class Found(NamedTuple):
    """A loss to minimise, the detached sum of each term, and each position's alpha where it was asked for."""

    total: Tensor
    sums: dict[str, Tensor]
    alpha_P: Tensor | None


class Extra(NamedTuple):
    """A second, trained factor of the logits: ``inner_PR @ outer_NR.T`` is added to them."""

    inner_PR: Tensor
    outer_NR: Tensor


def feature_distance(hidden_PD: Tensor, last_PD: Tensor, weights_P: Tensor) -> Tensor:
    """Weighted sum of squared distances to the target's last states, as a share of their variance.

    Both are ``[P, D]`` after the final norm. A regression beside the cross-entropy, as EAGLE has one
    (arXiv 2401.15077): D numbers a position to learn from instead of one token.
    """
    last_PD = last_PD.float()
    share_P = (hidden_PD.float() - last_PD).pow(2).mean(-1) / last_PD.var()
    return (share_P * weights_P).sum()


def per_position(logits_PN: Tensor, labels_P: Tensor, law: Law | None) -> dict[str, Tensor]:
    """Every term at every position, fp32: the definitions, written for autograd to differentiate.

    ``alpha`` is among them where the law's mass is known.
    """
    logq_PN = torch.log_softmax(logits_PN.float(), dim=-1)
    terms = {"ce": F.nll_loss(logq_PN, labels_P.clamp(min=0), reduction="none")}
    if law is None:
        return terms
    soft_PN, q_PN = law.soft_PN, logq_PN.exp()
    terms["kl"] = (torch.xlogy(soft_PN, soft_PN) - soft_PN * logq_PN).sum(-1)
    if law.mass_P1 is not None:
        p_PN = soft_PN * law.mass_P1
        alpha_P = torch.minimum(p_PN, q_PN).sum(-1)
        share_P = torch.exp(-HYBRID_RATE * alpha_P.detach())
        terms["l1"] = (p_PN - q_PN).abs().sum(-1)
        terms["nla"] = -alpha_P.clamp(min=1e-9).log()
        terms["hybrid"] = share_P * terms["kl"] + (1 - share_P) * (1 - alpha_P)
        terms["alpha"] = alpha_P.detach()
    return terms


def plain(  # noqa: PLR0913
    hidden_PD: Tensor,
    head_ND: Tensor,
    labels_P: Tensor,
    weights_P: Tensor,
    terms: LossWeights,
    teacher: Teacher | None = None,
    softcap: float | None = None,
    extra: Extra | None = None,
    lengths: Lengths | None = None,
    acceptance: bool = False,
) -> Found:
    """The reference: all logits at once."""
    whole = acceptance or _whole(terms, lengths)
    law = _law(teacher, slice(None), terms, whole)
    logits_PN = hidden_PD @ head_ND.T
    if softcap is not None:
        logits_PN = softcap * torch.tanh(logits_PN / softcap)
    if extra is not None:
        logits_PN = logits_PN + extra.inner_PR @ extra.outer_NR.T
    found = per_position(logits_PN, labels_P, law)
    alpha_P = found.pop("alpha", None)
    weights_P = weights_P.float()
    if lengths is not None:
        weights_P = lengths(_hits(lengths, found["ce"].detach(), alpha_P, labels_P), weights_P)
    sums = {name: (value * weights_P).sum() for name, value in found.items()}
    total = sum(getattr(terms, name) * value for name, value in sums.items())
    return Found(total, {name: value.detach() for name, value in sums.items()}, alpha_P if whole else None)


def chunked(  # noqa: PLR0913
    hidden_PD: Tensor,
    head_ND: Tensor,
    labels_P: Tensor,
    weights_P: Tensor,
    terms: LossWeights,
    teacher: Teacher | None = None,
    softcap: float | None = None,
    extra: Extra | None = None,
    lengths: Lengths | None = None,
    acceptance: bool = False,
    chunk: int = 256,
) -> Found:
    """As ``plain``, with at most ``[chunk, V]`` of logits alive at any time.

    ``labels_P`` are draft-vocabulary ids; a label of -1 (outside a reduced vocabulary) must have
    weight 0. The head is frozen: it gets no gradient. Positions of weight 0 cost nothing, and have an
    alpha of 0; with ``lengths``, blocks without any weight.
    """
    assert weights_P[labels_P < 0].abs().sum() == 0, "a label outside the draft vocabulary has weight"
    whole = acceptance or _whole(terms, lengths)
    used_P = weights_P != 0
    if lengths is not None:
        used_P = used_P.unflatten(0, (-1, lengths.block)).any(1).repeat_interleave(lengths.block)
        chunk = max(1, chunk // lengths.block) * lengths.block
    every = bool(used_P.all())
    if not every:
        hidden_PD, labels_P, weights_P = hidden_PD[used_P], labels_P[used_P], weights_P[used_P]
        if extra is not None:
            extra = Extra(extra.inner_PR[used_P], extra.outer_NR)
        if teacher is not None:
            teacher = Teacher(teacher.last_PD[used_P], teacher.head, teacher.kept_N, teacher.kept_head)
    plan = _Plan(terms, teacher, softcap, lengths, whole, chunk)
    inner_PR, outer_NR = extra or (None, None)
    total, alpha_P, *sums = _Chunked.apply(hidden_PD, inner_PR, outer_NR, head_ND, labels_P, weights_P, plan)
    if whole and not every:
        alpha_P = torch.zeros_like(used_P, dtype=alpha_P.dtype).masked_scatter_(used_P, alpha_P)
    return Found(total, dict(zip(plan.names, sums, strict=True)), alpha_P if whole else None)


def _whole(terms: LossWeights, lengths: Lengths | None) -> bool:
    return terms.acceptance or (lengths is not None and lengths.kind == "expected")


def _law(teacher: Teacher | None, rows: slice, terms: LossWeights, whole: bool) -> Law | None:
    if not terms.soft and not whole:
        return None
    assert teacher is not None, "a soft term needs the target's law"
    return teacher.law(rows, whole)


def _hits(lengths: Lengths, ce_P: Tensor, alpha_P: Tensor | None, labels_P: Tensor) -> Tensor:
    """What counts as a hit: a token that cannot be drafted never is one."""
    if lengths.kind == "expected":
        assert alpha_P is not None, "expected lengths need the acceptance probability"
        return alpha_P
    return torch.exp(-ce_P) * (labels_P >= 0)


@dataclass(frozen=True)
class _Plan:
    terms: LossWeights
    teacher: Teacher | None
    softcap: float | None
    lengths: Lengths | None
    whole: bool
    chunk: int

    @property
    def names(self) -> tuple[str, ...]:
        if self.whole:
            return ("ce", *SOFT)
        return ("ce", "kl") if self.terms.soft else ("ce",)


class _Chunked(torch.autograd.Function):
    """Loss and its gradient in one sweep over chunks of positions."""

    @staticmethod
    def forward(ctx, hidden_PD, inner_PR, outer_NR, head_ND, labels_P, weights_P, plan):  # noqa: PLR0913
        grad_PD = torch.empty_like(hidden_PD)
        grad_PR = None if inner_PR is None else torch.empty_like(inner_PR)
        grad_NR = None if outer_NR is None else torch.zeros_like(outer_NR)
        sums = torch.zeros(len(plan.names), dtype=torch.float32, device=hidden_PD.device)
        alphas = []
        for start in range(0, len(hidden_PD), plan.chunk):
            rows = slice(start, start + plan.chunk)
            logits_PN = (hidden_PD[rows] @ head_ND.T).float()
            if plan.softcap is not None:
                logits_PN = plan.softcap * torch.tanh(logits_PN / plan.softcap)
                slope_PN = 1 - (logits_PN / plan.softcap) ** 2
            if inner_PR is not None:
                logits_PN += inner_PR[rows] @ outer_NR.T
            law = _law(plan.teacher, rows, plan.terms, plan.whole)
            values, grad_PN, alpha_P = _value_and_grad(
                logits_PN, labels_P[rows], weights_P[rows].float(), law, plan
            )
            sums += values
            if alpha_P is not None:
                alphas.append(alpha_P)
            if inner_PR is not None:
                assert grad_PR is not None and grad_NR is not None  # noqa: PT018
                outer_PN = grad_PN.to(outer_NR.dtype)
                grad_PR[rows] = outer_PN @ outer_NR
                grad_NR += outer_PN.T @ inner_PR[rows]
            if plan.softcap is not None:
                grad_PN = grad_PN * slope_PN
            grad_PD[rows] = grad_PN.to(head_ND.dtype) @ head_ND
        ctx.save_for_backward(grad_PD, grad_PR, grad_NR)
        scale = torch.tensor([getattr(plan.terms, name) for name in plan.names], device=sums.device)
        alpha_P = torch.cat(alphas) if alphas else sums.new_zeros(len(hidden_PD))
        total = (scale * sums).sum()
        ctx.mark_non_differentiable(alpha_P, *(outs := sums.unbind()))
        return (total, alpha_P, *outs)

    @staticmethod
    def backward(ctx, grad_total, *_):
        grads = [None if kept is None else grad_total.to(kept.dtype) * kept for kept in ctx.saved_tensors]
        return (*grads, *[None] * 4)


def _value_and_grad(
    logits_PN: Tensor, labels_P: Tensor, weights_P: Tensor, law: Law | None, plan: _Plan
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weighted sums of the terms, the gradient of their total (reusing the logits' memory), and alpha."""
    terms = plan.terms
    lse_P1 = logits_PN.logsumexp(-1, keepdim=True)
    label_P1 = labels_P.clamp(min=0)[:, None]
    ce_P = (lse_P1 - logits_PN.gather(1, label_P1)).squeeze(1)
    logq_PN = logits_PN.sub_(lse_P1)
    values, alpha_P = [ce_P], None
    if law is None:
        grad_PN = logq_PN.exp_().mul_(terms.ce)
    else:
        soft_PN, q_PN = law.soft_PN, logq_PN.exp()
        kl_P = (torch.xlogy(soft_PN, soft_PN) - soft_PN * logq_PN).sum(-1)
        values.append(kl_P)
        pull_P1 = torch.full_like(lse_P1, terms.kl)
        if law.mass_P1 is None:
            grad_PN = (terms.ce + pull_P1) * q_PN - pull_P1 * soft_PN
        else:
            p_PN = soft_PN * law.mass_P1
            alpha_P = torch.minimum(p_PN, q_PN).sum(-1)
            share_P = torch.exp(-HYBRID_RATE * alpha_P)
            values += [
                (p_PN - q_PN).abs().sum(-1),
                -alpha_P.clamp(min=1e-9).log(),
                share_P * kl_P + (1 - share_P) * (1 - alpha_P),
            ]
            pull_P1 += terms.hybrid * share_P[:, None]
            grad_PN = (terms.ce + pull_P1) * q_PN - pull_P1 * soft_PN
            if terms.acceptance:
                falls_P = terms.l1 + terms.nla / alpha_P.clamp(min=1e-9) + terms.hybrid * (1 - share_P)
                grad_PN -= falls_P[:, None] * _centred(q_PN, q_PN < p_PN)  # by the gradient of alpha
            if terms.l1 > 0:
                grad_PN += terms.l1 * _centred(q_PN, q_PN > p_PN)
    grad_PN.scatter_add_(1, label_P1, torch.full_like(label_P1, -terms.ce, dtype=grad_PN.dtype))
    if plan.lengths is not None:
        weights_P = plan.lengths(_hits(plan.lengths, ce_P, alpha_P, labels_P), weights_P)
    sums = torch.stack([(value * weights_P).sum() for value in values])
    return sums, grad_PN.mul_(weights_P[:, None]), alpha_P


def _centred(q_PN: Tensor, chosen_PN: Tensor) -> Tensor:
    """q (1[chosen] - sum q 1[chosen]): how the mass of the chosen tokens moves with the logits."""
    mass_PN = q_PN * chosen_PN
    return mass_PN - q_PN * mass_PN.sum(-1, keepdim=True)
