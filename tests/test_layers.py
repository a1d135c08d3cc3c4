"""Products of a few rows take another way to the same numbers."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drafters.layers import FEW_ROWS, STREAMED_ROWS, FrozenLinear, Linear, packs_weights, product
from tests import tiny


@pytest.mark.parametrize("rows", range(FEW_ROWS + 3))
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_few_rows_give_what_a_linear_layer_gives(rows, bias):
    x, weight, offset = torch.randn(1, rows, 24), torch.randn(40, 24), torch.randn(40)
    given = offset if bias else None
    found = product(x, weight, given)
    assert found.shape == (1, rows, 40)
    assert torch.allclose(found, F.linear(x, weight, given), atol=1e-5)


def test_training_and_other_precisions_take_the_plain_way(monkeypatch):
    seen = []
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: seen.append(x.dtype))
    layer = Linear(4, 4)
    layer(torch.randn(2, 4))
    with torch.inference_mode():
        layer(torch.randn(2, 4))
        layer.bfloat16()(torch.randn(2, 4).bfloat16())
    assert seen == [torch.float32, torch.bfloat16]


def test_a_target_decodes_with_them():
    of = tiny.target()
    kind = FrozenLinear if packs_weights() else Linear
    assert all(type(module) is kind for module in of.model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@torch.inference_mode()
def test_the_result_is_laid_out_like_that_of_a_linear_layer(rows):
    assert product(torch.randn(1, rows, 24), torch.randn(40, 24)).is_contiguous()


def frozen(inputs: int = 24, outputs: int = 40, bias: bool = False) -> FrozenLinear:
    torch.manual_seed(0)
    return FrozenLinear(inputs, outputs, bias).requires_grad_(False)


@pytest.mark.skipif(not packs_weights(), reason="this torch has no products on reordered weights")
@pytest.mark.parametrize("rows", [1, STREAMED_ROWS, STREAMED_ROWS + 1, 33])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_reordered_weights_give_what_a_linear_layer_gives(rows, bias):
    layer = frozen(bias=bias)
    for x in (
        torch.randn(rows, 24),
        torch.randn(2, rows, 24),
        torch.randn(24, rows).T,
        torch.randn(rows, 48)[:, ::2],
    ):
        found = layer(x)
        assert torch.allclose(found, F.linear(x, layer.weight, layer.bias), atol=1e-5)
        assert found.is_contiguous()
    assert (layer._packed is None) == (2 * rows <= STREAMED_ROWS)
    assert layer(torch.empty(0, 24)).shape == (0, 40)


@pytest.mark.skipif(not packs_weights(), reason="this torch has no products on reordered weights")
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.load_state_dict({"weight": torch.ones(40, 24)}),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(40, 24), requires_grad=False)),
        lambda layer: layer.bfloat16().float(),
    ],
    ids=["in place", "loaded", "replaced", "moved"],
)
def test_a_weight_that_changes_after_all_is_reordered_again(change):
    layer, x = frozen(), torch.randn(9, 24)
    with torch.no_grad():
        layer(x)
        change(layer)
        assert torch.allclose(layer(x), F.linear(x, layer.weight), atol=1e-5)


@pytest.mark.skipif(not packs_weights(), reason="this torch has no products on reordered weights")
def test_reordered_weights_are_neither_saved_nor_copied():
    layer, x = frozen(), torch.randn(9, 24)
    with torch.no_grad():
        want = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), want)
    assert list(layer.state_dict()) == ["weight"]


def test_gradients_take_the_plain_way():
    layer, x = frozen(), torch.randn(9, 24, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer._packed is None


def test_a_target_without_room_for_a_second_copy_has_none(monkeypatch):
    monkeypatch.setattr("drafters.target.psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    of = tiny.target()
    assert all(type(module) is Linear for module in of.model.modules() if isinstance(module, nn.Linear))
