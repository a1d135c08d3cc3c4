"""Losses over the vocabulary, per position, as weighted sums; chunked so that logits never pile up.

With ``s`` the drafter's logits, q = softmax(s) and p the target's law at the same position:

    ce    -log q(x)                      x the token that was really produced
    kl    sum_v p(v) log(p(v) / q(v))    p renormalised on a reduced vocabulary
    l1    sum_v |p(v) - q(v)|            twice the total variation; p not renormalised
    nla   -log sum_v min(p(v), q(v))     minus the log of the acceptance probability (LK losses)

``feature`` has no law: it draws hidden states to the target's own (``feature_distance``).

Gradients with respect to s: ce and kl give q - p. With g_j = sign(q_j - p_j), l1 gives
q_j (g_j - sum_v q_v g_v). With b_j = 1[q_j < p_j] and alpha the acceptance probability, nla gives
-q_j (b_j - sum_v q_v b_v) / alpha.
``plain`` is the reference. ``chunked`` computes loss and gradient of a chunk of positions together
and keeps only the gradient of the hidden states; a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

SOFT = ("kl", "l1", "nla")


@dataclass
class LossWeights:
    """How much of each term; terms with weight 0 are not computed."""

    ce: float = 1.0
    kl: float = 0.0
    l1: float = 0.0
    nla: float = 0.0
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


@dataclass(frozen=True)
class Teacher:
    """The target's law at the labels: ``last_PD`` through ``head``, over the whole vocabulary.

    ``head(last)`` gives logits ``[P, V]``; ``kept_N`` picks the draft vocabulary, ``None`` keeps all.
    """

    last_PD: Tensor
    head: Callable[[Tensor], Tensor]
    kept_N: Tensor | None = None

    def law(self, rows: slice) -> Tensor:
        """p over the draft vocabulary, not renormalised, in fp32: ``[P, N]``."""
        p_PV = torch.softmax(self.head(self.last_PD[rows]).float(), dim=-1)
        return p_PV if self.kept_N is None else p_PV[:, self.kept_N]


def feature_distance(hidden_PD: Tensor, last_PD: Tensor, weights_P: Tensor) -> Tensor:
    """Weighted sum of squared distances to the target's last states, as a share of their variance.

    Both are ``[P, D]`` after the final norm. A regression beside the cross-entropy, as EAGLE has one
    (arXiv 2401.15077): D numbers a position to learn from instead of one token.
    """
    last_PD = last_PD.float()
    share_P = (hidden_PD.float() - last_PD).pow(2).mean(-1) / last_PD.var()
    return (share_P * weights_P).sum()


def per_position(logits_PV: Tensor, labels_P: Tensor, p_PV: Tensor | None) -> dict[str, Tensor]:
    """Every term at every position, fp32: the definitions, written for autograd to differentiate."""
    logq_PV = torch.log_softmax(logits_PV.float(), dim=-1)
    terms = {"ce": F.nll_loss(logq_PV, labels_P.clamp(min=0), reduction="none")}
    if p_PV is not None:
        renormalised = p_PV / p_PV.sum(-1, keepdim=True)
        q_PV = logq_PV.exp()
        terms["kl"] = (torch.xlogy(renormalised, renormalised) - renormalised * logq_PV).sum(-1)
        terms["l1"] = (p_PV - q_PV).abs().sum(-1)
        terms["nla"] = -torch.minimum(p_PV, q_PV).sum(-1).clamp(min=1e-9).log()
    return terms


def plain(
    hidden_PD: Tensor,
    head_ND: Tensor,
    labels_P: Tensor,
    weights_P: Tensor,
    terms: LossWeights,
    teacher: Teacher | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The reference: all logits at once. Returns the weighted sum and the detached sum of each term."""
    p_PV = None
    if terms.soft:
        assert teacher is not None, "a soft term needs the target's law"
        p_PV = teacher.law(slice(None))
    logits_PV = hidden_PD @ head_ND.T
    if softcap is not None:
        logits_PV = softcap * torch.tanh(logits_PV / softcap)
    found = per_position(logits_PV, labels_P, p_PV)
    weights_P = weights_P.float()
    sums = {name: (value * weights_P).sum() for name, value in found.items()}
    total = sum(getattr(terms, name) * value for name, value in sums.items())
    return total, {name: value.detach() for name, value in sums.items()}


def chunked(
    hidden_PD: Tensor,
    head_ND: Tensor,
    labels_P: Tensor,
    weights_P: Tensor,
    terms: LossWeights,
    teacher: Teacher | None = None,
    softcap: float | None = None,
    chunk: int = 256,
) -> tuple[Tensor, dict[str, Tensor]]:
    """As ``plain``, with at most ``[chunk, V]`` of logits alive at any time.

    ``labels_P`` are draft-vocabulary ids; a label of -1 (outside a reduced vocabulary) must have
    weight 0. The head is frozen: it gets no gradient. Positions of weight 0 cost nothing.
    """
    assert weights_P[labels_P < 0].abs().sum() == 0, "a label outside the draft vocabulary has weight"
    used_P = weights_P != 0
    if not bool(used_P.all()):
        hidden_PD, labels_P, weights_P = hidden_PD[used_P], labels_P[used_P], weights_P[used_P]
        if teacher is not None:
            teacher = Teacher(teacher.last_PD[used_P], teacher.head, teacher.kept_N)
    total, *sums = _Chunked.apply(hidden_PD, head_ND, labels_P, weights_P, terms, teacher, softcap, chunk)
    return total, dict(zip(_names(terms), sums, strict=True))


def _names(terms: LossWeights) -> tuple[str, ...]:
    return ("ce", *SOFT) if terms.soft else ("ce",)


class _Chunked(torch.autograd.Function):
    """Loss and its gradient in one sweep over chunks of positions."""

    @staticmethod
    def forward(ctx, hidden_PD, head_ND, labels_P, weights_P, terms, teacher, softcap, chunk):  # noqa: PLR0913
        grad_PD = torch.empty_like(hidden_PD)
        sums = torch.zeros(len(_names(terms)), dtype=torch.float32, device=hidden_PD.device)
        for start in range(0, len(hidden_PD), chunk):
            rows = slice(start, start + chunk)
            logits_PV = (hidden_PD[rows] @ head_ND.T).float()
            if softcap is not None:
                logits_PV = softcap * torch.tanh(logits_PV / softcap)
                slope_PV = 1 - (logits_PV / softcap) ** 2
            law_PV = teacher.law(rows) if terms.soft else None
            values, grad_PV = _value_and_grad(
                logits_PV, labels_P[rows], weights_P[rows].float(), terms, law_PV
            )
            sums += values
            if softcap is not None:
                grad_PV = grad_PV * slope_PV
            grad_PD[rows] = grad_PV.to(head_ND.dtype) @ head_ND
        ctx.save_for_backward(grad_PD)
        scale = torch.tensor([getattr(terms, name) for name in _names(terms)], device=sums.device)
        total = (scale * sums).sum()
        ctx.mark_non_differentiable(*(outs := sums.unbind()))
        return (total, *outs)

    @staticmethod
    def backward(ctx, grad_total, *_):
        (grad_PD,) = ctx.saved_tensors
        return (grad_total.to(grad_PD.dtype) * grad_PD, *[None] * 7)


def _value_and_grad(logits_PV, labels_P, weights_P, terms, p_PV) -> tuple[Tensor, Tensor]:
    """Weighted sums of the terms and the gradient of their total, reusing the logits' memory."""
    lse_P1 = logits_PV.logsumexp(-1, keepdim=True)
    label_P1 = labels_P[:, None]
    ce_P = (lse_P1 - logits_PV.gather(1, label_P1)).squeeze(1)
    values = [(ce_P * weights_P).sum()]
    if p_PV is None:
        grad_PV = logits_PV.sub_(lse_P1).exp_()
        grad_PV.scatter_add_(1, label_P1, -torch.ones_like(label_P1, dtype=grad_PV.dtype))
        return torch.stack(values), grad_PV.mul_((weights_P * terms.ce)[:, None])

    logq_PV = logits_PV.sub_(lse_P1)
    q_PV = logq_PV.exp()
    mass_P1 = p_PV.sum(-1, keepdim=True)
    soft_PV = p_PV / mass_P1
    kl_P = (torch.xlogy(soft_PV, soft_PV) - soft_PV * logq_PV).sum(-1)
    l1_P = (p_PV - q_PV).abs().sum(-1)
    alpha_P = torch.minimum(p_PV, q_PV).sum(-1).clamp(min=1e-9)
    values += [(term * weights_P).sum() for term in (kl_P, l1_P, -alpha_P.log())]
    # d(-alpha)/ds = q (1[q < p] terms) : see the module docstring; l1 counts both directions.
    above_PV = (q_PV > p_PV).float()
    tv_grad_PV = q_PV * (above_PV - (q_PV * above_PV).sum(-1, keepdim=True))
    below_PV = q_PV * ((q_PV < p_PV).float() - (q_PV * (q_PV < p_PV)).sum(-1, keepdim=True))
    grad_PV = (terms.ce + terms.kl) * q_PV - terms.kl * soft_PV
    grad_PV += terms.l1 * (tv_grad_PV - below_PV)
    grad_PV -= (terms.nla / alpha_P)[:, None] * below_PV
    grad_PV.scatter_add_(1, label_P1, torch.full_like(label_P1, -terms.ce, dtype=grad_PV.dtype))
    return torch.stack(values), grad_PV.mul_(weights_P[:, None])
