"""Exact resume: a checkpoint is a folder that appears whole, under its step number."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafters.files import flush
from train.engine import Engine, rank

WHOLE, PARTIAL = "step_????????", ".step_????????.tmp"


@dataclass
class Progress:
    """All of a run's state that is not in the engine. Data order and anchors follow from the step."""

    step: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    belongs: dict[str, Any] = field(default_factory=dict)  # what a resumed run must have again, by name


def save(engine: Engine, directory: Path, progress: Progress, keep: int) -> None:
    """Write ``checkpoints/step_XXXXXXXX``; all but the newest ``keep`` are removed afterwards."""
    final = directory / f"step_{progress.step:08d}"
    scratch = directory / f".{final.name}.tmp"
    if rank() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    engine.barrier()
    engine.save(scratch)
    engine.barrier()
    if rank() == 0:
        (scratch / "progress.json").write_text(json.dumps(asdict(progress)))
        flush(scratch)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
        ours = {path for pattern in (WHOLE, PARTIAL) for path in directory.glob(pattern)}
        for old in ours - set(checkpoints(directory)[-keep:]):
            shutil.rmtree(old)  # what a killed save left is among them
    engine.barrier()


def check(directory: Path, belongs: dict[str, Any]) -> None:
    """``ValueError`` naming what is not as it was when the newest checkpoint was written."""
    found = checkpoints(directory)
    then = _progress(found[-1]).belongs if found else belongs
    for name, value in belongs.items():
        if then[name] != value:
            raise ValueError(
                f"{found[-1]} belongs to other {name}: {then[name]} then, {value} now. Start with the same "
                "again, give this run another name with run=NAME, or overwrite=true to start it anew."
            )


def load(engine: Engine, directory: Path) -> Progress | None:
    """Restore the newest complete checkpoint, ``None`` when there is none."""
    found = checkpoints(directory)
    if not found:
        return None
    engine.load(found[-1])
    return _progress(found[-1])


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first: a folder has its final name only when it is whole."""
    return sorted(path for path in directory.glob(WHOLE) if (path / "progress.json").is_file())


def _progress(path: Path) -> Progress:
    return Progress(**json.loads((path / "progress.json").read_text()))
