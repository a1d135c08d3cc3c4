"""The contract of a method, the base of its settings, and the registry.

A method is one file of this folder with a config, the modules and six verbs. The registry is filled
by importing every module of ``drafters/``: a new file is a new method, and nothing else changes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafters.losses import LossWeights
from drafters.ops import product_dtype
from drafters.products import product
from drafters.target import Target
from drafters.types import Batch, Example, Loss, Proposal, States
from drafters.vocab import DraftVocab


@dataclass
class MethodConfig:
    """``method.*`` that every method has."""

    name: str = "???"
    layer_ids: list[int] | None = None  # None: evenly spaced, see the method
    draft_vocab: int | None = None  # size of a reduced draft vocabulary; None: the target's own
    loss: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        if self.draft_vocab not in (None, type(self).draft_vocab) and self.draft_vocab < 2:
            raise ValueError(f"method.draft_vocab={self.draft_vocab}: give at least 2, or null for all")

    def kept_tokens(self, vocab_size: int) -> int | None:
        """Size of the draft vocabulary beside a target's; ``None`` where every token can be drafted."""
        return self.draft_vocab if self.draft_vocab is not None and self.draft_vocab < vocab_size else None

    @property
    def needs_last(self) -> bool:
        """Whether training needs the target's last states beside the kept layers."""
        return self.loss.needs_last


class Drafter(nn.Module):
    """Base of all methods: owns trainable parameters only; the target is borrowed, never stored.

    Embedding and head are the target's, shared by reference. They are no parameters of this module,
    so they are neither trained nor saved with it.
    """

    config_class: ClassVar[type[MethodConfig]]
    mask_token: Any = None  # the id that fills slots, where a method has such: no answer may hold it
    temperatures: list[float] | None = (
        None  # of confidences, by position, once calibrated (eval/calibrate.py)
    )
    architecture: ClassVar[str]  # the class name that speculators and vLLM know it by
    layer_ids_key: ClassVar[str] = "aux_hidden_state_layer_ids"  # what they call the kept layers
    saves_shared: ClassVar[bool] = False  # whether the file has to repeat the target's embedding and head

    def __init__(self, config: MethodConfig, target: Target, vocab: DraftVocab | None) -> None:
        super().__init__()
        self.config = config
        self.vocab = vocab
        self._shared: dict[str, Any] = {"target": target, "head": None, "own_head": None}
        self.layer_ids = target.check_layers(self.choose_layers(config, target.num_layers))

    @property
    def target(self) -> Target:
        return self._shared["target"]

    @property
    def head_ND(self) -> Tensor:
        """The head over the draft vocabulary, where and in what the drafter's products are.

        These are rows of the target's head, unless the drafter was read with one of its own.
        """
        like = next(self.parameters())
        head, dtype = self._shared["head"], product_dtype(like)
        if head is None or head.dtype != dtype or head.device != like.device:
            rows = self._target_rows() if self.own_head_ND is None else self.own_head_ND
            head = self._shared["head"] = rows.detach().to(like.device, dtype)
        return head

    @property
    def own_head_ND(self) -> Tensor | None:
        """The head that others trained this drafter with; ``None`` where it shares the target's."""
        return self._shared["own_head"]

    def take_head(self, weight_ND: Tensor) -> None:
        """Score drafts with this head in place of the target's. It stays as it is: it is no parameter."""
        assert weight_ND.shape == self._target_rows().shape, weight_ND.shape
        self._shared |= {"own_head": weight_ND, "head": None}

    def _target_rows(self) -> Tensor:
        weight_VD = self.target.head_weight_VD
        return weight_VD if self.vocab is None else weight_VD[self.vocab.kept_N.to(weight_VD.device)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary of hidden states after the drafter's own norm."""
        return self.target.softcapped(product(hidden, self.head_ND))

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.vocab is None else self.vocab.kept_N.to(draft_ids.device)[draft_ids]

    @property
    def has_confidence(self) -> bool:
        """Whether proposals come with a confidence a draft."""
        return False

    @property
    def nested(self) -> bool:
        """Whether N drafts are the first N of any larger number, so that one pass tells them all."""
        return False

    def forward(self, batch: Batch) -> Loss:
        """What an engine wraps (DeepSpeed calls modules, not methods)."""
        return self.loss(batch)

    # The verbs --------------------------------------------------------------------------------

    @classmethod
    def choose_layers(cls, config: Any, num_layers: int) -> list[int]:
        """Which target layers to keep: used by capture and by the engine."""
        raise NotImplementedError

    def start(self, examples: Iterable[Example]) -> str | None:
        """Look at the training rows once, before the first step; a line for the console about the start.

        Most methods have no use for it.
        """
        return None

    def place(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Choose what a training step looks at (anchors) and count its weight, before any forward.

        The count must not depend on the model: it is summed over ranks and micro-batches first, and
        every micro-batch is divided by that one number.
        """
        raise NotImplementedError

    def loss(self, batch: Batch) -> Loss:
        """Sums and counts of a placed batch, on the same forward as ``drafts``."""
        raise NotImplementedError

    def drafts(self, batch: Batch, anchors_A: Tensor, n: int) -> Proposal:
        """The greedy drafts of many anchors at once, each given the path up to its anchor."""
        raise NotImplementedError

    def draft_logits(self, batch: Batch, anchors_A: Tensor, n: int) -> Tensor:
        """The logits behind ``drafts``, ``[A, K, N]``: what the export gate compares."""
        raise NotImplementedError

    def path_logits(self, batch: Batch, anchors_A: Tensor, n: int) -> Tensor:
        """Logits of each draft given that those before it were the batch's own tokens, ``[A, K, N]``.

        These are ``draft_logits`` where a draft depends on its anchor alone; a method whose drafts depend
        on one another overrides it. Drafts past the end of a document may have any logits.
        """
        return self.draft_logits(batch, anchors_A, n)

    def begin(self, slots: int, capacity: int) -> Any:
        """An empty serving state for ``slots`` requests of up to ``capacity`` tokens.

        It has ``drop(slots)`` and ``move(source, target)``.
        """
        raise NotImplementedError

    def advance(self, state: Any, rows: range, states: States, tokens_BJ: Tensor, kept: list[int]) -> None:
        """Extend slots ``rows`` by the first ``kept[i]`` true states of each. Nothing self-made is kept."""
        raise NotImplementedError

    def answering(self, state: Any, slot: int) -> None:
        """The prompt of a slot is complete; what ``advance`` brings from now on is its answer.

        Drafters have no use for it; proposers that remember answers do.
        """

    def propose(
        self, state: Any, rows: range, anchors_B: Tensor, n: int, uniforms_BK: Tensor | None = None
    ) -> Proposal:
        """``n`` drafts after the newest token of each slot of ``rows`` (``anchors_B`` are token ids)."""
        raise NotImplementedError

    # The drafter directory (drafters/checkpoint.py) ---------------------------------------------

    @property
    def max_drafts(self) -> int:
        """The largest N this drafter was trained for."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The method's own keys of config.json, in the speculators scheme."""
        raise NotImplementedError

    @classmethod
    def read_description(cls, found: dict[str, Any]) -> MethodConfig:
        """The inverse: settings from a config.json; layer ids and vocabulary are filled in by the reader."""
        raise NotImplementedError

    def vllm_refusal(self) -> str | None:
        """Why vLLM cannot serve this drafter as it is written, ``None`` where it can."""
        return None

    def layer_config(self) -> dict[str, Any]:
        """Sizes, norms and rotary positions of the draft layers, as a transformers config."""
        raise NotImplementedError


def check_lengths(lengths: list[int] | None, most: int) -> None:
    """``ValueError`` for lengths of drafts that training cannot ask for."""
    if lengths is not None and not all(1 <= n <= most for n in lengths or [0]):
        raise ValueError(
            f"method.lengths={lengths}: give lengths from 1 to {most} drafts; one that stands there twice is "
            "drawn twice as often"
        )


METHODS: dict[str, type[Drafter]] = {}


def method(config_class: type[MethodConfig]):
    """Register a drafter under its config's ``name``."""

    def register(drafter: type[Drafter]) -> type[Drafter]:
        name = config_class.name
        assert name not in METHODS, f"two methods are called {name}"
        drafter.config_class = config_class
        METHODS[name] = drafter
        return drafter

    return register


def all_methods() -> dict[str, type[Drafter]]:
    """Every method of this folder, by name."""
    import drafters

    for module in pkgutil.iter_modules(drafters.__path__):
        importlib.import_module(f"drafters.{module.name}")
    return METHODS


def build(config: MethodConfig, target: Target, vocab: DraftVocab | None = None) -> Drafter:
    """The drafter of a config, with freshly initialised parameters."""
    return all_methods()[config.name](config, target, vocab)
