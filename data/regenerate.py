"""Answers from the target itself: batched, on-policy, ids kept, resumable.

A drafter learns what its target would write, so other models' answers in a data set are replaced. Each
row's answers are appended to ``out`` as soon as they are complete; a second run with the same settings
asks for what is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.chat import Message, Renderer, Skip
from data.examples import questions
from data.sources import Row, parse, row_of
from drafters.target import Target
from serve.engine import Answer, Engine, Request


@dataclass
class RegenerateConfig:
    """``regenerate.*``"""

    max_new_tokens: int = 512
    temperature: float = 0.0  # 0: greedy
    batch: int = 16  # requests decoded together; 1 is exactly reproducible in fp32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_new_tokens < 1 or self.temperature < 0:
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
) -> Iterator[dict[str, Any]]:
    """Answered rows as JSON objects, in the order they finish.

    Each has ``messages`` with the answers in place, ``answers``: (index of the message, its ids), and
    ``finish_reason`` of the last answer: ``length`` when it was cut, and then it ends in no stop token.
    """
    jobs = {}
    for row in rows:
        parts = questions(row)
        if row.skip is None and parts:
            jobs[row.key] = _Job(row, parts, [], [])
    engine = Engine(target, slots=config.batch, capacity=max_length)
    for job in list(jobs.values()):
        if not _ask(engine, render, job, config, max_length):
            jobs.pop(job.row.key)
    with tqdm(total=len(jobs), unit="row", desc="answers", mininterval=1) as bar:
        while engine.busy:
            for answer in engine.step():
                job = jobs[answer.request.name]
                _take(render, job, answer, target.stop_ids)
                if job.parts and _ask(engine, render, job, config, max_length):
                    continue
                yield _as_json(job, render, target, config)
                bar.update()


def _ask(engine: Engine, render: Renderer, job: _Job, config: RegenerateConfig, max_length: int) -> bool:
    """Submit the next question; ``False`` when it does not fit or does not render."""
    messages = job.messages + job.parts[0]
    try:
        prompt = render.prompt_ids(messages, job.row.tools)
    except Skip as reason:
        tqdm.write(f"{job.row.where}: left out, {reason}")
        return False
    if len(prompt) + config.max_new_tokens > max_length:
        tqdm.write(f"{job.row.where}: left out, {len(prompt)} prompt tokens leave no room for an answer")
        return False
    job.messages = messages
    job.parts.pop(0)
    engine.submit(Request(prompt, config.max_new_tokens, config.temperature, config.seed, job.row.key))
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
    }


def append(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Append rows to a JSON Lines file, each line whole; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = 0
    with open(path, "a", encoding="utf-8") as file:
        for number, row in enumerate(rows, start=1):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
        os.fsync(file.fileno())
    return number


def done(path: Path) -> set[str]:
    """Keys of the rows that a previous run answered; a half-written last line is cut off."""
    if not path.exists():
        return set()
    keys, good = set(), b""
    for line in path.read_bytes().splitlines(keepends=True):
        row = row_of(0, str(path), parse(line)) if line.endswith(b"\n") else None
        if row is None or row.skip:
            break
        good += line
        keys.add(row.key)
    if len(good) != path.stat().st_size:
        scratch = path.with_suffix(".tmp")
        scratch.write_bytes(good)
        os.replace(scratch, path)
    return keys
