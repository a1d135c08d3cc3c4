"""Every HTML page that the project writes, in a real browser; and that faults are seen there."""

from __future__ import annotations

import ast
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from eval.report import as_png, html_table, image, page
from tests import browser, runs, test_sweeps, tiny
from tests.commands import CPU, command
from tests.test_imports import MODULES


@dataclass(frozen=True)
class Page:
    """A page, how many pictures and tables stand in it, and the command that writes it."""

    path: str
    pictures: int
    tables: int
    command: str


PAGES = [
    Page("scored/report.html", 1, 3, "eval drafter=runs/one/drafter data.path=held.jsonl out=scored"),
    Page("compare/compare.html", 1, 4, "eval task=compare runs=[one,other]"),
    Page("alike/compare.html", 1, 4, "eval task=compare runs=[one,copy] out=alike"),
    Page("plan/plan.html", 1, 3, "eval task=plan drafter=runs/one/drafter data.path=held.jsonl out=plan"),
    Page("sweeps/plan.html", 1, 1, "eval task=plan observed=sweep.csv out=sweeps"),
    Page("why/diagnose.html", 1, 4, "eval task=diagnose run=one out=why"),
    Page("shown.html", 0, 0, "data task=inspect data.path=odd.jsonl out=shown.jsonl data.max_skip=0.5"),
]


@pytest.fixture(scope="module")
def chromium():
    executable = browser.find()
    if executable is None:
        browser.missing()
    with browser.started(executable) as found:
        yield found


@pytest.fixture(scope="module")
def here(workshop, tmp_path_factory):
    """A working directory with runs ``one``, ``copy`` and ``other``, and rows for every command above."""
    directory = tmp_path_factory.mktemp("pages")
    rows = (workshop / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (directory / "held.jsonl").write_text("".join(rows[:4]), encoding="utf-8")
    question = {"role": "user", "content": "<b>&"}
    odd = [[question, {"role": "assistant", "content": text}] for text in ("<i>", "word" * 99, "a\n  b")]
    tiny.write_rows(directory / "odd.jsonl", [{"messages": messages} for messages in [[question], *odd]])
    whole = test_sweeps.panel(name=("other", "Method", "set"))
    test_sweeps.written(directory, [test_sweeps.partly(test_sweeps.panel(), 1, 4), whole])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        more = ["train.report=true", "data.eval_path=held.jsonl", "train.eval_every=99"]
        runs.train(workshop, *more, "train.steps=1")
        runs.train(workshop, *more, "train.steps=2", "run=other", "method.block_size=4")
        shutil.copytree("runs/one", "runs/copy")
        yield directory


@pytest.mark.parametrize("asked", PAGES, ids=lambda asked: asked.path)
def test_a_page_opens_without_fault_and_shows_its_pictures_and_tables(chromium, here, workshop, asked):
    name, *arguments = asked.command.split()
    assert command(name, *CPU, f"target={workshop / 'target'}", *arguments) == 0
    seen = browser.look(chromium, here / asked.path)
    assert seen.faults() == []
    assert (len(seen.pictures), len(seen.tables)) == (asked.pictures, asked.tables)


def test_every_name_of_a_page_in_the_source_is_opened_above():
    texts = (
        node.value for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.Constant)
    )
    names = {text for text in texts if isinstance(text, str) and text.endswith(".html") and " " not in text}
    assert "report.html" in names
    assert {name for name in names if not any(asked.path.endswith(name) for asked in PAGES)} == set()


# Faults ---------------------------------------------------------------------------------------------


def chart(*values: float) -> bytes:
    figure = Figure(figsize=(3, 2))
    figure.subplots().plot(values)
    return as_png(figure)


INLINE = image(chart(1, 2), "a line")
WHOLE = page("Title", "<h1>Head</h1>", html_table(["a"], [["1"]]), INLINE)


def test_a_page_without_fault_has_none(chromium, tmp_path):
    assert browser.look(chromium, written(tmp_path, WHOLE)).faults() == []


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("<h1>", "<script>console.error('oh')</script><h1>", "console: oh"),
        ("<h1>", "<script>gone()</script><h1>", "console: gone is not defined"),
        ("<title>Title</title>", "", "no title"),
        (' lang="en"', "", "no lang"),
        ('alt="a line"', "", "a picture without alt text"),
        ("base64,", "base64,AAAA", "picture 'a line' has not loaded"),
        (INLINE, image(chart(), "a line"), "picture 'a line' shows nothing: 0 colours"),
        (">1</td>", "> </td>", "table 0 is empty"),
        ("<h1>", "<h1 style='white-space:nowrap'>" + "wide " * 400, "pixels wider than its box"),
    ],
)
def test_a_fault_is_said(chromium, tmp_path, before, after, fault):
    assert before in WHOLE
    (found,) = browser.look(chromium, written(tmp_path, WHOLE.replace(before, after))).faults()
    assert fault in found


@pytest.mark.parametrize(
    "asking",
    [
        '<img alt="b" src="https://localhost/b.png">',
        '<img alt="b" src="beside.png">',
        '<link rel="stylesheet" href="http://localhost/a.css">',
        "<script>fetch('http://localhost/').catch(() => 0)</script>",
        '<iframe src="http://localhost/"></iframe>',
        "<style>@font-face{font-family:x;src:url(http://localhost/x)}h1{font-family:x}</style>",
    ],
)
def test_a_request_for_anything_outside_the_page_is_a_fault(chromium, tmp_path, asking):
    (tmp_path / "beside.png").write_bytes(chart(1, 2))
    seen = browser.look(chromium, written(tmp_path, WHOLE.replace("<h1>", asking + "<h1>")))
    assert any("asks for" in said for said in seen.faults()), seen


def written(directory: Path, text: str) -> Path:
    path = directory / "page.html"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("asked", "end"), [(None, pytest.skip.Exception), ("required", pytest.fail.Exception)]
)
def test_without_a_browser_tests_are_skipped_unless_one_is_required(monkeypatch, asked, end):
    monkeypatch.delenv("FOREDRAFT_BROWSER", raising=False)
    if asked:
        monkeypatch.setenv("FOREDRAFT_BROWSER", asked)
    with pytest.raises(end, match="make browser"):
        browser.missing()
