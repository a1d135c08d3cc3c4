"""Answers from the target itself: batched, on-policy, ids kept, resumable.

A drafter learns what its target would write, so other models' answers in a data set are replaced. Each
row's answers are appended to ``out`` as soon as they are complete; a second run with the same settings
asks for what is missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.chat import Message, Renderer, Skip
from data.examples import questions
from data.sources import Row, parse, row_of
from drafters.files import replace_file
from drafters.target import Target
from serve.engine import Engine
from serve.law import Sampling
from serve.types import Answer, Request


@dataclass
class RegenerateConfig:
    """``regenerate.*``"""

    max_new_tokens: int = 512
    temperature: float = 0.0  # 0: greedy
    batch: int = 16  # requests decoded together; 1 is exactly reproducible in fp32
    seed: int = 0  # each row draws from this and its key

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_new_tokens < 1 or not 0 <= self.temperature < math.inf:
            raise ValueError(
                "regenerate: batch and max_new_tokens are at least 1, temperature at least 0; "
                f"found {self.batch}, {self.max_new_tokens}, {self.temperature}"
            )


@dataclass
class _Job:
    """A row on its way: what is left to ask, and the conversation so far."""

    row: Row
    parts: list[list[Message]]
    messages: list[Message]
    answers: list[tuple[int, list[int]]]
    finish: str = "stop"


def regenerate(
    target: Target,
    render: Renderer,
    rows: Iterable[Row],
    config: RegenerateConfig,
    *,
    max_length: int,
    counts: Counter[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Answered rows as JSON objects, in the order they finish.

    Each has ``messages`` with the answers in place, ``answers``: (index of the message, its ids), and
    ``finish_reason`` of the last answer: ``length`` when it was cut, and then it ends in no stop token.
    A later question that leaves no room stays in ``messages`` unanswered. ``counts`` is filled with why
    rows and questions were left out, and with how many answers were cut.
    """
    counts = Counter() if counts is None else counts
    max_length = min(max_length, target.config.max_position_embeddings)
    jobs: dict[str, _Job] = {}
    for row in rows:
        if row.skip is None and row.key in jobs:
            counts["same id and question as an earlier row"] += 1
        elif row.skip is None:
            jobs[row.key] = _Job(row, questions(row), [], [])
    engine = Engine(target, slots=config.batch, capacity=max_length)
    for job in list(jobs.values()):
        if not _ask(engine, render, job, config, max_length, counts):
            jobs.pop(job.row.key)
    with tqdm(total=len(jobs), unit="row", desc="answers", mininterval=1) as bar:
        while engine.busy:
            for answer in engine.step():
                job = jobs[answer.request.name]
                _take(render, job, answer, target.stop_ids)
                counts["answer cut at regenerate.max_new_tokens"] += job.finish == "length"
                if job.parts and _ask(engine, render, job, config, max_length, counts):
                    continue
                job.messages += [message for part in job.parts for message in part]
                yield _as_json(job, render, target, config)
                bar.update()


def _ask(engine: Engine, render: Renderer, job: _Job, config: RegenerateConfig, max_length: int,
         counts: Counter[str]) -> bool:  # fmt: skip
    """Submit the next question; ``False`` when it does not fit or does not render."""
    messages = job.messages + job.parts[0]
    try:
        prompt = render.prompt_ids(messages, job.row.tools)
    except Skip as reason:
        tqdm.write(f"{job.row.where}: left out, {reason}")
        counts[str(reason)] += 1
        return False
    if len(prompt) + config.max_new_tokens > max_length:
        tqdm.write(f"{job.row.where}: left out, {len(prompt)} prompt tokens leave no room for an answer")
        counts[_NO_ROOM] += 1
        return False
    job.messages = messages
    job.parts.pop(0)
    seed = int(hashlib.sha256(f"{config.seed}/{job.row.key}".encode()).hexdigest()[:8], 16)
    sampling = Sampling(config.temperature, seed=seed)
    engine.submit(Request(prompt, config.max_new_tokens, sampling, name=job.row.key))
    return True


def _take(render: Renderer, job: _Job, answer: Answer, stop_ids: tuple[int, ...]) -> None:
    text_ids = answer.tokens[:-1] if answer.tokens[-1] in stop_ids else answer.tokens
    job.answers.append((len(job.messages), answer.tokens))
    job.messages.append({"role": "assistant", "content": render.tokenizer.decode(text_ids)})
    job.finish = answer.finish or "length"


def _as_json(job: _Job, render: Renderer, target: Target, config: RegenerateConfig) -> dict[str, Any]:
    row = job.row
    out = {"id": row.id, "domain": row.domain, **row.extra, "messages": job.messages}
    if row.tools:
        out["tools"] = row.tools
    return {
        **out,
        "answers": [[index, ids] for index, ids in job.answers],
        "finish_reason": job.finish,
        "tokenizer": render.tokenizer_hash,
        "made_by": made_by(target, render, config),
    }


def made_by(target: Target, render: Renderer, config: RegenerateConfig) -> str:
    """Who answered, and how: the target's signature, temperature and a hash of the template."""
    return f"{target.signature}/{config.temperature:g}/{render.template_hash}"


def append(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Append rows to a JSON Lines file, each line whole; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 0
    with open(path, "a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            number += 1
        os.fsync(file.fileno())
    return number


def done(path: Path, by: str | None = None) -> set[str]:
    """Keys of the rows that a previous run answered; a half-written last line is cut off.

    Errors: ``ValueError`` naming the first line that is no answered row, or one that another than ``by``
    (see ``made_by``) answered: then the file is another's.
    """
    if not path.exists():
        return set()
    lines = path.read_bytes().splitlines(keepends=True)
    begun = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
    keys = set()
    for number, line in enumerate(lines, start=1):
        row = row_of(number - 1, f"{path}:{number}", parse(line))
        if not row.answers:
            raise ValueError(f"{row.where}: {row.skip or 'a row without answers'}; {_OTHERS}")
        if by is not None and row.made_by not in (None, by):
            raise ValueError(
                f"{row.where}: answered by {row.made_by}, these answers would be by {by} (target, "
                "temperature, template); name another file with out=FILE"
            )
        keys.add(row.key)
    if begun:
        if not begun.startswith(_BEGINS[: len(begun)]):
            raise ValueError(f"{path}:{len(lines) + 1}: not the beginning of an answered row; {_OTHERS}")
        replace_file(path, b"".join(lines))
    return keys


_NO_ROOM = (
    "its prompt leaves no room for regenerate.max_new_tokens within data.max_length and the target's context"
)
_BEGINS = b'{"id": '
_OTHERS = "this file was not written by task=regenerate and is left as it is, name another with out=FILE"
