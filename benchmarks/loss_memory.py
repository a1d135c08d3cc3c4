"""Memory and gradients of the chunked loss beside the plain one: ``python -m benchmarks.loss_memory``.

4,096 positions over a vocabulary of 49,152, hidden 576, fp32. Each version runs in a process of its own,
and its peak is the growth of resident memory above what its inputs take.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import resource
import sys
from time import perf_counter

import torch

from benchmarks import environment
from drafters.losses import LossWeights, chunked, plain

POSITIONS, VOCAB, HIDDEN = 4096, 49152, 576


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same random hidden states, head, labels and weights for every version."""
    generator = torch.Generator().manual_seed(0)
    hidden_PD = torch.randn(POSITIONS, HIDDEN, generator=generator)
    head_ND = torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5
    labels_P = torch.randint(0, VOCAB, (POSITIONS,), generator=generator)
    weights_P = torch.rand(POSITIONS, generator=generator)
    return hidden_PD.requires_grad_(True), head_ND, labels_P, weights_P


def measure(name: str, queue) -> None:
    """Loss, gradient, seconds and peak extra bytes of one version."""
    torch.set_num_threads(2)
    hidden_PD, head_ND, labels_P, weights_P = inputs()
    (hidden_PD[:64].detach() @ head_ND[:64].T).sum()  # the matrix library takes its buffers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = perf_counter()
    form = {"plain": plain, "chunked": chunked}[name]
    loss, *_ = form(hidden_PD, head_ND, labels_P, weights_P, LossWeights())
    (loss / weights_P.sum()).backward()
    seconds = perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    queue.put((loss.item(), hidden_PD.grad.numpy(), seconds, peak))


def main() -> None:
    found = {}
    context = mp.get_context("spawn")
    for name in ("plain", "chunked"):
        queue = context.Queue()
        process = context.Process(target=measure, args=(name, queue))
        process.start()
        found[name] = queue.get()
        process.join()
    (loss, grad, seconds, peak), (loss_c, grad_c, seconds_c, peak_c) = found["plain"], found["chunked"]
    difference = float(abs(grad - grad_c).max() / abs(grad).max())
    print(f"{'version':10s} {'loss':>12s} {'seconds':>8s} {'peak extra MB':>14s}")
    for name, (value, _, took, extra) in found.items():
        print(f"{name:10s} {value:12.4f} {took:8.2f} {extra / 1e6:14.0f}")
    print(f"memory {peak_c / peak:.3f} of the plain version, gradients equal to {difference:.1e} relative")
    result = {
        "benchmark": "loss_memory",
        "memory_ratio": peak_c / peak,
        "time_ratio": seconds_c / seconds,
        "gradient_difference": difference,
        "loss_difference": abs(loss - loss_c) / abs(loss),
        **environment(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
