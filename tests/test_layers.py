"""Products of a few rows take another way to the same numbers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from drafters.layers import FEW_ROWS, Linear, product
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
    assert all(type(module) is Linear for module in of.model.modules() if isinstance(module, nn.Linear))
