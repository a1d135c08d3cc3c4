"""Products of a few rows with a large weight, by the way that is quickest on this machine.

Decoding multiplies one row to a few dozen with every weight, and reads each weight from memory for it. How
near that comes to the memory's speed hangs on the processor and on the number of rows, so the ways that lead
to the same numbers are timed at the first product that is worth it:

    linear      x W^T as torch does it
    streamed    (W x^T)^T, filled up to 2, 4 or 8 rows
    packed      W in oneDNN's own order, a second copy (``FrozenLinear``)

With 2 to 4 rows in fp32 one processor (AVX2) takes half the time of ``linear`` when streamed, another
(AVX-512) twice of it; from five rows on packed weights took 0.3 to 0.9 of it on both.
The ways' sums differ in the last bits. What was timed is therefore kept, so that a machine always takes the
same way, and what is said to be reproducible is.
"""

from __future__ import annotations

import math
import statistics
from functools import cache
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.machine import kept, of_speed
from drafters.ops import product_dtype

LARGE = 2**16  # numbers in a weight from which on the way matters
STREAMED = 8  # the most rows that are streamed
ROWS = (1, 2, 3, 4, 8, 16, 64)  # numbers that are timed: others are taken for the next; more take ``linear``
WAYS = {"linear", "streamed", "packed"}
WORTH = 0.9  # of the time of ``linear``: another way has to save a tenth


def product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x W^T``, laid out like the result of ``F.linear``: what follows is slow on others."""
    if _way(x, weight_OI, ("linear", "streamed")) == "streamed":
        return streamed(x, weight_OI, bias_O)
    return F.linear(x, weight_OI, bias_O)


def streamed(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``(W x^T)^T`` of 2, 4 or 8 rows; others are filled up to the next of these by repeating rows."""
    rows_PI = x.reshape(-1, x.shape[-1])
    num = len(rows_PI)
    full = max(2, 1 << (num - 1).bit_length())
    filled_PI = rows_PI if full == num else torch.cat([rows_PI, rows_PI[: full - num]])
    out_PO = (weight_OI @ filled_PI.T).T[:num].contiguous()
    if bias_O is not None:
        out_PO = out_PO + bias_O
    return out_PO.view(*x.shape[:-1], len(weight_OI))


class Linear(nn.Linear):
    """A linear layer that is quick at a few rows."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)


class FrozenLinear(Linear):
    """A linear layer whose weight stays as it is, so that a packed copy of it can be kept.

    The copy is made at the first product that it is quickest for, and again for a weight that was replaced
    or written to after all (what is written to ``weight.data``, torch does not count).
    """

    _packed: Packed | None = None

    def forward(self, input: Tensor) -> Tensor:
        x, weight = input, self.weight
        way = _way(x, weight, ("linear", "streamed", "packed"))
        if way == "linear" or weight.is_inference():  # what is written to those, torch does not count
            return F.linear(x, weight, self.bias)
        if way == "streamed":
            return streamed(x, weight, self.bias)
        if self._packed is None or not self._packed.holds(weight):
            self._packed = Packed(weight)
        return self._packed.product(x, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its own: such tensors cannot be copied."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


class Packed:
    """A weight in oneDNN's order, and what it was made from."""

    def __init__(self, weight: Tensor) -> None:
        self.source = weight.detach()  # held, so that no other weight comes to lie in its place
        self.version = weight._version
        self.reordered = torch.ops.mkldnn._reorder_linear_weight(self.source)

    def holds(self, weight: Tensor) -> bool:
        """Whether this is that weight still, neither replaced nor written to."""
        return weight.data_ptr() == self.source.data_ptr() and weight._version == self.version

    def product(self, x: Tensor, bias_O: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.reordered, bias_O, "none", [], "")


@cache
@torch.inference_mode(False)
def packs_weights() -> bool:
    """Whether this torch has products with packed weights, and right ones: they are not public."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.ones(16, 8), torch.ones(5, 8)
    try:
        return torch.allclose(Packed(weight).product(x, None), F.linear(x, weight), atol=1e-5)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


# Which way ---------------------------------------------------------------------------------------


# Numbers of rows that ``linear`` is quickest for: asked first, since in decoding Python's own time counts.
_plain: set[int] = set()


def _way(x: Tensor, weight_OI: Tensor, among: tuple[str, ...]) -> str:
    """The quickest of some ways; ``linear`` where nothing is to be gained.

    There is a choice in decoding, in fp32 on a CPU, with weights that take time to read.
    """
    rows = x.numel() // x.shape[-1]
    if rows in _plain or torch.is_grad_enabled() or weight_OI.numel() < LARGE or rows == 0:
        return "linear"
    if x.device.type != "cpu" or product_dtype(x) != torch.float32:
        return "linear"
    order = quickest(rows)
    if order[0] == "linear":
        _plain.add(rows)
    return next(way for way in order if way in among)


@cache
def quickest(rows: int) -> tuple[str, ...]:
    """The ways of a product of so many rows, the quickest first; ``linear`` and those that save a tenth."""
    size = next((size for size in ROWS if size >= rows), None)
    if size is None:  # bound by arithmetic, which all do alike
        return ("linear",)
    seconds = _seconds()[size]
    ways = [way for way in seconds if seconds[way] < WORTH * seconds["linear"]]
    return (*sorted(ways, key=seconds.__getitem__), "linear")


@cache
def _seconds() -> dict[int, dict[str, float]]:
    """Of a product, by number of rows and way: timed once on a machine."""
    key = {
        "version": 1,  # of how products are timed
        **of_speed(torch.device("cpu")),
        "packs": packs_weights(),
    }
    return kept("products", key, _timed, _read)


def _read(found: dict[str, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Errors: ``KeyError``, ``ValueError`` or ``TypeError`` for what is not a whole table of seconds."""
    table = {size: {"linear": found[str(size)]["linear"], **found[str(size)]} for size in ROWS}
    for ways in table.values():
        if not ways.keys() <= WAYS or not all(0 < seconds < math.inf for seconds in ways.values()):
            raise ValueError(f"not seconds by way: {ways}")
    return table


@torch.inference_mode(False)
def _timed() -> dict[str, dict[str, float]]:
    """Median seconds of each way by number of rows, over weights that together no cache holds."""
    weights = [torch.ones(2048, 1024) for _ in range(12)]  # 96 MB
    packed = [Packed(weight) for weight in weights] if packs_weights() else []
    found: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        x = torch.ones(rows, 1024)
        ways: dict[str, Any] = {"linear": lambda at, x=x: F.linear(x, weights[at])}
        if rows <= STREAMED:
            ways["streamed"] = lambda at, x=x: streamed(x, weights[at], None)
        if packed:
            ways["packed"] = lambda at, x=x: packed[at].product(x, None)
        found[str(rows)] = {way: _median(run, len(weights)) for way, run in ways.items()}
    return found


@torch.inference_mode()
def _median(run: Any, num: int) -> float:
    seconds = []
    for turn in range(4):
        for at in range(num):
            begun = perf_counter()
            run(at)
            if turn:  # the first one warms up
                seconds.append(perf_counter() - begun)
    return statistics.median(seconds)
