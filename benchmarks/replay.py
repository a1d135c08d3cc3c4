"""Replay of every N beside rolling out each N once, on the same answers to bundled evaluation prompts.

``python -m benchmarks.replay drafter=runs/demo/drafter``. Both sides have one thread, and seconds are those
of the processor: other work on the machine counts little. Replay is timed before and after the rollouts.
``slots=1,16`` also rolls out 16 requests at a time; ``per_domain`` and ``tokens`` say how many answers, and
how much of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import environment, options
from data.examples import renderer
from data.sources import DataConfig
from drafters import checkpoint
from drafters.method import Drafter
from drafters.target import EMBEDDED, HardwareConfig, Target, load
from drafters.types import Example
from eval.evaluate import EvalConfig, held_out
from eval.replay import Counts, paths, score
from eval.rollout import rollout

Found = dict[str, dict[int, Counts]]  # by row and N


def rows_of(target: Target, per_domain: int, tokens: int) -> list[Example]:
    """The first answers of each domain, cut to so many tokens."""
    data, settings = DataConfig(), EvalConfig(per_domain=per_domain)
    render = renderer(data, target.tokenizer, target.stop_ids)
    with TemporaryDirectory() as scratch:
        rows = held_out(data, target, render, settings, Path(scratch))
    ends = [row.mask.index(True) + tokens for row in rows]
    return [replace(row, ids=row.ids[:end], mask=row.mask[:end]) for row, end in zip(rows, ends, strict=True)]


def replayed(target: Target, drafter: Drafter, rows: Sequence[Example], ns: Sequence[int]) -> Found:
    """All N from one pass of the target."""
    found = list(paths(target, rows, drafter.layer_ids))
    return {path.example.name: by_n for path, by_n in zip(found, score(drafter, found, ns), strict=True)}


def rolled_out(
    target: Target, drafter: Drafter, rows: Sequence[Example], ns: Sequence[int], slots: int
) -> Found:
    """Each N by decoding."""
    found: Found = {row.name: {} for row in rows}
    for n in ns:
        decoded = rollout(target, drafter, rows, n, slots=slots)
        for example, _, counts in tqdm(decoded, f"{slots} slots, N={n}", len(rows), mininterval=5):
            found[example.name][n] = counts
    return found


def timed(work: Callable[[], Found]) -> tuple[Found, float]:
    """What it found, and the CPU seconds that it took."""
    begun = process_time()
    return work(), process_time() - begun


def main() -> None:
    chosen = options(sys.argv[1:], drafter="", target=EMBEDDED, per_domain=1, tokens=96, slots="1")
    if not chosen["drafter"]:
        raise ValueError("drafter=: name a drafter directory, for example drafter=runs/demo/drafter")
    torch.set_num_threads(1)
    directory = Path(chosen["drafter"])
    target = load(chosen["target"], checkpoint.hardware_for(directory, HardwareConfig()))
    drafter = checkpoint.read(directory, target).eval()
    measure(target, drafter, chosen)


def measure(target: Target, drafter: Drafter, chosen: dict[str, Any]) -> None:
    """Time both sides, compare their rounds, and print."""
    rows = rows_of(target, chosen["per_domain"], chosen["tokens"])
    ns = range(1, drafter.max_drafts + 1)
    short = rows_of(target, 1, 4)[:1]
    replayed(target, drafter, short, ns)  # neither is timed cold
    rolled_out(target, drafter, short, ns[:1], 1)
    counts, before = timed(lambda: replayed(target, drafter, rows, ns))
    sides = []
    for slots in map(int, chosen["slots"].split(",")):
        decoded, seconds = timed(lambda: rolled_out(target, drafter, rows, ns, slots))  # noqa: B023
        same = sum(decoded[name][n] == counts[name][n] for name in counts for n in ns)
        sides.append({"slots": slots, "seconds": seconds, "rounds_equal": same / (len(counts) * len(ns))})
    _, after = timed(lambda: replayed(target, drafter, rows, ns))
    replay = (before + after) / 2
    about = f"{len(rows)} answers of {sum(sum(row.mask) for row in rows)} tokens, N = 1 to {len(ns)}"
    print(f"\n{about}\n{'':22s} CPU seconds   over replay   rounds equal")
    print(f"{'replay':22s} {replay:11.1f}")
    for side in sides:
        side["over_replay"] = side["seconds"] / replay
        print(
            f"{'rollout, ' + str(side['slots']) + ' at a time':22s} {side['seconds']:11.1f} "
            f"{side['over_replay']:13.1f} {side['rounds_equal']:14.1%}"
        )
    result = {
        "benchmark": "replay",
        "method": drafter.config.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "answers": len(rows),
        "tokens": sum(sum(row.mask) for row in rows),
        "ns": list(ns),
        "replay_seconds": [before, after],
        "rollout": sides,
    }
    print(json.dumps({**result, **environment()}))


if __name__ == "__main__":
    main()
