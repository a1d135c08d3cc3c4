"""The benchmark of plans at tiny sizes: what it prints and how it counts, never how fast."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import plan
from drafters import checkpoint
from drafters.target import HardwareConfig, load
from drafters.types import Example
from serve.engine import Engine
from tests import tiny
from tests.test_sweeps import panel, partly, written


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_all_but_the_smallest_and_the_middle_number_of_drafts_are_blanked():
    assert plan.blanked(panel()) == partly(panel(), 1, 4)
    assert plan.probes(panel(ns=(3, 7, 11, 15))) == (3, 11)


def test_errors_and_regrets_are_against_what_was_measured(tmp_path, monkeypatch, capsys):
    """A perfect line is predicted; one with a dear N that nobody probed costs what the pick loses there."""
    monkeypatch.setattr(sys, "argv", ["", f"sweeps={written(tmp_path, [panel()])}"])
    plan.main()
    found = last_line(capsys)["sweeps"]
    assert found["panels"] == 1
    assert found["mean_error_pct"] < 3
    assert found["mean_regret_pct"] < 1
    trap = panel(lambda n: (1.2 + 0.15 * n) * (1.5 if n == 7 else 1), with_n=0, fall=1.0, first=0.95)
    monkeypatch.setattr(sys, "argv", ["", f"sweeps={written(tmp_path, [trap])}"])
    plan.main()
    rates = trap.measured
    assert last_line(capsys)["sweeps"]["mean_regret_pct"] == pytest.approx(
        100 * (1 - rates[7] / max(rates.values())), abs=0.1
    )


def test_every_number_of_drafts_is_measured_at_every_concurrency(workshop, tmp_path, monkeypatch, capsys):
    target = load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))
    checkpoint.write(tiny.dflash(target, mask_token=3), tmp_path / "drafter")
    prompts = [tiny.example(8, 8, seed).ids for seed in range(3)]
    own = [tiny.greedy(target, ids, 12) for ids in prompts]
    examples = [
        Example(ids + answer, [False] * len(ids) + [True] * len(answer), "chat", f"{at}")
        for at, (ids, answer) in enumerate(zip(prompts, own, strict=True))
    ]
    monkeypatch.setattr(plan, "conversations", lambda *_: examples)
    arguments = [
        f"target={workshop / 'target'}",
        f"drafter={tmp_path / 'drafter'}",
        "concurrency=1,2",
        "turns=1",
    ]
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    plan.main()
    found = last_line(capsys)["here"]
    assert [(row["requests"], row["n"]) for row in found["rows"]] == [
        (s, n) for s in (1, 2) for n in range(5)
    ]
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in found["rows"])
    assert [pick["requests"] for pick in found["picks"]] == [1, 2]
    assert all(pick["regret_pct"] >= 0 for pick in found["picks"])


def test_a_rate_counts_the_tokens_of_full_slots_over_their_seconds(monkeypatch):
    """A clock that moves a second a step: two slots without drafts give two tokens a second."""
    target, now = tiny.target(), [0.0]
    step = Engine.step

    def ticking(engine):
        now[0] += 1
        return step(engine)

    monkeypatch.setattr(Engine, "step", ticking)
    monkeypatch.setattr(plan, "perf_counter", lambda: now[0])
    engine = Engine(target, slots=2, capacity=64)
    found = plan.rate(engine, [tiny.example(30, 10, seed) for seed in range(3)], 0)
    # In the step that reads a prompt its first token comes on top: one in twenty tokens.
    assert found == pytest.approx(2 * 20 / 19, rel=0.05)
