"""One ``log(step, metrics)`` to console, JSONL and wandb (imported only here)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from drafters.files import replace_file


@dataclass
class LogConfig:
    """``log.*``"""

    every: int = 10  # optimizer steps between two lines
    wandb: bool = False  # offline unless WANDB_API_KEY is set
    project: str = "foredraft"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"log.every={self.every}: give at least 1")


class Log:
    """A progress bar, ``metrics.jsonl``, and wandb where asked for. Only rank 0 writes."""

    def __init__(
        self,
        config: LogConfig,
        directory: Path,
        settings: Mapping[str, Any],
        total: int,
        start: int,
        active: bool,
    ) -> None:
        self.config, self.active = config, active
        self.bar = tqdm(
            total=total, initial=start, unit="step", desc="train", disable=not active, mininterval=1
        )
        self.file = open(directory / "metrics.jsonl", "a") if active else None  # noqa: SIM115
        self.wandb = self._wandb(directory, settings) if active and config.wandb else None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log(dict(metrics), step=step)

    def progress(self, metrics: Mapping[str, str]) -> None:
        self.bar.set_postfix(metrics, refresh=False)
        self.bar.update()

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self.active:
            self.bar.write(text)

    def close(self) -> None:
        self.bar.close()
        if self.file is not None:
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish()

    def _wandb(self, directory: Path, settings: Mapping[str, Any]):
        import wandb

        usual = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        mode: Any = os.environ.get("WANDB_MODE", usual)  # wandb checks it
        return wandb.init(
            project=self.config.project,
            name=directory.name,
            dir=str(directory),
            config=dict(settings),
            mode=mode,
        )


def cut(path: Path, step: int) -> None:
    """Drop the lines of ``metrics.jsonl`` past a resumed step, a half-written last line included."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if value["step"] <= step:
            kept.append(line)
    replace_file(path, "".join(line + "\n" for line in kept).encode())
