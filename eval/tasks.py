"""What ``python -m eval`` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from data.examples import renderer
from drafters import checkpoint
from drafters.target import load
from eval import report
from eval.evaluate import evaluate, held_out, numbers_of_drafts

if TYPE_CHECKING:
    from recipes.schema import Run


def accept(run: Run) -> None:
    """Score ``drafter=`` on ``data.path`` and write the report to ``out=``."""
    if run.drafter is None:
        raise ValueError("drafter: name a drafter directory, for example drafter=runs/demo/drafter")
    directory = Path(run.drafter)
    checkpoint.read_config(directory)
    out = Path(run.out) if run.out else _beside(directory)
    target = load(run.target, run.hardware)
    drafter = checkpoint.read(directory, target)
    numbers_of_drafts(run.eval, drafter)  # refused before the target answers anything
    render = renderer(run.data, target.tokenizer, target.stop_ids)
    held = held_out(run.data, target, render, run.eval, out)
    found = evaluate(target, drafter, held, run.eval, run.seed)
    found = {"target": found["target"], "drafter": str(directory), **found}
    report.write(found, out)
    print(report.table(found))
    print(f"report: {out / 'report.html'}")


def _beside(directory: Path) -> Path:
    """``report/`` of the run that the drafter belongs to, else a folder here."""
    run = directory.resolve().parent
    return run / "report" if (run / "recipe.yaml").exists() else Path(f"report-{directory.resolve().name}")
