"""Rows to examples: one a conversation, or one an answered turn where the target's own ids were kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise

from data.chat import Message, Renderer, Skip, template_of
from data.sources import DataConfig, Row
from drafters.types import Example


def renderer(
    config: DataConfig, tokenizer, stop_ids: Iterable[int] = (), signature: str | None = None
) -> Renderer:
    """The renderer of these settings. Errors: ``ValueError`` when the template file is missing."""
    template = template_of(config.chat_template)
    return Renderer(tokenizer, template, tuple(stop_ids), dict(config.template_settings), signature)


def examples(
    rows: Iterable[Row], render: Renderer, max_length: int | None, strict: bool = False
) -> tuple[list[Example], list[Row]]:
    """Examples of all usable rows, and the rows with ``skip`` filled in where there is none.

    Errors: ``ValueError`` naming the first unusable row when ``strict``.
    """
    found: list[Example] = []
    seen: list[Row] = []
    for row in rows:
        if row.skip is None:
            try:
                found += of_row(row, render, max_length)
            except Skip as reason:
                if strict:
                    raise ValueError(f"{row.where}: {reason} (data.strict=true)") from reason
                row = replace(row, skip=str(reason))
        seen.append(row)
    return found, seen


def of_row(row: Row, render: Renderer, max_length: int | None) -> list[Example]:
    """The examples of one row; ``Skip`` says why there are none."""
    if row.answers:
        return list(_answered(row, render, max_length))
    example = render.example(
        row.messages,
        row.tools,
        domain=row.domain,
        name=row.where,
        truncated=row.finish == "length",
        max_length=max_length,
    )
    return [replace(example, source=row.source, lang=row.lang)]


def _answered(row: Row, render: Renderer, max_length: int | None) -> Iterator[Example]:
    """Kept ids after the prompt that a server would build: nothing is tokenised a second time."""
    if row.tokenizer != render.tokenizer_hash:
        raise Skip("its answers are of another tokenizer; answer it again with task=regenerate")
    if not row.answered_by(render.signature):
        raise Skip("its answers are another target's; answer it again with task=regenerate")
    usable = 0
    for index, ids in row.answers:
        prompt = render.prompt_ids(row.messages[:index], row.tools)
        whole, mask = prompt + ids, [False] * len(prompt) + [True] * len(ids)
        if max_length is not None:
            whole, mask = whole[:max_length], mask[:max_length]
        if any(mask):
            usable += 1
            yield Example(
                whole,
                mask,
                row.domain,
                f"{row.where} (turn {index})" if len(row.answers) > 1 else row.where,
                row.source,
                row.lang,
            )
    if not usable:
        raise Skip("no assistant text within max_length")


def turns(example: Example) -> list[Example]:
    """One example an answer, each with all that came before it; the example itself where it holds but one.

    An assistant's opening words, before which there is nothing, answer no prompt and are left out.
    """
    out: list[Example] = []
    end = 0
    for supervised, group in groupby(example.mask):
        start, end = end, end + len(list(group))
        if supervised and start > 0:
            name, mask = f"{example.name} (turn {len(out) + 1})", [False] * start + [True] * (end - start)
            out.append(replace(example, ids=example.ids[:end], mask=mask, name=name))
    return [example] if len(out) == 1 and out[0].mask == example.mask else out


def turn_rows(row: Row) -> list[Row]:
    """One row for each assistant turn: what was said before it, other turns as history.

    Where ids were kept, those are the turns. Where two users speak in a row answers are missing, which have
    to be made first: such a row stays whole.
    """
    roles = [message["role"] for message in row.messages]
    if ("user", "user") in pairwise(roles):
        return [row]
    ends = [index for index, _ in row.answers] or [
        at
        for at, (before, role) in enumerate(pairwise([*roles, "assistant"]), 1)
        if role == "assistant" and before in ("user", "tool")
    ]
    if len(ends) < 2:
        return [row]
    return [
        replace(row, where=f"{row.where} (turn {turn})", messages=row.messages[:end], answers=[])
        for turn, end in enumerate(ends, 1)
    ]


def questions(row: Row) -> list[list[Message]]:
    """The conversations that the target has to answer, one after another, without the answers.

    A trailing answer and all that a target gave before are dropped. Between two user messages in a row
    an answer belongs; other assistant turns are history and stay.
    """
    given = row.asked
    parts: list[list[Message]] = [[]]
    for at, message in enumerate(given):
        parts[-1].append(message)
        last = at == len(given) - 1
        if not last and message["role"] == "user" and given[at + 1]["role"] == "user":
            parts.append([])
    return parts if given else []
