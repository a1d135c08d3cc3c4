"""The nouns, and the one legend of shapes.

Capital suffixes on tensor names give the axes, everywhere in the project:

    B  rows: packs in training, requests in serving      L  kept target layers
    T  tokens of a row                                   D  hidden size of the target
    P  positions, any flat list of them                  V  vocabulary (N where reduced)
    A  anchors: last committed tokens                    K  drafts of a round
    S  slots of a block, the anchor's included           J  K + 1: drafts and the bonus token
    H  heads                                             E  size of one head

A *layer id* k is the output of decoder layer k, counted from 0. An *anchor* is the last committed
token: the target has not processed it yet. ``p`` is a law of the target, ``q`` one of the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One conversation as ids; ``mask[t]`` says that the assistant produced ``ids[t]``."""

    ids: list[int]
    mask: list[bool]
    domain: str
    name: str  # where it came from, for error messages: file and line, or an id
    source: str = ""  # the set or file that it belongs to
    lang: str | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.mask), (self.name, len(self.ids), len(self.mask))


@dataclass(frozen=True)
class States:
    """What the frozen target leaves behind at each position.

    ``layers_BTLD`` are the outputs of the kept decoder layers, in ascending layer id;
    ``last_BTD`` is the hidden state after the final norm, which the head reads. ``None``: not kept.
    """

    layers_BTLD: Tensor
    last_BTD: Tensor | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> States:
        last = None if self.last_BTD is None else self.last_BTD.to(device, dtype)
        return States(self.layers_BTLD.to(device, dtype), last)

    def last(self) -> Tensor:
        """``last_BTD`` of states that were kept with it."""
        assert self.last_BTD is not None, "states without the last one"
        return self.last_BTD

    def __getitem__(self, index) -> States:
        """Index rows and positions of both tensors alike."""
        last = None if self.last_BTD is None else self.last_BTD[index]
        return States(self.layers_BTLD[index], last)


@dataclass(frozen=True)
class Batch:
    """Packed documents and the target's states over them. Nothing in here is shifted.

    ``doc_BT`` numbers the documents of a row from 0; padding is -1. ``position_BT`` restarts at 0 in
    each document. ``anchors_A`` indexes the flattened ``B*T``; a method's ``place`` fills it in.
    """

    tokens_BT: Tensor
    mask_BT: Tensor
    doc_BT: Tensor
    position_BT: Tensor
    states: States
    names: list[str] = field(default_factory=list)
    anchors_A: Tensor | None = None
    num_drafts: int | None = None
    count: float = 0.0

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Batch:
        moved = {
            name: getattr(self, name).to(device) for name in ("tokens_BT", "mask_BT", "doc_BT", "position_BT")
        }
        anchors = None if self.anchors_A is None else self.anchors_A.to(device)
        return replace(self, **moved, anchors_A=anchors, states=self.states.to(device, dtype))

    def placed(self) -> tuple[Tensor, int]:
        """The anchors and how many drafts follow each, of a batch that a method has placed."""
        assert self.anchors_A is not None, "a batch without anchors"
        assert self.num_drafts is not None, "a batch without a number of drafts"
        return self.anchors_A, self.num_drafts


@dataclass(frozen=True)
class Proposal:
    """Drafts of a round: ``tokens_BK``, and the laws they were drawn from.

    ``laws_BKV`` is ``None`` for point masses (greedy drafts). ``confidence_BK``, where a method has
    it, is the probability that a draft is accepted given that those before it were. ``lengths`` says
    how many of its K drafts each row really has; ``None``: all of them. ``copied`` says which rows' drafts
    were looked up, where others are a trained drafter's.
    """

    tokens_BK: Tensor
    laws_BKV: Tensor | None = None
    confidence_BK: Tensor | None = None
    lengths: list[int] | None = None
    copied: list[bool] | None = None


@dataclass(frozen=True)
class Loss:
    """A sum to minimise and what to divide it by, once, over the whole optimizer step.

    ``sums`` and ``counts`` hold detached sums for the log, by name: a mean is made at the log line.
    """

    sum: Tensor
    count: float
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
