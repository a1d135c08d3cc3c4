"""What ``python -m data`` does."""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.capture import source
from data.chat import Skip
from data.examples import examples as to_examples
from data.examples import of_row, renderer
from data.regenerate import append, done, made_by, regenerate
from data.sources import Row, check_skips, read, report
from drafters.files import replace_file
from drafters.target import load, load_tokenizer

if TYPE_CHECKING:
    from recipes.schema import Run


def inspect(run: Run) -> None:
    """Show rows with their loss mask: one JSON object an input row to ``out=``, a page beside it."""
    tokenizer, stop_ids = load_tokenizer(run.target, run.hardware)
    render = renderer(run.data, tokenizer, stop_ids)
    out = Path(run.out or "inspect.jsonl")
    rows, shown = [], []
    for row in read(run.data):
        found, row = _look(row, render, run.data.max_length, run.data.strict)
        rows.append(row)
        shown.append(found)
    _write_lines(out, shown)
    _write_text(out.with_suffix(".html"), _page(shown))
    reasons, repeated = report(rows)
    for reason, number in reasons.most_common():
        print(f"{number:7d}  {reason}")
    for name in repeated:
        print(f"duplicate id: {name}")
    print(f"{len(rows)} rows: {out}, {out.with_suffix('.html')}")
    check_skips(rows, run.data.max_skip)


def _look(row: Row, render, max_length: int, strict: bool) -> tuple[dict[str, Any], Row]:
    """The object of one row. A row that was answered turn by turn shows its last turn."""
    ids, mask = [], []
    if row.skip is None:
        try:
            example = of_row(row, render, max_length)[-1]
            ids, mask = example.ids, example.mask
        except Skip as reason:
            row.skip = str(reason)
            if strict:
                raise ValueError(f"{row.where}: {reason} (data.strict=true)") from reason
    return {
        "row": row.index,
        "id": row.id,
        "status": "keep" if row.skip is None else f"skip:{row.skip}",
        "length": len(ids),
        "supervised_text": [render.tokenizer.decode(run) for run in _runs(ids, mask)],
        "ids": ids,
        "mask": [int(m) for m in mask],
    }, row


def _runs(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    runs: list[list[int]] = []
    before = False
    for i, now in zip(ids, mask, strict=True):
        if now and not before:
            runs.append([])
        if now:
            runs[-1].append(i)
        before = now
    return runs


def _page(shown: Sequence[dict[str, Any]], most: int = 200) -> str:
    """The first rows as a page: what is supervised is marked."""
    parts = []
    for found in shown[:most]:
        text = "<br>".join(f"<mark>{html.escape(t)}</mark>" for t in found["supervised_text"])
        facts = f"row {found['row']}", found["id"], found["status"], f"{found['length']} tokens"
        head = html.escape(" · ".join(map(str, facts)))
        parts.append(f"<section><h2>{head}</h2><p>{text}</p></section>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>What is supervised</title><style>'
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;"
        "overflow-wrap:anywhere}"
        "h2{font-size:1rem;color:#555}p{white-space:pre-wrap}mark{background:#d7f0d0}</style>"
        f"<h1>What is supervised</h1><p>{len(shown)} rows, the first {min(most, len(shown))} shown.</p>"
        f"{''.join(parts)}</html>"
    )


def regenerate_answers(run: Run) -> None:
    """Answer every row with the target; rows that ``out=`` already holds are left alone."""
    if run.out is None:
        raise ValueError("out: name a .jsonl file for the answers, for example out=answers.jsonl")
    out = Path(run.out)
    target = load(run.target, run.hardware)
    render = renderer(run.data, target.tokenizer, target.stop_ids)
    rows = list(read(run.data))
    check_skips(rows, run.data.max_skip)
    have = done(out, made_by(target, render, run.regenerate))
    missing = [row for row in rows if row.skip is None and row.key not in have]
    counts = Counter(row.skip for row in rows if row.skip)
    length = run.data.max_length
    made = append(out, regenerate(target, render, missing, run.regenerate, max_length=length, counts=counts))
    for reason, number in (+counts).most_common():
        print(f"{number:7d}  {reason}")
    print(f"{made} rows answered, {sum(row.key in have for row in rows)} were there: {out}")
    if not made and not have:
        raise ValueError(f"out={out}: no row was answered, the reasons stand above")


def capture_states(run: Run) -> None:
    """Write the target's states over the rows to the disk store, for runs with ``states.keep=disk``."""
    if run.method.name == "none":
        raise ValueError("no method: capture keeps the layers that a method reads, add +recipe=NAME")
    from drafters.method import all_methods

    target = load(run.target, run.hardware)
    render = renderer(run.data, target.tokenizer, target.stop_ids, target.signature)
    found, seen = to_examples(read(run.data), render, run.data.max_length, run.data.strict)
    check_skips(seen, run.data.max_skip)
    layer_ids = all_methods()[run.method.name].choose_layers(run.method, target.num_layers)
    run.states.keep = "disk"
    _, usable = source(run.states, target, found, layer_ids, with_last=run.method.needs_last)
    print(f"{len(usable)} documents, {sum(len(e.ids) for e in usable)} tokens, layers {layer_ids}")


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    _write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
