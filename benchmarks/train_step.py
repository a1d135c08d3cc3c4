"""A training step beside that of ``speculators`` 0.9.0: ``python -m benchmarks.train_step peer=PYTHON``

DFlash and DSpark at the shapes of SmolLM2-135M (hidden 576, vocabulary 49,152, two draft layers, five kept
layers), one row of 2,048 supervised tokens, 128 anchors of 7 drafts, in bf16 and in fp32. A step is forward,
backward, clipping and AdamW over random weights and states. Ours, the peer's and the matrix products that
they are held against take turns, each in a process of its own on the same two cores, so that whatever slows
the machine slows all three. Memory is the most that is ever resident, above what importing torch takes.

The peer needs an environment of its own, since its bounds exclude our transformers::

    python3 -m venv PEER
    PEER/bin/pip install torch==2.13.0 transformers==5.19.0 'datasets<=5.1.0' openai pydantic-settings \
        'loguru<=0.7.3' psutil rich
    PEER/bin/pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0

    python -m benchmarks.train_step peer=PEER/bin/python

Where a CPU only emulates bf16 (``bf16_emulated`` in the result), our trainer computes in fp32 from bf16
states and the peer's autocast does not, so the bf16 ratio says little; the share is of the emulated rate.
Without ``peer=`` only ours is measured. Also ``methods=dflash``, ``dtypes=float32``, ``steps=5``,
``threads=2``, and ``small=true`` for tiny shapes that only show that it runs.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from benchmarks import environment, options
from benchmarks.step import Shapes, Step
from benchmarks.worker import Worker, serve, torch_bytes
from drafters.method import all_methods
from drafters.target import DTYPES, bfloat16_pays

SMALL = Shapes(hidden=32, inner=64, heads=4, kv_heads=2, head_size=8, vocab=128, tokens=64, anchors=8)
WARM_UP = 2
PATIENCE = 20.0  # seconds; a step that takes longer is not repeated


def work(method: str, shapes: Shapes, attention: bool = True) -> float:
    """Floating-point operations that a step of a block method needs, in its products and its attention.

    A product of [m, k] and [k, n] is 2 m k n, and its backward one more of them for each operand that has a
    gradient. The head is frozen, and states have none. Attention counts what is visible.
    """
    s = shapes
    config: Any = all_methods()[method].config_class()
    drafts, slots = s.anchors * s.drafts, s.anchors * (s.drafts + config.first_slot)
    head = 2 * drafts * s.hidden * s.vocab * (3 if config.needs_last else 2)
    if "markov_rank" in vars(config):
        head += 3 * 2 * drafts * config.markov_rank * s.vocab
    context = 2 * 2 * s.tokens * s.states * s.hidden**2
    inside, kv = s.heads * s.head_size, 2 * s.kv_heads * s.head_size
    layers = 0.0
    for asking in [slots] * (s.layers - 1) + [drafts]:  # the last layer's other slots are never read
        layers += 3 * 2 * (s.tokens + slots) * s.hidden * kv
        layers += 3 * 2 * asking * s.hidden * (2 * inside + 3 * s.inner)
        layers += attention * 3 * 2 * asking * 2 * inside * (s.tokens / 2 + slots / s.anchors)
    return head + context + layers


class Products:
    """The head's product over a step's drafts, and its backward: what the matrix rate is taken from."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        rows = shapes.anchors * shapes.drafts
        self.hidden_PD = torch.randn(rows, shapes.hidden).to(dtype)
        self.head_VD = torch.randn(shapes.vocab, shapes.hidden).to(dtype)
        self.out_PV = torch.empty(rows, shapes.vocab, dtype=dtype)
        self.work = 2 * 2.0 * rows * shapes.hidden * shapes.vocab

    def __call__(self) -> None:
        torch.mm(self.hidden_PD, self.head_VD.T, out=self.out_PV)
        torch.mm(self.out_PV, self.head_VD, out=self.hidden_PD)
        self.hidden_PD.mul_(0).add_(1)


def take_turns(method: str, dtype: str, shapes: Shapes, chosen: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """For ours, the peer and the products: the times of their steps, and the most memory."""
    arguments = [f"methods={method}", f"dtypes={dtype}", f"small={str(chosen['small']).lower()}"]
    sides = {side: (sys.executable, __spec__.name, [f"side={side}", *arguments]) for side in ("ours", "rate")}
    if chosen["peer"]:
        sides["peer"] = (chosen["peer"], "benchmarks.peer_step", [method, dtype, json.dumps(asdict(shapes))])
    found: dict[str, dict[str, Any]] = {side: {"seconds": [], "cpu": []} for side in sides}
    with ExitStack() as stack:
        workers = {side: Worker(*how, chosen["threads"]) for side, how in sides.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        for turn in range(WARM_UP + chosen["steps"]):
            for side, worker in workers.items():
                if max(found[side]["seconds"], default=0) > PATIENCE:
                    continue
                step = worker.step()
                found[side]["peak"] = step["peak"]
                if turn >= WARM_UP or step["seconds"] > PATIENCE:
                    found[side]["seconds"].append(step["seconds"])
                    found[side]["cpu"].append(step["cpu"])
    return found


def compare(method: str, dtype: str, shapes: Shapes, chosen: dict[str, Any]) -> dict[str, Any]:
    """Ours against the peer and against the matrix rate, at one method and dtype."""
    found = take_turns(method, dtype, shapes, chosen)
    seconds = {side: median(times["seconds"]) for side, times in found.items()}
    rate = 4.0 * shapes.anchors * shapes.drafts * shapes.hidden * shapes.vocab / seconds["rate"]
    result = {
        "method": method,
        "dtype": dtype,
        "gflop": work(method, shapes) / 1e9,
        "seconds": seconds["ours"],
        "matrix_gflops": rate / 1e9,
        "share_of_matrix_rate": work(method, shapes) / seconds["ours"] / rate,
        "megabytes": (found["ours"]["peak"] - torch_bytes(sys.executable)) / 1e6,
        "cpu_seconds": {side: median(times["cpu"]) for side, times in found.items()},
    }
    if "peer" in found:
        megabytes = (found["peer"]["peak"] - torch_bytes(chosen["peer"])) / 1e6
        result |= {
            "peer_seconds": seconds["peer"],
            "times_as_fast": seconds["peer"] / seconds["ours"],
            "peer_megabytes": megabytes,
            "memory_ratio": result["megabytes"] / megabytes,
        }
    return result


def main() -> None:
    chosen = options(
        sys.argv[1:],
        peer="",
        methods="dflash,dspark",
        dtypes="bfloat16,float32",
        steps=5,
        threads=2,
        small=False,
        side="",  # a process of take_turns
    )
    shapes = SMALL if chosen["small"] else Shapes()
    if chosen["side"]:
        method, dtype = chosen["methods"], DTYPES[chosen["dtypes"]]
        ours = chosen["side"] == "ours"
        serve(Step(method, shapes, torch.device("cpu"), dtype) if ours else Products(shapes, dtype))
        return
    if not chosen["peer"]:
        print("no peer=PYTHON: only our side is measured; the docstring says how to install the other")
    rows = []
    for method in chosen["methods"].split(","):
        if method not in all_methods():
            print(f"{method}: no such method is registered, skipped")
            continue
        rows += [compare(method, dtype, shapes, chosen) for dtype in chosen["dtypes"].split(",")]
    _print(rows)
    torch.set_num_threads(chosen["threads"])
    result = {
        "benchmark": "train_step",
        "peer": "speculators 0.9.0" if chosen["peer"] else None,
        "bf16_emulated": not bfloat16_pays(),
        "rows": rows,
    }
    print(json.dumps({**result, **environment()}))


def _print(rows: list[dict[str, Any]]) -> None:
    columns = {
        "method": "method",
        "dtype": "dtype",
        "gflop": "GFLOP",
        "seconds": "ours s",
        "peer_seconds": "peer s",
        "times_as_fast": "x as fast",
        "matrix_gflops": "GFLOP/s",
        "share_of_matrix_rate": "share",
        "megabytes": "ours MB",
        "peer_megabytes": "peer MB",
        "memory_ratio": "memory",
    }
    print(" ".join(f"{title:>9s}" for title in columns.values()))
    for row in rows:
        cells = [row.get(key, "-") for key in columns]
        print(" ".join(f"{cell:>9s}" if isinstance(cell, str) else f"{cell:9.4g}" for cell in cells))


if __name__ == "__main__":
    main()
