"""Public sets: local copies in the layout of the hub, read by the code that reads the hub's."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from data import sets
from data.examples import questions
from data.sources import DOMAINS, DataConfig, Row, check_skips, read
from tests.commands import CPU, command

TOOL = {
    "name": "geometry.area",
    "description": "Area of a shape",
    "parameters": {
        "type": "dict",
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "description": "which shape"},
            "sides": {"type": "tuple", "items": {"type": "float"}},
        },
    },
}
TABLES = {  # dataset id: configuration: split: rows
    "openai/gsm8k": {
        "main": {
            "train": [{"question": "1 + 1?", "answer": "2"}],
            "test": [{"question": "2 + 3?", "answer": "5"}, {"question": "4 + 4?", "answer": "8"}],
        }
    },
    "HuggingFaceH4/MATH-500": {"default": {"test": [{"problem": "Solve x = 1.", "answer": "1"}]}},
    "HuggingFaceH4/aime_2024": {"default": {"train": [{"id": 60, "problem": "Find n."}]}},
    "math-ai/aime25": {"default": {"test": [{"problem": "Find m.", "answer": "3", "id": "0"}]}},
    "openai/openai_humaneval": {
        "openai_humaneval": {"test": [{"task_id": "HumanEval/0", "prompt": "def f(x):\n", "test": "..."}]}
    },
    "google-research-datasets/mbpp": {
        "full": {
            "train": [{"task_id": 601, "text": "Longest chain.", "test_list": ["assert g() == 1"]}],
            "test": [
                {
                    "task_id": 11,
                    "text": "Remove a.",
                    "test_list": ["assert f(1) == 2", "assert f(3) == 4"],
                }
            ],
        }
    },
    "HuggingFaceH4/mt_bench_prompts": {
        "default": {"train": [{"prompt": ["Write a poem.", "Now in prose."], "category": "writing"}]}
    },
    "tatsu-lab/alpaca": {
        "default": {
            "train": [
                {"instruction": f"Do {at}.", "input": "" if at else "this", "output": ""}
                for at in range(1002)
            ]
        }
    },
    "nvidia/SPEED-Bench": {
        "qualitative": {
            "test": [
                {"category": "coding", "turns": ["Sort it.", "Now faster."]},
                {"category": "writing", "turns": ["A letter."]},
                {
                    "category": "coding",
                    "turns": ["FULL DATA SHOULD BE FETCHED FROM THE SOURCE USING X"],
                },
            ]
        }
    },
}
FILES = {  # dataset id, file: text
    ("juletxara/mgsm", "mgsm_de.tsv"): '"Eins" und eins?\t2\nWas ist 2?\t2\n',
    ("juletxara/mgsm", "mgsm_en.tsv"): "What is 1 + 1?\t2\n",
    ("livecodebench/code_generation_lite", "test6.jsonl"): "".join(
        json.dumps({"question_content": "Add.", "starter_code": code}) + "\n" for code in ("", "class A:")
    ),
    ("lmarena-ai/arena-hard-auto", "data/arena-hard-v2.0/question.jsonl"): '{"uid": "a", "prompt": "Why?"}\n',
    ("gorilla-llm/Berkeley-Function-Calling-Leaderboard", "BFCL_v3_simple.json"): json.dumps(
        {"id": "simple_0", "question": [[{"role": "user", "content": "Area?"}]], "function": [TOOL]}
    ) + "\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """The repositories as directories: parquet files named in a card, and files as they are."""
    root = tmp_path_factory.mktemp("hub")
    for name, configs in TABLES.items():
        card = []
        for config, splits in configs.items():
            lines = []
            for split, some in splits.items():
                file = f"{config}/{split}-00000-of-00001.parquet"
                (root / name / config).mkdir(parents=True, exist_ok=True)
                datasets.Dataset.from_list(some).to_parquet(root / name / file)
                lines.append(f"  - split: {split}\n    path: {file}")
            card.append(f"- config_name: {config}\n  data_files:\n" + "\n".join(lines))
        (root / name / "README.md").write_text("---\nconfigs:\n" + "\n".join(card) + "\n---\n")
    for (name, file), text in FILES.items():
        (root / name / file).parent.mkdir(parents=True, exist_ok=True)
        (root / name / file).write_text(text, encoding="utf-8")
    return root


@pytest.fixture(autouse=True)
def _local(hub, monkeypatch, tmp_path):
    """The hub is that directory; what is not there is missing as it is without a network."""
    load, cache = datasets.load_dataset, str(tmp_path / "cache")

    def local(name, config=None, split=None):
        path = hub / name
        return load(str(path) if path.is_dir() else name, config, split=split, cache_dir=cache)

    def download(name, file, repo_type):
        assert repo_type == "dataset"
        if not (hub / name / file).is_file():
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"{file} is not in the cache")
        return str(hub / name / file)

    monkeypatch.setattr(datasets, "load_dataset", local)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)


def rows(path: str, split: str | None = "eval", **more) -> list[Row]:
    return list(read(DataConfig(path=path, split=split, **more)))


def text(row: Row) -> str:
    return row.messages[0]["content"]


# Every set ------------------------------------------------------------------------------------------

ALL = [name for name in sets.SETS if not name.startswith(("mgsm_", "bfcl_", "speed_bench_"))]


@pytest.mark.parametrize("name", [*ALL, "mgsm_de", "mgsm_en", "bfcl_simple", "speed_bench_writing"])
def test_a_set_gives_prompts_that_say_where_they_are_from(name):
    found = rows(name)
    assert found
    for row in found:
        assert row.skip is None
        assert row.domain == sets.SETS[name].domain
        assert row.source == row.extra["source"] == name
        assert row.lang == sets.SETS[name].lang
        assert row.where.startswith(f"{name}[")
        assert {message["role"] for message in row.messages} == {"user"}  # no answer of the set's own
    assert len({row.id for row in found}) == len(found)


def test_every_entry_is_of_a_known_domain_and_every_family_has_members():
    assert {public.domain for public in sets.SETS.values()} == set(DOMAINS)
    assert all(len(sets.members(family)) > 1 for family in sets.FAMILIES)
    assert not set(sets.FAMILIES) & sets.SETS.keys()
    assert len(sets.members("mgsm")) == 11
    assert len(sets.members("speed_bench")) == 11


# What a row becomes -----------------------------------------------------------------------------------


def test_splits_are_the_sets_own():
    assert [text(row) for row in rows("gsm8k")] == ["2 + 3?", "4 + 4?"]
    assert [text(row) for row in rows("gsm8k", None)] == ["1 + 1?"]
    assert [text(row) for row in rows("gsm8k", "test", limit=1)] == ["2 + 3?"]
    assert (len(rows("alpaca")), len(rows("alpaca", "train"))) == (1000, 2)
    assert text(rows("alpaca", limit=1)[0]) == "Do 0.\n\nthis"


def test_two_turns_are_two_questions_to_answer():
    (row,) = rows("mt_bench")
    assert [[m["content"] for m in part] for part in questions(row)] == [["Write a poem."], ["Now in prose."]]


def test_code_stands_in_fences_with_what_it_has_to_pass():
    assert "```python\ndef f(x):\n```" in text(rows("humaneval")[0])
    assert "```python\nassert f(1) == 2\nassert f(3) == 4\n```" in text(rows("mbpp")[0])
    standard, starter = map(text, rows("livecodebench"))
    assert "standard input" in standard
    assert "```python\nclass A:\n```" in starter


def test_quotes_in_a_tsv_are_text():
    assert [text(row) for row in rows("mgsm_de")] == ['"Eins" und eins?', "Was ist 2?"]


def test_tools_are_in_json_schema_and_a_property_may_be_called_type():
    (row,) = rows("bfcl_simple")
    function = row.tools[0]["function"]
    assert function["name"] == "geometry_area"
    assert function["parameters"] == {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "description": "which shape"},
            "sides": {"type": "array", "items": {"type": "number"}},
        },
    }


def test_a_category_has_its_own_rows_and_texts_that_are_not_shipped_are_counted():
    first, second = rows("speed_bench_coding")
    assert [m["content"] for m in first.messages] == ["Sort it.", "Now faster."]
    assert "prepare_data.py" in second.skip
    assert [text(row) for row in rows("speed_bench_writing")] == ["A letter."]
    with pytest.raises(ValueError, match="1 of 2 rows cannot be used"):
        check_skips([first, second], 0.05)


def test_a_target_answers_a_set_turn_by_turn_and_the_answers_stay_those_of_the_set(workshop, tmp_path):
    out = tmp_path / "answers.jsonl"
    asked = [f"target={workshop / 'target'}", "data.path=mt_bench+mgsm_de", "data.split=eval", f"out={out}"]
    assert command("data", "task=regenerate", *CPU, *asked, "regenerate.max_new_tokens=4") == 0
    chat, *german = sorted(rows(str(out)), key=lambda row: row.source, reverse=True)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert len(chat.answers) == 2
    assert [(row.source, row.lang, row.domain) for row in german] == [("mgsm_de", "de", "multilingual")] * 2


# Several at once ---------------------------------------------------------------------------------------


def test_names_are_joined_with_a_plus_also_with_files(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "mine", "domain": "chat"}\n')
    found = rows(f"gsm8k+mgsm_de+{path}+bundled")
    assert [row.source for row in found[:6]] == ["gsm8k"] * 2 + ["mgsm_de"] * 2 + ["own", "bundled"]
    assert [row.index for row in found] == list(range(len(found)))


def test_a_family_is_all_of_its_sets(hub):
    assert [row.source for row in rows("aime")] == ["aime_2024", "aime_2025"]
    with pytest.raises(ValueError, match="data.path=mgsm_bn"):  # the first that is not there
        rows("mgsm")


def test_a_file_or_directory_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").mkdir()
    Path("gsm8k/own.jsonl").write_text('{"prompt": "mine"}\n')
    Path("a+b.jsonl").write_text('{"prompt": "ours"}\n')
    assert [text(row) for row in rows("gsm8k")] == ["mine"]
    assert [text(row) for row in rows("a+b.jsonl")] == ["ours"]


# Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "near"), [("gsm8", "gsm8k"), ("MT-Bench", "mt_bench"), ("mgsm_d", "mgsm_de")]
)
def test_a_name_that_is_none_is_refused_with_the_nearest(name, near):
    with pytest.raises(ValueError, match=rf"data\.path={name}: .*Did you mean .*{near}"):
        rows(name)


@pytest.mark.parametrize("name", ["math_500", "mgsm_de", "mt_bench", "bfcl_simple"])
def test_a_set_to_measure_on_is_not_trained_on(name):
    with pytest.raises(ValueError, match=rf"data\.path={name}: no split train.*data\.split=eval"):
        rows(name, None)


def test_a_set_that_cannot_be_had_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"data\.path=mgsm_fr: juletxara/mgsm cannot be had .*HF_HOME"):
        rows("mgsm_fr")
    with pytest.raises(ValueError, match=r"data\.path=gsm8k: openai/gsm8k cannot be had .*nonsense"):
        rows("gsm8k", "nonsense")


def test_a_set_that_has_changed_is_named_with_the_column(hub, monkeypatch):
    other = datasets.Dataset.from_list([{"query": "1 + 1?"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: other)
    with pytest.raises(ValueError, match=r"gsm8k: rows of openai/gsm8k have no column 'question', but query"):
        rows("gsm8k")


def test_a_source_without_rows_is_refused(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "mine", "split": "train"}\n')
    with pytest.raises(ValueError, match=rf"data\.path={path}: it holds no row of split eval"):
        rows(f"{path}+gsm8k")


def test_a_domain_of_which_nothing_is_left_is_refused_whatever_max_skip_allows():
    def row(at: int, domain: str, skip: str | None = None) -> Row:
        return Row(at, f"file:{at}", domain=domain, skip=skip)

    good = [row(at, "chat") for at in range(40)]
    check_skips([*good, row(40, "chat", "bad"), row(41, "", "not JSON")], 0.1)
    with pytest.raises(ValueError, match="no row of domain tools can be used; the first, file:40: bad"):
        check_skips([*good, row(40, "tools", "bad"), row(41, "tools", "worse")], 0.1)
