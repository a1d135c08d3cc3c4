"""``python -m serve task=bench drafter=DIR``: what each proposer is worth on this machine, load by load.

All proposers get the same requests, with the same seeds: whatever drafts, the text is the same, and that is
counted too. Measurements run in a shuffled order, so that whatever slows the machine slows them alike.
``NAME, scheduled`` chooses the number of drafts every round, as the server does by default; it begins each
measurement without experience.
"""

from __future__ import annotations

import json
import platform
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from drafters.files import replace_file
from drafters.method import Drafter
from drafters.target import Target
from serve.answer import drafts_for, known_taus, loaded
from serve.clients import Cell, Measured, closed_loop
from serve.costs import costs_for
from serve.engine import Engine
from serve.law import Sampling
from serve.prompts import Prompts, built_in, read_prompts
from serve.proposers import ProposerConfig, build, drafts_asked
from serve.schedule import Schedule, schedule_of
from serve.speeds import PLAIN, draw, summarise, table
from serve.types import Request

if TYPE_CHECKING:
    from recipes.schema import Run

SCHEDULED = ", scheduled"  # behind the name of a proposer


@dataclass
class BenchConfig:
    """``bench.*``"""

    prompts: str | None = None  # JSON Lines: prompt or messages, and a kind; None: those of serve/prompts.py
    kinds: list[str] | None = None  # of prompts; None: all
    concurrency: list[int] = field(default_factory=lambda: [1, 4])  # clients, each with a request at a time
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    proposers: list[str] | None = None  # none is plain decoding; None: all there are
    requests: int = 8  # of a measurement, each with a prompt of its own
    max_new_tokens: int = 64
    repeats: int = 1  # of each measurement

    def __post_init__(self) -> None:
        for key in ("requests", "max_new_tokens", "repeats"):
            if vars(self)[key] < 1:
                raise ValueError(f"bench.{key}={vars(self)[key]}: give 1 or more")
        if not self.concurrency or not all(1 <= c <= self.requests for c in self.concurrency):
            raise ValueError(
                f"bench.concurrency={self.concurrency}: give numbers from 1 to the {self.requests} of "
                "bench.requests, as every client needs a request"
            )
        if not self.temperatures:
            raise ValueError("bench.temperatures is empty; [0.0] is greedy decoding")
        for temperature in self.temperatures:
            Sampling(temperature)  # refuses what is none


def measure(
    engines: Mapping[str, Callable[[int, int], Engine]],
    prompts: Mapping[str, Sequence[list[int]]],
    config: BenchConfig,
    seed: int = 0,
) -> Iterator[tuple[Cell, str, Measured]]:
    """Every cell with every proposer, ``repeats`` times, in a shuffled order.

    ``engines`` make a new engine each, of so many slots and tokens a slot: what one measurement taught its
    proposer or schedule, the next must not know.
    """
    cells = [Cell(*each) for each in product(prompts, config.temperatures, config.concurrency)]
    jobs = [*product(cells, engines)] * config.repeats
    random.Random(seed).shuffle(jobs)
    with tqdm(total=len(jobs) * config.requests, unit="answer", desc="bench", mininterval=1) as bar:
        for cell, name in jobs:
            bar.set_postfix_str(f"{cell.kind}, {cell.concurrency} clients, {name}")
            requests = [
                Request(prompt, config.max_new_tokens, Sampling(cell.temperature, seed=seed + i))
                for i, prompt in enumerate(prompts[cell.kind][: config.requests])
            ]
            need = max(len(request.prompt) + request.max_new_tokens for request in requests)
            engine = engines[name](cell.concurrency, need)
            short = Request(requests[0].prompt[:8], min(2, config.max_new_tokens))
            closed_loop(engine, [short] * cell.concurrency, cell.concurrency)  # none is timed cold
            yield cell, name, closed_loop(engine, requests, cell.concurrency, bar.update)


def engine_maker(
    name: str,
    target: Target,
    drafter: Drafter | None,
    config: ProposerConfig,
    most: int,
    tau_by_n: Mapping[int, float] | None = None,
) -> Callable[[int, int], Engine]:
    """Makes engines with the proposer of that name, a trained one at ``config.n`` drafts a round.

    Where it is scheduled, costs are looked up or measured now, for up to ``most`` slots.
    """
    base = name.removesuffix(SCHEDULED)
    schedule: Callable[[], Schedule | None] = lambda: None  # noqa: E731
    if base != name:
        config = replace(config, n=None)
        proposer = build(base, drafter, config, apart=True)
        if proposer is None:
            raise ValueError(f"bench.proposers: {name!r} has no drafts to schedule; write {base}")
        schedule = partial(schedule_of, proposer, costs_for(target, proposer, most), tau_by_n or {})

    def make(slots: int, capacity: int) -> Engine:
        proposer = build(base, drafter, config, apart=base != name)
        n = drafts_asked(proposer, config.n)
        return Engine(target, proposer, n, slots=slots, capacity=capacity, schedule=schedule())

    return make


def bench(run: Run) -> None:
    """Measure, print the table, and leave ``bench.json`` and ``bench.png`` in ``out`` (default: bench)."""
    config = run.bench
    prompts = built_in() if config.prompts is None else read_prompts(Path(config.prompts).expanduser())
    chosen = _chosen(prompts, config)  # refused before the target is loaded, as is a drafter that is none
    target, drafter, render = loaded(run)
    ids = {kind: [render.prompt_ids(messages) for messages in some] for kind, some in chosen.items()}
    _check_context(target, ids, config.max_new_tokens)
    names = list(dict.fromkeys(config.proposers or [])) or all_there_are(
        None if drafter is None else drafter.config.name
    )
    for name in names:  # one that is none is refused before anything is measured
        build(
            name.removesuffix(SCHEDULED),
            drafter,
            replace(run.serve, n=None if name == PLAIN else run.serve.n),
        )
    n = run.serve.n
    if drafter is not None and run.drafter is not None:
        n = n if n is not None else max(1, drafts_for(target, drafter, Path(run.drafter), None))
    own, trained, most = run.serve, replace(run.serve, n=n), max(config.concurrency)
    known = known_taus(Path(run.drafter)) if run.drafter else None
    asked = {PLAIN: replace(own, n=None), **dict.fromkeys(("ngram", "suffix"), own)}
    makers = {
        name: engine_maker(name, target, drafter, asked.get(name, trained), most, known) for name in names
    }
    found: dict[tuple[Cell, str], Measured] = {}
    for cell, name, measured in measure(makers, ids, config, run.seed):
        whole = found.setdefault((cell, name), Measured())
        whole.heard += measured.heard
        whole.seconds += measured.seconds
    rows = summarise(found, names)
    print(table(rows))
    facts = {"target": run.target, "drafter": run.drafter, "seed": run.seed, "machine": machine(target)}
    write({**facts, "settings": asdict(config), "n": n, "rows": rows}, Path(run.out or "bench"))


def all_there_are(method: str | None) -> list[str]:
    """Names of proposers to compare where none are asked for, with a drafter of that method or without."""
    trained = [] if method is None else [method, f"suffix+{method}"]
    return [PLAIN, "ngram", "suffix", *(name + how for name in trained for how in ("", SCHEDULED))]


def write(result: Mapping[str, Any], directory: Path) -> None:
    """``bench.json`` and ``bench.png``, each renamed into place."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(directory / "bench.json", json.dumps(result, indent=2).encode())
    replace_file(directory / "bench.png", draw(result["rows"]))
    print(f"\n{directory}/bench.json, {directory}/bench.png")


def machine(target: Target) -> dict[str, Any]:
    """What the figures depend on."""
    on_gpu = target.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(target.device) if on_gpu else platform.processor() or "cpu",
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _chosen(prompts: Prompts, config: BenchConfig) -> Prompts:
    """The kinds that were asked for, each with a prompt of its own for every request."""
    unknown = sorted({*(config.kinds or [])} - {*prompts})
    if unknown:
        raise ValueError(f"bench.kinds={config.kinds}: {unknown} is none of {sorted(prompts)}")
    chosen = {kind: some for kind, some in prompts.items() if not config.kinds or kind in config.kinds}
    for kind, some in chosen.items():
        if len(some) < config.requests:
            raise ValueError(
                f"bench.requests={config.requests}, but there are {len(some)} prompts of kind {kind}, and "
                "one that comes twice flatters proposers that remember; give more, or lower bench.requests"
            )
    return {kind: some[: config.requests] for kind, some in chosen.items()}


def _check_context(target: Target, ids: Mapping[str, Sequence[list[int]]], num: int) -> None:
    most = target.config.max_position_embeddings
    for kind, some in ids.items():
        if (longest := max(map(len, some))) + num > most:
            raise ValueError(
                f"bench.max_new_tokens={num} and a prompt of {longest} tokens (kind {kind}) exceed the "
                f"target's context of {most}; lower it, or leave the kind out with bench.kinds"
            )
