"""Benchmarks of a training step at tiny shapes: that they run and what they print, never how fast."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import device_step, options, train_step
from benchmarks.step import Shapes, Step
from drafters.method import all_methods

SHAPES = Shapes(
    hidden=48, inner=96, heads=6, kv_heads=2, head_size=8, vocab=300, tokens=96, anchors=16, drafts=3
)


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_train_step_prints_one_row_a_method_and_dtype(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "small=true", "steps=1", "methods=dflash,nosuch", "dtypes=float32"])
    train_step.main()
    found = last_line(capsys)
    (row,) = found["rows"]
    assert found["peer"] is None
    assert (row["method"], row["dtype"]) == ("dflash", "float32")
    assert row["seconds"] > 0
    assert row["megabytes"] > 0


def test_device_step_prints_one_row_a_method(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "small=true", "steps=1"])
    device_step.main()
    rows = last_line(capsys)["rows"]
    assert [row["method"] for row in rows] == sorted(all_methods())
    assert all(row["seconds"] > 0 and row["anchors"] > 0 for row in rows)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_work_of_a_step_is_what_torch_counts_but_for_what_is_masked(method):
    """torch counts whole attention products, half of which nobody sees, and recomputed scores."""
    step = Step(method, SHAPES, torch.device("cpu"), torch.float32)
    with FlopCounterMode(display=False) as counted:
        step()
    attention = sum(
        flops for kind, flops in counted.get_flop_counts()["Global"].items() if "attention" in str(kind)
    )
    assert step.anchors == SHAPES.anchors
    assert train_step.work(method, SHAPES, attention=False) == pytest.approx(
        counted.get_total_flops() - attention, rel=0.02
    )


def test_an_option_is_known_and_of_its_type():
    assert options(["steps=3", "small=true"], steps=5, small=False) == {"steps": 3, "small": True}
    for wrong in ("step=3", "small", "small=yes", "steps=many"):
        with pytest.raises(ValueError, match=wrong.partition("=")[2] or wrong):
            options([wrong], steps=5, small=False)
