"""Step time and memory of every method at the shapes of Qwen3-8B: ``python -m benchmarks.device_step``

For a GPU, CUDA or ROCm, and under eight minutes there: hidden 4,096, vocabulary 151,936, five kept layers,
random weights and states, bf16 with fp32 masters and AdamW, packs of 4,096 and 8,192 tokens. Block methods
have five draft layers and 512 anchors of 7 drafts, others their own depth and every anchor. Memory is the
most that torch held on the device, the target's embedding and head included, its decoder layers not.

Also ``methods=dflash,eagle3``, ``tokens=4096``, ``steps=5``; ``small=true`` runs tiny shapes on any machine.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks import environment, options
from benchmarks.step import Shapes, Step
from benchmarks.worker import peak_bytes
from drafters.method import all_methods
from drafters.target import pick_device

QWEN3_8B = Shapes(
    hidden=4096,
    inner=12288,
    heads=32,
    kv_heads=8,
    head_size=128,
    vocab=151936,
    tied=False,
    layers=5,
    anchors=512,
)
SMALL = Shapes(hidden=32, inner=64, heads=4, kv_heads=2, head_size=8, vocab=128, anchors=8)
WARM_UP = 2


def measure(method: str, shapes: Shapes, device: torch.device, steps: int) -> dict[str, Any]:
    """Median seconds and peak memory of a step; ``None`` for both where the device is too small."""
    gpu = device.type == "cuda"
    row: dict[str, Any] = {"method": method, "tokens": shapes.tokens, "seconds": None, "peak_bytes": None}
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    try:
        step = Step(method, shapes, device, torch.bfloat16)
        for _ in range(WARM_UP + steps):
            begun = perf_counter()
            step()
            if gpu:
                torch.cuda.synchronize(device)
            times.append(perf_counter() - begun)
    except torch.OutOfMemoryError:
        return row
    row["anchors"] = step.anchors
    row["parameters"] = sum(p.numel() for p in step.drafter.parameters())
    row["seconds"] = median(times[WARM_UP:])
    row["peak_bytes"] = torch.cuda.max_memory_allocated(device) if gpu else peak_bytes()
    return row


def main() -> None:
    chosen = options(sys.argv[1:], methods="", tokens="4096,8192", steps=5, small=False)
    device = pick_device("auto")
    if device.type == "cpu" and not chosen["small"]:
        raise ValueError("no GPU here: these shapes need one; small=true runs tiny ones")
    shapes = SMALL if chosen["small"] else QWEN3_8B
    sizes = [64] if chosen["small"] else [int(size) for size in chosen["tokens"].split(",")]
    names = chosen["methods"].split(",") if chosen["methods"] else sorted(all_methods())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rows = []
    titles = ("tokens", "anchors", "M params", "seconds", "peak GB")
    print(f"{name}\n{'method':10s} " + " ".join(f"{title:>8s}" for title in titles))
    for method in names:
        for tokens in sizes:
            row = measure(method, replace(shapes, tokens=tokens), device, chosen["steps"])
            rows.append(row)
            if row["seconds"] is None:
                print(f"{method:10s} {tokens:8d} out of memory", flush=True)
                continue
            print(
                f"{method:10s} {tokens:8d} {row['anchors']:8d} {row['parameters'] / 1e6:8.0f} "
                f"{row['seconds']:8.3f} {row['peak_bytes'] / 1e9:8.1f}",
                flush=True,
            )
    print(json.dumps({"benchmark": "device_step", "device": name, "rows": rows, **environment()}))


if __name__ == "__main__":
    main()
