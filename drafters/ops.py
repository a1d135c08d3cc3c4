"""Pure tensor functions: which positions are anchors, what a block may see, where labels stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def valid_anchors(mask_BT: Tensor, doc_BT: Tensor) -> Tensor:
    """Positions a round can start from: the token and its successor are supervised, in one document.

    Returns a bool tensor ``[B, T]``. At serving the first anchor is the first token of the answer, so
    nothing before it is ever an anchor.
    """
    next_BT = torch.zeros_like(mask_BT)
    next_BT[:, :-1] = mask_BT[:, 1:] & (doc_BT[:, 1:] == doc_BT[:, :-1])
    return mask_BT & next_BT & (doc_BT >= 0)


def sample_anchors(valid_BT: Tensor, doc_BT: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A random ``share`` of each document's valid anchors, at least one a document; flat, sorted.

    Sampling is without replacement and by document, so that short answers are not starved beside
    long ones in a pack (coverage of short documents was 15 % in one peer, speculators #1071).
    """
    assert 0 < share <= 1, share
    valid_P = valid_BT.reshape(-1)
    row_P = torch.arange(valid_BT.shape[0], device=doc_BT.device).repeat_interleave(valid_BT.shape[1])
    group_P = row_P * (int(doc_BT.max()) + 2) + doc_BT.reshape(-1)
    index_A = valid_P.nonzero().squeeze(1)
    if index_A.numel() == 0:
        return index_A
    # A random order, then a stable sort by document: ranks within a document are then random.
    shuffled = index_A[torch.randperm(len(index_A), generator=generator).to(index_A.device)]
    shuffled = shuffled[torch.sort(group_P[shuffled], stable=True).indices]
    group = group_P[shuffled]
    _, sizes = torch.unique_consecutive(group, return_counts=True)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    rank = torch.arange(len(shuffled), device=sizes.device) - starts.repeat_interleave(sizes)
    wanted = (sizes * share).round().clamp(min=1).repeat_interleave(sizes)
    return shuffled[rank < wanted].sort().values


def draw_length(lengths: list[int], generator: torch.Generator) -> int:
    """One of the lengths, each as likely as it stands there."""
    return lengths[int(torch.randint(len(lengths), (1,), generator=generator))]


def block_labels(
    tokens_BT: Tensor, mask_BT: Tensor, doc_BT: Tensor, anchors_A: Tensor, num: int
) -> tuple[Tensor, Tensor]:
    """Labels ``x[a+1..a+num]`` of each anchor, and which of them count.

    Returns ``labels_AK`` (0 where it does not count) and ``valid_AK``: a contiguous prefix of
    supervised tokens of the anchor's own document. One unsupervised token ends the block.
    """
    rows, length = tokens_BT.shape
    offsets_K = torch.arange(1, num + 1, device=anchors_A.device)
    where_AK = anchors_A[:, None] + offsets_K
    inside_AK = (anchors_A % length)[:, None] + offsets_K < length
    where_AK = where_AK.clamp(max=rows * length - 1)
    doc_P, mask_P = doc_BT.reshape(-1), mask_BT.reshape(-1)
    same_AK = doc_P[where_AK] == doc_P[anchors_A][:, None]
    valid_AK = (inside_AK & same_AK & mask_P[where_AK]).cumprod(1).bool()
    labels_AK = tokens_BT.reshape(-1)[where_AK] * valid_AK
    return labels_AK, valid_AK


def previous_tokens(tokens_BT: Tensor, anchors_A: Tensor, num: int) -> Tensor:
    """The token before each label of a block, ``x[a .. a+num-1]``; anything behind the last row's end."""
    tokens_P = tokens_BT.flatten()
    where_AK = anchors_A[:, None] + torch.arange(num, device=anchors_A.device)
    return tokens_P[where_AK.clamp(max=len(tokens_P) - 1)]


def decay_weights(num: int, gamma: float | None, first: int = 0) -> Tensor:
    """``exp(-k / gamma)`` for k = 0.. of the slots from ``first`` on, 0 before; all 1 if gamma is None."""
    weights = torch.ones(num) if gamma is None else torch.exp(-torch.arange(num) / gamma)
    return torch.cat([torch.zeros(first), weights])


@dataclass(frozen=True)
class Span:
    """Context rows ``start..end`` belong to the anchors ``first..last`` (both half open)."""

    start: int
    end: int
    first: int
    last: int


def document_spans(doc_BT: Tensor, anchors_A: Tensor, most: int | None = None) -> list[Span]:
    """Spans of at most that many anchors of one document; anchors are flat and sorted.

    Blocks never see each other, so cutting a document changes no result; it bounds the masks, whose size
    is the square of a span's anchors, and what is computed only to be masked. By default 16, or 64 on a
    GPU, where starting many small operations costs more. The context of a span ends at its last anchor:
    a state at or after an anchor is never visible.
    Without an anchor there is one empty span, so that every parameter still gets a gradient, of zeros.
    """
    if len(anchors_A) == 0:
        return [Span(0, 0, 0, 0)]
    most = most or (16 if doc_BT.device.type == "cpu" else 64)
    doc_P = doc_BT.reshape(-1)
    length = doc_BT.shape[1]
    change_P = torch.ones_like(doc_P, dtype=torch.bool)
    change_P[1:] = doc_P[1:] != doc_P[:-1]
    change_P[::length] = True
    starts = change_P.nonzero().squeeze(1)
    owner_A = torch.searchsorted(starts, anchors_A, right=True) - 1
    first_A = torch.searchsorted(owner_A, owner_A)  # the first anchor of the same document
    part_A = (torch.arange(len(anchors_A), device=anchors_A.device) - first_A) // most
    pairs, sizes = torch.unique_consecutive(torch.stack([owner_A, part_A]), return_counts=True, dim=1)
    owners, lasts = pairs[0], sizes.cumsum(0)
    ends_A = anchors_A[lasts - 1]
    firsts = (lasts - sizes).tolist()
    return [
        Span(start, end, first, last)
        for start, end, first, last in zip(
            starts[owners].tolist(), ends_A.tolist(), firsts, lasts.tolist(), strict=True
        )
    ]


def context_mask(span: Span, before_A: Tensor, num_slots: int, window: int | None = None) -> Tensor:
    """What the slots of a span's blocks may see: ``[A*S, context + A*S]``, True where visible.

    Context row t is visible strictly before the anchor (``t < before``, both counted within the
    document: the target's state at the anchor does not exist yet when a round starts). Slots see
    their own block, in both directions. With a sliding ``window`` a query sees the ``window`` latest
    positions up to its own, itself included, so that such a block is causal (vLLM's convention for
    sliding draft layers).
    """
    own_A = before_A[span.first : span.last]
    num = len(own_A) * num_slots
    block_R = torch.arange(len(own_A), device=own_A.device).repeat_interleave(num_slots)
    slot_R = torch.arange(num_slots, device=own_A.device).repeat(len(own_A))
    before_R = own_A.repeat_interleave(num_slots)
    context_T = torch.arange(span.end - span.start, device=own_A.device)
    see_context = context_T[None] < before_R[:, None]
    see_block = block_R[:, None] == block_R[None]
    if window is not None:
        query_R = before_R + slot_R
        see_context &= context_T[None] > (query_R - window)[:, None]
        distance = slot_R[:, None] - slot_R[None]
        see_block &= (distance >= 0) & (distance < window)
    assert see_block.shape == (num, num), see_block.shape
    return torch.cat([see_context, see_block], dim=1)


def first_places(counts: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of the first ``counts[i]`` places of every row, row by row: two indices ``[P]``."""
    counts_B1 = torch.tensor(counts, device=device)[:, None]
    row_P, at_P = (torch.arange(max(counts), device=device) < counts_B1).nonzero(as_tuple=True)
    return row_P, at_P


def product_dtype(like: Tensor) -> torch.dtype:
    """What matrix products of this tensor are computed in: autocast's dtype where that is on."""
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
