"""Prompts to measure with: short ones, long ones, and code to edit, or those of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from data.chat import Message

Prompts = Mapping[str, Sequence[list[Message]]]  # conversations that wait for an answer, by kind

SHORT = (
    "A baker sells 36 rolls in the morning and twice as many after noon. How many rolls is that in all?",
    "Write a Python function that counts the vowels in a string.",
    "Give me three tips for sleeping better.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short e-mail that thanks a colleague for help with a report.",
    "What is the difference between a list and a tuple in Python?",
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Name five vegetables that grow well in the shade, with a sentence about each.",
    "Write a SQL query that finds the three customers with the most orders.",
    "Tell a story of five sentences about a lighthouse keeper and a fox.",
    "Why do we have leap years?",
    "If 3 workers need 8 hours for a wall, how long do 4 workers need? Show the steps.",
    "Erkl\u00e4re in drei S\u00e4tzen, was ein Regenbogen ist.",
    "\u00bfCu\u00e1les son los planetas del sistema solar?",
    "Write a bash command that finds all files larger than 100 MB.",
    "Summarise the rules of chess for a child.",
)
CODE = (
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def peek(self):
        if not self.items:
            raise IndexError("peek at an empty stack")
        return self.items[-1]

    def __len__(self):
        return len(self.items)
""",
    """def read_table(path, separator=","):
    rows = []
    with open(path) as file:
        header = file.readline().strip().split(separator)
        for line in file:
            values = line.strip().split(separator)
            row = {}
            for name, value in zip(header, values):
                row[name] = value
            rows.append(row)
    return rows


def column(rows, name):
    values = []
    for row in rows:
        values.append(float(row[name]))
    return values
""",
    """def binary_search(items, wanted):
    low = 0
    high = len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1
""",
    """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
""",
)
EDITS = (
    "Add type annotations to every function. Answer with the whole file and nothing else.",
    "Add a one-line docstring to every function and class. Answer with the whole file and nothing else.",
    "Rename every function and method to camelCase. Answer with the whole file and nothing else.",
    "Print a line to standard error at the start of every function. Answer with the whole file.",
)
PLACES = ("Harbour", "Mill Lane", "Old Town", "Station")
QUESTIONS = (
    "Which day had the most visitors, and how many?",
    "Write the first five lines again as a Markdown table.",
    "How did the weather change over time? Answer in a few sentences.",
    "List all days with rain, one a line, as they stand above.",
)
WEATHER = ("sun", "cloud", "rain", "wind", "fog")


def built_in() -> Prompts:
    """Sixteen prompts of each kind: ``short``, ``edit`` (most of the answer is in the prompt), ``long``."""
    edits = [f"{edit}\n\n```python\n{code}```" for code, edit in product(CODE, EDITS)]
    long = [f"{diary(place)}\n\n{question}" for place, question in product(range(len(PLACES)), QUESTIONS)]
    return {
        kind: [_asked(text) for text in some]
        for kind, some in {"short": SHORT, "edit": edits, "long": long}.items()
    }


def diary(place: int, days: int = 40) -> str:
    """A long text of dull lines; every place has its own."""
    lines = [f"Visitors at {PLACES[place]}:"]
    for day in range(1, days + 1):
        visitors = 20 + (day * (17 + 6 * place) + 11 * place) % 97
        weather = WEATHER[(day * (place + 2) + day // 3) % len(WEATHER)]
        lines.append(f"day {day}: {visitors} visitors, {weather}, doors closed at {16 + day % 4}:30.")
    return "\n".join(lines)


def read_prompts(path: Path) -> Prompts:
    """Prompts of a JSON Lines file, by ``kind``: objects with ``prompt`` (text) or ``messages``.

    A row without a ``kind`` is of kind ``file``; answers at the end of ``messages`` are left out. Errors:
    ``ValueError`` naming the line.
    """
    if not path.is_file():
        raise ValueError(f"bench.prompts={path}: no such file")
    found: dict[str, list[list[Message]]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            kind, messages = _row(line, f"{path}:{number}")
            if messages in found.setdefault(kind, []):
                raise ValueError(f"{path}:{number}: this prompt stands there twice; leave it out")
            found[kind].append(messages)
    if not found:
        raise ValueError(f"bench.prompts={path}: the file is empty")
    return found


def _row(line: bytes, where: str) -> tuple[str, list[Message]]:
    try:
        row = json.loads(line.decode("utf-8"))
        json.dumps(row, ensure_ascii=False).encode("utf-8")  # half a surrogate pair is no text
    except ValueError as error:
        raise ValueError(f"{where}: not valid JSON in UTF-8 ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: an object with prompt or messages is needed")
    prompt, messages, kind = row.get("prompt"), row.get("messages"), row.get("kind", "file")
    if isinstance(prompt, str) and prompt.strip():
        messages = _asked(prompt)
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(f"{where}: give prompt, a text, or messages, a list of objects with a role")
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(f"{where}: messages ask for nothing")
    return str(kind), messages


def _asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]
