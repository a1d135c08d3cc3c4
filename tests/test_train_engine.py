"""The five verbs over plain torch. Two ranks of DeepSpeed are in test_distributed.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import runs
from train.engine import PlainEngine, check_launch, rank, world_size
from train.loop import TrainConfig
from train.optim import OptimConfig

CASE = json.loads((Path(__file__).parent / "cases" / "t01_loss_and_metrics.json").read_text())


def wrapped(module: nn.Module, dtype: torch.dtype = torch.float32, **optim) -> PlainEngine:
    engine = PlainEngine(OptimConfig(**optim), torch.device("cpu"), dtype)
    engine.wrap(module)
    return engine


def test_the_logged_norm_is_that_of_the_whole_gradient_before_clipping():
    want = CASE["grad_norm"]["expect_logged"]
    engine = wrapped(nn.Linear(2, 2, bias=False), clip=0.5)
    engine.backward((engine.module.weight * torch.tensor([[2.0, 1.0], [2.0, 0.0]])).sum())
    assert engine.step(1e-3) == pytest.approx(want)


def test_a_step_moves_along_the_gradient_clipped_to_the_given_norm():
    engine = wrapped(nn.Linear(2, 2, bias=False), clip=0.5)
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    before = engine.module.weight.detach().clone()
    engine.backward(engine.module.weight.sum())  # norm 2
    engine.step(1.0)
    moved = before - engine.module.weight.detach()
    torch.testing.assert_close(moved, torch.full((2, 2), 0.25), rtol=1e-5, atol=0)


def test_gradients_of_micro_batches_add_up_and_are_cleared_by_the_step():
    engine = wrapped(nn.Linear(1, 1, bias=False), clip=100.0)
    for factor in (1.0, 2.0, 4.0):
        engine.backward(engine.module.weight.sum() * factor)
    assert engine.step(1e-3) == pytest.approx(7.0)
    engine.backward(engine.module.weight.sum())
    assert engine.step(1e-3) == pytest.approx(1.0)


def test_a_norm_weight_moves_by_steps_smaller_than_bfloat16_can_see():
    case = CASE["norm_weight"]
    engine = wrapped(nn.LayerNorm(4, bias=False), torch.bfloat16, lr=1e-4)
    for _ in range(case["updates"]):
        with engine.precision():
            loss = engine.module.weight.sum()  # a constant gradient: AdamW moves by the rate
        engine.backward(loss)
        engine.step(-case["each"])
    found = engine.module.weight.detach()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((4,), case["expect_fp32"]), rtol=0, atol=1e-3)


def test_products_run_in_bfloat16_and_weights_stay_in_float32(monkeypatch):
    monkeypatch.setattr("train.engine.bfloat16_pays", lambda: True)
    engine = wrapped(nn.Linear(4, 4), torch.bfloat16)
    with engine.precision():
        out = engine.module(torch.ones(1, 4))
    assert out.dtype == torch.bfloat16
    engine.backward(out.float().sum())
    engine.step(1e-3)
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    assert {s["exp_avg"].dtype for s in engine.optimizer.state.values()} == {torch.float32}


def test_a_cpu_that_only_emulates_bfloat16_computes_in_float32(monkeypatch):
    monkeypatch.setattr("train.engine.bfloat16_pays", lambda: False)
    engine = wrapped(nn.Linear(4, 4), torch.bfloat16)
    with engine.precision():
        assert engine.module(torch.ones(1, 4)).dtype == torch.float32


def test_the_step_counter_goes_on_after_a_reload_in_bfloat16_too(tmp_path):
    case = CASE["step_counter"]
    engine = wrapped(nn.Linear(2, 2), torch.bfloat16)
    engine.backward(engine.module.weight.sum() + engine.module.bias.sum())
    engine.step(1e-3)
    for state in engine.optimizer.state.values():
        state["step"].fill_(case["start"])
    engine.save(tmp_path)
    again = wrapped(nn.Linear(2, 2), torch.bfloat16)
    again.load(tmp_path)
    again.backward(again.module.weight.sum() + again.module.bias.sum())
    again.step(1e-3)
    assert [int(state["step"]) for state in again.optimizer.state.values()] == [case["after_one_step"]] * 2


def test_a_reloaded_engine_takes_the_same_steps_to_the_bit(tmp_path):
    def go_on(engine: PlainEngine, steps: range) -> None:
        for step in steps:
            engine.backward((engine.module(torch.full((1, 3), float(step))) ** 2).sum())
            engine.step(1e-2 / (step + 1))

    unbroken = wrapped(nn.Linear(3, 2), weight_decay=0.1)
    start = {name: value.clone() for name, value in unbroken.module.state_dict().items()}
    go_on(unbroken, range(6))
    first = wrapped(nn.Linear(3, 2), weight_decay=0.1)
    first.module.load_state_dict(start)
    go_on(first, range(3))
    first.save(tmp_path)
    second = wrapped(nn.Linear(3, 2), weight_decay=0.1)
    second.load(tmp_path)
    go_on(second, range(3, 6))
    assert runs.same(second.module.state_dict(), unbroken.module.state_dict())
    assert runs.same(second.optimizer.state_dict(), unbroken.optimizer.state_dict())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stops_with_the_remedy_and_changes_nothing(value):
    engine = wrapped(nn.Linear(2, 2))
    before = {name: p.clone() for name, p in engine.module.state_dict().items()}
    engine.backward((engine.module.weight * value).sum())
    with pytest.raises(ValueError, match=r"(?s)gradient norm.*optim\.lr.*task=inspect.*hardware\.dtype"):
        engine.step(1e-3)
    assert runs.same(dict(engine.module.state_dict()), before)
    assert not engine.optimizer.state


def test_one_process_is_rank_0_of_1():
    assert (rank(), world_size()) == (0, 1)
    assert wrapped(nn.Linear(1, 1)).total({"a": 1.5}) == {"a": 1.5}


@pytest.mark.parametrize("packs", [1, 3, 5])
def test_packs_that_two_ranks_cannot_share_are_refused(monkeypatch, packs):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=rf"train\.packs={packs}.*multiple of the 2 ranks.*{packs + 1}"):
        check_launch("auto", packs)
    check_launch("auto", packs + 1)


def test_slurm_tasks_that_would_each_train_alone_are_refused(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(ValueError, match=r"SLURM_NTASKS=4, but WORLD_SIZE is not set.*srun.*torchrun"):
        check_launch("auto", 4)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_launch("auto", 4)


def test_the_plain_engine_refuses_a_launch_of_two_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"train\.engine=plain.*deepspeed"):
        check_launch("plain", 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"packs": 0}, {"pack_tokens": 0}, {"save_every": 0}, {"keep": 0}, {"eval_rows": 0}, {"eval_every": 0},
        {"steps": 0}, {"epochs": 0.0}, {"epochs": float("nan")}, {"engine": "fsdp"},
        {"zero_stage": 3}, {"zero_stage": 0},
    ],
)  # fmt: skip
def test_settings_of_training_are_checked_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"train\.{name}="):
        TrainConfig(**wrong)
