"""The bundled prompts: enough of each domain, nothing on both sides, and the answers belong to them."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter, defaultdict

import pytest

from data.sources import BUNDLED_DIRECTORY, DOMAINS, DataConfig, Row, _lines, read, row_of
from drafters.target import EMBEDDED, Target
from tests import tiny

ANSWERS = BUNDLED_DIRECTORY / "answers.jsonl.xz"
VOCABULARY = 49_152  # of SmolLM2


def parsed(*files) -> list[tuple[Row, dict]]:
    pairs = [pair for file in files for pair in _lines(file)]
    return [(row_of(at, where, value), value) for at, (where, value) in enumerate(pairs)]


@pytest.fixture(scope="module")
def prompts() -> list[Row]:
    return [row for row, _ in parsed(*(BUNDLED_DIRECTORY / "prompts" / f"{d}.jsonl" for d in DOMAINS))]


@pytest.fixture(scope="module")
def answered() -> list[tuple[Row, dict]]:
    assert ANSWERS.exists(), "data/bundled/answers.jsonl.xz is not shipped"
    return parsed(ANSWERS)


def normal(row: Row) -> str:
    """What was asked, without case, accents of form, punctuation and blanks."""
    text = " ".join(m["content"] for m in row.messages if m["role"] == "user")
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def test_every_prompt_can_be_used_and_has_an_id_of_its_own(prompts):
    assert [(row.where, row.skip) for row in prompts if row.skip] == []
    assert [name for name, number in Counter(row.id for row in prompts).items() if number > 1] == []
    assert all(row.messages[-1]["role"] in ("user", "tool") for row in prompts), (
        "prompts end before the answer"
    )


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_domain_has_sixty_prompts_to_train_on_and_twenty_to_measure(prompts, domain):
    split = Counter(row.extra["split"] for row in prompts if row.domain == domain)
    assert split["train"] >= 60
    assert split["eval"] >= 20
    assert set(split) == {"train", "eval"}


def test_there_are_five_domains(prompts):
    assert {row.domain for row in prompts} == set(DOMAINS)
    assert len(DOMAINS) == 5


def test_no_prompt_stands_twice_and_so_none_in_both_splits(prompts):
    where = defaultdict(list)
    for row in prompts:
        assert len(normal(row)) > 5, row.id
        where[normal(row)].append(row.id)
    assert [ids for ids in where.values() if len(ids) > 1] == []


@pytest.mark.parametrize("split", ["train", "eval"])
def test_multilingual_has_eight_languages_in_each_split(prompts, split):
    rows = [row for row in prompts if row.domain == "multilingual" and row.extra["split"] == split]
    assert len({row.extra["lang"] for row in rows}) >= 8
    assert all(row.extra["lang"] != "en" for row in rows)


def test_every_tools_prompt_has_tools_with_schemas(prompts):
    rows = [row for row in prompts if row.domain == "tools"]
    for row in rows:
        assert row.tools, row.id
        for tool in row.tools:
            function = tool["function"]
            assert tool["type"] == "function", row.id
            assert function["name"], row.id
            assert function["description"], row.id
            assert function["parameters"]["type"] == "object", row.id
            properties = function["parameters"]["properties"]
            assert set(function["parameters"].get("required", [])) <= set(properties), row.id
            assert all("type" in schema or "enum" in schema for schema in properties.values()), row.id
    assert len({json.dumps(row.tools, sort_keys=True) for row in rows}) > len(rows) / 2, "few tool sets"


def test_calls_in_the_prompts_name_tools_that_are_offered(prompts):
    calls = [(row, call) for row in prompts for m in row.messages for call in m.get("tool_calls", [])]
    for row, call in calls:
        assert call["function"]["name"] in {tool["function"]["name"] for tool in row.tools}, row.id
    assert calls


# The target's answers --------------------------------------------------------------------------------


def test_the_answers_are_those_of_the_prompts(prompts, answered):
    assert Counter(row.key for row, _ in answered) == Counter(row.key for row in prompts)
    split = {row.key: (row.domain, row.extra["split"]) for row in prompts}
    assert all(split[row.key] == (row.domain, row.extra["split"]) for row, _ in answered)


def test_there_are_a_hundred_thousand_answer_tokens(answered):
    assert sum(len(ids) for row, _ in answered for _, ids in row.answers) >= 100_000


def test_every_row_is_answered_in_ids_of_the_embedded_target(answered):
    for row, value in answered:
        assert row.skip is None, (row.where, row.skip)
        assert row.answers, row.id
        assert all(0 <= i < VOCABULARY for _, ids in row.answers for i in ids), row.id
        assert value["finish_reason"] in ("stop", "length"), row.id
        assert row.answers[-1][0] == len(row.messages) - 1, row.id
        assert (row.answers[-1][1][-1] == 2) == (row.finish == "stop"), row.id
    assert len({row.tokenizer for row, _ in answered}) == 1


def test_the_answers_count_for_the_embedded_target_and_no_sibling():
    rows = [row for split in ("train", "eval") for row in read(DataConfig(split=split))]
    sibling = tiny.target()  # SmolLM2-360M has the same tokenizer
    embedded = Target(sibling.model, sibling.tokenizer, EMBEDDED)
    assert all(row.answered_by(embedded.signature) for row in rows)
    assert not any(row.answered_by(sibling.signature) for row in rows)


def test_bundled_is_read_by_its_name_and_split(prompts):
    for split in ("train", "eval"):
        found = list(read(DataConfig(path="bundled", split=split)))
        assert {row.key for row in found} == {row.key for row in prompts if row.extra["split"] == split}
        assert found[0].where.startswith("bundled/")
    assert {row.extra["split"] for row in read(DataConfig())} == {"train"}
