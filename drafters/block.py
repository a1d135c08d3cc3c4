"""The block-parallel backbone that DFlash and DSpark share (DFlash, arXiv 2602.06036).

A round at anchor a (position of the last committed token) runs one block of S slots through a few
decoder layers. Slot 0 holds the anchor's embedding, every other slot the mask token's. Keys and values
of the *context* are projected straight from fused target states; the context has no queries:

    context c_t = hidden_norm(fc(g_t)), g_t the kept layers' outputs, t < a       (strictly)

            c_0  c_1  ...  c_{a-1} | x_a   M    M    M
    slot 0   v    v    v     v     |  v    v    v    v      position a
    slot 1   v    v    v     v     |  v    v    v    v      position a + 1
    slot 2   v    v    v     v     |  v    v    v    v      ...

The target's state at the anchor does not exist when a round starts, so it must not be seen in training.
Which token a slot predicts is the *layout*, stored in the checkpoint:

    anchor_predicts = false   slot s predicts x[a+s],   s >= 1; N drafts take N + 1 slots  (z-lab)
    anchor_predicts = true    slot s predicts x[a+s+1], s >= 0; N drafts take N slots      (DeepSpec)

Training, replay and serving call ``hidden`` below; they differ only in where keys and values lie.
``read_out`` makes drafts of what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from drafters.layers import Blocks, ContextLayer, RMSNorm, Rotary
from drafters.method import Drafter, MethodConfig, check_lengths
from drafters.objective import counted
from drafters.ops import (
    Span,
    context_mask,
    decay_weights,
    document_spans,
    draw_length,
    first_places,
    sample_anchors,
    valid_anchors,
)
from drafters.products import Linear
from drafters.shape import copy_layer, draft_shape, layer_config, randomise
from drafters.target import Target
from drafters.types import Batch, Proposal, States
from drafters.vocab import DraftVocab


@dataclass
class BlockConfig(MethodConfig):
    """``method.*`` of block drafters."""

    block_size: int = 8  # slots at full length, the anchor's included
    anchor_predicts: bool = False  # the layout, see drafters/block.py
    num_layers: int = 2  # draft layers
    num_states: int = 5  # kept target layers where layer_ids is not given
    mask_token: int | None = None  # None: an unused special token of the target's tokenizer
    sliding_window: int | None = None  # tokens a draft query sees; None: all
    init: str = "target"  # target: start from decoder layers of the target; random
    init_layers: list[int] | None = None  # which ones; None: the last
    anchor_share: float = 0.5  # share of a document's possible anchors a full-length pass looks at
    lengths: list[int] | None = None  # drafts a block is trained for, drawn alike; None: always all
    decay: float | None = 4.0  # weight exp(-k / decay) of the k-th draft; None: all alike

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 1 if self.anchor_predicts else 2
        if self.block_size < least:
            raise ValueError(f"method.block_size={self.block_size}: this layout needs at least {least}")
        if not 0 < self.anchor_share <= 1:
            raise ValueError(f"method.anchor_share={self.anchor_share}: give a share above 0, at most 1")
        check_lengths(self.lengths, self.max_drafts)
        if self.init not in ("target", "random"):
            raise ValueError(f"method.init={self.init}: write target or random")
        for name in ("num_layers", "num_states", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"method.{name}={value}: give at least 1")
        if self.decay is not None and not self.decay > 0:
            raise ValueError(f"method.decay={self.decay}: give a number above 0, or null for equal weights")

    @property
    def max_drafts(self) -> int:
        """Drafts of a full block: the largest N this drafter was trained for."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The first slot that predicts."""
        return 0 if self.anchor_predicts else 1


@dataclass
class BlockState:
    """Context keys and values of serving, ``[slots, capacity, H, E]`` a layer, true up to ``lengths``."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]

    def drop(self, slots: list[int]) -> None:
        """Forget what the slots hold; they start again from length 0."""
        for slot in slots:
            self.lengths[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Put one slot's request into another slot."""
        length = self.lengths[source]
        for store in (*self.keys, *self.values):
            store[target, :length] = store[source, :length]
        self.lengths[target], self.lengths[source] = length, 0


class BlockDrafter(Drafter):
    """Context projection, layers and norm; subclasses add a loss and what follows the logits."""

    config_class: ClassVar[type[BlockConfig]]
    config: BlockConfig
    layers: Sequence[ContextLayer]  # an nn.ModuleList

    def __init__(self, config: BlockConfig, target: Target, vocab: DraftVocab | None = None) -> None:
        super().__init__(config, target, vocab)
        self.shape = draft_shape(target, config.num_layers, config.sliding_window)
        size = self.shape.hidden_size
        self.fc = Linear(len(self.layer_ids) * target.hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, self.shape.rms_norm_eps)
        layers = nn.ModuleList(ContextLayer(self.shape) for _ in range(config.num_layers))
        self.layers = cast(Sequence[ContextLayer], layers)
        self.norm = RMSNorm(size, self.shape.rms_norm_eps)
        self.rotary = Rotary(self.shape)
        self.mask_token = choose_mask_token(config, target)
        self.reset_parameters()

    @property
    def max_drafts(self) -> int:
        return self.config.max_drafts

    def describe(self) -> dict[str, Any]:
        return {
            "block_size": self.config.block_size,
            "mask_token_id": self.mask_token,
            "sample_from_anchor": self.config.anchor_predicts,
            # vLLM makes every layer causal without this; a full-attention block is not (vllm_formats 5).
            "sliding_window_non_causal": self.config.sliding_window is None,
        }

    @property
    def nested(self) -> bool:
        """Causal blocks alone, since in others a slot sees those after it; and in fp32: rounded to bf16, sums
        of a longer block differ by more than the last bits."""
        return self.config.sliding_window is not None and self.fc.weight.dtype == torch.float32

    @classmethod
    def read_description(cls, found: dict[str, Any]) -> BlockConfig:
        layers = found["transformer_layer_config"]
        return cls.config_class(
            block_size=found["block_size"],
            anchor_predicts=found["sample_from_anchor"],
            num_layers=layers["num_hidden_layers"],
            mask_token=found["mask_token_id"],
            sliding_window=layers.get("sliding_window"),
            init="random",
        )

    def layer_config(self) -> dict[str, Any]:
        return layer_config(self.shape)

    @classmethod
    def choose_layers(cls, config: BlockConfig, num_layers: int) -> list[int]:
        return config.layer_ids or evenly_spaced(config.num_states, num_layers)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Random (standard deviation 0.02), then copies of target layers where asked for."""
        randomise(self)
        if self.config.init == "target":
            start_from_target(self)

    # The forward that training, replay and serving share --------------------------------------

    def context(self, states: States) -> Tensor:
        """Fused target states, ``[..., D]``: what every draft layer's context keys and values read."""
        return self.hidden_norm(self.fc(states.layers_BTLD.flatten(-2).to(self.fc.weight.dtype)))

    def slots(self, num_drafts: int) -> int:
        """Slots of a block with exactly that many predicting ones."""
        return num_drafts + self.config.first_slot

    def hidden(
        self,
        anchor_tokens_A: Tensor,
        position_A: Tensor,
        context: list[tuple[Tensor, Tensor]],
        spans: list[Span],
        num_drafts: int,
    ) -> Tensor:
        """Normed hidden states of the predicting slots, ``[A, K, D]``.

        ``position_A``: the anchor's position in its sequence, which is also how many context rows of
        its span it may see. ``context`` holds each layer's keys and values over all spans, [T, H, E].
        """
        num = self.slots(num_drafts)
        tokens_AS = anchor_tokens_A[:, None].repeat(1, num)
        tokens_AS[:, 1:] = self.mask_token
        x_PD = self.target.embed(tokens_AS.flatten()).to(self.fc.weight.dtype)
        position_AS = position_A[:, None] + torch.arange(num, device=position_A.device)
        window = self.config.sliding_window
        masks = [context_mask(span, position_A, num, window) for span in spans]
        blocks = Blocks(num, self.rotary(position_AS.flatten()), spans, masks)
        for layer, keys_values in zip(self.layers, context, strict=True):
            # After the last layer only the predicting slots are read.
            first = self.config.first_slot if layer is self.layers[-1] else 0
            x_PD = layer(x_PD, keys_values, blocks, first)
        return self.norm(x_PD.unflatten(0, (len(anchor_tokens_A), num_drafts)))

    def hidden_of(self, batch: Batch, anchors_A: Tensor, num_drafts: int) -> Tensor:
        """``hidden`` for anchors of a packed batch (flat indices, ascending)."""
        context_PD = self.context(batch.states).flatten(0, 1)
        position_P = batch.position_BT.flatten()
        rotary = self.rotary(position_P)
        context = [layer.self_attn.keys_values(context_PD, rotary) for layer in self.layers]
        spans = document_spans(batch.doc_BT, anchors_A)
        tokens_A = batch.tokens_BT.flatten()[anchors_A]
        return self.hidden(tokens_A, position_P[anchors_A], context, spans, num_drafts)

    def read_out(self, hidden_AKD: Tensor, tokens_A: Tensor) -> tuple[Tensor, Proposal]:
        """Logits ``[A, K, N]`` and greedy drafts from the slots' hidden states and the anchors' tokens."""
        logits_AKN = self.logits(hidden_AKD)
        return logits_AKN, Proposal(self.to_target_ids(logits_AKN.argmax(-1)))

    def draft_logits(self, batch: Batch, anchors_A: Tensor, n: int) -> Tensor:
        tokens_A = batch.tokens_BT.flatten()[anchors_A]
        return self.read_out(self.hidden_of(batch, anchors_A, n), tokens_A)[0]

    def drafts(self, batch: Batch, anchors_A: Tensor, n: int) -> Proposal:
        tokens_A = batch.tokens_BT.flatten()[anchors_A]
        return self.read_out(self.hidden_of(batch, anchors_A, n), tokens_A)[1]

    def place(self, batch: Batch, generator: torch.Generator) -> Batch:
        """How many drafts a training pass asks for, and from which random anchors.

        A shorter block leaves room for more anchors: a pass looks at the same number of slots.
        """
        most = self.config.max_drafts
        num = draw_length(self.config.lengths or [most], generator)
        share = min(1.0, self.config.anchor_share * self.slots(most) / self.slots(num))
        valid_BT = valid_anchors(batch.mask_BT, batch.doc_BT)
        anchors_A = sample_anchors(valid_BT, batch.doc_BT, share, generator)
        return counted(self, replace(batch, anchors_A=anchors_A, num_drafts=num), self.weights_K)

    def weights_K(self, num: int) -> Tensor:
        """How much each of ``num`` drafts of a block counts."""
        return decay_weights(num, self.config.decay)

    # Serving ----------------------------------------------------------------------------------

    def begin(self, slots: int, capacity: int) -> BlockState:
        weight = self.fc.weight
        attention = self.layers[0].self_attn
        shape = (slots, capacity, attention.kv_heads, attention.size)
        make = lambda: [weight.new_zeros(shape) for _ in self.layers]  # noqa: E731
        return BlockState(make(), make(), [0] * slots)

    def advance(
        self, state: BlockState, rows: range, states: States, tokens_BJ: Tensor, kept: list[int]
    ) -> None:
        row_P, at_P = first_places(kept, tokens_BJ.device)
        start_B = torch.tensor([state.lengths[row] for row in rows], device=tokens_BJ.device)
        position_P = start_B[row_P] + at_P
        context_PD, rotary = self.context(states[row_P, at_P]), self.rotary(position_P)
        where = row_P + rows.start, position_P
        for layer, keys, values in zip(self.layers, state.keys, state.values, strict=True):
            keys[where], values[where] = layer.self_attn.keys_values(context_PD, rotary)
        for row, num in zip(rows, kept, strict=True):
            state.lengths[row] += num

    def propose(
        self,
        state: BlockState,
        rows: range,
        anchors_B: Tensor,
        n: int,
        uniforms_BK: Tensor | None = None,
    ) -> Proposal:
        capacity = state.keys[0].shape[1]
        context = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(state.keys, state.values, strict=True)]
        spans = [
            Span(row * capacity, row * capacity + state.lengths[row], at, at + 1)
            for at, row in enumerate(rows)
        ]
        position_B = torch.tensor([state.lengths[row] for row in rows], device=anchors_B.device)
        hidden_BKD = self.hidden(anchors_B, position_B, context, spans, n)
        return self.read_out(hidden_BKD, anchors_B)[1]


def evenly_spaced(num: int, num_layers: int) -> list[int]:
    """Layer ids from 1 to ``num_layers - 3``, evenly spaced (the z-lab rule); one id is the middle.

    Targets too small for that spread over all layers but the last.
    """
    if num == 1:
        return [num_layers // 2]
    first, last = (1, num_layers - 3) if num_layers - 3 >= num else (0, num_layers - 2)
    ids = [round(first + i * (last - first) / (num - 1)) for i in range(num)]
    if len(set(ids)) < num:
        raise ValueError(f"method.num_states={num}: the target has only {num_layers} layers; give fewer")
    return ids


def choose_mask_token(config: BlockConfig, target: Target) -> int:
    """The token that fills empty slots: an id with an embedding row that no answer ever holds.

    Errors: ``ValueError`` for an id outside the vocabulary, or one that starts, ends or pads text.
    """
    tokenizer = target.tokenizer
    taken = set(target.stop_ids)
    if tokenizer is not None:
        taken |= {
            i
            for i in (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
            if i is not None
        }
    if config.mask_token is not None:
        if not 0 <= config.mask_token < target.vocab_size:
            raise ValueError(
                f"method.mask_token={config.mask_token}: the target has ids 0 to {target.vocab_size - 1}"
            )
        if config.mask_token in taken:
            raise ValueError(
                f"method.mask_token={config.mask_token}: this token starts, ends or pads text of the target; "
                "give an id that never occurs in an answer, or leave it out"
            )
        return config.mask_token
    if tokenizer is None:
        return max(set(range(target.vocab_size)) - taken)
    special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i not in taken]
    padding = range(len(tokenizer), target.vocab_size)
    for found in (special, padding):
        usable = [i for i in found if i < target.vocab_size]
        if usable:
            return max(usable)
    raise ValueError(
        "method.mask_token: the tokenizer has no spare special token; name an id that answers never hold"
    )


def start_from_target(drafter: BlockDrafter) -> None:
    """Copy decoder layers, final norm and the input norm of the target into a fresh drafter.

    The context starts as the highest kept layer that the copied ones can read, so that context keys and
    values are nearly the target's own. Qwen3-style query and key norms start at the scale that the
    target's projections give unit-variance inputs, where the target has none.
    Errors: ``ValueError`` for layers that compute something else (mixture-of-experts or latent attention,
    biases, more norms, another activation): ``init=random``.
    """
    config, target = drafter.config, drafter.target
    ids = config.init_layers or list(range(target.num_layers - config.num_layers, target.num_layers))
    if len(ids) != config.num_layers:
        raise ValueError(f"method.init_layers={ids}: give {config.num_layers} layer ids, one a draft layer")
    for layer, k in zip(drafter.layers, target.check_layers(ids, "method.init_layers"), strict=True):
        copy_layer(layer, target, k)
    drafter.norm.weight.copy_(target.decoder.norm.weight)
    below = [i for i, k in enumerate(drafter.layer_ids) if k < ids[-1]]
    at = max(below, default=0) * target.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, at : at + target.hidden_size].copy_(torch.eye(target.hidden_size))
    drafter.hidden_norm.weight.copy_(target.layers[ids[0]].get_parameter("input_layernorm.weight"))
