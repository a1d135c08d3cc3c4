"""One optimizer step of a method at given shapes, over a target of random weights and random states.

The step is the training loop's: place anchors, forward, backward, clip, update. The states stand in the
batch already, so neither the target's pass nor reading them from a disk is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafters.block import BlockConfig
from drafters.method import Drafter, all_methods, build
from drafters.target import Target
from drafters.types import Batch, States
from drafters.vocab import DraftVocab
from train.engine import PlainEngine
from train.optim import OptimConfig

TARGET_LAYERS = 8  # enough for any method's choice; dropped as soon as the drafter is built


@dataclass(frozen=True)
class Shapes:
    """Sizes of a target, of its drafter and of one pack; the defaults are SmolLM2-135M's."""

    hidden: int = 576
    inner: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64
    vocab: int = 49152
    tied: bool = True
    layers: int = 2
    states: int = 5
    drafts: int = 7
    tokens: int = 2048
    anchors: int = 128


def random_target(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> Target:
    """A Qwen3 that has never seen anything."""
    config = Qwen3Config(
        vocab_size=shapes.vocab,
        hidden_size=shapes.hidden,
        intermediate_size=shapes.inner,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=shapes.heads,
        num_key_value_heads=shapes.kv_heads,
        head_dim=shapes.head_size,
        tie_word_embeddings=shapes.tied,
        max_position_embeddings=max(4096, shapes.tokens),
    )
    with device:
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    return Target(model, name="random")


def settings(method: str, shapes: Shapes) -> Any:
    """The method's config at these shapes. Methods other than blocks keep their own anchors and depth."""
    kind = all_methods()[method].config_class
    if not issubclass(kind, BlockConfig):
        return kind(init="random")  # type: ignore[call-arg]
    return kind(
        init="random",
        num_states=shapes.states,
        num_layers=shapes.layers,
        block_size=shapes.drafts + kind().first_slot,
        anchor_share=min(1.0, shapes.anchors / (shapes.tokens - 1)),
    )


def random_batch(shapes: Shapes, states: int, dtype: torch.dtype, device: torch.device) -> Batch:
    """One row, one document, every token supervised."""
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, device=device, dtype=dtype)  # noqa: E731
    tokens = shapes.tokens
    return Batch(
        tokens_BT=torch.randint(shapes.vocab - 1, (1, tokens), generator=generator, device=device),
        mask_BT=torch.ones(1, tokens, dtype=torch.bool, device=device),
        doc_BT=torch.zeros(1, tokens, dtype=torch.long, device=device),
        position_BT=torch.arange(tokens, device=device)[None],
        states=States(draw(1, tokens, states, shapes.hidden), draw(1, tokens, shapes.hidden)),
    )


class Step:
    """Call it for one step."""

    def __init__(self, method: str, shapes: Shapes, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.device = device
        self.target = random_target(shapes, device, dtype)
        config, vocab = settings(method, shapes), None
        kept = config.kept_tokens(shapes.vocab)
        if kept is not None:
            vocab = DraftVocab(torch.arange(kept), shapes.vocab)
        with device:
            self.drafter: Drafter = build(config, self.target, vocab).train()
        del self.target.layers[:]
        self.optim = OptimConfig()
        self.engine = PlainEngine(self.optim, device, dtype)
        self.module = self.engine.wrap(self.drafter)
        self.batch = random_batch(shapes, len(self.drafter.layer_ids), dtype, device)
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self) -> float:
        """The loss, a mean."""
        batch = self.drafter.place(self.batch, self.generator)
        self.anchors = len(batch.placed()[0])
        with self.engine.precision():
            loss = self.module(batch.to(self.device, torch.float32))
        mean = loss.sum / batch.count
        self.engine.backward(mean)
        self.engine.step(self.optim.lr)
        return float(mean.detach())
