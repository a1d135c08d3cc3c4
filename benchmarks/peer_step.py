"""A training step of ``speculators`` as its trainer takes it, run by the interpreter of its own environment.

Started by benchmarks/train_step.py. Parameters are fp32 and bf16 is autocast, as in its train/trainer.py;
eager attention and eager losses, since the others need a compiler or Triton. Random weights.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import Qwen3Config

from benchmarks.worker import serve


def model(method: str, shapes: dict) -> torch.nn.Module:
    """Its drafter at these shapes."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    drafter_class, config_class = {
        "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    }[method]
    layers = Qwen3Config(
        vocab_size=shapes["vocab"],
        hidden_size=shapes["hidden"],
        intermediate_size=shapes["inner"],
        num_hidden_layers=shapes["layers"],
        num_attention_heads=shapes["heads"],
        num_key_value_heads=shapes["kv_heads"],
        head_dim=shapes["head_size"],
        max_position_embeddings=max(4096, shapes["tokens"]),
    )
    layers._attn_implementation = "eager"  # noqa: SLF001
    first = method == "dspark"  # its anchor slot predicts
    config = config_class(
        transformer_layer_config=layers,
        draft_vocab_size=shapes["vocab"],
        block_size=shapes["drafts"] + (0 if first else 1),
        sample_from_anchor=first,
        mask_token_id=shapes["vocab"] - 1,
        aux_hidden_state_layer_ids=list(range(1, shapes["states"] + 1)),
        speculators_config=SpeculatorsConfig(
            algorithm=method,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shapes["drafts"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    drafter = drafter_class(config)
    for weight in (drafter.embed_tokens, drafter.lm_head, drafter.verifier_lm_head):
        torch.nn.init.normal_(weight.weight, std=0.02)
    return drafter.train()


def main() -> None:
    """``python -m benchmarks.peer_step METHOD DTYPE SHAPES``"""
    from speculators.losses import resolve_loss_config

    method, dtype, shapes = sys.argv[1], getattr(torch, sys.argv[2]), json.loads(sys.argv[3])
    torch.manual_seed(0)
    drafter = model(method, shapes)
    optimizer = torch.optim.AdamW(drafter.named_parameters(), lr=6e-4)
    tokens, hidden = shapes["tokens"], shapes["hidden"]
    batch = {
        "hidden_states": torch.randn(1, tokens, shapes["states"] * hidden).to(dtype),
        "input_ids": torch.randint(shapes["vocab"] - 1, (1, tokens)),
        "loss_mask": torch.ones(1, tokens, dtype=torch.bool),
        "verifier_last_hidden_states": torch.randn(1, tokens, hidden).to(dtype),
        "document_ids": torch.zeros(1, tokens, dtype=torch.long),
        "position_ids": torch.arange(tokens)[None],
    }
    wanted = {"dflash": "ce", "dspark": '{"ce": 0.1, "tv": 0.9}'}[method]
    more = {
        "loss_config": resolve_loss_config(wanted, "eager"),
        "max_anchors": shapes["anchors"],
        **({"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]} if method == "dspark" else {}),
    }

    def step() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            _, loss, _ = drafter(**batch, **more)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        assert bool(torch.isfinite(loss)), loss

    serve(step)


if __name__ == "__main__":
    main()
