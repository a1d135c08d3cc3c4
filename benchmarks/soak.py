"""Many clients, random aborts: no slot leaks, memory stays flat, every finished answer equals its solo run.

``python -m benchmarks.soak seconds=120 clients=32 drafter=DIR proposer=suffix+eagle3``; fp32, half of the
requests greedy and half sampled with a seed. Answers that part from their solo run are told with how far
apart the target's best two choices were there: the order of additions differs in a batch. It ends with
status 1 where a slot leaks, or an answer parts where there was no tie.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks import environment, options
from benchmarks.vllm_parity import prompts_of
from drafters import checkpoint
from drafters.target import HardwareConfig, Target, load
from serve.engine import Engine
from serve.law import Sampling
from serve.proposers import UNTRAINED, ProposerConfig, build, drafts_asked
from serve.tasks import ROUNDING, margin_after
from serve.types import Answer, Request


def requests(target: Target, number: int) -> list[Request]:
    """Different prompts and lengths, greedy and sampled."""
    asked = prompts_of(target, number)
    return [
        Request(
            example.ids,
            8 + 5 * (at % 12),
            Sampling(0.0 if at % 2 else 0.8, top_p=0.95, seed=at),
            name=str(at),
        )
        for at, example in enumerate(asked)
    ]


def soak(engine: Engine, asked: list[Request], clients: int, seconds: float) -> dict[str, Any]:
    """Keep ``clients`` requests in the engine; at every second step somebody aborts."""
    chance, process = random.Random(0), psutil.Process()
    done: list[Answer] = []
    aborted, memory, start = 0, [], monotonic()
    with tqdm(total=round(seconds), unit="s", desc="soak", mininterval=5) as bar:
        while monotonic() - start < seconds:
            while len(engine.waiting) + len(engine.active) < clients:
                engine.submit(chance.choice(asked))
            if chance.random() < 0.5:
                engine.abort(chance.choice([*engine.waiting, *engine.active]))
                aborted += 1
            done += engine.step()
            memory.append(process.memory_info().rss)
            bar.update(int(monotonic() - start) - bar.n)
    for answer in [*engine.waiting, *engine.active]:
        engine.abort(answer)
    leaked = len(engine.active) + len(engine.waiting) + sum(engine.cache.lengths)
    half, last = (max(memory[: len(memory) // 2]), max(memory[len(memory) // 2 :]))
    return {
        "finished": done,
        "aborted": aborted,
        "leaked": leaked,
        "megabytes_first_half": half / 1e6,
        "megabytes_second_half": last / 1e6,
    }


def parted(target: Target, asked: list[Request], done: list[Answer], capacity: int) -> list[float]:
    """Margins, in logits, of the places where an answer parts from its solo run (plain, alone)."""
    engine, solo = Engine(target, capacity=capacity), {}
    for request in tqdm(asked, desc="solo", mininterval=5):
        (answer,) = engine.run([request])
        solo[request.name] = answer.tokens
    margins = []
    for answer in done:
        want = solo[answer.request.name]
        if answer.tokens != want:
            pairs = enumerate(zip(answer.tokens, want, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(want), len(answer.tokens)))
            margins.append(margin_after(target, answer.request.prompt + want[:at], answer.request.sampling))
    return margins


def main() -> None:
    chosen = options(
        sys.argv[1:], seconds=120, clients=32, slots=32, drafter="", proposer="suffix", prompts=24, n=4
    )
    target = load("smollm2-embedded", HardwareConfig(dtype="float32"))
    drafter = checkpoint.read(Path(chosen["drafter"]), target) if chosen["drafter"] else None
    n = None if chosen["proposer"] in UNTRAINED else chosen["n"]
    proposer = build(chosen["proposer"], drafter, ProposerConfig(n=n))
    asked = requests(target, chosen["prompts"])
    capacity = max(len(request.prompt) + request.max_new_tokens for request in asked)
    engine = Engine(target, proposer, drafts_asked(proposer, n), slots=chosen["slots"], capacity=capacity)
    found = soak(engine, asked, chosen["clients"], chosen["seconds"])
    done = found.pop("finished")
    margins = parted(target, asked, done, capacity)
    rounds = [r for answer in done for r in answer.rounds]
    result = {
        "benchmark": "soak",
        **chosen,
        "drafter": Path(chosen["drafter"]).name,
        "finished": len(done),
        "tau": sum(r.emitted for r in rounds) / max(1, len(rounds)),
        **found,
        "parted": len(margins),
        "largest_margin_of_a_parting": max(margins, default=0.0),
        **environment(),
    }
    for key, value in result.items():
        print(f"{key:30s} {value}")
    print(json.dumps(result))
    if result["leaked"] or result["largest_margin_of_a_parting"] >= ROUNDING:
        sys.exit("a slot leaked, or an answer parts from its solo run where the target's choice was no tie")


if __name__ == "__main__":
    main()
