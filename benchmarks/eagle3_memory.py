"""Memory of EAGLE-3's unroll beside a naive one: ``python -m benchmarks.eagle3_memory``.

One decoder layer at the sizes of the embedded target (hidden 576, 9 heads of 64 over 3), one document of
1,536 tokens, every position an anchor, fp32. The naive unroll keeps the keys of all steps side by side under
a dense mask, as the reference codes draw it. Each case runs in a process of its own; its peak is the growth
of resident memory above what its inputs take. What counts is what the steps beyond the first add.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import resource
import sys
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import environment
from drafters.eagle3 import Eagle3, Eagle3Config
from drafters.target import Target
from drafters.types import Batch, States

TOKENS, STEPS = 1536, 7
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


def inputs() -> tuple[Eagle3, Batch]:
    """A random drafter and one document with the states of one kept layer."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, head_dim=64, num_hidden_layers=1, vocab_size=256)
    drafter = Eagle3(Eagle3Config(init="random", layer_ids=[0]), Target(LlamaForCausalLM(config)))
    tokens_BT = torch.randint(256, (1, TOKENS))
    doc_BT, position_BT = torch.zeros_like(tokens_BT), torch.arange(TOKENS)[None]
    states = States(torch.randn(1, TOKENS, 1, SIZES["hidden_size"]))
    return drafter, Batch(tokens_BT, doc_BT == 0, doc_BT, position_BT, states)


def ours(drafter: Eagle3, batch: Batch, num: int) -> Tensor:
    """Normed hidden states ``[A, K, D]`` of every position but the first, teacher-forced."""
    tokens_TK = torch.stack([batch.tokens_BT[0].roll(-k) for k in range(num)], dim=1)
    return drafter.forced(batch, torch.arange(1, TOKENS), tokens_TK[1:])


def naive(drafter: Eagle3, batch: Batch, num: int) -> Tensor:
    """The same: keys of all steps in one long sequence, one dense mask."""
    layer, hidden_TD = drafter.layers[0], drafter.fuse(batch.states)[0]
    attention, position_T = layer.self_attn, batch.position_BT[0]
    tokens_T, keys, values, out = batch.tokens_BT[0], [], [], []
    for k in range(num):
        both, residual_TD = layer.inputs(drafter.embed(tokens_T.roll(-1 - k)), hidden_TD)
        rotary = drafter.rotary(position_T + k)
        query_THE = attention.queries(both, rotary)
        key_THE, value_THE = attention.keys_values(both, rotary)
        keys.append(key_THE)
        values.append(value_THE)
        groups = attention.heads // attention.kv_heads
        all_keys, all_values = (torch.cat(rows).repeat_interleave(groups, dim=1) for rows in (keys, values))
        at_T1, key_1T = position_T[:, None], torch.arange(len(all_keys))[None]
        seen = torch.where(key_1T < TOKENS, key_1T <= at_T1, key_1T % TOKENS == at_T1)
        scores = torch.einsum("ahe,the->hat", query_THE, all_keys) * attention.size**-0.5
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        hidden_TD = layer.finish(residual_TD, torch.einsum("hat,the->ahe", weights, all_values).flatten(1))
        out.append(drafter.norm(hidden_TD))
    return torch.stack(out, dim=1)[:-1]


def measure(name: str, num: int, queue) -> None:
    """Value, gradient, seconds and peak extra bytes of one form at one number of steps."""
    torch.set_num_threads(2)
    drafter, batch = inputs()
    form = {"naive": naive, "ours": ours}[name]
    (torch.randn(64, 576) @ torch.randn(576, 64)).sum()  # the matrix library takes its buffers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = perf_counter()
    # Without the last chains, which read beyond the end. A normed row has one length, hence silu.
    total = F.silu(form(drafter, batch, num)[:-STEPS]).square().mean()
    total.backward()
    seconds = perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    grad = drafter.layers[0].self_attn.k_proj.weight.grad
    assert grad is not None
    queue.put((total.item(), grad.numpy(), seconds, peak))


def main() -> None:
    found = {}
    context = mp.get_context("spawn")
    print(f"{'unroll':8s} {'steps':>5s} {'seconds':>8s} {'peak extra MB':>14s}")
    for name in ("naive", "ours"):
        for num in (1, STEPS):
            queue = context.Queue()
            process = context.Process(target=measure, args=(name, num, queue))
            process.start()
            found[name, num] = queue.get()
            process.join()
            _, _, seconds, peak = found[name, num]
            print(f"{name:8s} {num:5d} {seconds:8.2f} {peak / 1e6:14.0f}")
    grown = {name: found[name, STEPS][3] - found[name, 1][3] for name in ("naive", "ours")}
    ratio = grown["ours"] / grown["naive"]
    (value, grad, took, _), (value_o, grad_o, took_o, _) = found["naive", STEPS], found["ours", STEPS]
    difference = float(abs(grad - grad_o).max() / abs(grad).max())
    print(
        f"{STEPS} steps add {ratio:.3f} of what the naive unroll's add; gradients equal to {difference:.1e}"
    )
    result = {
        "benchmark": "eagle3_memory",
        "tokens": TOKENS,
        "steps": STEPS,
        "growth_ratio": ratio,
        "growth_mb": {name: round(size / 1e6) for name, size in grown.items()},
        "time_ratio": took_o / took,
        "gradient_difference": difference,
        "value_difference": abs(value - value_o) / abs(value),
        **environment(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
