"""What drafters learn at their anchors: labels, weights, the target's law, and the loss over them.

Draft k = 0, 1, ... of anchor a has the label x[a + 1 + k]. The target's law of that token comes from its
state one position before. Labels are a contiguous run of supervised tokens of the anchor's document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from drafters.losses import Extra, Found, Lengths, Teacher, chunked, feature_distance
from drafters.method import Drafter
from drafters.ops import block_labels
from drafters.types import Batch, Loss


def weighted_labels(
    drafter: Drafter, batch: Batch, weights_K: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Draft-vocabulary labels ``[A, K]`` (-1: cannot be drafted) and the weight of each.

    ``weights_K(num)`` are the weights of the drafts of a block.
    """
    labels_AK, weights_AK = _round_labels(drafter, batch, weights_K)
    return labels_AK, weights_AK * (labels_AK >= 0)


def _round_labels(
    drafter: Drafter, batch: Batch, weights_K: Callable[[int], Tensor]
) -> tuple[Tensor, Tensor]:
    """The same with the weight of a label that cannot be drafted: a round that comes to it ends there."""
    anchors_A, num = batch.placed()
    labels_AK, valid_AK = block_labels(batch.tokens_BT, batch.mask_BT, batch.doc_BT, anchors_A, num)
    if drafter.vocab is not None:
        labels_AK = drafter.vocab.draft_id_V.to(labels_AK.device)[labels_AK]
    return labels_AK, weights_K(num).to(labels_AK.device) * valid_AK


def counted(drafter: Drafter, batch: Batch, weights_K: Callable[[int], Tensor]) -> Batch:
    """A batch whose anchors are drawn, with the sum of its labels' weights."""
    return replace(batch, count=float(weighted_labels(drafter, batch, weights_K)[1].sum()))


def teacher(drafter: Drafter, batch: Batch) -> Teacher:
    """The target's law at each label of a placed batch."""
    assert drafter.own_head_ND is None, "logits of the target's states through another head are not its law"
    anchors_A, num = batch.placed()
    last_PD = batch.states.last().flatten(0, 1).to(drafter.target.dtype)
    offset_K = torch.arange(num, device=last_PD.device)
    where_AK = (anchors_A[:, None] + offset_K).clamp(max=len(last_PD) - 1)
    kept_N = None if drafter.vocab is None else drafter.vocab.kept_N.to(last_PD.device)
    kept_head = lambda some_PD: drafter.logits(some_PD.to(drafter.head_ND.dtype))  # noqa: E731
    return Teacher(last_PD[where_AK.flatten()], drafter.target.head, kept_N, kept_head)


def objective(
    drafter: Drafter,
    batch: Batch,
    hidden_AKD: Tensor,
    weights_K: Callable[[int], Tensor],
    *,
    extra: Extra | None = None,
    lengths: Lengths | None = None,
    acceptance: bool = False,
) -> tuple[Loss, Found, Tensor]:
    """The loss of a placed batch over normed hidden states, what was found, and weights ``[A, K]``.

    These weights are for what a drafter learns of its rounds, its confidence: they count labels that a
    reduced vocabulary cannot draft as well, where ``acceptance`` asks for the acceptance probability too.
    """
    labels_AK, every_AK = _round_labels(drafter, batch, weights_K)
    weights_P = (every_AK * (labels_AK >= 0)).flatten()
    hidden_PD = hidden_AKD.flatten(0, 1)
    terms = drafter.config.loss
    needs_law = terms.soft or acceptance or lengths is not None
    law = teacher(drafter, batch) if needs_law or terms.feature > 0 else None
    found = chunked(
        hidden_PD,
        drafter.head_ND,
        labels_AK.flatten(),
        weights_P,
        terms,
        law if needs_law else None,
        drafter.target.softcap,
        extra,
        lengths,
        (every_AK != 0).flatten() if acceptance else None,
    )
    total, sums = found.total, dict(found.sums)
    if terms.feature > 0:
        assert law is not None
        distance = feature_distance(hidden_PD, law.last_PD, weights_P)
        total = total + terms.feature * distance
        sums["feature"] = distance.detach()
    return Loss(total, batch.count, sums, dict.fromkeys(sums, batch.count)), found, every_AK
