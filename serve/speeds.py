"""What measurements come to: a line for every cell and proposer, a table of them, a picture.

tokens/s           tokens of all answers over the time from the first request to the end of the last
first token        from handing a request in to its first token, waiting and prefill included
ms/token           of each answer, from its first token to its last
tau                tokens committed per target pass
other text         answers whose ids are not those of plain decoding: rounding, or a fault
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from itertools import product
from typing import Any

import numpy as np

from serve.clients import Cell, Measured

PLAIN = "none"  # the proposer that drafts nothing


def row_of(cell: Cell, name: str, measured: Measured, plain: Measured | None) -> dict[str, Any]:
    """One line of the result; ``plain`` is the same cell without drafts, where that was measured."""
    heard = measured.heard
    rounds = [each for one in heard for each in one.answer.rounds]
    tokens = sum(len(one.answer.tokens) for one in heard)
    speed = tokens / measured.seconds
    later = [each for one in heard if (each := one.per_token) is not None]
    out = {
        **asdict(cell),
        "proposer": name,
        "prompt_tokens": round(float(np.mean([len(one.answer.request.prompt) for one in heard])), 1),
        "answers": len(heard),
        "tokens": tokens,
        "tokens_per_second": round(speed, 3),
        "first_token_p50": round(float(np.quantile([one.to_first for one in heard], 0.5)), 5),
        "first_token_p95": round(float(np.quantile([one.to_first for one in heard], 0.95)), 5),
        "time_per_token": round(float(np.median(later)), 6) if later else None,
        "tau": round(sum(r.emitted for r in rounds) / max(1, len(rounds)), 4),
        "drafted_per_round": round(sum(r.drafted for r in rounds) / max(1, len(rounds)), 4),
        "accepted_per_round": round(sum(r.accepted for r in rounds) / max(1, len(rounds)), 4),
    }
    if plain is not None:
        want = {one.answer.request.sampling.seed: one.answer.tokens for one in plain.heard}
        rate = sum(len(one.answer.tokens) for one in plain.heard) / plain.seconds
        out["speedup"] = round(speed / rate, 4)
        out["other_text"] = sum(one.answer.tokens != want[one.answer.request.sampling.seed] for one in heard)
    return out


def summarise(found: Mapping[tuple[Cell, str], Measured], names: Sequence[str]) -> list[dict[str, Any]]:
    """A line for every cell and proposer: cells in order, in each of them proposers as they were named."""
    cells = sorted({cell for cell, _ in found}, key=astuple)
    return [
        row_of(cell, name, found[cell, name], found.get((cell, PLAIN)))
        for cell, name in product(cells, names)
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The result for a terminal: a line a proposer, cells apart."""
    lines, before = [], None
    for row in rows:
        cell = Cell(row["kind"], row["temperature"], row["concurrency"])
        if cell != before:
            lines += [
                "",
                f"{cell.kind}, {row['prompt_tokens']:.0f} prompt tokens, temperature {cell.temperature:g}, "
                f"{cell.concurrency} at a time",
                f"{'proposer':24s} {'tokens/s':>9s} {'times':>6s} {'first token p50, p95':>21s} "
                f"{'ms/token':>9s} {'tau':>6s} {'drafted':>8s} {'accepted':>9s} {'other text':>11s}",
            ]
            before = cell
        pace = "-" if row["time_per_token"] is None else f"{1000 * row['time_per_token']:.2f}"
        times = f"{row['speedup']:.2f}" if "speedup" in row else "-"
        other = f"{row['other_text']} of {row['answers']}" if "other_text" in row else "-"
        lines.append(
            f"{row['proposer']:24s} {row['tokens_per_second']:9.1f} {times:>6s} "
            f"{row['first_token_p50']:10.3f} {row['first_token_p95']:8.3f} s {pace:>9s} {row['tau']:6.2f} "
            f"{row['drafted_per_round']:8.2f} {row['accepted_per_round']:9.2f} {other:>11s}"
        )
    return "\n".join(lines[1:])


def draw(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Tokens/s over concurrency, a line a proposer, a panel for each kind and temperature, as PNG."""
    from matplotlib.figure import Figure

    kinds = sorted({row["kind"] for row in rows})
    heats = sorted({row["temperature"] for row in rows})
    names = list(dict.fromkeys(row["proposer"] for row in rows))
    figure = Figure(figsize=(4.2 * len(kinds) + 1, 3.6 * len(heats)), layout="constrained")
    panels = figure.subplots(len(heats), len(kinds), squeeze=False, sharex=True)
    for (heat, kind), axes in zip(product(heats, kinds), panels.flat, strict=True):
        for name in names:
            points = [
                (row["concurrency"], row["tokens_per_second"])
                for row in rows
                if (row["kind"], row["temperature"], row["proposer"]) == (kind, heat, name)
            ]
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.set(title=f"{kind}, temperature {heat:g}", xlabel="requests at a time", ylabel="tokens/s")
        axes.set_xticks(sorted({row["concurrency"] for row in rows}))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    lines = panels[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=3, frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
