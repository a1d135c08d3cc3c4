"""The loop, one page, read top to bottom.

No method is named here. A step draws its packs and anchors from (seed, step), so a resumed run
continues as if it had never stopped; the loss is divided once, by the count of the whole step over all
ranks and micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from time import perf_counter

import torch
from safetensors.torch import save_file
from torch import nn

from data.stream import Stream
from drafters.files import flush
from drafters.method import Drafter
from drafters.types import Batch, Loss
from eval import replay
from train import checkpoint
from train.engine import Engine, rank
from train.log import Log
from train.optim import OptimConfig, rate


@dataclass
class TrainConfig:
    """``train.*``"""

    steps: int | None = None  # optimizer steps; None: what tokens or epochs come to
    tokens: int | None = None  # supervised tokens to learn from, for runs of one budget; None: epochs
    epochs: float = 1.0
    packs: int = 1  # packs of one optimizer step, over all ranks
    pack_tokens: int = 2048  # tokens of a pack
    engine: str = "auto"  # auto | plain | deepspeed
    zero_stage: int = 1
    save_every: int = 200  # steps between checkpoints
    keep: int = 2  # checkpoints kept
    eval_every: int | None = None  # steps between acceptance checks; None: a fifth of the run
    eval_rows: int = 16  # held-out answers of such a check
    report: bool = True  # evaluate the exported drafter at the end

    def __post_init__(self) -> None:
        for name in ("packs", "pack_tokens", "save_every", "keep", "eval_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)}: give at least 1")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"train.steps={self.steps}: give at least 1, or null to train for train.epochs")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(
                f"train.tokens={self.tokens}: give at least 1, or null to train for train.epochs"
            )
        if self.tokens is not None and self.steps is not None:
            raise ValueError(
                f"train.steps={self.steps} train.tokens={self.tokens}: one budget, write null for the other"
            )
        if self.eval_every is not None and self.eval_every < 1:
            raise ValueError(f"train.eval_every={self.eval_every}: give at least 1, or null for five checks")
        if not self.epochs > 0:
            raise ValueError(f"train.epochs={self.epochs}: give a number above 0")
        if self.engine not in ("auto", "plain", "deepspeed"):
            raise ValueError(f"train.engine={self.engine}: write auto, plain or deepspeed")
        if self.zero_stage not in (1, 2):
            raise ValueError(
                f"train.zero_stage={self.zero_stage}: write 1 or 2; the drafter stays whole on every rank, "
                "for acceptance checks and the export"
            )


@dataclass
class Job:
    """What the loop works on."""

    drafter: Drafter
    engine: Engine
    stream: Stream
    held: Sequence[replay.Path]  # held-out answers, with the target's states
    directory: Path
    log: Log
    total: int
    seed: int

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"


def train(
    job: Job, progress: checkpoint.Progress, config: TrainConfig, optim: OptimConfig, log_every: int
) -> None:
    """Run the optimizer steps that are left; ``progress`` moves along, the best weights go to disk."""
    engine, module = job.engine, job.engine.module
    eval_every = config.eval_every or max(1, job.total // 5)
    window = Window()
    for step in range(progress.step, job.total):
        begun = perf_counter()
        micro = [place(job, batch, step, at) for at, batch in enumerate(job.stream.step(step))]
        count = engine.total({"count": sum(batch.count for batch in micro)})["count"]
        window.waited += perf_counter() - begun
        lr = rate(step, job.total, optim)
        if count > 0:
            for batch in micro:
                with engine.precision():
                    loss = module(batch.to(engine.device, torch.float32)) if batch.count else nothing(module)
                engine.backward(loss.sum / count)
                window.add(loss, batch)
            window.norm = engine.step(lr)
        else:
            job.log.say(
                f"step {step + 1}: nothing to learn from in {[n for b in micro for n in b.names]}; no update"
            )
        window.seconds += perf_counter() - begun

        progress.step = step + 1
        last = progress.step == job.total
        saving = last or progress.step % config.save_every == 0
        job.log.progress(window.postfix())
        if progress.step % log_every == 0 or saving:  # a checkpoint holds no half of a window
            job.log(
                progress.step,
                {"lr": lr, "epoch": job.stream.epoch_of(progress.step), **window.close(engine)},
            )
        if progress.step % eval_every == 0 or last:
            check_acceptance(job, progress)
        if saving:
            checkpoint.save(engine, job.checkpoints, progress, config.keep)
            drop_other_bests(job, progress)


def place(job: Job, batch: Batch, step: int, at: int) -> Batch:
    """Anchors from (seed, pack number) alone: the same on any number of ranks, and after a resume."""
    index = step * job.stream.packs + job.stream.rank + at * job.stream.world
    generator = torch.Generator().manual_seed((job.seed + 1) * 1_000_003 + index)
    return job.drafter.place(batch, generator)


def nothing(module: nn.Module) -> Loss:
    """The loss of a pack without anchors: 0, with a gradient of 0 for every parameter.

    All ranks have to reduce the gradients of the same parameters, or they wait for each other for ever.
    """
    return Loss(torch.stack([parameter.sum() for parameter in module.parameters()]).sum() * 0.0, 0.0)


def check_acceptance(job: Job, progress: checkpoint.Progress) -> None:
    """Replay the held-out answers at the largest N; keep the weights when they accept more than ever."""
    if rank() != 0:
        return
    n = job.drafter.max_drafts
    with evaluating(job.drafter):
        counts = reduce(add, (by_n[n] for by_n in replay.score(job.drafter, job.held, [n])))
    job.log(
        progress.step,
        {
            "held_out/tau": counts.tau,
            "held_out/rounds": counts.rounds,
            "held_out/first": counts.survival[0],
        },
    )
    job.log.say(f"step {progress.step}: tau {counts.tau:.3f} at N={n} over {len(job.held)} held-out answers")
    if counts.tau > progress.best_tau:
        progress.best_tau, progress.best_step = counts.tau, progress.step
        save_best(job, progress.best_step)


def best(directory: Path, step: int) -> Path:
    """Where the weights that accepted most at ``step`` are kept."""
    return directory / f"best_{step:08d}.safetensors"


def save_best(job: Job, step: int) -> None:
    """The drafter's weights as they are, renamed into place."""
    path = best(job.directory, step)
    scratch = path.with_suffix(".tmp")
    save_file(
        {name: value.float().cpu().contiguous() for name, value in job.drafter.state_dict().items()},
        scratch,
    )
    flush(scratch)
    os.replace(scratch, path)


def drop_other_bests(job: Job, progress: checkpoint.Progress) -> None:
    """Once a checkpoint names the best weights: until then a resumed run needs those before."""
    if rank() == 0:
        for path in job.directory.glob("best_*.safetensors"):
            if path != best(job.directory, progress.best_step):
                path.unlink()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for as long as the block lasts, also when it raises."""
    was = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was)


@dataclass
class Window:
    """Sums since the last log line; means are made when it closes."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    anchors: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    norm: float = 0.0

    def add(self, loss: Loss, batch: Batch) -> None:
        for name, value in loss.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
            self.counts[name] = self.counts.get(name, 0.0) + float(loss.counts[name])
        self.tokens += batch.tokens_BT.numel()
        self.anchors += 0 if batch.anchors_A is None else len(batch.anchors_A)

    def postfix(self) -> dict[str, str]:
        """For the progress bar."""
        means = {name: f"{value / max(self.counts[name], 1e-9):.3f}" for name, value in self.sums.items()}
        return {
            **means,
            "tok/s": f"{self.tokens / max(self.seconds, 1e-9):.0f}",
            "wait": f"{self.waited / max(self.seconds, 1e-9):.0%}",
        }

    def close(self, engine: Engine) -> dict[str, float]:
        """Means over all ranks, and start again."""
        sums = engine.total(self.sums)
        counts = engine.total(self.counts)
        seen = engine.total({"tokens": self.tokens, "anchors": self.anchors})
        seconds = max(self.seconds, 1e-9)
        out = {
            **{f"loss/{name}": value / max(counts[name], 1e-9) for name, value in sorted(sums.items())},
            "grad_norm": self.norm,
            **seen,
            "tokens_per_second": seen["tokens"] / seconds,
            "waiting": self.waited / seconds,
        }
        vars(self).update(vars(Window()))
        return out
