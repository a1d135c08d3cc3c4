"""Answers by the target: what it would write alone, ids kept, and never asked for twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from data.chat import Renderer
from data.examples import examples, of_row, questions
from data.regenerate import RegenerateConfig, append, done, made_by, regenerate
from data.sources import DataConfig, Row, read
from tests import tiny

CASES = Path(__file__).parent / "cases"


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module")
def render(target):
    return Renderer(target.tokenizer, stop_ids=target.stop_ids)


def asked(*texts: str, id: str | None = None, **more) -> dict:
    return {"id": id or texts[0], "messages": [{"role": "user", "content": text} for text in texts], **more}


def rows_of(tmp_path, *rows: dict) -> list[Row]:
    return list(read(DataConfig(path=str(tiny.write_rows(tmp_path / "rows.jsonl", list(rows))))))


def answers(target, render, rows, counts=None, max_length: int = 200, **settings) -> dict[str, dict]:
    config = RegenerateConfig(**{"max_new_tokens": 12, **settings})
    made = regenerate(target, render, rows, config, max_length=max_length, counts=counts)
    return {row["id"]: row for row in made}


ROWS = [asked(f"question {'x' * at}", id=f"r{at}", domain="code", split="train") for at in range(7)]


def test_an_answer_is_the_targets_own_greedy_one_and_its_ids_are_kept(target, render, tmp_path):
    rows = rows_of(tmp_path, *ROWS)
    made = answers(target, render, rows, max_new_tokens=60)
    assert sorted(made) == [row.id for row in rows]
    for row in rows:
        found, want = made[row.id], tiny.greedy(target, render.prompt_ids(row.messages), 60)
        assert found["answers"] == [[1, want]]
        assert found["finish_reason"] == ("stop" if want[-1] in target.stop_ids else "length")
        text = target.tokenizer.decode(want[:-1] if found["finish_reason"] == "stop" else want)
        assert found["messages"] == [*row.messages, {"role": "assistant", "content": text}]
        assert (found["domain"], found["split"]) == ("code", "train")
    assert {row["finish_reason"] for row in made.values()} == {"stop", "length"}, "both must occur"


@pytest.mark.parametrize("batch", [3, 16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_made_together_are_those_made_one_at_a_time(target, render, tmp_path, batch, temperature):
    rows = rows_of(tmp_path, *ROWS)
    alone = answers(target, render, rows, batch=1, temperature=temperature)
    assert answers(target, render, rows, batch=batch, temperature=temperature) == alone
    if temperature:
        assert alone != answers(target, render, rows, batch=1, temperature=temperature, seed=1)


def test_equal_questions_of_two_rows_draw_answers_of_their_own(target, render, tmp_path):
    rows = rows_of(tmp_path, asked("same", id="one"), asked("same", id="two"))
    made = answers(target, render, rows, temperature=1.0, batch=1)
    assert made["one"]["answers"] != made["two"]["answers"]
    made = answers(target, render, rows)
    assert made["one"]["answers"] == made["two"]["answers"], "greedy answers have nothing to draw"


def test_every_question_of_a_conversation_is_answered_after_the_answers_before_it(target, render, tmp_path):
    (row,) = rows_of(tmp_path, asked("one", "two", "three"))
    found = answers(target, render, [row])["one"]
    assert [m["role"] for m in found["messages"]] == ["user", "assistant"] * 3
    assert [index for index, _ in found["answers"]] == [1, 3, 5]
    for index, ids in found["answers"]:
        assert ids == tiny.greedy(target, render.prompt_ids(found["messages"][:index]), 12)


def test_what_was_written_is_trained_on_as_the_target_made_it(target, render, tmp_path):
    append(tmp_path / "out.jsonl", answers(target, render, rows_of(tmp_path, asked("one", "two"))).values())
    (row,) = read(DataConfig(path=str(tmp_path / "out.jsonl")))
    first, second = of_row(row, render, None)
    for found, (index, ids) in zip((first, second), row.answers, strict=True):
        prompt = render.prompt_ids(row.messages[:index])
        assert found.ids == prompt + ids
        assert found.mask == [False] * len(prompt) + [True] * len(ids)


def test_old_answers_are_replaced_and_history_with_tools_stays(target, render, tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    history = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    old = asked("one", id="old")
    old["messages"].append({"role": "assistant", "content": "another model's"})
    rows = rows_of(tmp_path, old, {"id": "tools", "messages": history})
    made = answers(target, render, rows)
    assert [m["role"] for m in made["old"]["messages"]] == ["user", "assistant"]
    assert made["old"]["messages"][1]["content"] != "another model's"
    assert made["tools"]["messages"][:4] == rows[1].messages
    assert made["tools"]["answers"][0][0] == 4


def test_a_row_regenerated_again_is_asked_what_it_was_asked_first(target, render, tmp_path):
    first = rows_of(tmp_path, asked("one", "two"))
    again = rows_of(tmp_path, *answers(target, render, first).values())
    assert questions(again[0]) == questions(first[0])
    assert answers(target, render, again) == answers(target, render, first)


# Resuming --------------------------------------------------------------------------------------------


def shapes() -> list[dict]:
    """Rows of every shape: plain, several turns, one that comes with an answer, one without an id."""
    given = asked("given", id="given")
    given["messages"] += [{"role": "assistant", "content": "old"}, {"role": "user", "content": "and"}]
    trailing = asked("trailing", id="trailing")
    trailing["messages"].append({"role": "assistant", "content": "old"})
    nameless = asked("nameless")
    del nameless["id"]
    return [asked("plain"), asked("a", "b"), given, trailing, nameless, asked("other", id="plain")]


def test_a_second_run_asks_for_nothing(target, render, tmp_path):
    rows, out = rows_of(tmp_path, *shapes()), tmp_path / "out.jsonl"
    config = RegenerateConfig(max_new_tokens=6)
    assert append(out, regenerate(target, render, rows, config, max_length=200)) == len(rows) == 6
    assert done(out) == {row.key for row in rows}


def test_d17_an_old_answer_does_not_hide_that_a_row_was_answered(target, render, tmp_path):
    rows, out = list(read(DataConfig(path=str(CASES / "d17_regenerated_rows.jsonl")))), tmp_path / "out.jsonl"
    counts: Counter = Counter()
    append(out, answers(target, render, rows, counts, max_new_tokens=1).values())
    assert done(out) == {row.key for row in rows}
    assert counts == {"answer cut at regenerate.max_new_tokens": 2}
    for row in read(DataConfig(path=str(out))):
        assert [m["role"] for m in row.messages] == ["user", "assistant"]
        assert row.finish == "length"
        assert of_row(row, render, None)[0].ids[-1] not in target.stop_ids


def test_a_killed_run_is_finished_by_the_next_and_equals_one_that_was_not(target, render, tmp_path):
    rows, whole, out = rows_of(tmp_path, *ROWS), tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    append(whole, answers(target, render, rows, batch=1).values())
    lines = whole.read_bytes().splitlines(keepends=True)
    for kept, half in ((0, 3), (2, 40), (6, 1), (3, 0)):
        out.write_bytes(b"".join(lines[:kept]) + lines[kept][:half])
        have = done(out)
        assert have == {row.key for row in rows[:kept]}
        append(out, answers(target, render, [row for row in rows if row.key not in have], batch=1).values())
        assert out.read_bytes() == whole.read_bytes()


def test_rows_are_in_the_file_as_soon_as_they_are_complete(target, render, tmp_path):
    out, rows = tmp_path / "out.jsonl", rows_of(tmp_path, *ROWS)

    def stopped():
        for number, row in enumerate(answers(target, render, rows).values()):
            if number == 3:
                raise KeyboardInterrupt
            yield row

    with pytest.raises(KeyboardInterrupt):
        append(out, stopped())
    assert len(out.read_text().splitlines()) == 3
    assert all(json.loads(line) for line in out.read_text().splitlines())


@pytest.mark.parametrize(
    "content", ['{"id": "x", "messages": [{"role": "user", "content": "hi"}]}\n', "my notes", "a\nb\n"]
)
def test_a_file_that_holds_something_else_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"mine\.jsonl:1: .*out=FILE"):
        done(path)
    assert path.read_text() == content


def test_no_file_yet_means_nothing_is_done(tmp_path):
    assert done(tmp_path / "new.jsonl") == set()


def test_a_file_that_another_answered_is_refused_and_one_that_does_not_say_is_not(target, render, tmp_path):
    rows, out = rows_of(tmp_path, *ROWS[:2]), tmp_path / "out.jsonl"
    config = RegenerateConfig(max_new_tokens=3)
    by = made_by(target, render, config)
    append(out, regenerate(target, render, rows, config, max_length=200))
    assert done(out, by) == {row.key for row in rows}
    template = Renderer(target.tokenizer, tiny.CHATML + " ", target.stop_ids)
    settings = Renderer(target.tokenizer, None, target.stop_ids, {"enable_thinking": False})
    others = {
        made_by(tiny.target(seed=1), render, config),
        made_by(target, render, RegenerateConfig(temperature=0.7)),
        made_by(target, template, config),
        made_by(target, settings, config),
    }
    assert len(others - {by}) == 4
    for other in others:
        with pytest.raises(ValueError, match=rf"out\.jsonl:1: answered by {by}, .* by {other}.*out=FILE"):
            done(out, other)
    lines = [{k: v for k, v in json.loads(line).items() if k != "made_by"} for line in out.open()]
    assert done(tiny.write_rows(out, lines), "another") == {row.key for row in rows}


def test_rows_of_another_target_are_not_trained_on(target, render, tmp_path):
    made = answers(target, render, rows_of(tmp_path, *ROWS[:2]), temperature=0.5)
    rows = rows_of(tmp_path, *made.values())
    for signature, kept in ((target.signature, 2), (None, 2), (tiny.target(seed=1).signature, 0)):
        found, seen = examples(rows, replace(render, signature=signature), None)
        assert len(found) == kept
        assert {row.skip for row in seen} == ({None} if kept else {FOREIGN})


FOREIGN = "its answers are another target's; answer it again with task=regenerate"


# Rows that are left out ------------------------------------------------------------------------------

ROOM = (
    "its prompt leaves no room for regenerate.max_new_tokens within data.max_length and the target's context"
)


def test_rows_that_leave_no_room_are_counted_and_named(target, render, tmp_path, capsys):
    rows, counts = rows_of(tmp_path, asked("short"), asked("x" * 60, id="long")), Counter()
    assert list(answers(target, render, rows, counts, max_length=40)) == ["short"]
    assert counts[ROOM] == 1
    assert "rows.jsonl:2: left out, 63 prompt tokens leave no room" in capsys.readouterr().out


def test_a_prompt_that_just_fits_is_answered(target, render, tmp_path):
    (row,) = rows_of(tmp_path, asked("short"))
    size = len(render.prompt_ids(row.messages)) + 12
    assert list(answers(target, render, [row], max_length=size)) == ["short"]
    assert list(answers(target, render, [row], max_length=size - 1)) == []


def test_the_targets_context_bounds_an_answer_too(target, render, tmp_path):
    rows, counts = rows_of(tmp_path, asked("short")), Counter()
    assert target.config.max_position_embeddings == 512
    assert not answers(target, render, rows, counts, max_length=4096, max_new_tokens=510)
    assert counts[ROOM] == 1


def test_a_later_question_without_room_stays_unanswered_and_is_not_asked_again(target, render, tmp_path):
    rows, counts, out = rows_of(tmp_path, asked("one", "x" * 60)), Counter(), tmp_path / "out.jsonl"
    append(out, answers(target, render, rows, counts, max_length=50).values())
    (row,) = read(DataConfig(path=str(out)))
    assert [m["role"] for m in row.messages] == ["user", "assistant", "user"]
    assert [index for index, _ in row.answers] == [1]
    assert counts[ROOM] == 1
    assert done(out) == {rows[0].key}
    assert len(of_row(row, render, None)) == 1


def test_rows_that_cannot_be_used_or_asked_are_left_out_with_a_count(target, tmp_path):
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}" + tiny.CHATML
    render, counts = Renderer(target.tokenizer, template, target.stop_ids), Counter()
    rows = rows_of(tmp_path, asked("yes"), asked("no"), asked("yes"), {"text": "x"})
    assert list(answers(target, render, rows, counts, max_new_tokens=1)) == ["yes"]
    assert counts["same id and question as an earlier row"] == 1
    assert counts["the chat template refuses it: never"] == 1


@pytest.mark.parametrize("bad", [{"batch": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}])
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(ValueError, match="regenerate: batch and max_new_tokens are at least 1"):
        RegenerateConfig(**bad)
