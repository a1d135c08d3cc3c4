"""Around the loop: target and conversations in, drafter directory and report out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from data.capture import source
from data.stream import Stream, seen_table
from drafters import vocab as vocabulary
from drafters.method import Drafter, build
from drafters.target import bfloat16_pays, pick_dtype
from drafters.types import Example
from eval import replay
from eval.evaluate import numbers_of_drafts
from eval.rows import spread
from train import checkpoint
from train.directory import open_directory, settings_of, write_record
from train.engine import check_launch, local_device, make_engine, rank, world_size
from train.export import export, write_report
from train.log import Log, cut
from train.loop import Job, train
from train.rows import Loaded, load_data

if TYPE_CHECKING:
    from recipes.schema import Run


def run_training(run: Run, recipe: str | None) -> Path:
    """Train, export, report; or go on where an interrupted run of the same settings stopped.

    Errors: ``ValueError`` for a run directory of other settings, for data that cannot be used, and for an
    export that does not reproduce the training logits. Nothing half-written is left.
    """
    if run.method.name == "none":
        raise ValueError("no method: add a recipe, for example `python -m train +recipe=dflash`")
    check_launch(run.train.engine, run.train.packs)
    device = local_device(run.hardware.device)  # first: what is loaded below goes to this rank's GPU
    times = Times()
    with open_directory(run, recipe, device) as directory:
        with times.of("target and rows"):
            loaded = load_data(run, directory, device)
        if rank() == 0:
            checkpoint.check(directory / "checkpoints", loaded.belongs)
            write_record(run, directory, loaded)
        with times.of("states"):
            job, progress = prepare(run, directory, loaded)
        with times.of("training"), closing(job.log):
            train(job, progress, run.train, run.optim, run.log.every)
        if rank() == 0:  # the other ranks end here
            seen = job.stream.seen(job.total)
            write_record(run, directory, loaded, seen)
            print(seen_table(seen))
            with times.of("export and report"):
                export(run, job, loaded, progress)
                if run.train.report:
                    write_report(run, job, loaded)
            print(times)
    return directory


class Times:
    """Seconds of each part of a run, for its last line."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        begun = perf_counter()
        yield
        self.seconds[part] = perf_counter() - begun

    def __str__(self) -> str:
        return "seconds: " + ", ".join(f"{part} {taken:.0f}" for part, taken in self.seconds.items())


def prepare(run: Run, directory: Path, loaded: Loaded) -> tuple[Job, checkpoint.Progress]:
    """States, draft vocabulary, drafter, engine; restored from the newest checkpoint where there is one."""
    target, settings = loaded.target, run.method
    vocab = None
    kept = settings.kept_tokens(target.vocab_size)
    if kept is not None:
        counts_V = vocabulary.count_tokens(
            (torch.tensor(e.ids)[torch.tensor(e.mask)] for e in loaded.all_rows), target.vocab_size
        )
        usable = None if target.tokenizer is None else len(target.tokenizer)
        vocab = vocabulary.choose(counts_V, kept, target.stop_ids, usable)
        print(f"draft vocabulary: {len(vocab)} tokens, {vocab.covers(counts_V):.2%} of the supervised ones")
    torch.manual_seed(run.seed)  # here, so that nothing before this changes what a drafter starts from
    drafter = build(settings, target, vocab).to(target.device)
    if (told := drafter.start(loaded.train)) and rank() == 0:
        print(told)
    numbers_of_drafts(run.eval, drafter)
    _refuse_mask_token(drafter, loaded.train)
    dtype = pick_dtype(run.hardware.dtype, target.device)
    engine = make_engine(
        run.train.engine, run.optim, target.device, dtype, run.train.packs, run.train.zero_stage
    )
    if rank() == 0 and dtype == torch.bfloat16 and target.device.type == "cpu" and not bfloat16_pays():
        print("this CPU only emulates bfloat16: states are bfloat16, products of the training run in float32")
    states, usable_rows = source(
        run.states, target, loaded.train, drafter.layer_ids, with_last=settings.needs_last,
        rank=rank(), world=world_size(), barrier=engine.barrier,
    )  # fmt: skip
    stream = Stream(
        usable_rows, states, budget=run.train.pack_tokens, packs=run.train.packs, seed=run.seed,
        weights=run.data.weights, rank=rank(), world=world_size(),
    )  # fmt: skip
    total = run.train.steps or (
        stream.steps_of(run.train.tokens) if run.train.tokens else stream.steps(run.train.epochs)
    )
    engine.wrap(drafter)
    progress = checkpoint.load(engine, directory / "checkpoints")
    progress = progress or checkpoint.Progress(belongs=loaded.belongs)
    some = spread(loaded.held, run.train.eval_rows)
    held = list(replay.paths(target, some, drafter.layer_ids, temperature=run.eval.temperature))
    if rank() == 0:
        if max(path.length for path in held) < 2:
            raise ValueError(
                f"all {len(held)} held-out answers are another model's: the target leaves them within two "
                "tokens, so acceptance cannot be measured. Let the target answer them: "
                "`python -m data task=regenerate`"
            )
        if off := sum(path.off_path for path in held):
            print(
                f"{off} of {len(held)} held-out answers ({off / len(held):.0%}) leave the target's own path "
                "and are cut there; `python -m data task=regenerate` gives answers that do not"
            )
        cut(directory / "metrics.jsonl", progress.step)
    log = Log(run.log, directory, settings_of(run), total, progress.step, rank() == 0)
    return Job(drafter, engine, stream, held, directory, log, total, run.seed), progress


def _refuse_mask_token(drafter: Drafter, examples: Sequence[Example]) -> None:
    """A drafter that fills slots with a token cannot learn an answer that holds it."""
    token = drafter.mask_token
    for example in examples:
        if any(i == token and answered for i, answered in zip(example.ids, example.mask, strict=True)):
            raise ValueError(
                f"{example.name}: the answer holds token {token}, which fills empty slots; name one that no "
                "answer holds with method.mask_token=ID"
            )
