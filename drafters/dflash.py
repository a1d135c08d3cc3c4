"""DFlash: a block of drafts in one pass (arXiv 2602.06036; drawing and layouts in drafters/block.py).

The backbone's hidden states of the predicting slots go straight to the target's frozen head. Slot by
slot the label is the token the target really produced; the loss of draft k (from 0) of an anchor is
weighted by exp(-k / decay) and summed over the contiguous supervised prefix of the block (section 3.3
of the paper: decay 4 for blocks of 8). Compared with z-lab/dflash at 44947fb (slot s predicts x[a+s])
and DeepSpec at afdfa7c (slot s predicts x[a+s+1]).
"""

from __future__ import annotations

from dataclasses import dataclass

from drafters.block import BlockConfig, BlockDrafter
from drafters.method import method
from drafters.objective import objective
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

    def loss(self, batch: Batch) -> Loss:
        return objective(self, batch, self.hidden_of(batch, *batch.placed()), self.weights_K)[0]

    def vllm_refusal(self) -> str | None:
        if self.config.anchor_predicts:
            return "vLLM misreads or refuses a block whose anchor slot predicts (method.anchor_predicts)"
        return None
