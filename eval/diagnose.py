"""``python -m eval task=diagnose run=DIR``: why a drafter accepts little: checks and a likely cause.

Checks are functions of what eval/case.py reads, in four modules. The first fault is the likely cause; without
one it is the first thing that is suspicious.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.files import replace_file
from eval import drafter_checks, row_checks, state_checks, weakness
from eval.case import Case
from eval.report import as_png, html_table, image, page
from eval.trials import Trial
from eval.verdict import Check, Verdict

SCHEMA_VERSION = 1
CHECKS: dict[str, Check] = {  # in the order in which one fault hides another
    "target": row_checks.target,
    "template": row_checks.template,
    "mask": row_checks.mask,
    "answers": row_checks.answers,
    "states": state_checks.states,
    "number range": state_checks.number_range,
    "last state": state_checks.last_state,
    "layer ids": state_checks.layer_ids,
    "context": state_checks.context,
    "rope": drafter_checks.rope,
    "layout": drafter_checks.layout,
    "vocabulary map": drafter_checks.vocabulary_map,
    "vocabulary": drafter_checks.vocabulary,
    "mask token": drafter_checks.mask_token,
    "as exported": drafter_checks.as_exported,
    "as taught": drafter_checks.as_taught,
    "training": weakness.training,
    "position decay": weakness.position_decay,
    "domain gap": weakness.domain_gap,
    "drafts a round": weakness.drafts_a_round,
}


@dataclass(frozen=True)
class Finding(Verdict):
    """A verdict with the check that gave it."""

    check: str = ""


def examine(case: Case) -> list[Finding]:
    """Every check, in order."""
    return [Finding(**vars(look(case)), check=name) for name, look in CHECKS.items()]


def likely(findings: Sequence[Finding]) -> Finding | None:
    """The likely cause: the first fault, else the first thing that is suspicious."""
    found = (one for kind in ("fault", "suspicious") for one in findings if one.verdict == kind)
    return next(found, None)


def build(case: Case, findings: Sequence[Finding]) -> dict[str, Any]:
    """diagnose.json."""
    cause = likely(findings)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": None if case.run is None else str(case.run),
        "drafter": None if case.directory is None else str(case.directory),
        "target": case.target.name,
        "cause": None if cause is None else vars(cause),
        "findings": [vars(one) for one in findings],
        "trials": {
            "rows": [_figures(one) for one in case.readings],
            "drafter": [_figures(one) for one in case.trials],
        },
    }


def _figures(trial: Trial) -> dict[str, Any]:
    return {
        "check": trial.check,
        "name": trial.name,
        "hits": round(trial.hits, 4),
        "log_probability": round(trial.nats, 4),
        "reproduces": trial.reproduces,
    }


def table(result: dict[str, Any]) -> str:
    """For a terminal: a line a check, then the cause and what to do."""
    lines = [f"{one['verdict']:12s}{one['check']:16s}{one['found']}" for one in result["findings"]]
    cause = result["cause"]
    if cause is None:
        return "\n".join([*lines, "", "nothing wrong found"])
    likely = "likely cause" if cause["verdict"] == "fault" else "no fault; the first thing to look at"
    where = f" ({cause['where']})" if cause["where"] else ""
    return "\n".join(
        [*lines, "", f"{likely}: {cause['check']}{where}: {cause['found']}", f"remedy: {cause['remedy']}"]
    )


def write(result: dict[str, Any], directory: Path) -> None:
    """``diagnose.json`` and ``diagnose.html`` (opens offline), each renamed into place."""
    directory.mkdir(parents=True, exist_ok=True)
    cause, trials = result["cause"], result["trials"]
    head = ["verdict", "check", "found", "where", "remedy"]
    named = "nothing wrong found" if cause is None else f"{cause['check']}: {cause['found']}"
    parts = [
        f"<h1>Diagnosis of {result['drafter'] or result['run']}</h1>",
        html_table([], [["likely cause", named], ["remedy", "" if cause is None else cause["remedy"]]]),
        html_table(head, [[one[key] for key in head] for one in result["findings"]]),
        f"<p>{READ_AS}</p>",
        *(
            [image(draw(trials), "tokens hit as it is, and under each alternative")]
            if any(trials.values())
            else []
        ),
        *(
            html_table(list(some[0]), [list(one.values()) for one in some])
            for some in trials.values()
            if some
        ),
    ]
    replace_file(directory / "diagnose.json", json.dumps(result, indent=2).encode())
    replace_file(directory / "diagnose.html", page("Diagnosis", *parts).encode())


READ_AS = (
    "Rows: the share of the first tokens of answers that the target would choose, as they are read and\n"
    "otherwise. Drafter: drafts accepted an anchor, as it is and with one thing about it changed."
)


def draw(trials: dict[str, list[dict[str, Any]]]) -> bytes:
    """Bars for what was tried, the present reading first, as PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = {name: some for name, some in trials.items() if some}
    most = max(len(some) for some in shown.values())
    figure = Figure(figsize=(6.5 * len(shown), 1.2 + 0.24 * most), layout="constrained")
    titles = {"rows": "answer tokens the target would choose", "drafter": "drafts accepted an anchor"}
    for axes, (name, some) in zip(
        figure.subplots(1, len(shown), squeeze=False)[0], shown.items(), strict=True
    ):
        shades = matplotlib.colormaps["YlOrBr"]([0.25 + 0.5 * at / len(some) for at in range(1, len(some))])
        colors = ["tab:blue", *map(tuple, shades)]
        axes.barh([one["name"] for one in some], [one["hits"] for one in some], color=colors)
        axes.invert_yaxis()
        axes.set_title(titles[name])
        axes.grid(axis="x", alpha=0.3)
    return as_png(figure)
