"""Prompts and conversations in: JSON Lines files, Hugging Face datasets, the bundled set.

Every row keeps where it came from. A row that cannot be used is counted under its reason; too many of
them stop the run. Nothing is dropped without a count.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from math import inf
from pathlib import Path
from typing import Any

from data import sets
from data.chat import Message, Skip
from drafters.target import EMBEDDED

BUNDLED = "bundled"
BUNDLED_DIRECTORY = Path(__file__).parent / "bundled"
DOMAINS = ("math", "code", "chat", "multilingual", "tools")
UNKNOWN = ""  # the domain of a row that could not be read
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "bot": "assistant", "model": "assistant", "tool": "tool", "function": "tool",
    "observation": "tool", "ipython": "tool",
}  # fmt: skip


@dataclass
class DataConfig:
    """``data.*``: which conversations, and what makes one unusable."""

    path: str = (
        BUNDLED  # JSON Lines (also .xz), a directory, a name of sets.py or datasets, bundled; a+b: both
    )
    split: str | None = None  # rows that name a split are filtered by it; None: train, and eval in evaluation
    eval_path: str | None = None  # held-out conversations; None: the bundled ones, or a part of path
    holdout: float = 0.05  # that part
    chat_template: str | None = None  # a Jinja file that replaces the tokenizer's template
    template_settings: dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}
    max_length: int = 4096  # tokens; longer rows are cut
    strict: bool = False  # stop at the first row that cannot be used
    max_skip: float = 0.05  # above this share of unusable rows the run stops
    limit: int | None = None  # use the first so many rows
    weights: dict[str, float] = field(
        default_factory=dict
    )  # of supervised tokens, by domain or source; see mix.py
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_length", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name}={value}: give at least 1")
        if not 0 <= self.holdout < 1:
            raise ValueError(f"data.holdout={self.holdout}: give a share of at least 0 and below 1")
        if not 0 <= self.max_skip <= 1:
            raise ValueError(f"data.max_skip={self.max_skip}: give a share from 0 to 1")
        for name, weight in self.weights.items():
            if not 0 < weight < inf:
                raise ValueError(f"data.weights.{name}={weight:g}: give a number above 0, or leave it out")


@dataclass
class Row:
    """One conversation as it was given. ``skip`` is why it cannot be used, ``None`` if it can."""

    index: int
    where: str  # file:line, or dataset[index]
    id: str | None = None
    domain: str = "chat"
    messages: list[Message] = field(default_factory=list)
    tools: list | None = None
    answers: list[tuple[int, list[int]]] = field(
        default_factory=list
    )  # (index of a message, the ids kept of it)
    finish: str | None = None  # of the last answer: stop, or length when it was cut
    tokenizer: str | None = None  # hash of the one that the kept ids belong to
    made_by: str | None = None  # signature of the target that gave them, /, and how; None: not known
    extra: dict[str, Any] = field(default_factory=dict)
    skip: str | None = None

    def answered_by(self, signature: str | None) -> bool:
        """Whether the kept ids are this target's, as far as the row or the caller says."""
        return None in (self.made_by, signature) or str(self.made_by).split("/")[0] == signature

    @property
    def temperature(self) -> float | None:
        """What the kept ids were sampled at, 0 for greedy ones; ``None`` where the row does not say."""
        found = re.match(r"[^/]+/(\d+(?:\.\d+)?(?:e-?\d+)?)(?:/|$)", self.made_by or "")
        return float(found[1]) if found else None

    @property
    def source(self) -> str:
        """The set that the row names, or the file or dataset that it stands in."""
        stands_in = re.sub(r":\d+$|\[\d+\]$", "", self.where)
        return str(self.extra.get("source") or re.sub(r"^.*/|\.jsonl(\.xz)?$", "", stands_in))

    @property
    def lang(self) -> str | None:
        return None if self.extra.get("lang") is None else str(self.extra["lang"])

    @property
    def asked(self) -> list[Message]:
        """The messages without a trailing answer and without all that a target answered."""
        answered = {index for index, _ in self.answers}
        asked = [m for at, m in enumerate(self.messages) if at not in answered]
        while asked and asked[-1]["role"] == "assistant":
            asked.pop()
        return asked

    @property
    def key(self) -> str:
        """Id and what was asked: what a resumed run recognises a row by, before and after its answer."""
        return f"{self.id}/{content_id(self.asked, self.tools)}"


def read(config: DataConfig) -> Iterator[Row]:
    """Every row of the source in order, unusable ones included, numbered from 0.

    Errors: ``ValueError`` naming file and line at the first bad row when ``config.strict``.
    """
    rows = _numbered(_objects(config.path, config.split or "train"))
    for row in rows:
        if config.limit is not None and row.index >= config.limit:
            return
        if row.skip and config.strict:
            raise ValueError(
                f"{row.where}: {row.skip} (data.strict=true; false counts such rows and goes on)"
            )
        yield row


def _numbered(objects: Iterable[tuple[str, Any]]) -> Iterator[Row]:
    for index, (where, value) in enumerate(objects):
        yield row_of(index, where, value)


def row_of(index: int, where: str, value: Any) -> Row:
    """A row from a parsed object; what is wrong with it stands in ``skip``."""
    if isinstance(value, Skip):
        return Row(index, where, domain=UNKNOWN, skip=str(value))
    try:
        return _row(index, where, value)
    except Skip as reason:
        name, domain = value.get("id"), str(value.get("domain") or UNKNOWN)
        return Row(index, where, None if name is None else str(name), domain, skip=str(reason))


# Files ------------------------------------------------------------------------------------------


def _objects(path: str, split: str) -> Iterator[tuple[str, Any]]:
    """(where, object or Skip) of every row; rows that name another split are left out unnumbered."""
    there = bool(path) and Path(path).expanduser().exists()
    parts = [] if there else path.split("+") if "+" in path else sets.members(path)
    if not path or not all(parts):
        raise ValueError(f"data.path={path}: an empty name; give files, sets or dataset names, joined by +")
    if len(parts) > 1:
        return (pair for part in parts for pair in _some(part, split))
    if parts:
        return sets.rows(path, split)
    if path == BUNDLED:
        return bundled(split)
    files = _files(path)
    if files is None:
        return _dataset(path, split)
    pairs = (pair for file in files for pair in _lines(file))
    return (pair for pair in pairs if not _other_split(pair[1], split))


def _some(part: str, split: str) -> Iterator[tuple[str, Any]]:
    """The rows of one source of several. Errors: ``ValueError`` when there is none."""
    number = 0
    for number, pair in enumerate(_objects(part, split), start=1):  # noqa: B007
        yield pair
    if not number:
        raise ValueError(f"data.path={part}: it holds no row of split {split}; leave it out, or name another")


def _other_split(value: Any, split: str) -> bool:
    return isinstance(value, dict) and value.get("split") not in (None, split)


def _files(path: str) -> list[Path] | None:
    at = Path(path).expanduser()
    if at.is_dir():
        files = sorted(f for f in at.iterdir() if f.name.endswith((".jsonl", ".jsonl.xz")))
        if not files:
            raise ValueError(f"data.path={path}: the directory holds no .jsonl file")
        return files
    if at.is_file():
        return [at]
    if path.endswith((".jsonl", ".json", ".xz")) or path.startswith((".", "/", "~")):
        raise ValueError(f"data.path={path}: no such file")
    return None


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    raw = lzma.open(file) if file.suffix == ".xz" else open(file, "rb")  # noqa: SIM115
    with raw as lines:
        for number, line in enumerate(_whole(lines, file), start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            yield f"{file}:{number}", parse(line)


def _whole(lines: Iterable[bytes], file: Path) -> Iterator[bytes]:
    """The lines; ``ValueError`` naming the file where its compression is damaged."""
    try:
        yield from lines
    except (EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{file}: damaged or cut off ({error}); copy or download it again") from error


def parse(line: bytes) -> Any:
    """A JSON object, or the ``Skip`` that says why there is none."""
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return Skip(f"not UTF-8: byte 0x{line[error.start]:02X}")
    except (json.JSONDecodeError, RecursionError) as error:
        return Skip(f"not JSON: {getattr(error, 'msg', 'nested too deeply')}")
    except ValueError as error:
        return Skip(f"not JSON: {error}")
    return value if isinstance(value, dict) else Skip("not a JSON object")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _dataset(name: str, split: str) -> Iterator[tuple[str, Any]]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, ConnectionError) as error:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), [*sets.SETS, *sets.FAMILIES], 2)
        raise ValueError(
            f"data.path={name}: neither a file here nor a dataset that can be loaded "
            f"({str(error).splitlines()[0]}). Give a .jsonl file, a directory of them, a dataset name, "
            f"a set of data/sets.py or {BUNDLED}." + (f" Did you mean {' or '.join(near)}?" if near else "")
        ) from error
    for index, value in enumerate(rows):
        yield f"{name}[{index}]", _present(value)


def _present(value: Any) -> Any:
    """Without the nulls that Arrow writes for every key that only other rows have."""
    if isinstance(value, dict):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    return [_present(inner) for inner in value] if isinstance(value, list) else value


def bundled(split: str) -> Iterator[tuple[str, Any]]:
    """The project's own prompts with the embedded target's answers, prompts alone where none is shipped."""
    shipped = BUNDLED_DIRECTORY / "answers.jsonl.xz"
    files = [shipped] if shipped.exists() else [BUNDLED_DIRECTORY / "prompts" / f"{d}.jsonl" for d in DOMAINS]
    for file in files:
        for where, value in _lines(file):
            if value["split"] == split:
                yield (
                    f"{BUNDLED}/{where.rpartition('/')[2]}",
                    {
                        "made_by": f"{EMBEDDED}/0",
                        "source": BUNDLED,
                        **value,
                    },
                )


# Rows -------------------------------------------------------------------------------------------


def _row(index: int, where: str, value: dict[str, Any]) -> Row:
    _check_text(value)
    messages = [_message(m) for m in _conversation(value)]
    if not any(m["role"] == "user" for m in messages):
        raise Skip("no user message")
    tools = _tools(value.get("tools"))
    name = value.get("id")
    return Row(
        index,
        where,
        id=content_id(messages, tools) if name is None else str(name),
        domain=str(value.get("domain") or "chat"),
        messages=messages,
        tools=tools,
        answers=_answers(value.get("answers"), messages),
        finish=value.get("finish_reason"),
        tokenizer=value.get("tokenizer"),
        made_by=value.get("made_by"),
        extra={key: value[key] for key in ("split", "lang", "source") if key in value},
    )


def _answers(given: Any, messages: list[Message]) -> list[tuple[int, list[int]]]:
    """Kept ids of regenerated answers, each with the index of its message."""
    if not given:
        return []
    good = isinstance(given, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in given)
    if not good or not all(
        isinstance(index, int) and 0 <= index < len(messages) and messages[index]["role"] == "assistant"
        and isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids)
        for index, ids in given
    ):  # fmt: skip
        raise Skip("answers do not name assistant messages and their ids")
    return [(index, ids) for index, ids in given]


def content_id(messages: list[Message], tools: list | None) -> str:
    """An id from what the row says: stable under filters and reordering."""
    content = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _check_text(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise Skip("half a surrogate pair in the text") from error


def _conversation(value: dict[str, Any]) -> list:
    """The messages of any of the layouts people have."""
    for key in ("messages", "conversations", "conversation"):
        if isinstance(value.get(key), list) and value[key]:
            return value[key]
    answer: Any = next(
        (value[key] for key in ("response", "completion", "answer", "output") if value.get(key)), []
    )
    answers = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
    for key in ("prompt", "question", "instruction", "input"):
        given = value.get(key)
        if isinstance(given, list) and given:
            return given + answers
        if isinstance(given, str) and given:
            system = [{"role": "system", "content": value["system"]}] if value.get("system") else []
            return [*system, {"role": "user", "content": _with_material(value, key)}, *answers]
    raise Skip(
        f"no conversation: none of messages, conversations, prompt, instruction in {sorted(value)[:8]}"
    )


def _with_material(value: dict[str, Any], key: str) -> str:
    """An instruction or question with the text that it is about."""
    material = [value[name] for name in ("input", "context") if name != key and value.get(name)]
    return "\n\n".join(
        [value[key], *map(str, material)] if key in ("instruction", "question") else [value[key]]
    )


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise Skip("a message is not an object")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise Skip(f"unknown role {role!r}")
    content = message.get("content", message.get("value"))
    out: Message = {"role": ROLES[role], "content": _content(content)}
    for key in ("reasoning_content", "tool_call_id", "name"):
        if message.get(key) is not None:
            out[key] = message[key]
    if message.get("tool_calls"):
        out["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    elif not out["content"] and out["role"] == "user":
        raise Skip("empty user message")
    return out


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in content
    ):
        return "".join(part["text"] for part in content)
    raise Skip("message content is neither text nor parts of text")


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object; strings are JSON text and keep nothing else."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Skip("a tool call without a function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except json.JSONDecodeError as error:
            raise Skip("tool call arguments are not JSON") from error
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return out if call.get("id") is None else {"id": call["id"], **out}


def _tools(tools: Any) -> list | None:
    """Tool definitions from a list or from JSON text; none and empty are the same."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise Skip("tools are not JSON") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Skip("tools are not a list of objects")
    return tools


# Counting and splitting -------------------------------------------------------------------------


def report(rows: Iterable[Row]) -> tuple[Counter, list[str]]:
    """Counts by reason ("keep" among them), and ids that occur more than once."""
    reasons: Counter = Counter()
    seen: Counter = Counter()
    for row in rows:
        reasons["keep" if row.skip is None else row.skip] += 1
        if row.id is not None:
            seen[row.id] += 1
    return reasons, sorted(name for name, number in seen.items() if number > 1)


def check_skips(rows: list[Row], max_skip: float) -> None:
    """``ValueError`` with the reasons when nothing is left, or of a domain, or over ``max_skip`` is lost."""
    if not rows:
        raise ValueError("data.path: it holds no row of this data.split; name a file that does")
    bad = [row for row in rows if row.skip]
    if len(bad) < len(rows) and len(bad) <= max_skip * len(rows):
        for domain in {row.domain for row in bad} - {row.domain for row in rows if not row.skip} - {UNKNOWN}:
            lost = next(row for row in bad if row.domain == domain)
            raise ValueError(f"no row of domain {domain} can be used; the first, {lost.where}: {lost.skip}")
        return
    reasons = Counter(row.skip for row in bad)
    first = {row.skip: row.where for row in reversed(bad)}
    table = "\n".join(f"  {n:6d}  {reason}  (first: {first[reason]})" for reason, n in reasons.most_common())
    raise ValueError(
        f"{len(bad)} of {len(rows)} rows cannot be used, more than data.max_skip={max_skip} allows:\n"
        f"{table}\n"
        "Mend or remove them, or raise data.max_skip."
    )


def split_point(num: int, ratio: float) -> int:
    """How many of ``num`` rows come before the border: one exact floor, so that nothing is on both sides.

    Errors: ``ValueError`` when a side that should hold rows is empty.
    """
    first = int(Decimal(num) * Decimal(str(round(ratio, 9))))  # 1 - 0.9 is 0.1 here
    if (ratio > 0 and first == 0) or (ratio < 1 and first == num):
        raise ValueError(f"{num} rows cannot be split at {ratio}: one side is empty")
    return first
