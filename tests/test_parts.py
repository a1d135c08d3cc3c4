"""Scores by language and by source."""

from __future__ import annotations

from dataclasses import replace

from drafters.types import Example
from eval.parts import by_part
from eval.replay import Counts
from eval.report import Scored, summarise


def scored(name: str, domain: str, accepted: list[int]) -> Scored:
    counts = Counts(2)
    for number in accepted:
        counts.add_round(number, number + 1)
    return Scored(name, domain, {2: counts})


def example(name: str, domain: str, lang: str | None, source: str) -> Example:
    return Example([1, 2], [False, True], domain, name, source, lang)


SCORED = [
    scored("a", "multilingual", [1, 2]),
    scored("b", "multilingual", [0, 0]),
    scored("c", "multilingual", [2]),
    scored("d", "math", [1]),
    scored("e", "math", []),
]
HELD = [
    example("a (turn 1)", "multilingual", "de", "mgsm_de"),
    example("a (turn 3)", "multilingual", "de", "mgsm_de"),
    example("b", "multilingual", "fr", "mgsm_fr"),
    example("c", "multilingual", "de", "own"),
    example("d", "math", None, "gsm8k"),
    example("e", "math", "en", "gsm8k"),
]


def test_a_language_has_the_scores_of_its_conversations():
    found = by_part("lang", SCORED, HELD, 2, 0)
    assert list(found) == ["de", "fr"]  # d names none, e made no round
    assert found["de"] == summarise([SCORED[0], SCORED[2]], 2, 0)
    assert found["fr"]["tau"] == 1.0


def test_sources_part_the_same_conversations_otherwise():
    found = by_part("source", SCORED, HELD, 2, 0)
    assert {name: row["prompts"] for name, row in found.items()} == {
        "gsm8k": 1, "mgsm_de": 1, "mgsm_fr": 1, "own": 1,
    }  # fmt: skip


def test_conversations_without_a_language_leave_no_part():
    assert by_part("lang", SCORED, [replace(example, lang=None) for example in HELD], 2, 0) == {}
