"""The conversations of a run: those it trains on, and those held out to measure acceptance."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data.capture import check_ids
from data.examples import examples as to_examples
from data.examples import renderer, turns
from data.mix import chosen
from data.sources import BUNDLED, Row, check_skips, content_id, read, split_point
from drafters.target import Target, load
from drafters.types import Example
from eval.evaluate import check_sampled, held_out
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
    found, seen = to_examples(read(run.data), render, run.data.max_length, run.data.strict)
    check_skips(seen, run.data.max_skip)
    check_ids(found, target.vocab_size)
    held = _held_out(run, target, render, directory)
    if held is None:
        apart = hold_out([row for row in seen if row.skip is None], run.data.holdout, run.data.seed)
        check_sampled((row for row in seen if row.where in apart), run.data, run.eval)
        held = [turn for example in found if _row(example) in apart for turn in turns(example)]
        found = [example for example in found if _row(example) not in apart]
    if rank() != 0:
        held = []
    elif not held:
        raise ValueError(
            f"data.holdout={run.data.holdout}: no conversation is left to measure acceptance on; give a "
            "larger share, or data.eval_path=FILE"
        )
    train = chosen(found, run.data.weights)
    rows = json.dumps([[e.ids, e.mask] for e in (*train, *held)])
    return Loaded(target, found, train, held, hashlib.sha256(rows.encode()).hexdigest()[:16])


def _held_out(run: Run, target: Target, render, directory: Path) -> list[Example] | None:
    """Held-out answers from their own source, ``None`` when a part of the training rows has to serve."""
    path = run.data.eval_path or (BUNDLED if run.data.path == BUNDLED else None)
    if path is None:
        return None
    if rank() != 0:
        return []  # rank 0 alone measures acceptance
    return held_out(
        replace(run.data, path=path, split="eval", limit=None), target, render, run.eval, directory
    )


def hold_out(rows: Sequence[Row], share: float, seed: int) -> set[str]:
    """Where the rows to hold out stand: a share of each domain's conversations, drawn by ``seed``.

    Rows that ask the same stay on one side. A domain of one conversation is trained on.
    """
    by_domain: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        asked = content_id(row.asked, row.tools)
        by_domain.setdefault(row.domain, {}).setdefault(asked, []).append(row.where)
    held: set[str] = set()
    for domain, conversations in by_domain.items():
        some = list(conversations.values())
        random.Random(seed).shuffle(some)
        try:
            border = split_point(len(some), 1 - share) if len(some) > 1 else 1
        except ValueError as error:
            raise ValueError(
                f"data.holdout={share}: of {len(some)} conversations of domain {domain} none would be left "
                "to train on; give a smaller share, or data.eval_path=FILE"
            ) from error
        held.update(where for group in some[border:] for where in group)
    return held


def _row(example: Example) -> str:
    """Where the row of an example stands; those of one conversation are told apart by a turn."""
    return example.name.split(" (turn ")[0]
