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

from drafters.ops import product_dtype

SOFT = ("kl", "l1", "nla", "hybrid")
HYBRID_RATE = 3.0  # eta of the LK losses' hybrid
PIECE = 2**20  # logits of a chunk that a CPU works on at a time: 4 MB of its cache


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

    Without a mass only p~ is known; over the whole vocabulary it is the number 1.
    """

    soft_PN: Tensor
    mass_P1: Tensor | float | None

    def p(self) -> Tensor:
        """The law as it is, of a law whose mass is known."""
        assert self.mass_P1 is not None, "a law without its mass"
        return self.soft_PN if isinstance(self.mass_P1, float) else self.soft_PN * self.mass_P1


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

    def logits(self, rows: slice, whole: bool) -> Tensor:
        """Of the draft vocabulary alone, or of the whole one where its mass is asked for."""
        last_PD = self.last_PD[rows]
        if self.kept_N is None or whole or self.kept_head is None:
            return self.head(last_PD)
        return self.kept_head(last_PD)

    def law(self, logits_PV: Tensor, whole: bool) -> Law:
        """In fp32, of ``logits``; ``whole``: with the mass. No law is divided by a mass: it may be 0."""
        logits_PV = logits_PV.float()
        if self.kept_N is None:
            soft_PN = torch.softmax(logits_PV, dim=-1)
            return Law(soft_PN, 1.0 if whole else None)
        if not whole and self.kept_head is not None:
            return Law(torch.softmax(logits_PV, dim=-1), None)
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
        p_PN = law.p()
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
    heard_P: Tensor | None = None,
) -> Found:
    """The reference: all logits at once; ``heard_P`` asks for alpha, which comes at every position here."""
    whole = heard_P is not None or _whole(terms, lengths)
    law = None
    if terms.soft or whole:
        assert teacher is not None, "a soft term needs the target's law"
        law = teacher.law(teacher.logits(slice(None), whole), whole)
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
    sums = {name: (found[name] * weights_P).sum() for name in _names(terms, whole)}
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
    heard_P: Tensor | None = None,
    chunk: int = 512,
) -> Found:
    """As ``plain``, with at most ``[chunk, V]`` of logits alive at any time.

    ``labels_P`` are draft-vocabulary ids; a label of -1 (outside a reduced vocabulary) must have
    weight 0. The head is frozen: it gets no gradient. Positions of weight 0 cost nothing and have an
    alpha of 0, but for those that ``heard_P`` names; with ``lengths``, blocks without any weight.
    """
    assert weights_P[labels_P < 0].abs().sum() == 0, "a label outside the draft vocabulary has weight"
    whole = heard_P is not None or _whole(terms, lengths)
    assert teacher is not None or not (terms.soft or whole), "a soft term needs the target's law"
    used_P, unit = weights_P != 0, 1
    if heard_P is not None:
        used_P = used_P | heard_P
    if lengths is not None:
        unit = lengths.block
        used_P = used_P.unflatten(0, (-1, unit)).any(1).repeat_interleave(unit)
    every = bool(used_P.all())
    if not every:
        hidden_PD, labels_P, weights_P = hidden_PD[used_P], labels_P[used_P], weights_P[used_P]
        if extra is not None:
            extra = Extra(extra.inner_PR[used_P], extra.outer_NR)
        if teacher is not None:
            teacher = Teacher(teacher.last_PD[used_P], teacher.head, teacher.kept_N, teacher.kept_head)
    plan = _Plan(terms, teacher, softcap, lengths, whole, _even(len(labels_P), chunk, unit))
    inner_PR, outer_NR = extra or (None, None)
    total, alpha_P, *sums = _Chunked.apply(hidden_PD, inner_PR, outer_NR, head_ND, labels_P, weights_P, plan)
    if whole and not every:
        alpha_P = torch.zeros_like(used_P, dtype=alpha_P.dtype).masked_scatter_(used_P, alpha_P)
    return Found(total, dict(zip(plan.names, sums, strict=True)), alpha_P if whole else None)


def _whole(terms: LossWeights, lengths: Lengths | None) -> bool:
    return terms.acceptance or (lengths is not None and lengths.kind == "expected")


def _even(positions: int, chunk: int, unit: int) -> int:
    """Chunks of one size, at most ``chunk`` but whole units: a short last one would be slower a position."""
    units = max(1, -(-positions // unit))
    chunks = -(-units // max(1, chunk // unit))
    return -(-units // chunks) * unit


def _names(terms: LossWeights, whole: bool) -> tuple[str, ...]:
    """The terms that are found: those with a weight, and those that come with alpha for nothing."""
    free = ("ce", "l1", "nla") if whole else ("ce",)
    return tuple(name for name in ("ce", *SOFT) if name in free or getattr(terms, name) > 0)


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
        return _names(self.terms, self.whole)


class _Chunked(torch.autograd.Function):
    """Loss and its gradient in one sweep over chunks of positions.

    A chunk is what one matrix product takes; its logits turn into their gradient in place. Weights scale
    rows, so they come in after the products, which have fewer columns.
    """

    @staticmethod
    def forward(ctx, hidden_PD, inner_PR, outer_NR, head_ND, labels_P, weights_P, plan):  # noqa: PLR0913
        grad_PD = torch.empty_like(hidden_PD)
        grad_PR = None if inner_PR is None else torch.empty_like(inner_PR)
        grad_NR = None if outer_NR is None else torch.zeros_like(outer_NR)
        dtype = product_dtype(hidden_PD)
        hidden_PD, head_ND = hidden_PD.to(dtype), head_ND.to(dtype)
        if inner_PR is not None:
            inner_PR, outer_NR = inner_PR.to(dtype), outer_NR.to(dtype)
        sums = torch.zeros(len(plan.names), dtype=torch.float32, device=hidden_PD.device)
        alphas = []
        room_PN = hidden_PD.new_empty(min(plan.chunk, len(hidden_PD)), len(head_ND))
        for start in range(0, len(hidden_PD), plan.chunk):
            rows = slice(start, start + plan.chunk)
            logits_PN = room_PN[: len(hidden_PD[rows])]
            torch.mm(hidden_PD[rows], head_ND.T, out=logits_PN)
            slope_PN = None if plan.softcap is None else _cap(logits_PN, plan.softcap)
            if inner_PR is not None:
                torch.addmm(logits_PN, inner_PR[rows], outer_NR.T, out=logits_PN)
            values_PM, alpha_P = _values(logits_PN, labels_P[rows], rows, plan)
            grad_PN, weight_P = logits_PN, weights_P[rows].float()
            if plan.lengths is not None:
                weight_P = plan.lengths(
                    _hits(plan.lengths, values_PM[:, 0], alpha_P, labels_P[rows]), weight_P
                )
            sums += (values_PM * weight_P[:, None]).sum(0)
            if alpha_P is not None:
                alphas.append(alpha_P)
            if inner_PR is not None:
                assert grad_PR is not None and grad_NR is not None  # noqa: PT018
                grad_PR[rows] = (grad_PN @ outer_NR) * weight_P[:, None]
                grad_NR += grad_PN.T @ (inner_PR[rows] * weight_P[:, None]).to(dtype)
            if slope_PN is not None:
                grad_PN.mul_(slope_PN)
            grad_PD[rows] = (grad_PN @ head_ND) * weight_P[:, None]
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


def _cap(logits_PN: Tensor, softcap: float) -> Tensor:
    """Soft-cap logits in place; returns the derivative."""
    logits_PN.div_(softcap).tanh_()
    slope_PN = 1 - logits_PN**2
    logits_PN.mul_(softcap)
    return slope_PN


def _values(logits_PN: Tensor, labels_P: Tensor, rows: slice, plan: _Plan) -> tuple[Tensor, Tensor | None]:
    """Each term at each position of a chunk and alpha; the logits become the gradient of the total.

    On a CPU in pieces of a few rows, whose many passes stay in its cache.
    """
    teacher = plan.teacher if plan.terms.soft or plan.whole else None
    teacher_PV = None if teacher is None else teacher.logits(rows, plan.whole)
    size = max(1, PIECE // logits_PN.shape[1]) if logits_PN.device.type == "cpu" else len(logits_PN)
    values: list[Tensor] = []
    alphas: list[Tensor] = []
    for start in range(0, len(logits_PN), size):
        piece = slice(start, start + size)
        law = None
        if teacher is not None and teacher_PV is not None:
            law = teacher.law(teacher_PV[piece], plan.whole)
        value_PM, alpha_P = _value_and_grad(logits_PN[piece], labels_P[piece], law, plan)
        values.append(value_PM)
        if alpha_P is not None:
            alphas.append(alpha_P)
    return torch.cat(values), torch.cat(alphas) if alphas else None


def _value_and_grad(
    logits_PN: Tensor, labels_P: Tensor, law: Law | None, plan: _Plan
) -> tuple[Tensor, Tensor | None]:
    """The same of one piece."""
    terms, label_P1 = plan.terms, labels_P.clamp(min=0)[:, None]
    x_PN = logits_PN.float()  # the same memory where they are fp32
    x_PN.sub_(x_PN.amax(-1, keepdim=True))
    label_logit_P1, kl_P1 = x_PN.gather(1, label_P1), None
    if law is not None and (terms.kl > 0 or terms.hybrid > 0):
        log_soft_PN = law.soft_PN.clamp(min=torch.finfo(torch.float32).tiny).log_()
        kl_P1 = (log_soft_PN.sub_(x_PN).mul_(law.soft_PN)).sum(-1, keepdim=True)
    z_P1 = x_PN.exp_().sum(-1, keepdim=True)
    log_z_P1 = z_P1.log()
    found, alpha_P1 = {"ce": log_z_P1 - label_logit_P1}, None
    q_PN = x_PN.div_(z_P1)
    pull_P1 = torch.full_like(z_P1, terms.kl)  # towards p~, as kl draws
    if kl_P1 is not None:
        found["kl"] = kl_P1 = kl_P1 + log_z_P1
    if law is not None and law.mass_P1 is not None:
        p_PN = law.p()
        least_PN = torch.minimum(p_PN, q_PN)
        alpha_P1 = least_PN.sum(-1, keepdim=True)
        share_P1 = torch.exp(-HYBRID_RATE * alpha_P1)
        bounded_P1 = alpha_P1.clamp(min=1e-9)
        found["l1"] = 1 + law.mass_P1 - 2 * alpha_P1
        found["nla"] = -bounded_P1.log()
        if kl_P1 is not None:
            found["hybrid"] = share_P1 * kl_P1 + (1 - share_P1) * (1 - alpha_P1)
            pull_P1 += terms.hybrid * share_P1
    if alpha_P1 is not None and terms.acceptance:
        # The gradient of -alpha is -q (b - sum q b): l1 takes it twice.
        fall_P1 = 2 * terms.l1 + terms.nla / bounded_P1 + terms.hybrid * (1 - share_P1)
        below_PN = least_PN.lt_(p_PN).mul_(q_PN)  # q where q < p: the least is q
        below_P1 = below_PN.sum(-1, keepdim=True)
        q_PN.mul_(terms.ce + pull_P1 + fall_P1 * below_P1).addcmul_(below_PN, fall_P1, value=-1)
    else:
        q_PN.mul_(terms.ce + pull_P1)
    if law is not None and kl_P1 is not None:
        q_PN.addcmul_(law.soft_PN, pull_P1, value=-1)
    q_PN.scatter_add_(1, label_P1, torch.full_like(label_logit_P1, -terms.ce))
    if q_PN.data_ptr() != logits_PN.data_ptr():
        logits_PN.copy_(q_PN)
    value_PM = torch.cat([found[name] for name in plan.names], 1)
    return value_PM, None if alpha_P1 is None else alpha_P1.squeeze(1)
