"""Public sets by name: where each lies on the Hugging Face hub, and how one of its rows becomes a prompt.

``data.path=gsm8k`` reads one, ``data.path=gsm8k+mgsm_de`` two, and ``mgsm``, ``bfcl``, ``aime`` and
``speed_bench`` stand for all sets whose names begin so. Rows are prompts alone: the sets' own answers are not
the target's. Of repositories that ``datasets`` cannot read (loading scripts, files of many layouts) one file
is read.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.chat import Skip

Found = dict[str, Any]


@dataclass(frozen=True)
class PublicSet:
    """One set: dataset id, domain, its splits, and the function from its rows to ours."""

    hub: str
    domain: str
    chat: Callable[[Found], Found]  # messages, and tools where there are any
    split: str = "test"  # to measure on
    train: str | None = None
    config: str | None = None
    file: str | None = None  # JSON Lines, or .tsv of question and answer
    lang: str | None = None
    category: str | None = None  # the rows that belong to it, where the set has a column of that name


def _users(*turns: str) -> Found:
    return {"messages": [{"role": "user", "content": turn} for turn in turns]}


def _asks(column: str) -> Callable[[Found], Found]:
    return lambda row: _users(row[column])


def _fenced(code: str) -> str:
    return f"```python\n{code.strip()}\n```"


def _humaneval(row: Found) -> Found:
    return _users(f"Complete this Python function.\n\n{_fenced(row['prompt'])}")


def _mbpp(row: Found) -> Found:
    tests = _fenced("\n".join(row["test_list"]))
    return _users(f"{row['text']}\n\nThe code, in Python, should pass these tests:\n\n{tests}")


def _livecodebench(row: Found) -> Found:
    how = "Read from standard input and write to standard output, in Python."
    if row["starter_code"]:
        how = f"Begin with this Python code:\n\n{_fenced(row['starter_code'])}"
    return _users(f"{row['question_content']}\n\n{how}")


def _alpaca(row: Found) -> Found:
    return _users("\n\n".join(filter(None, [row["instruction"], row["input"]])))


NOT_SHIPPED = "SHOULD BE FETCHED FROM THE SOURCE"  # in place of texts of other licences


def _speed_bench(row: Found) -> Found:
    if any(NOT_SHIPPED in turn for turn in row["turns"]):
        raise Skip("SPEED-Bench does not ship this text; give the file that its prepare_data.py writes")
    return _users(*row["turns"])


TYPES = {
    "dict": "object", "HashMap": "object", "Hashtable": "object", "float": "number", "double": "number",
    "bool": "boolean", "list": "array", "tuple": "array", "ArrayList": "array", "Array": "array",
    "Queue": "array", "Stack": "array", "long": "integer", "short": "integer", "byte": "integer",
    "Bigint": "integer", "String": "string", "char": "string", "any": "string", "Any": "string",
}  # fmt: skip


def _bfcl(row: Found) -> Found:
    tools = [
        {
            "type": "function",
            "function": {
                "name": re.sub(r"[^A-Za-z0-9_-]", "_", function["name"]),
                "description": function["description"],
                "parameters": _schema(function["parameters"]),
            },
        }
        for function in row["function"]
    ]
    return {"messages": row["question"][0], "tools": tools}


def _schema(value: Any) -> Any:
    """A JSON schema with JSON's types in place of those of Python, Java and JavaScript."""
    if isinstance(value, dict):
        return {
            key: TYPES.get(inner, inner) if key == "type" and isinstance(inner, str) else _schema(inner)
            for key, inner in value.items()
        }
    return [_schema(inner) for inner in value] if isinstance(value, list) else value


SETS = {
    "gsm8k": PublicSet("openai/gsm8k", "math", _asks("question"), train="train", config="main"),
    "math_500": PublicSet("HuggingFaceH4/MATH-500", "math", _asks("problem")),
    "aime_2024": PublicSet("HuggingFaceH4/aime_2024", "math", _asks("problem"), split="train"),
    "aime_2025": PublicSet("math-ai/aime25", "math", _asks("problem")),
    "humaneval": PublicSet("openai/openai_humaneval", "code", _humaneval),
    "mbpp": PublicSet("google-research-datasets/mbpp", "code", _mbpp, train="train", config="full"),
    "livecodebench": PublicSet(  # what its sixth version added; the files before it take gigabytes
        "livecodebench/code_generation_lite", "code", _livecodebench, file="test6.jsonl"
    ),
    "mt_bench": PublicSet(
        "HuggingFaceH4/mt_bench_prompts", "chat", lambda row: _users(*row["prompt"]), split="train"
    ),
    "alpaca": PublicSet("tatsu-lab/alpaca", "chat", _alpaca, split="train[:1000]", train="train[1000:]"),
    "arena_hard": PublicSet(
        "lmarena-ai/arena-hard-auto", "chat", _asks("prompt"), file="data/arena-hard-v2.0/question.jsonl"
    ),
    "mgsm_en": PublicSet("juletxara/mgsm", "math", _asks("question"), file="mgsm_en.tsv", lang="en"),
    **{
        f"mgsm_{lang}": PublicSet(
            "juletxara/mgsm", "multilingual", _asks("question"), file=f"mgsm_{lang}.tsv", lang=lang
        )
        for lang in ("bn", "de", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")
    },
    **{
        f"bfcl_{name}": PublicSet(
            "gorilla-llm/Berkeley-Function-Calling-Leaderboard", "tools", _bfcl, file=f"BFCL_v3_{name}.json"
        )
        for name in (
            "simple", "multiple", "parallel", "parallel_multiple", "java", "javascript", "irrelevance",
            "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance",
            "live_relevance",
        )
    },
    **{
        f"speed_bench_{name}": PublicSet(
            "nvidia/SPEED-Bench", domain, _speed_bench, config="qualitative", category=name
        )
        for name, domain in {
            "coding": "code", "math": "math", "multilingual": "multilingual", "humanities": "chat",
            "qa": "chat", "rag": "chat", "reasoning": "chat", "roleplay": "chat", "stem": "chat",
            "summarization": "chat", "writing": "chat",
        }.items()
    },
}  # fmt: skip
FAMILIES = ("aime", "mgsm", "bfcl", "speed_bench")


def members(name: str) -> list[str]:
    """The sets that a name stands for; none for a name that is not known here."""
    if name in FAMILIES:
        return [each for each in SETS if each.startswith(f"{name}_")]
    return [name] if name in SETS else []


def rows(name: str, split: str) -> Iterator[tuple[str, Found | Skip]]:
    """(where, row) of a set; ``split`` is train, eval or one of the set's own.

    Errors: ``ValueError`` for a set without rows to train on, one that cannot be had, and columns that are
    not those it is known by.
    """
    public = SETS[name]
    own = {"train": public.train, "eval": public.split}.get(split, split)
    if own is None or (public.file and own != public.split):
        raise ValueError(f"data.path={name}: no split {split}; it is there to measure on, data.split=eval")
    for index, row in enumerate(_read(name, public, own)):
        if public.category not in (None, row.get("category")):
            continue
        where = f"{name}[{index}]"
        facts = {"id": f"{name}-{index}", "domain": public.domain, "source": name}
        try:
            made: Found | Skip = {**facts, **public.chat(row)}
        except Skip as reason:
            made = reason
        except KeyError as error:
            raise ValueError(
                f"data.path={name}: rows of {public.hub} have no column {error}, but {', '.join(row)}; "
                "the set is no longer what data/sets.py knows"
            ) from error
        if public.lang and isinstance(made, dict):
            made["lang"] = public.lang
        yield where, made


def _read(name: str, public: PublicSet, split: str) -> Iterator[Found]:
    import datasets
    from huggingface_hub import hf_hub_download

    try:
        if public.file is None:
            found = datasets.load_dataset(public.hub, public.config, split=split)
        else:
            path = Path(hf_hub_download(public.hub, public.file, repo_type="dataset"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"data.path={name}: {public.hub} cannot be had ({str(error).splitlines()[0]}). It is downloaded "
            "once, into the cache of HF_HOME"
        ) from error
    if public.file is None:
        yield from found
    elif public.file.endswith(".tsv"):
        with open(path, encoding="utf-8", newline="") as lines:
            names = ("question", "answer")
            yield from csv.DictReader(lines, names, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        with open(path, encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines)
