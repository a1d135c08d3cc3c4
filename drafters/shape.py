"""What draft layers take from the target: their sizes, and weights to start from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config

from drafters.layers import ContextLayer
from drafters.target import Target


def draft_shape(
    target: Target, num_layers: int, sliding_window: int | None = None, kv_heads: int | None = None
) -> Qwen3Config:
    """Sizes and rotary positions of draft layers, taken from the target; key and value heads where given."""
    source = target.config
    rope = _rope(target, sliding_window is not None)
    rope = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}  # draft layers rotate whole heads
    return Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=kv_heads or source.num_key_value_heads,
        head_dim=vars(source).get("head_dim") or source.hidden_size // source.num_attention_heads,
        rms_norm_eps=source.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=source.max_position_embeddings,
        sliding_window=sliding_window,
        use_sliding_window=sliding_window is not None,
        layer_types=["full_attention" if sliding_window is None else "sliding_attention"] * num_layers,
        tie_word_embeddings=False,
    )


def _rope(target: Target, sliding: bool = False) -> dict[str, Any]:
    """The target's rotary settings; one set a layer type: a draft has only full or only sliding layers."""
    found = target.config.rope_parameters
    return found if "rope_type" in found else found["sliding_attention" if sliding else "full_attention"]


def layer_config(shape: Qwen3Config, family: str = "qwen3") -> dict[str, Any]:
    """Draft layers of the drafter directory, as a transformers config of ``family`` (qwen3 or llama)."""
    keys = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim hidden_act rms_norm_eps rope_parameters max_position_embeddings "
        "attention_bias tie_word_embeddings"
    )
    if family == "qwen3":
        keys += " sliding_window use_sliding_window layer_types"
    return {"model_type": family, **{key: getattr(shape, key) for key in keys.split()}}


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Matrices normal with standard deviation 0.02, as the families' own initialisation; norms stay 1."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=0.02)


def copy_layer(layer: ContextLayer, target: Target, k: int) -> None:
    """Give a draft layer the weights of decoder layer k. Errors as ``start_from_target``."""
    act = vars(target.config).get("hidden_act") or vars(target.config).get("hidden_activation")
    if act != "silu":
        raise ValueError(
            f"method.init=target: the MLP of a draft layer is silu, that of {target.name} {act}; "
            "use method.init=random"
        )
    partial = _rope(target).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(
            f"method.init=target: {target.name} rotates partial_rotary_factor={partial} of each head, a "
            "draft layer all of it, so that a copy would compute something else; use method.init=random"
        )
    source = target.layers[k]
    theirs = dict(source.named_parameters())
    if extra := sorted(theirs.keys() - dict(layer.named_parameters()).keys()):
        raise ValueError(
            f"method.init=target: layer {k} of {type(source).__name__} has {extra[0]}, which a draft layer "
            "has not, so that a copy would compute something else; use method.init=random"
        )
    for name, ours in layer.named_parameters():
        if name in theirs and theirs[name].shape == ours.shape:
            ours.copy_(theirs[name])
        elif name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            projection = theirs[name.replace("_norm", "_proj")] * theirs["input_layernorm.weight"]
            ours.fill_(projection.float().pow(2).sum(1).mean().sqrt().item())
        else:
            raise ValueError(
                f"method.init=target: layer {k} of {type(source).__name__} has no {name} of shape "
                f"{tuple(ours.shape)} to start from; use method.init=random"
            )
