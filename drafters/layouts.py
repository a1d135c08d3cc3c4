"""How others lay out a drafter directory: the names, the settings, and what each layout cannot hold.

Tensor by tensor these are the layouts of z-lab/dflash at 1012959, SpecForge at 0354ed8, SGLang's
llama_eagle3.py, SafeAILab/EAGLE at 148042c and DeepSpec at 5905deb. A key that a config.json lacks means what
its format documents, written below in ``defaults``, or is an error. Their layer ids name the output of a
layer, as ours do, but for the top-level ``eagle_aux_hidden_state_layer_ids``, which vLLM reads as the layer's
input (+1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafters.block import evenly_spaced
from drafters.method import Drafter, MethodConfig, all_methods
from drafters.target import Target

AUX_IDS = "eagle_aux_hidden_state_layer_ids"


class Fields:
    """A config.json: a key is there, or its format documents what its absence means.

    Errors: ``ValueError`` naming the file, the key, the value and what to write instead.
    """

    def __init__(self, found: Mapping[str, Any], defaults: Mapping[str, Any], directory: Path) -> None:
        self.found, self.defaults, self.directory = found, defaults, directory

    def __contains__(self, key: str) -> bool:
        return key in self.found

    def __getitem__(self, key: str) -> Any:
        if self.found.get(key) is not None:  # null is a key that is not there, as transformers has it
            return self.found[key]
        if key not in self.defaults:
            raise ValueError(
                f"{self.directory}/config.json has no {key!r} and its format documents no default: add it"
            )
        default = self.defaults[key]
        return default(self) if callable(default) else default

    def must_be(self, key: str, wanted: Any, why: str) -> None:
        """Refuse any other value of ``key``; none at all is right where its format allows that."""
        value = self[key]
        if value is not None and value != wanted:
            self.refuse(key, value, f"{why} ({key}={wanted!r})")

    def refuse(self, key: str, value: Any, why: str) -> None:
        """Errors: always."""
        raise ValueError(f"{self.directory}/config.json: {key}={value!r}: {why}")


@dataclass(frozen=True)
class Layout:
    """One way of laying out a drafter directory."""

    title: str
    architecture: str
    refusal: Callable[[Drafter], str | None]  # why it cannot hold a drafter, naming the field
    config: Callable[[Drafter], dict[str, Any]]  # its config.json, but for what all layouts share
    settings: Callable[[Fields, Target], MethodConfig]  # the inverse
    defaults: Mapping[str, Any]  # what the absence of a key means
    renamed: Mapping[str, str] = field(default_factory=dict)  # our tensor names begin so, theirs so
    saves_embedding: bool = False
    saves_head: bool = False
    saves_maps: bool = False
    own_head: bool = False  # its drafters may have a head that is not the target's


# What all of them share: the keys of a transformers config ------------------------------------------------

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "hidden_act", "attention_bias",
)  # fmt: skip

TRANSFORMERS_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "target_hidden_size": None,  # as wide as the drafter
    "draft_vocab_size": None,  # the target's own
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "layer_types": None,  # all full attention, unless use_sliding_window says otherwise
    "use_sliding_window": False,
    "sliding_window": None,
}


def common_config(drafter: Drafter) -> dict[str, Any]:
    """The layers' sizes and positions, rotary fields and dtype under their old names and their new ones."""
    layers = drafter.layer_config()
    rope = rope_of(layers, "full_attention", "the drafter")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    dtype = str(next(drafter.parameters()).dtype).removeprefix("torch.")
    return {
        **layers,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def check_common(fields: Fields, drafter: Drafter) -> None:
    """``ValueError`` for draft layers that compute something else than those a drafter of this target has."""
    ours, name = drafter.layer_config(), drafter.target.name
    why = f"a drafter of {name} has another; give target= the model it was made for"
    for key in SIZES:
        fields.must_be(key, ours[key], why)
    fields.must_be("mlp_bias", False, "the MLP of a draft layer has no biases")
    fields.must_be("target_hidden_size", drafter.target.hidden_size, why)
    kind = ours["layer_types"][0] if "layer_types" in ours else "full_attention"
    theirs = rope_of(fields, kind, f"{fields.directory}/config.json")
    wanted = rope_of(ours, kind, name)
    if theirs != wanted:
        raise ValueError(
            f"{fields.directory}/config.json: its rotary positions are {theirs}, a drafter of {name} has "
            f"{wanted}; give target= the model it was made for"
        )
    if theirs["rope_type"] in ("dynamic", "longrope"):  # others do not depend on the length
        fields.must_be("max_position_embeddings", ours["max_position_embeddings"], why)


def rope_of(config: Any, layer_type: str, where: str) -> dict[str, Any]:
    """Rotary positions of a config in the new form, from either: ``rope_type``, ``rope_theta`` and the rest.

    ``layer_type`` chooses where there is a set for each. Errors: ``ValueError`` for an unknown type, for a
    rotation of a part of the head, and for old and new fields that disagree.
    """
    get = lambda key: config[key] if key in config or isinstance(config, Fields) else None  # noqa: E731
    new = get("rope_parameters")
    if new is not None and layer_type in new:
        new = new[layer_type]
    old = {"rope_theta": get("rope_theta"), **(get("rope_scaling") or {})}
    rope = _one_rope(old if new is None else new, where)
    if new is not None and "rope_theta" not in rope:
        rope["rope_theta"] = old["rope_theta"]
    both = new is not None and ("rope_theta" in config or ("rope_scaling" in config and get("rope_scaling")))
    if both and _one_rope(old, where) != rope:
        raise ValueError(f"{where}: rope_parameters={new} beside rope_theta and rope_scaling={old}; keep one")
    return rope


def _one_rope(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        raise ValueError(f"{where}: rope_type={kind!r} is none of {known}")
    part = fields.get("partial_rotary_factor")
    if part not in (None, 1.0):
        raise ValueError(f"{where}: partial_rotary_factor={part}: the whole head of a draft layer is rotated")
    skipped = ("type", "rope_type", "partial_rotary_factor")
    rest = {key: value for key, value in fields.items() if key not in skipped and value is not None}
    return {"rope_type": kind, **rest}


# EAGLE-3 of SpecForge, SGLang and SafeAILab ---------------------------------------------------------------


def _eagle3_refusal(drafter: Drafter) -> str | None:
    config: Any = drafter.config
    if config.layer_type != "llama":
        return f"method.layer_type={config.layer_type}: its layer has no norms on queries and keys, as llama"
    for name in ("norm_before_residual", "norm_before_fc"):
        if getattr(config, name):
            return f"method.{name}=true: it has no such flag; only false can be written"
    if len(drafter.layer_ids) != 3:
        return f"method.layer_ids={drafter.layer_ids}: its fc reads three kept layers"
    return None


def _eagle3_config(drafter: Drafter) -> dict[str, Any]:
    config: Any = drafter.config
    return {
        "draft_vocab_size": drafter.target.vocab_size if drafter.vocab is None else len(drafter.vocab),
        "mlp_bias": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": config.norm_before_residual,  # for vLLM, which knows more than SGLang
        "norm_before_fc": config.norm_before_fc,
        "num_aux_hidden_states": len(drafter.layer_ids),
        "eagle_config": {AUX_IDS: drafter.layer_ids, "use_aux_hidden_state": True},  # SGLang: outputs
        AUX_IDS: [k + 1 for k in drafter.layer_ids],  # vLLM, which looks here first: inputs
    }


def _eagle3_settings(fields: Fields, target: Target) -> MethodConfig:
    fields.must_be("num_hidden_layers", 1, "an EAGLE-3 drafter has one layer here")
    fields.must_be("tie_word_embeddings", False, "its head is not the embedding")
    fields.must_be("use_aux_norm", False, "write fc_norm, and fc_norm.0 for aux_norm_low and so on")
    ids = _eagle3_layers(fields, target)
    fields.must_be("num_aux_hidden_states", len(ids), f"it reads the layers {ids}")
    make: Any = all_methods()["eagle3"].config_class  # knows more keys than its base
    return make(
        layer_ids=ids,
        layer_type="llama",
        kv_heads=fields["num_key_value_heads"],
        unroll={**fields.defaults["foredraft"], **fields["foredraft"]}["max_drafts"],
        init="random",
        **{
            name: bool(fields[name])
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
    )


def _eagle3_layers(fields: Fields, target: Target) -> list[int]:
    """Outputs that SGLang's nested key names, or inputs that vLLM's names, or the three of all of them."""
    nested = fields["eagle_config"] or {}
    for key, value in nested.items():
        if key != AUX_IDS and (key not in EAGLE_CONFIG or EAGLE_CONFIG[key] != value):
            fields.refuse(f"eagle_config.{key}", value, "such a drafter cannot be held here")
    named = []
    if nested.get(AUX_IDS):
        named.append(list(nested[AUX_IDS]))
    if fields.found.get(AUX_IDS):
        named.append([k - 1 for k in fields[AUX_IDS]])
    if len(named) == 2 and named[0] != named[1]:
        fields.refuse(
            f"eagle_config.{AUX_IDS}",
            named[0],
            f"SGLang reads these as outputs of layers, vLLM the top-level {fields[AUX_IDS]} as inputs (+1), "
            "and they name different layers; correct one of them or remove it",
        )
    num = target.num_layers
    return named[0] if named else [1, num // 2 - 1, num - 4]


EAGLE_CONFIG = {  # keys of eagle_config beside the ids, and the one value that is held
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}

EAGLE3 = Layout(
    title="EAGLE-3 of SpecForge, SGLang and SafeAILab",
    architecture="LlamaForCausalLMEagle3",
    refusal=_eagle3_refusal,
    config=_eagle3_config,
    settings=_eagle3_settings,
    defaults={
        **TRANSFORMERS_DEFAULTS,
        "head_dim": lambda fields: fields["hidden_size"] // fields["num_attention_heads"],
        "num_key_value_heads": lambda fields: fields["num_attention_heads"],
        "tie_word_embeddings": False,
        "eagle_config": None,
        "num_aux_hidden_states": None,
        "use_aux_norm": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "foredraft": {"max_drafts": 7},  # the length of the unroll in SpecForge and SafeAILab
    },
    renamed={"layers.0.": "midlayer."},
    saves_head=True,
    saves_maps=True,
    own_head=True,
)


# DFlash of z-lab, SpecForge and SGLang --------------------------------------------------------------------


def _dflash_refusal(drafter: Drafter) -> str | None:
    config: Any = drafter.config
    if config.anchor_predicts:
        return (
            "method.anchor_predicts=true: its anchor slot predicts nothing; format=deepspec holds this layout"
        )
    if drafter.vocab is not None:
        return f"method.draft_vocab={len(drafter.vocab)}: it drafts all the target's tokens"
    return None


def _dflash_config(drafter: Drafter) -> dict[str, Any]:
    config: Any = drafter.config
    return {
        "block_size": config.block_size,
        "num_target_layers": drafter.target.num_layers,
        "is_causal": config.sliding_window is not None,
        "dflash_config": {"mask_token_id": drafter.mask_token, "target_layer_ids": drafter.layer_ids},
    }


def _dflash_settings(fields: Fields, target: Target) -> MethodConfig:
    nested = fields["dflash_config"] or {}
    for key, value in nested.items():
        if key not in DFLASH_KEYS and fields.defaults.get(key) != value:
            fields.refuse(f"dflash_config.{key}", value, "such a drafter cannot be held here")
    fields = Fields({**fields.found, **nested}, fields.defaults, fields.directory)
    for key in DFLASH_PLAIN:
        fields.must_be(key, DFLASH_PLAIN[key], "such a drafter cannot be held here")
    return _block_settings(fields, target, "dflash", anchor_predicts=False)


def _block_settings(fields: Fields, target: Target, method: str, **more: Any) -> MethodConfig:
    """Of a block drafter: slots, mask token, kept layers, and which context and slots a query sees."""
    fields.must_be("num_target_layers", target.num_layers, f"{target.name} has another number of layers")
    window = _sliding_window(fields)
    for key in ("is_causal", "causal"):
        fields.must_be(key, window is not None, "sliding layers are causal here and full ones are not")
    make: Any = all_methods()[method].config_class
    return make(
        block_size=fields["block_size"],
        num_layers=fields["num_hidden_layers"],
        layer_ids=list(fields["target_layer_ids"]),
        mask_token=fields["mask_token_id"],
        sliding_window=window,
        init="random",
        **more,
    )


def _sliding_window(fields: Fields) -> int | None:
    types = fields["layer_types"]
    if types is None:
        fields.must_be("use_sliding_window", False, "name the kind of each layer in layer_types")
        return None
    if len(types) != fields["num_hidden_layers"] or len(set(types)) != 1:
        fields.refuse("layer_types", types, "all draft layers are of one kind here, and each is named")
    if types[0] == "full_attention":
        return None
    window = fields["sliding_window"]
    if types[0] != "sliding_attention" or window is None:
        fields.refuse("layer_types", types, f"beside sliding_window={window}: this kind is not known here")
    return window


DFLASH_KEYS = {"mask_token_id", "mask_token", "target_layer_ids", "block_size", "causal"}
DFLASH_PLAIN = {  # keys of dflash_config that other drafters have, and the one value that is held
    "projector_type": "dflash",
    "attention_mode": "gqa",
    "shift_label": False,
    "pure_draft_prefix_len": 0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "use_aux_hidden_state": True,
}

BLOCK_DEFAULTS: dict[str, Any] = {
    **TRANSFORMERS_DEFAULTS,
    "is_causal": None,  # sliding layers are, full ones are not
    "causal": None,
    "num_target_layers": None,  # whatever the target has
}

DFLASH = Layout(
    title="DFlash of z-lab, SpecForge and SGLang",
    architecture="DFlashDraftModel",
    refusal=_dflash_refusal,
    config=_dflash_config,
    settings=_dflash_settings,
    defaults={
        **BLOCK_DEFAULTS,
        **DFLASH_PLAIN,
        "dflash_config": None,
        "target_layer_ids": lambda fields: evenly_spaced(
            fields["num_hidden_layers"], fields["num_target_layers"]
        ),
    },
)


# DSpark of DeepSpec, whose DFlash is a DSpark without heads ------------------------------------------------


def _dspark_refusal(drafter: Drafter) -> str | None:
    config: Any = drafter.config
    if not config.anchor_predicts:
        return (
            "method.anchor_predicts=false: its anchor slot predicts; format=zlab holds DFlash of this layout"
        )
    if drafter.vocab is not None:
        return f"method.draft_vocab={len(drafter.vocab)}: it drafts all the target's tokens"
    if config.sliding_window is not None:
        return f"method.sliding_window={config.sliding_window}: its draft layers see all the context"
    return None


def _dspark_config(drafter: Drafter) -> dict[str, Any]:
    heads: dict[str, Any] = {"markov_rank": 0, "enable_confidence_head": False}
    described = drafter.describe()
    if "markov_rank" in described:
        heads = {key: described[key] for key in ("markov_rank", "enable_confidence_head")}
    if heads["markov_rank"]:
        heads["markov_head_type"] = described["markov_head_type"]
    if heads["enable_confidence_head"]:
        heads["confidence_head_with_markov"] = described["confidence_head_with_markov"]
    return {
        "block_size": described["block_size"],
        "mask_token_id": drafter.mask_token,
        "target_layer_ids": drafter.layer_ids,
        "num_target_layers": drafter.target.num_layers,
        "num_anchors": 512,  # of training, but DeepSpec loads no file without it
        **heads,
    }


def _dspark_settings(fields: Fields, target: Target) -> MethodConfig:
    fields.must_be("sample_from_anchor", True, "the anchor slot of this format predicts")
    rank, heard = fields["markov_rank"], fields["enable_confidence_head"]
    if not rank and not heard:  # DeepSpec's DFlash
        return _block_settings(fields, target, "dflash", anchor_predicts=True)
    kind = fields["markov_head_type"] if rank else "none"
    if heard:
        fields.must_be(
            "confidence_head_with_markov",
            bool(rank),
            "a confidence reads the Markov embedding where there is one",
        )
    heads: dict[str, Any] = {
        "markov": kind,
        "confidence": 1.0 if heard else 0.0,
        **({"markov_rank": rank} if rank else {}),
    }
    return _block_settings(fields, target, "dspark", anchor_predicts=True, **heads)


DSPARK = Layout(
    title="DSpark of DeepSpec",
    architecture="Qwen3DSparkModel",
    refusal=_dspark_refusal,
    config=_dspark_config,
    settings=_dspark_settings,
    defaults={**BLOCK_DEFAULTS, "sample_from_anchor": True},
    saves_embedding=True,
    saves_head=True,
)
