"""The conversations of a run: those it trains on, and those held out to measure acceptance.

Training draws them here, and whoever asks afterwards what a run has seen (eval/diagnose.py) draws the same.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.capture import check_ids
from data.chat import Renderer
from data.examples import examples as to_examples
from data.examples import turns
from data.mix import chosen
from data.sources import BUNDLED, DataConfig, Row, check_skips, content_id, read, split_point
from drafters.target import Target
from drafters.types import Example
from eval.evaluate import EvalConfig, check_sampled, held_out


@dataclass(frozen=True)
class Rows:
    """Conversations to train on and to hold out, and the rows of ``data.path`` that they came from.

    ``all`` are those that could be trained on, of which ``data.weights`` chose ``train``.
    """

    all: list[Example]
    train: list[Example]
    held: list[Example]
    read: list[Row]

    @property
    def key(self) -> str:
        """A hash over the ids and loss masks of both."""
        content = json.dumps([[e.ids, e.mask] for e in (*self.train, *self.held)])
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def conversations(
    data: DataConfig,
    settings: EvalConfig,
    target: Target,
    render: Renderer,
    cache: Path,
    measured: bool = True,
) -> Rows:
    """The conversations of these settings; held-out ones are answered where they come without answers.

    Of several ranks one measures acceptance; the others hold the same rows out and get none of them.
    """
    found, seen = to_examples(read(data), render, data.max_length, data.strict)
    check_skips(seen, data.max_skip)
    check_ids(found, target.vocab_size)
    path = data.eval_path or (BUNDLED if data.path == BUNDLED else None)
    if path is not None:
        apart = replace(data, path=path, split="eval", limit=None)
        held = held_out(apart, target, render, settings, cache) if measured else []
        return Rows(found, chosen(found, data.weights), held, seen)
    places = hold_out([row for row in seen if row.skip is None], data.holdout, data.seed)
    check_sampled((row for row in seen if row.where in places), data, settings)
    held = [turn for example in found if _row(example) in places for turn in turns(example)]
    found = [example for example in found if _row(example) not in places]
    return Rows(found, chosen(found, data.weights), held if measured else [], seen)


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


def spread(rows: Sequence[Example], number: int) -> list[Example]:
    """A part of the rows that holds every domain alike."""
    by_domain: dict[str, list[Example]] = {}
    for example in rows:
        by_domain.setdefault(example.domain, []).append(example)
    turns = max((len(some) for some in by_domain.values()), default=0)
    mixed = [some[at] for at in range(turns) for some in by_domain.values() if at < len(some)]
    return mixed[:number]
