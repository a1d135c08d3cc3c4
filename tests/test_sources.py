"""Prompts in: every layout people have, nothing dropped without a count, errors that name file and line."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import datasets
import pytest

from data.sources import DataConfig, Row, check_skips, read, report, split_point
from tests import tiny

CASES = Path(__file__).parent / "cases"


def chat(user: str = "hi", assistant: str = "yo", **more) -> dict:
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"messages": messages, **more}


def rows_of(path: Path, **settings) -> list[Row]:
    return list(read(DataConfig(path=str(path), **settings)))


def one(tmp_path: Path, row: dict) -> Row:
    return rows_of(tiny.write_rows(tmp_path / "one.jsonl", [row]))[0]


def expected(name: str) -> dict:
    return json.loads((CASES / f"{name}_expect.json").read_text())


# Where rows come from ------------------------------------------------------------------------------


def test_plain_compressed_and_directory_hold_the_same_rows(tmp_path):
    rows = [chat(f"q{at}", id=f"r{at}") for at in range(4)]
    plain = tiny.write_rows(tmp_path / "a.jsonl", rows[:2])
    packed = tmp_path / "b.jsonl.xz"
    packed.write_bytes(lzma.compress("".join(json.dumps(row) + "\n" for row in rows[2:]).encode()))
    (tmp_path / "notes.txt").write_text("no rows here")
    found = rows_of(tmp_path)
    assert [row.id for row in found] == ["r0", "r1", "r2", "r3"]
    assert [row.index for row in found] == [0, 1, 2, 3]
    assert [row.where for row in found] == [f"{plain}:1", f"{plain}:2", f"{packed}:1", f"{packed}:2"]
    assert [row.messages for row in found] == [row["messages"] for row in rows]


def test_a_datasets_name_gives_rows_as_they_were_before_arrow_filled_in_nulls(monkeypatch):
    def tool(**properties):
        return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}

    rows = [chat("a", tools=[tool(city={"type": "string"})]), chat("b", tools=[tool(day={"type": "string"})])]
    asked = {}

    def load(name, split):
        asked.update(name=name, split=split)
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = list(read(DataConfig(path="someone/chats", split="test")))
    assert asked == {"name": "someone/chats", "split": "test"}
    assert [row.where for row in found] == ["someone/chats[0]", "someone/chats[1]"]
    assert [row.messages for row in found] == [row["messages"] for row in rows]
    assert [row.tools for row in found] == [row["tools"] for row in rows]


@pytest.mark.parametrize("path", ["nowhere.jsonl", "./nowhere", "someone/no-such-chats"])
def test_a_source_that_is_not_there_is_an_error_that_names_it(path):
    with pytest.raises(ValueError, match=f"data.path={path}"):
        list(read(DataConfig(path=path)))


def test_a_directory_without_rows_and_a_damaged_archive_are_errors_that_name_them(tmp_path):
    with pytest.raises(ValueError, match="holds no .jsonl file"):
        rows_of(tmp_path)
    cut = tmp_path / "cut.jsonl.xz"
    cut.write_bytes(
        lzma.compress(b"".join(json.dumps(chat(str(i))).encode() + b"\n" for i in range(99)))[:-40]
    )
    with pytest.raises(ValueError, match=r"cut\.jsonl\.xz: damaged or cut off"):
        rows_of(cut)


def test_rows_of_another_split_are_left_out_and_rows_without_one_stay(tmp_path):
    rows = [chat("a", split="train"), chat("b", split="eval"), chat("c")]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    assert [row.messages[0]["content"] for row in rows_of(path)] == ["a", "c"]
    assert [row.messages[0]["content"] for row in rows_of(path, split="eval")] == ["b", "c"]


def test_limit_takes_the_first_rows(tmp_path):
    path = tiny.write_rows(tmp_path / "rows.jsonl", [chat(str(at)) for at in range(5)])
    assert [row.index for row in rows_of(path, limit=2)] == [0, 1]


# Layouts -------------------------------------------------------------------------------------------

PAIR = [("user", "hi"), ("assistant", "yo")]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        (chat(), PAIR),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, PAIR),
        ({"prompt": "hi", "response": "yo"}, PAIR),
        ({"prompt": "hi", "completion": "yo"}, PAIR),
        ({"question": "hi", "answer": "yo"}, PAIR),
        ({"system": "be kind", "prompt": "hi", "response": "yo"}, [("system", "be kind"), *PAIR]),
        ({"prompt": "hi"}, PAIR[:1]),
        ({"prompt": [{"role": "user", "content": "hi"}]}, PAIR[:1]),
        ({"prompt": [{"role": "user", "content": "hi"}],
          "completion": [{"role": "assistant", "content": "yo"}]}, PAIR),
        ({"instruction": "sum up", "context": "text", "response": "yo"},
         [("user", "sum up\n\ntext"), PAIR[1]]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}]},
         PAIR[:1]),
    ],
)  # fmt: skip
def test_every_layout_becomes_the_same_messages(tmp_path, row, turns):
    found = one(tmp_path, row)
    assert found.skip is None
    assert [(m["role"], m["content"]) for m in found.messages] == turns


def test_d16_instruction_rows_keep_their_input_and_have_ids_of_their_own():
    rows, expect = rows_of(CASES / "d16_instruction_input_output.jsonl"), expected("d16")
    for row, text in zip(rows, expect["user_text_contains"], strict=True):
        assert text in row.messages[0]["content"]
        assert row.messages[0]["content"].startswith(("Count the vowels.", "Name a tree."))
    assert len({row.id for row in rows}) == expect["distinct_ids"]
    assert [row.messages[1]["content"] for row in rows] == ["2", "3", "Ash"]


def test_d07_calls_keep_every_turn_and_the_types_of_their_arguments():
    rows = rows_of(CASES / "d07_tool_calls_mixed_types.jsonl")
    assert len(rows) == expected("d07")["n_rows"]
    assert [row.skip for row in rows] == [None] * 4
    assert [[m["role"] for m in row.messages] for row in rows[:3]] == [
        ["user", "assistant", "tool", "assistant"]
    ] * 3
    assert [row.messages[1]["tool_calls"][0]["function"]["arguments"] for row in rows[:3]] == [
        {"x": 3}, {"x": 3}, {"x": "noon"},
    ]  # fmt: skip
    assert rows[0].messages == rows[1].messages  # null and empty content, text and object arguments
    assert rows[0].tools == rows[1].tools
    assert [row.tools for row in rows[2:]] == [None, None]
    assert rows[0].messages[2]["tool_call_id"] == rows[0].messages[1]["tool_calls"][0]["id"] == "t1"


def test_d10_surrogate_pairs_are_joined_and_lone_halves_refused():
    pair, high, low, nul, accents = rows_of(CASES / "d10_surrogates.jsonl")
    assert pair.messages[0]["content"] == "thumb \U0001f44d"
    assert {high.skip, low.skip} == {"half a surrogate pair in the text"}
    assert nul.messages[0]["content"] == "nul \x00 in text"
    raw = json.loads((CASES / "d10_surrogates.jsonl").read_text().splitlines()[4])
    assert accents.messages == raw["messages"]
    assert "\u00e9" in accents.messages[0]["content"]
    assert "e\u0301" in accents.messages[0]["content"]


# Bad rows ------------------------------------------------------------------------------------------


def test_d09_bad_lines_are_counted_with_file_and_line_and_the_good_ones_kept():
    path = CASES / "d09_bad_lines.jsonl"
    by_line = {int(row.where.removeprefix(f"{path}:")): row for row in rows_of(path)}
    assert [line for line, row in by_line.items() if row.skip is None] == [1, 3, 8]
    assert 2 not in by_line  # blank
    assert [by_line[line].index for line in (1, 3, 8)] == [0, 1, 6]
    reasons = {line: row.skip for line, row in by_line.items() if row.skip}
    assert list(reasons) == [4, 5, 6, 7, 9]
    assert "not JSON" in reasons[4]
    assert reasons[5] == "not a JSON object"
    assert "NaN" in reasons[6]
    assert "0xE9" in reasons[7]
    assert "not JSON" in reasons[9]


def test_d09_strict_stops_at_the_first_bad_line_and_names_file_and_line():
    path = CASES / "d09_bad_lines.jsonl"
    rows = read(DataConfig(path=str(path), strict=True))
    assert [next(rows).id, next(rows).id] == ["l0", "l2"]
    with pytest.raises(ValueError, match=r"d09_bad_lines\.jsonl:4: not JSON.*data\.strict=true"):
        next(rows)


def test_d09_repeated_ids_are_reported():
    reasons, repeated = report(rows_of(CASES / "d09_bad_lines.jsonl"))
    assert repeated == ["l2"]
    assert reasons["keep"] == 3
    assert sum(reasons.values()) == 8


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "hi"}, "no conversation"),
        ({"messages": [{"role": "assistant", "content": "yo"}]}, "no user message"),
        ({"messages": [{"role": "alien", "content": "hi"}]}, "unknown role 'alien'"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown role"),
        ({"messages": ["hi"]}, "not an object"),
        ({"messages": [{"role": "user", "content": ""}]}, "empty user message"),
        ({"messages": [{"role": "user", "content": 3}]}, "neither text nor parts"),
        (chat(tools="[{"), "tools are not JSON"),
        (chat(tools={"name": "f"}), "not a list"),
        (chat(answers=[[0, [1]]]), "answers do not name assistant messages"),
        (chat(answers=[[1, []]]), "answers do not name assistant messages"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": 1}]}]},
         "without a function name"),
        ({"messages": [{"role": "user", "content": "x"},
                       {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
         "arguments are not JSON"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_used_says_why(tmp_path, row, reason):
    found = one(tmp_path, {"id": "bad", **row})
    assert reason in found.skip
    assert found.id == "bad"


def test_more_bad_rows_than_max_skip_stop_the_run_with_a_table_of_reasons(tmp_path):
    bad = [{"text": "x"}, {"messages": ["x"]}, {"messages": ["y"]}]
    rows = rows_of(tiny.write_rows(tmp_path / "rows.jsonl", [*(chat(str(at)) for at in range(9)), *bad]))
    check_skips(rows, 0.25)
    with pytest.raises(
        ValueError, match="3 of 12 rows cannot be used, more than data.max_skip=0.24"
    ) as error:
        check_skips(rows, 0.24)
    assert "2  a message is not an object  (first: " in str(error.value)
    assert "rows.jsonl:11)" in str(error.value)
    assert "1  no conversation" in str(error.value)


def test_nothing_left_is_an_error_whatever_max_skip_allows(tmp_path):
    with pytest.raises(ValueError, match="1 of 1 rows"):
        check_skips([one(tmp_path, {"text": "x"})], 1.0)
    with pytest.raises(ValueError, match="it holds no row"):
        check_skips([], 1.0)


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"holdout": 1.0}, {"holdout": -0.1}, {"max_length": 0}, {"max_skip": 5}], ids=str
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong):
    (key,) = wrong
    with pytest.raises(ValueError, match=rf"data\.{key}=.*give"):
        DataConfig(**wrong)


# Identity and splitting ----------------------------------------------------------------------------


def test_an_id_from_the_content_survives_reordering(tmp_path):
    rows = [chat("a"), chat("b")]
    ids = [row.id for row in rows_of(tiny.write_rows(tmp_path / "rows.jsonl", rows))]
    turned = [row.id for row in rows_of(tiny.write_rows(tmp_path / "rows.jsonl", rows[::-1]))]
    assert ids == turned[::-1]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    "case", json.loads((CASES / "d14_split_boundaries.json").read_text())["cases"], ids=str
)
def test_d14_every_row_is_on_one_side_of_the_border(case):
    if "result" in case:
        with pytest.raises(ValueError, match="one side is empty"):
            split_point(case["n"], case["train_ratio"])
        return
    border = split_point(case["n"], case["train_ratio"])
    assert (border, case["n"] - border) == (case["train"], case["val"])


def test_a_share_left_over_from_a_float_subtraction_is_the_share_that_was_meant():
    assert split_point(10, 1 - 0.9) == 1
    assert split_point(10, 1 - 0.8) == 2
