"""DFlash: a block of drafts in one pass (arXiv 2602.06036; drawing and layouts in drafters/block.py).

The backbone's hidden states of the predicting slots go straight to the target's frozen head. Slot by
slot the label is the token the target really produced; the loss of draft k (from 0) of an anchor is
weighted by exp(-k / decay) and summed over the contiguous supervised prefix of the block (section 3.3
of the paper: decay 4 for blocks of 8). Compared with z-lab/dflash at 44947fb (slot s predicts x[a+s])
and DeepSpec at afdfa7c (slot s predicts x[a+s+1]).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from drafters.block import BlockConfig, BlockDrafter
from drafters.losses import Teacher, chunked, feature_distance
from drafters.method import method
from drafters.ops import block_labels, decay_weights
from drafters.types import Batch, Loss


@dataclass
class DFlashConfig(BlockConfig):
    """``method.*`` of DFlash."""

    name: str = "dflash"


@method(DFlashConfig)
class DFlash(BlockDrafter):
    """Block drafter with the target's head and nothing after it."""

    config: DFlashConfig
    architecture = "DFlashDraftModel"

    def place(self, batch: Batch, generator: torch.Generator) -> Batch:
        batch = self.place_anchors(batch, generator)
        return replace(batch, count=float(self._weights(batch)[1].sum()))

    def loss(self, batch: Batch) -> Loss:
        labels_AK, weights_AK = self._weights(batch)
        hidden_PD = self.hidden_of(batch, *batch.placed()).flatten(0, 1)
        weights_P = weights_AK.flatten()
        terms = self.config.loss
        teacher = self._teacher(batch) if terms.needs_last else None
        total, sums = chunked(
            hidden_PD,
            self.head_ND,
            labels_AK.flatten(),
            weights_P,
            terms,
            teacher if terms.soft else None,
            softcap=self.target.softcap,
        )
        if teacher is not None and terms.feature > 0:
            distance = feature_distance(hidden_PD, teacher.last_PD, weights_P)
            total = total + terms.feature * distance
            sums["feature"] = distance.detach()
        return Loss(total, batch.count, sums, dict.fromkeys(sums, batch.count))

    def _weights(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft-vocabulary labels ``[A, K]`` (-1: cannot be drafted) and the weight of each."""
        anchors_A, num = batch.placed()
        labels_AK, valid_AK = block_labels(batch.tokens_BT, batch.mask_BT, batch.doc_BT, anchors_A, num)
        if self.vocab is not None:
            labels_AK = self.vocab.draft_id_V.to(labels_AK.device)[labels_AK]
        decay_K = decay_weights(num, self.config.decay).to(labels_AK.device)
        return labels_AK, decay_K * valid_AK * (labels_AK >= 0)

    def _teacher(self, batch: Batch) -> Teacher:
        """The target's law at each label: its state one position before the label."""
        anchors_A, num = batch.placed()
        last_PD = batch.states.last().flatten(0, 1).to(self.target.dtype)
        offset_K = torch.arange(num, device=last_PD.device)
        where_AK = (anchors_A[:, None] + offset_K).clamp(max=len(last_PD) - 1)
        kept = None if self.vocab is None else self.vocab.kept_N.to(last_PD.device)
        return Teacher(last_PD[where_AK.flatten()], self.target.head, kept)
