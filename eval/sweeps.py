"""Published sweeps of N that are partly measured: the tokens a second of the other N, and the N to deploy.

A round of N drafts commits tau(N) tokens in c(N) seconds, so tokens a second are tau(N) / c(N), and a rate
that was measured gives c. Both are smooth in N where the rate is not: tau follows from how acceptance falls
with position and with N, c is near a straight line. Figures of sweeps are single runs and noisy; lines of
panels that share a model and a method are therefore drawn towards each other (a mixed-effects model), and a
measured rate is taken as one sample of its line, not as the truth.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from drafters.files import replace_file
from eval.report import as_png, columns, html_table, image, page

HEADER = (
    "model", "method", "dataset", "baseline_tok_s", "n", "speedup", "tok_s", "mean_acceptance_length",
    "acceptance_rate_pct", "survival_per_position",
)  # fmt: skip
SEPARATOR = "|"

# Standard deviations of a line a + b N, in rounds of plain decoding: over all sweeps, of a model and method
# about those, of a panel about its own; and of the noise of one figure, as a share of it.
LEVELS, SLOPES, NOISE = (2.0, 0.5, 0.2), (0.2, 0.08, 0.02), 0.03
MOST, FAR = 256, 1000.0  # drafts, and times the baseline, beyond which a row is a mistake
TAIL = 6  # positions that say how acceptance goes on beyond the last measured one


@dataclass(frozen=True)
class Point:
    """One N of a panel; ``rate`` is ``None`` where nobody measured it, ``survival`` empty where unknown."""

    n: int
    rate: float | None
    survival: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """A sweep of N for one model, method and dataset; ``baseline`` are tokens a second without drafts."""

    model: str
    method: str
    dataset: str
    baseline: float
    points: tuple[Point, ...]

    @property
    def measured(self) -> dict[int, float]:
        """Tokens a second by N."""
        return {point.n: point.rate for point in self.points if point.rate is not None}


# Reading ------------------------------------------------------------------------------------------


def read(path: Path) -> list[Panel]:
    """The panels of a file. Errors: ``ValueError`` naming the row that is missing something or impossible."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"observed={path}: {error}; name a file of text") from error
    table = csv.reader(lines, delimiter=SEPARATOR)
    try:
        rows = [(f"{path}:{table.line_num}", [cell.strip() for cell in row]) for row in table if row]
    except csv.Error as error:
        raise ValueError(f"{path}:{table.line_num}: {error}") from error
    _, head = rows.pop(0) if rows else ("", [])
    if tuple(head) != HEADER:
        lacking = [name for name in HEADER if name not in head]
        why = f"no column {', '.join(lacking)}" if lacking else "columns in another order, or more of them"
        raise ValueError(f"{path}:1: {why}; the header is {SEPARATOR.join(HEADER)}")
    if not rows:
        raise ValueError(f"{path} holds no row below its header")
    found: dict[tuple[str, str, str], list[tuple[str, float, Point]]] = {}
    for where, row in rows:
        name, baseline, point = _row(where, row)
        found.setdefault(name, []).append((where, baseline, point))
    return [_panel(name, points) for name, points in found.items()]


def _row(where: str, row: Sequence[str]) -> tuple[tuple[str, str, str], float, Point]:
    if len(row) != len(HEADER):
        raise ValueError(f"{where}: {len(row)} columns, the header has {len(HEADER)}")
    given = dict(zip(HEADER, row, strict=True))
    if lacking := [key for key in ("model", "method", "dataset") if not given[key]]:
        raise ValueError(f"{where}: no {lacking[0]}")
    baseline = _number(where, "baseline_tok_s", given["baseline_tok_s"])
    n = _number(where, "n", given["n"], 0)
    if n != int(n) or not 1 <= n <= MOST:
        raise ValueError(
            f"{where}: n={given['n']}; give a whole number of drafts from 1 to {MOST}; what was measured "
            "without drafts stands in baseline_tok_s"
        )
    rate = _number(where, "tok_s", given["tok_s"]) if given["tok_s"] else None
    if rate is not None and not 1 / FAR < rate / baseline < FAR:
        raise ValueError(f"{where}: tok_s={rate:g} is {rate / baseline:g} times the baseline {baseline:g}")
    survival = tuple(_number(where, "survival_per_position", x, 0) for x in given[HEADER[-1]].split())
    point = Point(int(n), rate, survival)
    _check(where, point, given, baseline)
    return (given["model"], given["method"], given["dataset"]), baseline, point


def _number(where: str, key: str, text: str, least: float | None = None) -> float:
    """A finite number above 0, or from ``least`` on."""
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"{where}: {key}={text!r} is no number; write it with digits and a point") from error
    if not math.isfinite(value) or (value <= 0 if least is None else value < least):
        right = "a number above 0" if least is None else f"{least:g} or more"
        raise ValueError(f"{where}: {key}={text} is impossible; give {right}, or leave the row out")
    return value


def _check(where: str, point: Point, given: Mapping[str, str], baseline: float) -> None:
    """``ValueError`` for figures that contradict themselves or each other."""
    curve = point.survival
    if curve and len(curve) != point.n:
        raise ValueError(f"{where}: {len(curve)} survivals for n={point.n}; give one a position")
    for k, (before, after) in enumerate(zip((1.0, *curve), curve, strict=False), start=1):
        if after > before:
            raise ValueError(
                f"{where}: survival rises from {before:g} to {after:g} at position {k}; a draft is accepted "
                "only after those before it"
            )
    stated = {
        "speedup": (point.rate / baseline if point.rate else None, 0.03),
        "mean_acceptance_length": (1 + sum(curve) if curve else None, 0.05),
    }
    percent = given["acceptance_rate_pct"]
    if percent and _number(where, "acceptance_rate_pct", percent, 0) > 100:
        raise ValueError(f"{where}: acceptance_rate_pct={percent} is more than all")
    for key, (other, tolerance) in stated.items():
        if given[key]:
            value = _number(where, key, given[key])
            if key == "mean_acceptance_length" and not 1 <= value <= point.n + 1:
                raise ValueError(
                    f"{where}: {key}={given[key]}, but n={point.n} gives 1 to {point.n + 1} tokens"
                )
            if other is not None and abs(value / other - 1) > tolerance:
                raise ValueError(f"{where}: {key}={given[key]}, but the other columns make it {other:.2f}")


def _panel(name: tuple[str, str, str], rows: list[tuple[str, float, Point]]) -> Panel:
    first, baseline, _ = rows[0]
    for where, other, _ in rows:
        if other != baseline:
            raise ValueError(f"{where}: baseline_tok_s={other:g}, but {baseline:g} at {first}; one a panel")
    rows = sorted(rows, key=lambda row: row[2].n)
    for n, some in groupby(rows, key=lambda row: row[2].n):
        if len(twice := list(some)) > 1:
            raise ValueError(f"{twice[1][0]}: n={n} of {' '.join(name)} stands at {twice[0][0]} already")
    panel = Panel(*name, baseline, tuple(point for _, _, point in rows))
    if len(panel.measured) < 2:
        raise ValueError(
            f"{first}: {' '.join(name)} has {len(panel.measured)} rows with a tok_s; measure two N or more"
        )
    if not any(point.survival for point in panel.points):
        raise ValueError(
            f"{first}: {' '.join(name)} has no survival_per_position; give that of one N or more"
        )
    return panel


# Acceptance ---------------------------------------------------------------------------------------


def survival(known: Mapping[int, Sequence[float]], n: int) -> list[float]:
    """Survival at positions 1 to ``n`` of rounds of ``n`` drafts, from the curves of other numbers of drafts.

    The acceptance of a draft given those before it changes with N in proportion to log N, by as much at every
    position where only one curve tells; beyond the last position it goes on falling as it fell.
    """
    if n in known:
        return list(known[n])
    near = sorted(known, key=lambda other: abs(math.log(other / n)))[:2]
    below, above = min(near), max(near)
    logs = _further(_conditional(known[above]), n)
    if below < above:
        shift = _conditional(known[below]) - logs[:below]
        by_position = np.append(shift, np.full(max(0, len(logs) - len(shift)), shift.mean()))[: len(logs)]
        logs = logs + math.log(above / n) / math.log(above / below) * by_position
    return np.exp(np.minimum(logs, 0.0)[:n].cumsum()).tolist()


def _conditional(curve: Sequence[float]) -> np.ndarray:
    """Log acceptance of each draft given those before it."""
    values = np.maximum(curve, 1e-6)
    return np.log(values / np.append(1.0, values[:-1]))


def _further(logs: np.ndarray, n: int) -> np.ndarray:
    """Goes on to ``n`` positions with the line of the last ones, where that falls."""
    if n <= len(logs):
        return logs
    tail = logs[-TAIL:]
    slope, last = 0.0, float(tail[-1])
    if len(tail) > 2:
        slope, start = np.polyfit(np.arange(len(tail)), tail, 1)
        slope, last = min(slope, 0.0), start + slope * (len(tail) - 1)
    return np.append(logs, last + slope * np.arange(1, n - len(logs) + 1))


def taus(panel: Panel) -> dict[int, float]:
    """Tokens a round by N: measured survival where there is one."""
    known = {point.n: point.survival for point in panel.points if point.survival}
    return {point.n: 1 + sum(survival(known, point.n)) for point in panel.points}


# Costs and picks ----------------------------------------------------------------------------------


def predict(panels: Sequence[Panel]) -> list[dict[int, float]]:
    """Tokens a second by N for every panel, without drafts (0) as measured."""
    tau = [taus(panel) for panel in panels]
    measured = [(p, n, rate) for p, panel in enumerate(panels) for n, rate in panel.measured.items()]
    seen = [(p, n) for p, n, _ in measured]
    cost = np.array([tau[p][n] * panels[p].baseline / rate for p, n, rate in measured])
    noise = np.diag((NOISE * cost) ** 2)
    weights = np.linalg.solve(_lines(panels, seen, seen) + noise, cost)
    found = []
    for p, panel in enumerate(panels):
        line = _lines(panels, [(p, point.n) for point in panel.points], seen) @ weights
        # A pass over more tokens is never cheaper, and none is cheaper than a plain round.
        costs = np.maximum.accumulate(np.maximum(line, 1.0))
        rates = {
            point.n: tau[p][point.n] * panel.baseline / c
            for point, c in zip(panel.points, costs, strict=True)
        }
        found.append({0: panel.baseline, **rates})
    return found


Pairs = Sequence[tuple[int, int]]  # a panel and an N


def _lines(panels: Sequence[Panel], some: Pairs, others: Pairs) -> np.ndarray:
    """Covariance of the lines at these pairs: shared by all, by a model and method, by a panel."""
    (panel_S, n_S), (panel_O, n_O) = np.array(some).T, np.array(others).T
    names = np.array([f"{panel.model}{SEPARATOR}{panel.method}" for panel in panels])
    alike = (1.0, names[panel_S][:, None] == names[panel_O], panel_S[:, None] == panel_O)
    parts = zip(alike, LEVELS, SLOPES, strict=True)
    return sum(same * (level**2 + slope**2 * np.outer(n_S, n_O)) for same, level, slope in parts)


def plan(panels: Sequence[Panel]) -> dict[str, Any]:
    """plan.json of a file of sweeps: for every panel its pick (0: do not draft), and the rate of every N."""
    out = []
    for panel, rates in zip(panels, predict(panels), strict=True):
        pick = max(rates, key=rates.__getitem__)
        out.append(
            {
                "model": panel.model,
                "method": panel.method,
                "dataset": panel.dataset,
                "pick": pick,
                "gain": round(rates[pick] / panel.baseline, 3),
                "predicted": {str(n): round(rate, 1) for n, rate in rates.items() if n},
                "measured": {"0": panel.baseline, **{str(n): rate for n, rate in panel.measured.items()}},
                "tau": {str(n): round(value, 3) for n, value in taus(panel).items()},
            }
        )
    return {"schema_version": 1, "panels": out}


def table(found: Mapping[str, Any]) -> str:
    """A line a panel: the pick, its gain over not drafting, and the rates by N; measured N have a star."""
    return "\n".join(columns([HEAD, *map(_row_of, found["panels"])]))


HEAD = ("model", "method", "dataset", "pick", "gain", "tokens a second by N")


def _row_of(panel: Mapping[str, Any]) -> tuple[object, ...]:
    rates = "  ".join(
        f"{n}{'*' if n in panel['measured'] else ''}: {rate:.0f}" for n, rate in panel["predicted"].items()
    )
    names = (panel[key] for key in ("model", "method", "dataset", "pick"))
    return *names, f"{panel['gain']:.2f}", rates


def write(found: Mapping[str, Any], out: Path) -> Path:
    """``plan.json`` (or ``out`` itself where it is named .json), ``plan.png`` and ``plan.html`` beside it."""
    file = out if out.suffix == ".json" else out / "plan.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    picture = draw(found)
    parts = [
        "<h1>How many tokens to draft</h1>",
        "<p>Tokens a second by N as predicted; a star marks a measured N. Pick 0: do not draft.</p>",
        html_table(HEAD, map(_row_of, found["panels"])),
        image(picture, "tokens a second over N, a picture a panel: predicted, measured, without drafts"),
    ]
    replace_file(file, json.dumps(found, indent=2, allow_nan=False).encode())
    replace_file(file.with_suffix(".png"), picture)
    replace_file(file.with_suffix(".html"), page("How many tokens to draft", *parts).encode())
    return file


def draw(found: Mapping[str, Any]) -> bytes:
    """Tokens a second over N, a small picture a panel, as PNG."""
    from matplotlib.figure import Figure

    panels = found["panels"]
    across = min(6, len(panels))
    down = math.ceil(len(panels) / across)
    figure = Figure(figsize=(max(4.5, 2.3 * across), max(3.2, 1.9 * down)), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        ns = [int(n) for n in panel["predicted"]]
        axes.plot(ns, list(panel["predicted"].values()), label="predicted")
        measured = {int(n): rate for n, rate in panel["measured"].items() if n != "0"}
        axes.plot(measured.keys(), measured.values(), "o", color="black", markersize=4, label="measured")
        axes.axhline(panel["measured"]["0"], color="gray", linestyle="--", linewidth=1, label="no drafts")
        title = f"{panel['model']} {panel['method']}\n{panel['dataset']}".strip()
        axes.set_title(title.replace("$", r"\$"), fontsize=7)
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8)
    figure.supxlabel("drafts a round (N)", fontsize=8)
    figure.supylabel("tokens a second", fontsize=8)
    return as_png(figure)
