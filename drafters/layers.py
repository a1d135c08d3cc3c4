"""Layers that every drafter is built from; model families differ by flags, not by copies.

Module names are the tensor names of the drafter directory (vLLM and speculators read the same).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from drafters.ops import Span
from drafters.products import Linear


class RMSNorm(nn.Module):
    """Root mean square norm with a weight (Zhang & Sennrich 2019), computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Rotary(nn.Module):
    """Rotary positions of any type that transformers knows, by its own code: ``cos, sin`` of [P, E]."""

    def __init__(self, shape: Qwen3Config) -> None:
        super().__init__()
        self.embedding = Qwen3RotaryEmbedding(shape)

    def _apply(self, fn, recurse: bool = True) -> Rotary:
        """Frequencies stay fp32 whatever dtype the drafter gets: rounded, they turn far positions wrong."""
        kept = dict(self.embedding.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            setattr(self.embedding, name, buffer.to(getattr(self.embedding, name).device))
        return self

    def forward(self, position_P: Tensor) -> tuple[Tensor, Tensor]:
        like = self.embedding.inv_freq
        cos_1PE, sin_1PE = self.embedding(like, position_P[None])
        return cos_1PE[0], sin_1PE[0]


def rotate(x_PHE: Tensor, cos_PE: Tensor, sin_PE: Tensor) -> Tensor:
    """Apply rotary positions in the half-split (neox) layout."""
    half = x_PHE.shape[-1] // 2
    turned = torch.cat([-x_PHE[..., half:], x_PHE[..., :half]], dim=-1)
    return x_PHE * cos_PE[:, None].to(x_PHE.dtype) + turned * sin_PE[:, None].to(x_PHE.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, inner, bias=False)
        self.up_proj = Linear(hidden, inner, bias=False)
        self.down_proj = Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Blocks:
    """What all layers of a pass share: blocks of ``slots`` rows each, flattened to P rows.

    ``rotary`` are ``cos, sin`` of ``[P, E]``; ``masks`` says for each span which context rows and slots its
    rows see, ``[A*S, context + A*S]``.
    """

    slots: int
    rotary: tuple[Tensor, Tensor]
    spans: list[Span]
    masks: list[Tensor]


class Attention(nn.Module):
    """Projections to and from heads, with rotary positions; what is seen is left to the subclass.

    ``inputs`` is the width that queries, keys and values read, the hidden size where it is ``None``.
    ``normed``: queries and keys have a norm (Qwen3), or have none (Llama).
    """

    def __init__(self, shape: Qwen3Config, inputs: int | None = None, normed: bool = True) -> None:
        super().__init__()
        size, kv_heads = shape.head_dim, shape.num_key_value_heads
        assert size is not None, "a draft shape names the size of its heads"
        assert kv_heads is not None, "a draft shape names its key and value heads"
        self.heads, self.kv_heads, self.size = shape.num_attention_heads, kv_heads, size
        inputs = inputs or shape.hidden_size
        self.q_proj = Linear(inputs, self.heads * size, bias=False)
        self.k_proj = Linear(inputs, self.kv_heads * size, bias=False)
        self.v_proj = Linear(inputs, self.kv_heads * size, bias=False)
        self.o_proj = Linear(self.heads * size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, shape.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(size, shape.rms_norm_eps) if normed else nn.Identity()

    def queries(self, x_PD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Queries (normed, rotated) ``[P, H, E]``."""
        return rotate(self.q_norm(self.q_proj(x_PD).unflatten(-1, (self.heads, self.size))), *rotary)

    def keys_values(self, x_PD: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values ``[P, H, E]``; of context rows and of block rows alike."""
        key_PHE = self.k_norm(self.k_proj(x_PD).unflatten(-1, (self.kv_heads, self.size)))
        value_PHE = self.v_proj(x_PD).unflatten(-1, (self.kv_heads, self.size))
        return rotate(key_PHE, *rotary), value_PHE


class ContextAttention(Attention):
    """Self-attention of blocks that also reads keys and values projected from target states."""

    def forward(self, x_PD: Tensor, context: tuple[Tensor, Tensor], blocks: Blocks, first: int = 0) -> Tensor:
        """Blocks flattened to ``x_PD``; ``context`` holds keys and values ``[T, H, E]``.

        Only the slots from ``first`` on ask; the answer holds a row for each of them.
        """
        rotary, slots = blocks.rotary, blocks.slots
        cos_PE, sin_PE = (tail(rows, slots, first) for rows in rotary)
        query_PHE = self.queries(tail(x_PD, slots, first), (cos_PE, sin_PE))
        key_PHE, value_PHE = self.keys_values(x_PD, rotary)
        key_THE, value_THE = context
        out = []
        for span, mask in zip(blocks.spans, blocks.masks, strict=True):
            rows = slice(span.first * slots, span.last * slots)
            seen = slice(span.start, span.end)
            key = torch.cat([key_THE[seen], key_PHE[rows]]).transpose(0, 1)
            value = torch.cat([value_THE[seen], value_PHE[rows]]).transpose(0, 1)
            asked = slice(span.first * (slots - first), span.last * (slots - first))
            query = query_PHE[asked].transpose(0, 1)
            found_HPE = F.scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=tail(mask, slots, first), enable_gqa=True
            )[0]
            out.append(found_HPE.transpose(0, 1).flatten(1))
        return self.o_proj(torch.cat(out))


class ContextLayer(nn.Module):
    """A pre-norm decoder layer over blocks (Qwen3 style). Context rows meet neither its norms nor its MLP."""

    def __init__(self, shape: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = ContextAttention(shape)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x_PD: Tensor, context: tuple[Tensor, Tensor], blocks: Blocks, first: int = 0) -> Tensor:
        """The slots from ``first`` on, after this layer."""
        seen_PD = self.self_attn(self.input_layernorm(x_PD), context, blocks, first)
        x_PD = tail(x_PD, blocks.slots, first) + seen_PD
        return x_PD + self.mlp(self.post_attention_layernorm(x_PD))


def tail(rows: Tensor, slots: int, first: int) -> Tensor:
    """Of blocks of ``slots`` rows each, the rows from slot ``first`` on."""
    return rows if first == 0 else rows.unflatten(0, (-1, slots))[:, first:].flatten(0, 1)
