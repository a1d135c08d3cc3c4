"""The draft vocabulary: choose it, map it, check it.

A drafter may score only the N tokens its target produces most (EAGLE-3's reduced head). ``d2t`` holds
offsets, as every engine reads it: target id = draft id + d2t[draft id].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocab:
    """``kept_N``: the target ids that can be drafted, strictly ascending, out of ``size`` ids."""

    kept_N: Tensor
    size: int

    def __post_init__(self) -> None:
        kept = self.kept_N
        if kept.dim() != 1 or len(kept) < 2 or not bool((kept[1:] > kept[:-1]).all()):
            raise ValueError("draft vocabulary: kept ids must be a strictly ascending list of two or more")
        if int(kept[0]) < 0 or int(kept[-1]) >= self.size:
            outside = int(kept[0]) if int(kept[0]) < 0 else int(kept[-1])
            raise ValueError(
                f"draft vocabulary: id {outside} is outside the target's {self.size} ids; "
                "it belongs to another target, choose it again from this target's answers"
            )

    def __len__(self) -> int:
        return len(self.kept_N)

    @property
    def d2t_N(self) -> Tensor:
        """Offsets: target id = draft id + offset."""
        return self.kept_N - torch.arange(len(self.kept_N))

    @property
    def t2d_V(self) -> Tensor:
        """True at the kept ids."""
        flags = torch.zeros(self.size, dtype=torch.bool)
        flags[self.kept_N] = True
        return flags

    @cached_property
    def draft_id_V(self) -> Tensor:
        """The draft id of a target id, -1 where it cannot be drafted."""
        ids = torch.full((self.size,), -1, dtype=torch.long)
        ids[self.kept_N] = torch.arange(len(self.kept_N))
        return ids

    def covers(self, counts_V: Tensor) -> float:
        """Share of the counted tokens that can be drafted: the ceiling of first-draft acceptance."""
        return float(counts_V[self.kept_N].sum() / counts_V.sum().clamp(min=1))


def count_tokens(ids: Iterable[Tensor], size: int) -> Tensor:
    """How often each target id occurs: ``[V]``."""
    counts_V = torch.zeros(size, dtype=torch.long)
    for some in ids:
        counts_V += torch.bincount(some, minlength=size)
    return counts_V


def choose(counts_V: Tensor, num: int, always: Iterable[int] = (), usable: int | None = None) -> DraftVocab:
    """The ``num`` most frequent ids, lowest first among equals, and those of ``always`` whatever their count.

    ``usable`` is the tokenizer's length: head rows from there on are padding and are never kept.
    Errors: ``ValueError`` when ``num`` exceeds what can be kept.
    """
    size = len(counts_V)
    usable = size if usable is None else min(usable, size)
    if num > usable:
        raise ValueError(f"method.draft_vocab={num}: the target has only {usable} usable tokens")
    score = counts_V.clone().double()
    score[usable:] = -1
    for token in always:
        score[token] = float("inf")
    # Descending by count; a stable sort keeps the lower id first among equals.
    kept_N = torch.sort(score, descending=True, stable=True).indices[:num].sort().values
    return DraftVocab(kept_N, size)


def from_maps(d2t_N: Tensor, t2d_V: Tensor | None, size: int) -> DraftVocab:
    """Read the maps of a checkpoint, refusing absolute ids in ``d2t`` and maps that disagree.

    Offsets cannot rise at every id unless no two neighbouring ids are kept; absolute ids always do.
    """
    for name, held in (("d2t", d2t_N), ("t2d", t2d_V)):
        if held is not None and (held.dim() != 1 or held.is_floating_point()):
            raise ValueError(f"{name}: {tuple(held.shape)} of {held.dtype}; it must be one row of integers")
    d2t_N = d2t_N.long()
    kept_N = d2t_N + torch.arange(len(d2t_N))
    rising = len(d2t_N) > 1 and bool((d2t_N[1:] > d2t_N[:-1]).all())
    if rising and (t2d_V is None or torch.equal(t2d_V.nonzero().flatten(), d2t_N)):
        raise ValueError(
            "d2t: looks like absolute target ids; it must hold offsets, target id - draft id: subtract "
            "arange(len(d2t)), and store t2d, which tells the two apart"
        )
    if not bool((kept_N[1:] > kept_N[:-1]).all()):
        raise ValueError("d2t: target ids are not ascending; it must hold offsets (target id - draft id)")
    vocab = DraftVocab(kept_N, size)
    if t2d_V is not None and not (len(t2d_V) == size and torch.equal(t2d_V.bool(), vocab.t2d_V)):
        raise ValueError("t2d and d2t name different tokens; one of them is of another vocabulary")
    return vocab
