"""The drafter directory: config.json and model.safetensors in the speculators layout, which vLLM reads.

Layer ids are converted here and nowhere else: ours name the *output* of layer k, those of vLLM and
speculators its *input* (+1). What vLLM does not know stands under one key ``foredraft``. Embedding and
head are the target's and are not saved again, except where the format needs them: the head rows of a reduced
vocabulary, both for EAGLE-3. Read back, they have to be the target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import formats
from drafters.files import new_directory, replace_file
from drafters.method import Drafter, all_methods
from drafters.target import HardwareConfig, Target
from drafters.vocab import from_maps

SPECULATORS_VERSION = "0.9.0"
FINGERPRINT = ("vocab_size", "hidden_size", "num_layers", "tokenizer")
NUMBER, MAYBE = "a whole number", "a whole number or null"
KINDS = {  # of what is read from config.json; a key that is needed and not there is refused where it is read
    "speculators_model_type": "a string",
    "dtype": "a string",
    "draft_vocab_size": NUMBER,
    "aux_hidden_state_layer_ids": "a list of whole numbers",
    "eagle_aux_hidden_state_layer_ids": "a list of whole numbers",
    "block_size": NUMBER,
    "mask_token_id": MAYBE,
    "markov_rank": MAYBE,
    **dict.fromkeys(
        ("sample_from_anchor", "sliding_window_non_causal", "enable_confidence_head",
         "confidence_head_with_markov", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        "true or false",
    ),
    "markov_head_type": "a string",
    "transformer_layer_config": "an object",
    "transformer_layer_config.model_type": "a string",
    "transformer_layer_config.num_hidden_layers": NUMBER,
    "transformer_layer_config.num_key_value_heads": NUMBER,
    "transformer_layer_config.sliding_window": MAYBE,
    "transformer_layer_config.rope_scaling": "an object or null",
    "speculators_config": "an object",
    "speculators_config.proposal_methods": "a list of one object",
    "foredraft.target": "an object",
    "foredraft.layer_ids": "a list of whole numbers",
    "foredraft.dtype": "a string",
    "foredraft.own_head": "true or false",
    "foredraft.confidence_temperatures": "a list of numbers or null",
    "foredraft.evidence": "an object",
}  # fmt: skip


def write(
    drafter: Drafter,
    directory: Path,
    notes: dict[str, Any] | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write the directory whole or not at all; an existing one is replaced.

    ``notes`` go under ``foredraft`` in config.json (run, data hashes, acceptance). ``check`` is called on
    the directory under its temporary name; when it raises, nothing is left behind.
    """
    held = tensors(drafter)
    _check_finite(held, f"export to {directory} refused")
    with new_directory(directory, replace=True) as scratch:
        save_file(held, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(config(drafter, notes or {}), indent=2) + "\n")
        if check is not None:
            check(scratch)


def note(directory: Path, **facts: Any) -> None:
    """Add to what stands under ``foredraft`` in config.json; the tensors stay as they were checked."""
    found = read_config(directory)
    found["foredraft"] = {**found.get("foredraft", {}), **facts}
    replace_file(directory / "config.json", (json.dumps(found, indent=2) + "\n").encode())


def tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Every tensor of the file, by its name in the speculators scheme."""
    out = {name: value.detach().cpu().contiguous() for name, value in drafter.state_dict().items()}
    if drafter.vocab is not None or drafter.own_head_ND is not None or drafter.saves_shared:
        out["lm_head.weight"] = drafter.head_ND.detach().to("cpu", copy=True).contiguous()
    if drafter.vocab is not None:
        out["d2t"] = drafter.vocab.d2t_N
        out["t2d"] = drafter.vocab.t2d_V
    if drafter.saves_shared:
        like = next(drafter.parameters())
        out[formats.EMBEDDING] = drafter.target.embedding.weight.detach().to("cpu", like.dtype, copy=True)
    return out


def config(drafter: Drafter, notes: dict[str, Any]) -> dict[str, Any]:
    """config.json: the speculators keys, the method's own among them, and ours under one key."""
    target, settings = drafter.target, drafter.config
    refusal = drafter.vllm_refusal()
    return {
        "architectures": [drafter.architecture],
        "speculators_model_type": settings.name,
        "speculators_version": SPECULATORS_VERSION,
        "dtype": str(next(drafter.parameters()).dtype).removeprefix("torch."),
        "draft_vocab_size": target.vocab_size if drafter.vocab is None else len(drafter.vocab),
        "target_hidden_size": None,
        drafter.layer_ids_key: [k + 1 for k in drafter.layer_ids],
        **drafter.describe(),
        "transformer_layer_config": drafter.layer_config(),
        "speculators_config": {
            "algorithm": settings.name,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": drafter.max_drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target.name,
                "architectures": [type(target.model).__name__],
            },
        },
        "foredraft": {
            "version": own_version(),
            "target": target.fingerprint,
            "layer_ids": drafter.layer_ids,  # outputs, where the key above counts inputs
            "dtype": str(target.dtype).removeprefix("torch."),
            "own_head": drafter.own_head_ND is not None,
            "vllm": {
                "servable": refusal is None,
                "why": refusal or "the speculators layout, as vLLM reads it",
            },
            **({} if drafter.temperatures is None else {"confidence_temperatures": drafter.temperatures}),
            **notes,
        },
    }


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a drafter directory. Errors: ``ValueError`` when it is none."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"drafter={directory}: no drafter directory, it has no config.json")
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); export the run again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; export the run again")
    if not isinstance(found.get("foredraft", {}), dict):
        raise ValueError(f"{path}: foredraft={found['foredraft']!r}, but an object is needed")
    if "speculators_model_type" not in found:
        formats.recognise(found, directory)
    else:
        _check_kinds(found, path)
    return found


def _check_kinds(found: dict[str, Any], path: Path) -> None:
    """``ValueError`` naming the first field of config.json that is of another kind than it is read as."""
    for key, kind in KINDS.items():
        value: Any = found
        for part in key.split("."):
            value = value.get(part, KINDS) if value is not KINDS else KINDS  # KINDS: not there
        if value is not KINDS and not _is_kind(value, kind):
            raise ValueError(f"{path}: {key}={value!r}, but {kind} is needed")


def _is_kind(value: Any, kind: str) -> bool:
    if value is None:
        return kind.endswith(" or null")
    if isinstance(value, list):
        if kind == "a list of one object":
            return len(value) == 1 and isinstance(value[0], dict)
        of = (int, float) if "of numbers" in kind else int
        return kind.startswith("a list") and all(isinstance(v, of) and not isinstance(v, bool) for v in value)
    of_one: dict[type, str] = {bool: "true or false", int: NUMBER, str: "a string", dict: "an object"}
    return type(value) in of_one and kind.startswith(of_one[type(value)])


def hardware_for(directory: Path, hardware: HardwareConfig) -> HardwareConfig:
    """``hardware.dtype=auto`` is what the drafter was trained under, not what a new timing says."""
    trained = read_config(directory).get("foredraft", {}).get("dtype", "auto")
    return replace(hardware, dtype=trained) if hardware.dtype == "auto" else hardware


def read(directory: Path, target: Target) -> Drafter:
    """The drafter of a directory, ours or others', strictly: every tensor named, shaped and used.

    It is where its target is. Errors: ``ValueError`` naming the field or tensor, for another target, an
    unknown method, or a file that does not fit its config.
    """
    found = read_config(directory)
    if "speculators_model_type" not in found:
        _check_target(found.get("foredraft", {}).get("target"), target, directory)
        drafter = formats.read(found, directory, target)
        _check_finite(drafter.state_dict(), str(directory))
    else:
        try:
            drafter = _read(found, directory, target)
        except KeyError as error:
            raise ValueError(f"{directory}/config.json has no {error}; export the run again") from error
    _check_temperatures(drafter, directory)
    if "foredraft" in found and "speculators_config" in found:
        check_drafts(found, drafter)
    return drafter.to(target.device)


def _read(found: dict[str, Any], directory: Path, target: Target) -> Drafter:
    name = found["speculators_model_type"]
    if name not in all_methods():
        raise ValueError(
            f"drafter={directory}: method {name!r} is not one of {', '.join(sorted(all_methods()))}"
        )
    _check_target(found.get("foredraft", {}).get("target"), target, directory)
    try:
        held = load_file(directory / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{directory}/model.safetensors cannot be read: {error}; export the run again"
        ) from error
    _check_finite(held, f"{directory}/model.safetensors")
    _check_dtype(held, found["dtype"], directory)
    maps = {key: held.pop(key, None) for key in ("d2t", "t2d", "lm_head.weight")}
    embedding = held.pop(formats.EMBEDDING, None)
    if maps["d2t"] is not None and maps["lm_head.weight"] is None:
        raise ValueError(
            f"{directory}/model.safetensors: missing tensors ['lm_head.weight'] that d2t goes with"
        )
    try:
        vocab = None if maps["d2t"] is None else from_maps(maps["d2t"], maps["t2d"], target.vocab_size)
    except ValueError as error:
        raise ValueError(f"{directory}/model.safetensors: {error}") from error
    if found["draft_vocab_size"] != (target.vocab_size if vocab is None else len(vocab)):
        raise ValueError(
            f"{directory}: draft_vocab_size={found['draft_vocab_size']} but d2t maps "
            f"{vocab and len(vocab)} tokens"
        )
    cls = all_methods()[name]
    _check_num_layers(held, found["transformer_layer_config"]["num_hidden_layers"], directory)
    settings = cls.read_description(found)
    settings.layer_ids = [k - 1 for k in found[cls.layer_ids_key]]
    settings.draft_vocab = None if vocab is None else len(vocab)
    drafter = cls(settings, target, vocab)
    drafter.temperatures = found.get("foredraft", {}).get("confidence_temperatures")
    names = {name: name for name in drafter.state_dict()}
    formats.load_strictly(drafter, held, names, next(iter(held.values())).dtype, directory)
    _check_layer_ids(drafter, found, directory)
    _check_layer_config(drafter, found["transformer_layer_config"], directory)
    formats.check_embedding(embedding, target, directory)
    head = maps["lm_head.weight"]
    if head is not None and found.get("foredraft", {}).get("own_head"):
        drafter.take_head(head)
    if head is not None and not formats.alike(head, drafter.head_ND):
        raise ValueError(f"{directory}: lm_head.weight is not the rows of the target's head that d2t names")
    return drafter.eval()


def _check_finite(held: dict[str, Tensor], where: str) -> None:
    bad = [name for name, value in held.items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise ValueError(f"{where}: NaN or infinite numbers in {bad}; export an earlier checkpoint")


def _check_dtype(held: dict[str, Tensor], declared: str, directory: Path) -> None:
    other = {
        name: str(value.dtype).removeprefix("torch.")
        for name, value in held.items()
        if value.is_floating_point() and str(value.dtype) != f"torch.{declared}"
    }
    if other:
        name, dtype = next(iter(other.items()))
        raise ValueError(
            f"{directory}: config.json says dtype={declared!r}, but {len(other)} tensors are of another, the "
            f"first {name} of {dtype}"
        )


def _check_num_layers(held: dict[str, Tensor], declared: int, directory: Path) -> None:
    """Before the layers are made: a wrong number may be more than memory holds."""
    num = len({name.split(".")[1] for name in held if name.startswith("layers.")})
    if num != declared:
        raise ValueError(
            f"{directory}: transformer_layer_config.num_hidden_layers={declared}, but model.safetensors has "
            f"tensors of {num} layers"
        )


def _check_temperatures(drafter: Drafter, directory: Path) -> None:
    known, key = drafter.temperatures, f"{directory}: foredraft.confidence_temperatures"
    if known is not None and not drafter.has_confidence:
        raise ValueError(f"{key}={known}: this drafter has no confidence head")
    if known is not None and not (
        len(known) == drafter.max_drafts and all(isfinite(t) and t > 0 for t in known)
    ):
        raise ValueError(f"{key}={known}: {drafter.max_drafts} numbers above 0 are needed")


def _check_layer_ids(drafter: Drafter, found: dict[str, Any], directory: Path) -> None:
    """Against our own record, where there is one: an id of the other convention still loads."""
    recorded = found.get("foredraft", {}).get("layer_ids")
    if recorded is not None and recorded != drafter.layer_ids:
        key = drafter.layer_ids_key
        raise ValueError(
            f"{directory}: {key}={found[key]} are the inputs of layers, so their outputs are "
            f"{drafter.layer_ids}; foredraft.layer_ids={recorded} says otherwise"
        )


def _check_layer_config(drafter: Drafter, stored: dict[str, Any], directory: Path) -> None:
    ours = drafter.layer_config()
    for key in sorted(ours.keys() & stored.keys()):
        if ours[key] != stored[key]:
            raise ValueError(
                f"{directory}: transformer_layer_config.{key}={stored[key]!r}, but a drafter of this target "
                f"has {ours[key]!r}"
            )
    _check_rope(stored, ours["rope_parameters"], directory)


def _check_rope(layers: dict[str, Any], wanted: dict[str, Any], directory: Path) -> None:
    """Rotary positions under their old names; the new one is a field like others."""
    old = {**(layers.get("rope_scaling") or {})}
    old = {"rope_type" if key == "type" else key: value for key, value in old.items()}
    if "rope_theta" in layers:
        old["rope_theta"] = layers["rope_theta"]
    if "rope_theta" not in old and "rope_parameters" not in layers:
        raise ValueError(
            f"{directory}: transformer_layer_config has no rope_parameters: an engine would take its default"
        )
    for key, value in old.items():
        if value != wanted.get(key):
            raise ValueError(
                f"{directory}: transformer_layer_config: {key}={value!r}, but rotary positions of the target "
                f"have {wanted.get(key)!r}"
            )


def _check_target(stored: dict[str, Any] | None, target: Target, directory: Path) -> None:
    if stored is None:
        return
    for key in FINGERPRINT:
        if stored[key] != target.fingerprint[key]:
            raise ValueError(
                f"drafter={directory} was made for another target: its {key} is {stored[key]}, that of "
                f"{target.name} is {target.fingerprint[key]}; give target= the model it was trained on"
            )


def check_drafts(stored: dict[str, Any], drafter: Drafter) -> None:
    """``ValueError`` for a stored number of drafts that the stored sizes do not make."""
    proposal = stored["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    if proposal != drafter.max_drafts:
        layout = ", ".join(f"{key}={value}" for key, value in drafter.describe().items())
        raise ValueError(
            f"speculative_tokens={proposal}, but {layout} makes {drafter.max_drafts} drafts a round; export "
            "the run again"
        )


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as one level of dotted keys."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            out.update(flat(value, f"{prefix}{key}."))
        else:
            out[prefix + key] = value
    return out


def other_weights(directory: Path, target: Target) -> str | None:
    """The weights that a drafter was trained on, where they are not the target's; ``None`` where they are."""
    trained = (read_config(directory).get("foredraft", {}).get("target") or {}).get("weights")
    return None if trained in (None, target.fingerprint["weights"]) else trained


def own_version() -> str:
    """The version of this project, as installed."""
    try:
        return version("foredraft")
    except PackageNotFoundError:
        return "source"
