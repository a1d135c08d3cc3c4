"""Rows as training reads them, and as they could be read otherwise: another template, shifted answers.

An answer that a target gave is likeliest after the prompt that it was given to, and from its own first token
on. Each reading is scored by the target alone, no drafter is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile, zip_longest

import numpy as np
import torch

from data.capture import capture
from data.chat import Renderer, Skip
from data.examples import of_row
from data.sources import Row
from drafters.target import Target
from drafters.types import Example
from eval.sampled import log_law
from eval.trials import Limit, Trial

ROWS, AT_ONCE = 16, 4
READ = 32  # tokens of an answer that are looked at
OTHERWISE = Limit(nats=0.1, hits=0.02)
SWITCHES = ("enable_thinking", "thinking")  # of templates that write both ways


def readings(
    target: Target, rows: Sequence[Row], render: Renderer, served: Renderer | None, max_length: int
) -> list[Trial]:
    """As they are read, then each other reading; none where no row gives an answer after a prompt.

    ``served`` writes prompts as a server does that is told nothing.
    """
    some = list(_readable(rows, render, max_length))
    if not some:
        return []
    as_read = [parts for row in some if (parts := _parts(row, render, max_length)) is not None]
    out = [_trial(target, "", "as they are read", as_read)]
    for name, other in _templates(target, render, served):
        out.append(_trial(target, "template", name, [_parts(row, other, max_length) for row in some]))
    if any(row.answers for row in some):
        early = [(prompt, answer[1:]) for prompt, answer in as_read]
        late = _after_one_more(target, as_read)
        out.append(_trial(target, "mask", "answers without their first token", early))
        out.append(_trial(target, "mask", "answers after a token that is missing", late))
    return out


Parts = tuple[list[int], list[int]]  # a prompt, and the beginning of its answer


def _readable(rows: Sequence[Row], render: Renderer, max_length: int) -> Iterator[Row]:
    """Some rows that give an answer after a prompt, of every domain alike."""
    by_domain: dict[str, list[Row]] = {}
    for row in rows:
        some = by_domain.setdefault(row.domain, [])
        if row.skip is None and len(some) < ROWS and _parts(row, render, max_length) is not None:
            some.append(row)
    mixed = (row for row in chain.from_iterable(zip_longest(*by_domain.values())) if row is not None)
    return islice(mixed, ROWS)


def _parts(row: Row, render: Renderer, max_length: int) -> Parts | None:
    """``None`` for a row that does not render, or whose answer has no prompt before it."""
    try:
        example = of_row(row, render, max_length)[-1]
    except Skip:
        return None
    first = example.mask.index(True)
    pairs = zip(example.ids[first : first + READ], example.mask[first:], strict=False)
    return (example.ids[:first], [i for i, _ in takewhile(lambda pair: pair[1], pairs)]) if first else None


def _templates(target: Target, render: Renderer, served: Renderer | None) -> list[tuple[str, Renderer]]:
    """Templates that may have written the prompts instead."""
    text = render.template or target.tokenizer.chat_template
    out = [] if served is None else [("the target's own template", served)]
    for switch in SWITCHES:
        for value in (True, False) if switch in text else ():
            other = replace(render, settings={**render.settings, switch: value})
            out.append((f"{switch}={str(value).lower()}", other))
    return [(name, other) for name, other in out if other.template_hash != render.template_hash]


@torch.inference_mode()
def _logits(target: Target, rows: Sequence[Parts]) -> Iterator[torch.Tensor]:
    """The target's logits from the end of each prompt to the end of what follows it."""
    for at in range(0, len(rows), AT_ONCE):
        some = rows[at : at + AT_ONCE]
        wholes = [Example(prompt + answer, [True] * len(prompt + answer), "", "") for prompt, answer in some]
        for (prompt, _), states in zip(some, capture(target, wholes, [0], with_last=True), strict=True):
            yield target.head(states.last()[0, len(prompt) - 1 :].to(target.device)).float()


def _after_one_more(target: Target, rows: Sequence[Parts]) -> list[Parts]:
    """The answers after the token that the target would begin with."""
    firsts = [int(logits_PV.argmax()) for logits_PV in _logits(target, [(prompt, []) for prompt, _ in rows])]
    return [([*prompt, first], answer) for (prompt, answer), first in zip(rows, firsts, strict=True)]


def _trial(target: Target, check: str, name: str, rows: Sequence[Parts | None]) -> Trial:
    """What the target says of these answers after these prompts; a row without parts counts nothing."""
    sums = np.zeros((len(rows), 4))
    there = {at: parts for at, parts in enumerate(rows) if parts is not None and parts[1]}
    for (at, (_, answer)), logits_PV in zip(
        there.items(), _logits(target, list(there.values())), strict=True
    ):
        ids_P = torch.tensor(answer, device=logits_PV.device)
        hits = int((logits_PV[:-1].argmax(-1) == ids_P).sum())
        sums[at] = float(log_law(logits_PV[:-1], ids_P, 1.0).sum()), len(answer), hits, len(answer)
    return Trial(check, name, OTHERWISE, *sums.T)
