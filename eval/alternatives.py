"""A drafter with one thing about it changed: the hypotheses of task=diagnose, tried on answers.

Each says that the drafter was trained with another setting than it now has. It is tried on its own answers,
teacher-forced: the drafts of some anchors, each given the answer up to it.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.capture import capture, refuse_bad
from data.pack import pack
from drafters.block import BlockDrafter
from drafters.layers import Rotary
from drafters.method import Drafter
from drafters.ops import block_labels, valid_anchors
from drafters.types import Batch, Example, States
from eval.sampled import log_law
from eval.trials import Limit, Trial

ANSWER = 64  # tokens of an answer that are looked at
ANCHORS = 16  # of these, evenly spread
AT_ONCE = 4  # answers that the target reads together
LOGITS = 2**26  # numbers of [A, K, N] at once
FADE = 0.5  # weight of a draft beside the one before it: late ones are guesses
BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # of rotary positions, as families have them
MASKS = 12  # tokens that are tried as the one that fills slots
BETTER = Limit(nats=0.25, hits=0.2)
# A state that does not exist yet when a round starts tells any drafter something: it has to explain a lot.
LEAK = Limit(nats=1.0, hits=0.3)
DRAWS = 4  # of anchors and lengths, that a loss is the mean of


@dataclass(frozen=True)
class Alternative:
    """Attributes of a drafter to change while it is tried, and what of its answers is read otherwise."""

    check: str
    name: str
    put: Mapping[str, Any] = field(default_factory=dict)
    shift: int = 0  # the state of position t + shift stands in place of that of t
    reach: int = 0  # that many states from the anchor's own on are seen by a block, besides those before
    before_norm: bool = False  # the labels are those of the target's head on its state before the norm
    limit: Limit = BETTER


AS_IS, AS_MENDED = Alternative("", "as it is"), Alternative("", "as mended")


@dataclass(frozen=True)
class Seen:
    """Answers in one pack, with the states of every layer that any alternative reads.

    ``says_BT`` is what the head makes of the target's state before the norm, at the position before.
    """

    batch: Batch
    ids: list[int]
    says_BT: Tensor

    def read(self, layer_ids: Sequence[int], shift: int, reach: int) -> Batch:
        """The pack with these layers, each position with the state of another of its document.

        A block sees as many states as its anchor's position says, and only differences of positions matter.
        """
        doc_P = self.batch.doc_BT[0]
        own_P = torch.arange(len(doc_P), device=doc_P.device)
        at_P = (own_P + shift).clamp(0, len(doc_P) - 1)
        at_P = torch.where(doc_P[at_P] == doc_P, at_P, own_P)
        layers_BTLD = self.batch.states.layers_BTLD[:, :, [self.ids.index(k) for k in layer_ids]]
        position_BT = self.batch.position_BT + reach
        states = States(layers_BTLD[:, at_P], self.batch.states.last_BTD)
        return replace(self.batch, position_BT=position_BT, states=states)


def alternatives(drafter: Drafter, bases: Sequence[float] = ()) -> list[Alternative]:
    """Every single thing that is commonly wrong about a drafter; ``bases`` are tried besides the usual."""
    return [
        *_layer_ids(drafter),
        *_context(drafter),
        Alternative("last state", "taught by the state before the norm", before_norm=True),
        *_rope(drafter, bases),
        *_layout(drafter),
        *_mask_token(drafter),
    ]


def _layer_ids(drafter: Drafter) -> Iterator[Alternative]:
    ids = drafter.layer_ids
    moved = [[k + by for k in ids] for by in (-1, 1)]
    moved += [[*ids[:i], ids[i] + by, *ids[i + 1 :]] for i in range(len(ids)) for by in (-1, 1)]
    for some in moved if len(ids) > 1 else moved[:2]:
        if some == sorted(set(some)) and some[0] >= 0 and some[-1] < drafter.target.num_layers:
            yield Alternative("layer ids", f"layers {some}", {"layer_ids": some})


def _context(drafter: Drafter) -> Iterator[Alternative]:
    yield Alternative("context", "each state one position early", shift=1, limit=LEAK)
    yield Alternative("context", "each state one position late", shift=-1)
    if isinstance(drafter, BlockDrafter):
        yield Alternative("context", "blocks that see the anchor's own state", reach=1, limit=LEAK)
        yield Alternative("context", "blocks that miss the newest state", reach=-1)


def _rope(drafter: Drafter, bases: Sequence[float]) -> Iterator[Alternative]:
    rotary = dict(drafter.named_children()).get("rotary")
    if not isinstance(rotary, Rotary):
        return
    own = dict(rotary.embedding.config.rope_parameters or {})
    for base in sorted({*BASES, *bases} - {own["rope_theta"]}):
        shape = copy.deepcopy(rotary.embedding.config)
        shape.rope_parameters = {**own, "rope_theta": base}
        other = Rotary(shape).to(drafter.target.device)
        yield Alternative("rope", f"rope base {base:g}", {"rotary": other})


def _layout(drafter: Drafter) -> Iterator[Alternative]:
    if isinstance(drafter, BlockDrafter) and drafter.config.block_size > 1:
        other = replace(drafter.config, anchor_predicts=not drafter.config.anchor_predicts, lengths=None)
        name = f"anchor_predicts={str(other.anchor_predicts).lower()}"
        yield Alternative("layout", name, {"config": other})


def _mask_token(drafter: Drafter) -> Iterator[Alternative]:
    tokenizer = drafter.target.tokenizer
    if drafter.mask_token is None or tokenizer is None:
        return
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    named = sorted(special, key=lambda i: "mask" not in tokenizer.convert_ids_to_tokens(i).lower())
    for token in [i for i in named if i != drafter.mask_token and i < drafter.target.vocab_size][:MASKS]:
        yield Alternative("mask token", f"mask token {token}", {"mask_token": token})


# Trying ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def see(drafter: Drafter, rows: Sequence[Example], some: Sequence[Alternative]) -> Seen:
    """The beginnings of answers, with the states that these alternatives read.

    Errors: ``ValueError`` naming a row whose states are NaN, infinite or zero.
    """
    target = drafter.target
    last = target.num_layers - 1
    ids = sorted({last, *drafter.layer_ids, *(k for one in some for k in one.put.get("layer_ids", []))})
    ends = [row.mask.index(True) + ANSWER for row in rows]
    short = [
        replace(row, ids=row.ids[:end], mask=row.mask[:end]) for row, end in zip(rows, ends, strict=True)
    ]
    parts = [short[at : at + AT_ONCE] for at in range(0, len(short), AT_ONCE)]
    states = [one for part in parts for one in capture(target, part, ids, with_last=True)]
    for row, one in zip(short, states, strict=True):
        refuse_bad(row, one)
    batch = pack(short, states).to(target.device)
    says_BT = target.head(batch.states.layers_BTLD[:, :, ids.index(last)]).argmax(-1).roll(1, 1)
    return Seen(batch, ids, says_BT)


@torch.inference_mode()
def attempt(drafter: Drafter, seen: Seen, alternative: Alternative) -> Trial:
    """One alternative on these answers. Rows without an anchor count nothing."""
    batch = seen.batch
    valid_P = (valid_anchors(batch.mask_BT, batch.doc_BT) & (batch.position_BT > 0)).flatten()
    anchors = [_spread(valid_P & (batch.doc_BT[0] == doc)) for doc in range(len(batch.names))]
    with changed(drafter, alternative.put):
        at_once = max(1, LOGITS // (drafter.max_drafts * len(drafter.head_ND)))
        parts = [_sums(drafter, seen, part_A, alternative) for part_A in torch.cat(anchors).split(at_once)]
    sums = torch.cat(parts).double().cpu()
    rows = [some.sum(0).numpy() for some in sums.split([len(one) for one in anchors])]
    return Trial(alternative.check, alternative.name, alternative.limit, *np.stack(rows, 1))


@torch.inference_mode()
def loss(drafter: Drafter, seen: Seen, alternative: Alternative) -> dict[str, float]:
    """The terms of the training loss on these answers, as the log of a run has them."""
    generator, sums, counts = torch.Generator().manual_seed(0), Counter[str](), Counter[str]()
    with changed(drafter, alternative.put):
        for _ in range(DRAWS):
            batch = seen.read(drafter.layer_ids, alternative.shift, alternative.reach)
            found = drafter.loss(drafter.place(batch, generator))
            sums.update({name: float(value) for name, value in found.sums.items()})
            counts.update(found.counts)
    return {name: value / counts[name] for name, value in sums.items() if counts[name]}


def _spread(valid_P: Tensor) -> Tensor:
    """Some of these positions, from the first to the last."""
    at_A = valid_P.nonzero()[:, 0]
    picks = torch.linspace(0, max(len(at_A) - 1, 0), min(len(at_A), ANCHORS)).round().long()
    return at_A[picks.to(at_A.device)]


@contextmanager
def changed(drafter: Drafter, put: Mapping[str, Any]) -> Iterator[None]:
    """The drafter with other attributes, as long as the block lasts."""
    before = {name: getattr(drafter, name) for name in put}
    try:
        for name, value in put.items():
            setattr(drafter, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(drafter, name, value)


def _sums(drafter: Drafter, seen: Seen, anchors_A: Tensor, alternative: Alternative) -> Tensor:
    """Of each anchor the weighted log-probability of its labels, their weight, accepted drafts, and 1."""
    batch, num = seen.read(drafter.layer_ids, alternative.shift, alternative.reach), drafter.max_drafts
    says_BT = seen.says_BT if alternative.before_norm else batch.tokens_BT
    labels_AK, valid_AK = block_labels(says_BT, batch.mask_BT, batch.doc_BT, anchors_A, num)
    if drafter.vocab is not None:
        labels_AK = drafter.vocab.draft_id_V.to(labels_AK.device)[labels_AK]
    logits_AKN = drafter.path_logits(batch, anchors_A, num)
    accepted_A = ((logits_AKN.argmax(-1) == labels_AK) & valid_AK).cumprod(1).sum(1)
    weight_AK = FADE ** torch.arange(num, device=anchors_A.device) * (valid_AK & (labels_AK >= 0))
    log_AK = log_law(logits_AKN, labels_AK.clamp(min=0), 1.0) * weight_AK
    return torch.stack([log_AK.sum(1), weight_AK.sum(1), accepted_A, torch.ones_like(accepted_A)], 1)
