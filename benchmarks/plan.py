"""How right plans are: against published sweeps, and against an exhaustive sweep on this machine.

``python -m benchmarks.plan sweeps=FILE`` blanks all but two N of every panel (the smallest, and the middle
one, ``sorted[len // 2]``) and plans from those. ``drafter=DIR`` measures costs here, predicts tokens a second
at several concurrencies for every N, and lets the engine answer the same prompts at each, all in turns.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from tqdm import tqdm

from benchmarks import environment, options
from data.examples import examples as to_examples
from data.examples import renderer
from data.sources import DataConfig, read
from drafters import checkpoint
from drafters.method import Drafter
from drafters.target import EMBEDDED, HardwareConfig, Target, load
from drafters.types import Example
from eval import plan, sweeps
from eval.costs import CONTEXTS, measure
from eval.evaluate import EvalConfig, evaluate
from eval.report import from_row
from eval.sweeps import Panel, Point
from serve.engine import Engine
from serve.types import Request

DEFAULTS = {
    "sweeps": "", "drafter": "", "target": EMBEDDED, "dtype": "float32", "per_domain": 2, "tokens": 64,
    "concurrency": "1,4,16", "turns": 2,
}  # fmt: skip


# Published sweeps ---------------------------------------------------------------------------------


def probes(panel: Panel) -> tuple[int, int]:
    """The two N that a plan is given: the smallest, and the middle one."""
    ns = [point.n for point in panel.points]
    return ns[0], ns[len(ns) // 2]


def blanked(panel: Panel) -> Panel:
    """Without what was measured at any other N."""
    given = probes(panel)
    return replace(
        panel,
        points=tuple(point if point.n in given else Point(point.n, None, ()) for point in panel.points),
    )


def against_sweeps(path: Path) -> dict[str, Any]:
    """Mean error of predicted tokens a second at unprobed N, and mean regret of the picks, in per cent."""
    panels = sweeps.read(path)
    errors, regrets, tau_errors = [], [], []
    print(f"{'model':24s} {'method':11s} {'dataset':10s} pick best regret  errors at unprobed N")
    for panel, rates in zip(panels, sweeps.predict([blanked(panel) for panel in panels]), strict=True):
        true = {0: panel.baseline, **panel.measured}
        pick, best = (max(found, key=found.__getitem__) for found in (rates, true))
        wrong = {n: rates[n] / true[n] - 1 for n in panel.measured if n not in probes(panel)}
        taus, own = sweeps.taus(blanked(panel)), sweeps.taus(panel)
        tau_errors += [abs(taus[n] / own[n] - 1) for n in wrong]
        errors += map(abs, wrong.values())
        regrets.append(1 - true[pick] / true[best])
        shown = "  ".join(f"{n}: {100 * error:+.1f}%" for n, error in wrong.items())
        names = f"{panel.model:24s} {panel.method:11s} {panel.dataset:10s}"
        print(f"{names} {pick:4d} {best:4d} {100 * regrets[-1]:5.1f}%  {shown}")
    return {
        "panels": len(panels),
        "mean_regret_pct": round(100 * statistics.mean(regrets), 2),
        "median_regret_pct": round(100 * statistics.median(regrets), 2),
        "mean_error_pct": round(100 * statistics.mean(errors), 2),
        "median_error_pct": round(100 * statistics.median(errors), 2),
        "mean_error_of_tau_pct": round(100 * statistics.mean(tau_errors), 2),
    }


# This machine -------------------------------------------------------------------------------------


def conversations(target: Target, per_domain: int, tokens: int) -> list[Example]:
    """Of the bundled held-out answers, the first of each domain that are long enough, cut to one length."""
    config = DataConfig(split="eval")
    render = renderer(config, target.tokenizer, target.stop_ids, target.signature)
    found, _ = to_examples(read(config), render, None)
    taken: dict[str, list[Example]] = {}
    for example in found:
        first, some = example.mask.index(True), taken.setdefault(example.domain, [])
        if len(some) < per_domain and len(example.ids) - first >= tokens:
            end = first + tokens
            some.append(replace(example, ids=example.ids[:end], mask=example.mask[:end]))
    return [example for some in taken.values() for example in some]


def rate(engine: Engine, examples: Sequence[Example], seed: int) -> float:
    """Tokens a second while all slots are at work: from the last first prompt to the last prompt of all.

    Each prompt is answered as often as keeps the slots at work for three answers each.
    """
    asked = [example for _ in range(-(-3 * engine.slots // len(examples))) for example in examples]
    random.Random(seed).shuffle(asked)
    for example in asked:
        first = example.mask.index(True)
        engine.submit(Request(example.ids[:first], len(example.ids) - first, ignore_eos=True))
    finished, marks = 0, []
    while engine.busy:
        last = not engine.waiting
        for answer in engine.step():
            finished += len(answer.tokens)
        if not last and engine.decoding == engine.slots:
            marks.append((perf_counter(), finished + sum(len(answer.tokens) for answer in engine.active)))
    (begun, before), (ended, after) = marks[0], marks[-1]
    return (after - before) / (ended - begun)


def here(chosen: dict[str, Any]) -> dict[str, Any]:
    """Predicted and measured tokens a second at every concurrency and N, and the picks' regrets."""
    target = load(chosen["target"], HardwareConfig(dtype=chosen["dtype"]))
    drafter = checkpoint.read(Path(chosen["drafter"]), target)
    examples = conversations(target, chosen["per_domain"], chosen["tokens"])
    concurrency = [int(size) for size in chosen["concurrency"].split(",")]
    scored = [
        from_row(row)
        for row in evaluate(target, drafter, examples, EvalConfig(break_even=False), 0)["conversations"]
    ]
    loads = plan.workloads(plan.PlanConfig(), examples)
    ns = list(range(1, drafter.max_drafts + 1))
    begun = perf_counter()
    costs = measure(target, drafter, max(concurrency), ns, CONTEXTS)
    seconds = perf_counter() - begun
    result = plan.build(
        [plan.Candidate(drafter.config.name, chosen["drafter"], scored, costs)], loads, {},
        plan.PlanConfig(concurrency=concurrency), 0,
    )  # fmt: skip
    rows = _swept(target, drafter, examples, concurrency, chosen["turns"])
    table = []
    for line in result["predictions"]:
        if line["mix"] == plan.TRAFFIC:
            size, n = line["concurrency"], line["n"]
            predicted, measured = line["tokens_per_second"], statistics.median(rows[size, n])
            table.append({"requests": size, "n": n, "predicted": predicted, "measured": round(measured, 2),
                          "error_pct": round(100 * (predicted / measured - 1), 2)})  # fmt: skip
    _print(table)
    return {
        "method": drafter.config.name,
        "dtype": chosen["dtype"],
        "prompts": len(examples),
        "seconds_to_measure_costs": round(seconds, 1),
        "rows": table,
        "largest_error_pct": max(abs(row["error_pct"]) for row in table),
        "mean_error_pct": round(statistics.mean(abs(row["error_pct"]) for row in table), 2),
        "picks": [_pick(table, size) for size in concurrency],
    }


def _swept(
    target: Target, drafter: Drafter, examples: Sequence[Example], concurrency: Sequence[int], turns: int
) -> dict[tuple[int, int], list[float]]:
    """Tokens a second by concurrency and N, each in every turn."""
    longest = max(len(example.ids) for example in examples) + drafter.max_drafts + 1
    rows: dict[tuple[int, int], list[float]] = {
        (size, n): [] for size in concurrency for n in range(drafter.max_drafts + 1)
    }
    cells = [(turn, cell) for turn in range(turns) for cell in random.Random(turn).sample([*rows], len(rows))]
    for turn, (size, n) in tqdm(cells, desc="sweep", mininterval=5):
        engine = Engine(target, drafter if n else None, n or None, slots=size, capacity=longest)
        rows[size, n].append(rate(engine, examples, turn))
    return rows


def _pick(table: Sequence[dict[str, Any]], size: int) -> dict[str, Any]:
    """The N with the largest prediction at a concurrency, and how far it is from the fastest measured."""
    some = [row for row in table if row["requests"] == size]
    pick = max(some, key=lambda row: row["predicted"])
    best = max(some, key=lambda row: row["measured"])
    regret = 100 * (1 - pick["measured"] / best["measured"])
    return {"requests": size, "pick": pick["n"], "best": best["n"], "regret_pct": round(regret, 2)}


def _print(table: Sequence[dict[str, Any]]) -> None:
    print(f"{'requests':>8s} {'N':>3s} {'predicted':>10s} {'measured':>9s}  error")
    for row in table:
        figures = f"{row['predicted']:10.1f} {row['measured']:9.1f}"
        print(f"{row['requests']:8d} {row['n']:3d} {figures} {row['error_pct']:+6.1f}%")


def main() -> None:
    chosen = options(sys.argv[1:], **DEFAULTS)
    if not chosen["sweeps"] and not chosen["drafter"]:
        raise SystemExit("name sweeps=FILE, drafter=DIR or both")
    result: dict[str, Any] = {"benchmark": "plan"}
    if chosen["sweeps"]:
        result["sweeps"] = against_sweeps(Path(chosen["sweeps"]))
    if chosen["drafter"]:
        result["here"] = here(chosen)
    print(json.dumps({**result, **environment()}))


if __name__ == "__main__":
    main()
