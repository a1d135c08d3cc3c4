"""The same scores by language or source: parts of a domain that are worth a line of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from drafters.types import Example
from eval.report import Scored, summarise


def by_part(
    key: Literal["lang", "source"], scored: Sequence[Scored], held: Sequence[Example], max_n: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Entries like those of ``domains`` for each language or source of the held-out conversations.

    Conversations that name none, and those that made no round, are in no part.
    """
    of = {example.name.split(" (turn ")[0]: getattr(example, key) for example in held}
    parts: dict[str, list[Scored]] = {}
    for one in scored:
        if of[one.name] and one.by_n[max_n].rounds:
            parts.setdefault(of[one.name], []).append(one)
    return {name: summarise(some, max_n, seed) for name, some in sorted(parts.items())}
