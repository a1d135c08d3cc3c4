"""The target and the conversations of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.examples import renderer
from drafters.target import Target, load
from drafters.types import Example
from eval.rows import conversations
from train.engine import rank, world_size

if TYPE_CHECKING:
    from recipes.schema import Run


@dataclass
class Loaded:
    """Target and conversations of a run; those held out are rank 0's, which measures acceptance.

    The draft vocabulary is counted over ``all_rows``, so that mixes of them (``data.weights``) are compared
    with one vocabulary.
    """

    target: Target
    all_rows: list[Example]
    train: list[Example]
    held: list[Example]
    data_key: str
    template: str  # a hash of what prompts were written with

    @property
    def belongs(self) -> dict[str, Any]:
        """What has to be the same again when a checkpoint is resumed."""
        return {
            "data": self.data_key,
            "target weights": self.target.fingerprint["weights"],
            "number of ranks": world_size(),
        }


def load_data(run: Run, directory: Path, device: torch.device) -> Loaded:
    """The target, and conversations to train on and to hold out."""
    target = load(run.target, replace(run.hardware, device=str(device)))
    render = renderer(run.data, target.tokenizer, target.stop_ids, target.signature)
    rows = conversations(run.data, run.eval, target, render, directory, measured=rank() == 0)
    if rank() == 0 and not rows.held:
        raise ValueError(
            f"data.holdout={run.data.holdout}: no conversation is left to measure acceptance on; give a "
            "larger share, or data.eval_path=FILE"
        )
    return Loaded(target, rows.all, rows.train, rows.held, rows.key, render.template_hash)
