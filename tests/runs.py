"""Training runs of a tiny target, in this process or in one that can be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from torch import nn

from drafters.types import Batch, Loss, States
from recipes.schema import Run, register
from train.engine import PlainEngine
from train.job import run_training
from train.log import Log, LogConfig
from train.loop import Job
from train.optim import OptimConfig

TIMES = ("tokens_per_second", "waiting")  # what no two runs have in common


def settings(workshop: Path, *more: str) -> list[str]:
    """Overrides of a run that takes a second: later ones replace earlier ones."""
    chosen = [
        f"target={workshop / 'target'}",
        f"data.path={workshop / 'rows.jsonl'}",
        "data.holdout=0.2",
        "method.mask_token=3",  # the target is random and answers with any of the others
        "hardware.dtype=float32",
        "hardware.device=cpu",
        "run=one",
        "train.steps=6",
        "train.save_every=3",
        "train.keep=9",
        "train.eval_every=3",
        "train.pack_tokens=100",
        "train.report=false",
        "optim.lr=3e-3",
        "log.every=2",
    ]
    return list({text.lstrip("+").split("=")[0]: text for text in [*chosen, *more]}.values())


def run_of(*overrides: str, recipe: str = "dflash") -> Run:
    """The settings object that ``python -m train +recipe=... overrides`` would get."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_module("recipes", version_base="1.3"):
        return OmegaConf.to_object(compose("run", [f"+recipe={recipe}", *overrides]))


def train(workshop: Path, *more: str) -> Path:
    """One run in this process, under ``runs/`` of the working directory."""
    return run_training(run_of(*settings(workshop, *more)), "dflash")


def command(arguments: list[str]) -> None:
    """``python -m train`` with these arguments, in this process."""
    from recipes.cli import start
    from train.__main__ import main

    before, sys.argv = sys.argv, ["train", *arguments]
    try:
        start(main)
    finally:
        sys.argv = before


def started(directory: Path, arguments: list[str], event: int | None = None, name: str = "SIGKILL") -> Any:
    """``command`` in a process of its own, cheap to start: imports are done once, in a fork server.

    With ``event`` the process sends itself that signal at its ``event``-th look at a file of the run.
    """
    os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)  # the fork server imports from there
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runs"])
    process = context.Process(target=_child, args=(str(directory), arguments, event, name))
    process.start()
    return process


def _child(directory: str, arguments: list[str], event: int | None, name: str) -> None:
    torch.set_num_threads(1)
    os.chdir(directory)
    sys.stdout = sys.stderr = open("output.txt", "a")  # noqa: SIM115
    left = [event]

    def heard(kind: str, args: tuple) -> None:
        if left[0] is not None and args and "runs/" in str(args[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), getattr(signal, name))

    sys.addaudithook(heard)
    command(arguments)


def spoilable(made: Path, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A copy of what was made once, as working directory."""
    shutil.copytree(made, folder / "here")
    patch.chdir(folder / "here")
    return folder / "here"


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def held(run: Path, step: int) -> dict[str, Any]:
    """Weights and optimizer state of a checkpoint."""
    return torch.load(run / "checkpoints" / f"step_{step:08d}" / "engine.pt", weights_only=True)


def same(one: Any, other: Any) -> bool:
    """Whether two trees of tensors are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# A drafter of one weight, for what the loop does around any drafter ------------------------------


class Toy(nn.Module):
    """Its loss at a token is the weight times a number that the batch brings."""

    max_drafts = 1

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([start]))

    def place(self, batch: Batch, generator: torch.Generator) -> Batch:
        return replace(batch, count=float(batch.mask_BT.sum()))

    def forward(self, batch: Batch) -> Loss:
        total = (self.weight * batch.states.layers_BTLD[..., 0, 0] * batch.mask_BT).sum()
        return Loss(total, batch.count, {"ce": total.detach()}, {"ce": torch.tensor(batch.count)})


def numbers(values: list[float], mask: list[int] | None = None) -> Batch:
    """A pack whose token losses, for a weight of 1, are these."""
    tokens_BT = torch.zeros(1, len(values), dtype=torch.long)
    mask_BT = torch.tensor([mask or [1] * len(values)], dtype=torch.bool)
    states = States(torch.tensor(values)[None, :, None, None])
    return Batch(tokens_BT, mask_BT, tokens_BT, tokens_BT, states, names=["numbers"])


class Steps:
    """A stream that holds the packs of every step."""

    rank, world = 0, 1

    def __init__(self, steps: list[list[Batch]]) -> None:
        self.steps, self.packs = steps, len(steps[0])

    def step(self, index: int) -> list[Batch]:
        return self.steps[index]

    def epoch_of(self, step: int) -> float:
        return step / len(self.steps)


class Watched(PlainEngine):
    """Keeps the gradients and learning rates that its steps were given."""

    def __init__(self, config: OptimConfig | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(config or OptimConfig(), torch.device("cpu"), dtype)
        self.rates: list[float] = []
        self.gradients: list[dict[str, torch.Tensor | None]] = []

    def step(self, rate: float) -> float:
        self.rates.append(rate)
        grads = {name: p.grad for name, p in self.module.named_parameters()}
        self.gradients.append({name: None if g is None else g.clone() for name, g in grads.items()})
        return super().step(rate)


def toy_job(directory: Path, steps: list[list[Batch]], engine: PlainEngine | None = None) -> Job:
    """A job over a ``Toy``."""
    engine = engine or Watched()
    toy = engine.wrap(Toy())
    log = Log(LogConfig(), directory, {}, len(steps), 0, True)
    return Job(toy, engine, Steps(steps), [], directory, log, len(steps), 0)
