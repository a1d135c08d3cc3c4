"""What ``python -m eval`` does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from data.examples import renderer
from data.sources import BUNDLED
from drafters import checkpoint
from drafters.method import Drafter
from drafters.target import Target, load
from drafters.types import Example
from eval import calibrate, report
from eval.evaluate import evaluate, held_out, numbers_of_drafts
from eval.replay import paths

if TYPE_CHECKING:
    from recipes.schema import Run


def accept(run: Run) -> None:
    """Score ``drafter=`` on ``data.path`` and write the report to ``out=``."""
    directory, target, drafter, held, out = _opened(run)
    found = evaluate(target, drafter, held, run.eval, run.seed)
    found = {"target": found["target"], "drafter": str(directory), **found}
    report.write(found, out)
    print(report.table(found))
    print(f"report: {out / 'report.html'}")


def calibrated(run: Run) -> None:
    """Temperatures of ``drafter=``'s confidences from ``data.path``, into its config.json."""
    directory, target, drafter, held, out = _opened(run)
    found = list(paths(target, held, drafter.layer_ids))
    print(calibrate.table(calibrate.keep(drafter, directory, found, out / calibrate.FILE)))
    print(f"{directory}/config.json: confidence_temperatures")


def _opened(run: Run) -> tuple[Path, Target, Drafter, list[Example], Path]:
    """The drafter directory, target, drafter, held-out conversations and the folder for what is found."""
    if run.drafter is None:
        raise ValueError("drafter: name a drafter directory, for example drafter=runs/demo/drafter")
    directory = Path(run.drafter)
    hardware = checkpoint.hardware_for(directory, run.hardware)
    out = Path(run.out) if run.out else _beside(directory, run.data.path)
    target = load(run.target, hardware)
    drafter = checkpoint.read(directory, target)
    numbers_of_drafts(run.eval, drafter)  # refused before the target answers anything
    render = renderer(run.data, target.tokenizer, target.stop_ids)
    held = held_out(run.data, target, render, run.eval, out)
    return directory, target, drafter, held, out


def _beside(directory: Path, data: str) -> Path:
    """A folder of the run that the drafter belongs to, else one here.

    ``report/`` is of the file that the run itself held out; others get a folder of their name.
    """
    run = directory.resolve().parent
    if not (run / "recipe.yaml").exists():
        return Path(f"report-{directory.resolve().name}")
    trained = yaml.safe_load((run / "recipe.yaml").read_text())["settings"]["data"]
    own = trained["eval_path"] or (BUNDLED if trained["path"] == BUNDLED else None)
    return run / ("report" if data == own else f"report-{Path(data).name.split('.')[0]}")
