"""``python -m data``: rows shown with their mask, prompts answered, states stored."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests import tiny

CASES = Path(__file__).parent / "cases"


@pytest.fixture
def data(workshop, tmp_path, monkeypatch, capsys):
    """``python -m data`` with these arguments in this process: exit code, and what it said."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        more = [f"target={workshop / 'target'}", "hardware.dtype=float32", "hardware.device=cpu"]
        monkeypatch.setattr(sys, "argv", ["data", *more, *arguments])
        code = 0
        try:
            runpy.run_module("data", run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def chats(path: Path, number: int = 3) -> Path:
    rows = []
    for at in range(number):
        messages = [{"role": "user", "content": f"q{at}"}, {"role": "assistant", "content": f"a{at}"}]
        rows.append({"id": f"r{at}", "messages": messages})
    return tiny.write_rows(path, rows)


# inspect ---------------------------------------------------------------------------------------------


def test_inspect_writes_one_object_a_row_in_order_and_a_page(data, tmp_path):
    code, said = data("task=inspect", f"data.path={chats(tmp_path / 'rows.jsonl')}", "out=shown.jsonl")
    assert code == 0, said
    tokenizer, found = tiny.tokenizer(), lines(tmp_path / "shown.jsonl")
    for at, row in enumerate(found):
        assert list(row) == ["row", "id", "status", "length", "supervised_text", "ids", "mask"]
        assert (row["row"], row["id"], row["status"]) == (at, f"r{at}", "keep")
        assert row["supervised_text"] == [f"a{at}<|end|>"]
        assert row["length"] == len(row["ids"]) == len(row["mask"])
        kept = [i for i, m in zip(row["ids"], row["mask"], strict=True) if m]
        assert tokenizer.decode(kept) == f"a{at}<|end|>"
    assert "3  keep" in said
    page = (tmp_path / "shown.html").read_text(encoding="utf-8")
    assert "<mark>a2&lt;|end|&gt;</mark>" in page


def test_inspect_is_what_data_does_when_nothing_is_asked(data, tmp_path):
    assert data(f"data.path={chats(tmp_path / 'rows.jsonl')}")[0] == 0
    assert len(lines(tmp_path / "inspect.jsonl")) == 3


def test_d09_inspect_counts_by_reason_stops_above_the_limit_and_writes_the_file_all_the_same(data, tmp_path):
    path = CASES / "d09_bad_lines.jsonl"
    code, said = data("task=inspect", f"data.path={path}", "out=shown.jsonl", "data.max_skip=0.5")
    assert code == 1
    assert "5 of 8 rows cannot be used" in said
    assert f"{path}:4" in said
    assert "duplicate id: l2" in said
    found = lines(tmp_path / "shown.jsonl")
    assert [row["status"].partition(":")[0] for row in found] == [
        "keep",
        "keep",
        "skip",
        "skip",
        "skip",
        "skip",
        "keep",
        "skip",
    ]
    assert [row["row"] for row in found] == list(range(8))
    assert data("task=inspect", f"data.path={path}", "data.max_skip=0.7")[0] == 0


def test_strict_stops_at_the_first_bad_line(data, tmp_path):
    code, said = data("task=inspect", f"data.path={CASES / 'd09_bad_lines.jsonl'}", "data.strict=true")
    assert code == 1
    assert "d09_bad_lines.jsonl:4: not JSON" in said
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    code, said = data("task=inspect", f"data.path={rows}", "data.strict=true")
    assert code == 1
    assert "rows.jsonl:1: no assistant text" in said


def test_d10_no_row_with_odd_text_stops_inspect(data, tmp_path):
    path = CASES / "d10_surrogates.jsonl"
    code, said = data("task=inspect", f"data.path={path}", "out=shown.jsonl", "data.max_skip=0.5")
    assert code == 0, said
    assert "2  half a surrogate pair in the text" in said
    statuses = [row["status"] for row in lines(tmp_path / "shown.jsonl")]
    assert [status.startswith("skip:half") for status in statuses] == [False, True, True, False, False]


def test_max_length_cuts_and_a_template_file_replaces_the_tokenizers(data, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    )
    more = [
        "out=shown.jsonl",
        f"data.path={chats(tmp_path / 'rows.jsonl')}",
        f"data.chat_template={template}",
    ]
    assert data("task=inspect", *more)[0] == 0
    assert lines(tmp_path / "shown.jsonl")[0]["supervised_text"] == ["a0]"]
    assert data("task=inspect", *more, "data.max_length=6")[0] == 0
    assert lines(tmp_path / "shown.jsonl")[0]["supervised_text"] == ["a"]
    code, said = data("task=inspect", *more, "data.max_length=5")
    assert code == 1
    assert "no assistant text within max_length" in said


# regenerate ------------------------------------------------------------------------------------------


def test_regenerate_answers_every_row_and_a_second_run_none(data, tmp_path):
    more = [f"data.path={chats(tmp_path / 'rows.jsonl')}", "out=answers.jsonl", "regenerate.max_new_tokens=4"]
    code, said = data("task=regenerate", *more)
    assert code == 0, said
    assert "3 rows answered, 0 were there" in said
    first = (tmp_path / "answers.jsonl").read_bytes()
    assert {row["id"] for row in lines(tmp_path / "answers.jsonl")} == {"r0", "r1", "r2"}
    assert "0 rows answered, 3 were there" in data("task=regenerate", *more)[1]
    assert (tmp_path / "answers.jsonl").read_bytes() == first
    code, said = data("task=inspect", "data.path=answers.jsonl", "out=shown.jsonl")
    assert code == 0, said
    for row, shown in zip(lines(tmp_path / "answers.jsonl"), lines(tmp_path / "shown.jsonl"), strict=True):
        assert [i for i, m in zip(shown["ids"], shown["mask"], strict=True) if m] == row["answers"][0][1]


def test_regenerate_prints_why_rows_are_left_out_and_fails_when_none_is_answered(data, tmp_path):
    more = [f"data.path={chats(tmp_path / 'rows.jsonl')}", "out=answers.jsonl", "data.max_length=20"]
    code, said = data("task=regenerate", *more, "regenerate.max_new_tokens=19")
    assert code == 1
    assert "3  its prompt leaves no room" in said
    assert "no row was answered" in said
    code, said = data("task=regenerate", *more[:1], "out=null")
    assert code == 1
    assert "out=answers.jsonl" in said


def test_regenerate_refuses_to_write_into_a_file_that_is_not_its_own(data, tmp_path):
    rows = chats(tmp_path / "rows.jsonl")
    before = rows.read_bytes()
    code, said = data("task=regenerate", f"data.path={rows}", f"out={rows}")
    assert code == 1
    assert "rows.jsonl:1: a row without answers" in said
    assert rows.read_bytes() == before


def test_regenerate_refuses_to_mix_answers_that_were_made_otherwise(data, tmp_path):
    more = [f"data.path={chats(tmp_path / 'rows.jsonl')}", "out=answers.jsonl", "regenerate.max_new_tokens=4"]
    assert data("task=regenerate", *more)[0] == 0
    before = (tmp_path / "answers.jsonl").read_bytes()
    code, said = data("task=regenerate", *more, "regenerate.temperature=0.5")
    assert code == 1
    assert "answers.jsonl:1: answered by " in said
    assert "/0.5/" in said
    assert (tmp_path / "answers.jsonl").read_bytes() == before


# capture ---------------------------------------------------------------------------------------------


def test_capture_fills_the_store_that_training_reads(data, workshop, tmp_path, monkeypatch):
    from tests import runs

    rows = workshop / "rows.jsonl"
    code, said = data("+recipe=dflash", "task=capture", f"data.path={rows}", "states.directory=states")
    assert code == 0, said
    assert "24 documents" in said
    shards = {path: path.read_bytes() for path in (tmp_path / "states").rglob("*.safetensors")}
    assert shards
    runs.train(workshop, "states.keep=disk", "states.directory=states", "train.steps=1")
    assert {path: path.read_bytes() for path in (tmp_path / "states").rglob("*.safetensors")} == shards


def test_capture_leaves_out_answers_of_another_target(data, workshop, tmp_path):
    rows = [{**row, "made_by": "0" * 16 + "/0/abc"} for row in lines(workshop / "rows.jsonl")]
    path = tiny.write_rows(tmp_path / "rows.jsonl", rows)
    code, said = data("+recipe=dflash", "task=capture", f"data.path={path}", "states.directory=states")
    assert code == 1
    assert "24  its answers are another target's; answer it again with task=regenerate" in said


def test_an_empty_file_is_said_to_hold_no_row(data, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    code, said = data("task=inspect", "data.path=empty.jsonl", "out=shown.jsonl")
    assert code == 1
    assert "holds no row" in said
    assert "max_skip" not in said


def test_capture_without_a_method_says_what_to_add(data, tmp_path):
    code, said = data("task=capture", f"data.path={chats(tmp_path / 'rows.jsonl')}")
    assert code == 1
    assert "+recipe=NAME" in said


def test_a_file_that_is_not_there_is_one_message_without_a_traceback(data):
    code, said = data("task=inspect", "data.path=gone.jsonl")
    assert code == 1
    assert "error: data.path=gone.jsonl: no such file" in said
    assert "Traceback" not in said
