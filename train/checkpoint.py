"""Exact resume: a checkpoint is a folder that appears whole, under its step number."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from train.engine import Engine, rank


@dataclass
class Progress:
    """All of a run's state that is not in the engine. Data order and anchors follow from the step."""

    step: int = 0
    best_tau: float = 0.0
    best_step: int = -1
    data_key: str = ""


def save(engine: Engine, directory: Path, progress: Progress, keep: int) -> None:
    """Write ``checkpoints/step_XXXXXXXX``; the oldest beyond ``keep`` are removed afterwards."""
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
        _flush(scratch)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
        for old in checkpoints(directory)[:-keep]:
            shutil.rmtree(old)
    engine.barrier()


def load(engine: Engine, directory: Path) -> Progress | None:
    """Restore the newest complete checkpoint, ``None`` when there is none."""
    found = checkpoints(directory)
    if not found:
        return None
    engine.load(found[-1])
    return Progress(**json.loads((found[-1] / "progress.json").read_text()))


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first: a folder has its final name only when it is whole."""
    return sorted(path for path in directory.glob("step_*") if (path / "progress.json").is_file())


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
