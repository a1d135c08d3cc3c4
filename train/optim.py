"""Parameter groups, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class OptimConfig:
    """``optim.*``: AdamW with warm-up and cosine."""

    lr: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0  # on matrices only
    warmup: float = 0.04  # share of all steps
    final: float = 0.0  # share of lr that the cosine comes down to
    clip: float = 1.0  # global gradient norm

    def __post_init__(self) -> None:
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optim.{name}={getattr(self, name)}: give a positive number")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optim.{name}={getattr(self, name)}: give at least 0 and below 1")
        if not 0 <= self.final <= 1:
            raise ValueError(f"optim.final={self.final}: a share of optim.lr, from 0 to 1")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optim.warmup={self.warmup}: a share of all steps, at least 0 and below 1")


def make(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW over what is trainable; vectors (norms, biases) are not decayed."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def rate(step: int, total: int, config: OptimConfig) -> float:
    """The learning rate of step ``step`` of ``total``: linear warm-up, then a cosine to ``final``.

    A pure function, so a resumed run needs no scheduler state.
    """
    warm = round(config.warmup * total)
    if step < warm:
        return config.lr * (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    return config.lr * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * done)))
