"""Products of a few rows take another way to the same numbers."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drafters import products
from drafters.products import STREAMED, FrozenLinear, Linear, packs_weights, product
from tests import tiny


@pytest.fixture
def take(monkeypatch):
    """Makes one way the quickest, for weights of any size."""

    def chosen(way: str) -> None:
        monkeypatch.setattr(products, "LARGE", 0)
        monkeypatch.setattr(products, "_plain", set())
        monkeypatch.setattr(products, "quickest", lambda rows: (way, "linear"))

    return chosen


@pytest.mark.parametrize("rows", range(STREAMED + 1))
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_a_few_rows_give_what_a_linear_layer_gives(take, rows, bias):
    take("streamed")
    x, weight, offset = torch.randn(1, rows, 24), torch.randn(40, 24), torch.randn(40)
    given = offset if bias else None
    found = product(x, weight, given)
    assert found.shape == (1, rows, 40)
    assert torch.allclose(found, F.linear(x, weight, given), atol=1e-5)


def test_training_and_other_precisions_take_the_plain_way(take, monkeypatch):
    take("streamed")
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
def test_the_result_is_laid_out_like_that_of_a_linear_layer(take, rows):
    take("streamed")
    assert product(torch.randn(1, rows, 24), torch.randn(40, 24)).is_contiguous()


@torch.inference_mode(False)
def frozen(inputs: int = 24, outputs: int = 40, bias: bool = False) -> FrozenLinear:
    torch.manual_seed(0)
    return FrozenLinear(inputs, outputs, bias).requires_grad_(False)


@pytest.mark.skipif(not packs_weights(), reason="this torch has no products with packed weights")
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packed_weights_give_what_a_linear_layer_gives(take, rows, bias):
    take("packed")
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
    assert layer._packed is not None
    assert layer(torch.empty(0, 24)).shape == (0, 40)


@pytest.mark.skipif(not packs_weights(), reason="this torch has no products with packed weights")
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
def test_a_weight_that_changes_after_all_is_packed_again(take, change):
    take("packed")
    layer, x = frozen(), torch.randn(9, 24)
    with torch.no_grad():
        layer(x)
        change(layer)
        assert torch.allclose(layer(x), F.linear(x, layer.weight), atol=1e-5)


@pytest.mark.skipif(not packs_weights(), reason="this torch has no products with packed weights")
def test_packed_weights_are_neither_saved_nor_copied(take):
    take("packed")
    layer, x = frozen(), torch.randn(9, 24)
    with torch.no_grad():
        want = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), want)
    assert list(layer.state_dict()) == ["weight"]


def test_gradients_take_the_plain_way(take):
    take("packed")
    layer, x = frozen(), torch.randn(9, 24, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer._packed is None


@torch.inference_mode()
def test_small_weights_are_worth_no_timing(monkeypatch):
    monkeypatch.setattr(products, "_seconds", None)
    assert frozen()(torch.randn(2, 24)).shape == (2, 40)


def test_the_quickest_way_goes_first_and_the_plain_one_where_little_is_saved(monkeypatch):
    seconds = {
        1: {"linear": 1.0, "streamed": 0.95, "packed": 2.0},
        2: {"linear": 1.0, "streamed": 0.5, "packed": 0.7},
        16: {"linear": 1.0, "packed": 0.4},
    }
    monkeypatch.setattr(products, "ROWS", (*seconds,))
    monkeypatch.setattr(products, "_seconds", lambda: seconds)
    monkeypatch.setattr(products, "quickest", products.quickest.__wrapped__)
    assert products.quickest(1) == ("linear",)
    assert products.quickest(2) == ("streamed", "packed", "linear")
    for rows in (3, 16):  # taken for the next number that was timed
        assert products.quickest(rows) == ("packed", "linear")
    assert products.quickest(17) == ("linear",)


@torch.inference_mode()
def test_a_machine_takes_the_same_way_in_every_process(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    found = products._seconds.__wrapped__()
    assert list(found) == list(products.ROWS)
    assert all(("streamed" in found[rows]) == (rows <= STREAMED) for rows in products.ROWS)
    assert all(seconds > 0 for ways in found.values() for seconds in ways.values())
    monkeypatch.setattr(products, "_timed", None)
    assert products._seconds.__wrapped__() == found
    (file,) = (tmp_path / "products").iterdir()
    monkeypatch.setattr(products, "_timed", lambda: {str(rows): {"linear": 1.0} for rows in products.ROWS})
    whole = file.read_text()
    for damage in (
        whole.replace("linear", "lines"),
        re.sub(r'"linear": [-.\de]+', '"linear": -1.0', whole),
        re.sub(r'"linear": [-.\de]+', '"linear": "abc"', whole),
        "[" * 100_000,
    ):
        file.write_text(damage)  # not a whole table of seconds: timed again
        assert products._seconds.__wrapped__()[1] == {"linear": 1.0}


@torch.inference_mode()
def test_no_copy_is_kept_of_weights_whose_changes_torch_does_not_count(take):
    take("packed")
    layer, x = FrozenLinear(24, 40, bias=False).requires_grad_(False), torch.randn(9, 24)
    assert layer.weight.is_inference()
    layer(x)
    layer.weight.mul_(2)
    assert torch.allclose(layer(x), F.linear(x, layer.weight), atol=1e-5)


@torch.inference_mode()
def test_under_autocast_products_are_those_of_torch(take):
    take("packed")
    layer, x = frozen(bias=True), torch.randn(9, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_a_target_without_room_for_a_second_copy_has_none(monkeypatch):
    monkeypatch.setattr("drafters.target.free_memory", lambda: 1000)
    of = tiny.target()
    assert all(type(module) is Linear for module in of.model.modules() if isinstance(module, nn.Linear))
