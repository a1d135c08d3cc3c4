"""Parameter groups and the learning rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from train.optim import OptimConfig, make, rate

CONFIG = OptimConfig(lr=2e-3, warmup=0.2, final=0.1)


def test_the_rate_rises_linearly_and_then_follows_a_cosine():
    found = [rate(step, 20, CONFIG) for step in range(20)]
    rising = [2e-3 * (step + 1) / 4 for step in range(4)]
    falling = [2e-4 + 1.8e-3 * (1 + math.cos(math.pi * step / 16)) / 2 for step in range(16)]
    assert found == pytest.approx([*rising, *falling], rel=1e-12)


def test_the_rate_of_a_step_depends_on_nothing_but_its_number():
    forward = [rate(step, 50, CONFIG) for step in range(50)]
    backward = [rate(step, 50, CONFIG) for step in reversed(range(50))]
    assert forward == backward[::-1]


@pytest.mark.parametrize("total", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.04, 0.5, 0.99])
def test_every_step_of_a_run_of_any_length_has_a_positive_rate(total, warmup):
    rates = [rate(step, total, OptimConfig(lr=1e-3, warmup=warmup)) for step in range(total)]
    assert all(0 < found <= 1e-3 for found in rates)
    assert max(rates) == 1e-3


def test_matrices_are_decayed_and_vectors_and_frozen_weights_are_not():
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    module[2].requires_grad_(False)
    optimizer = make(module, OptimConfig(lr=0.1, weight_decay=0.5))
    before = {name: value.clone() for name, value in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    after = dict(module.named_parameters())
    torch.testing.assert_close(after["0.weight"], before["0.weight"] * (1 - 0.1 * 0.5))
    for name in ("0.bias", "1.weight", "1.bias", "2.weight"):
        assert torch.equal(after[name], before[name]), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0}, {"lr": math.nan}, {"lr": math.inf}, {"clip": 0.0}, {"clip": -1.0}, {"warmup": 1.0},
        {"warmup": -0.1}, {"final": 1.5}, {"beta1": 1.0}, {"beta2": -0.1},
    ],
)  # fmt: skip
def test_settings_that_would_train_nothing_are_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=rf"optim\.{name}="):
        OptimConfig(**wrong)
