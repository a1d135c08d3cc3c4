"""Drafter directories of others: written from our drafters, and read into them.

The layouts are in drafters/layouts.py, ours (speculators, which vLLM reads) in drafters/checkpoint.py.
Nothing is taken on trust: what was written is read back and compared before it gets its name, and every
tensor that is read is wanted, there, and of the shape that its config asks for.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.files import new_directory
from drafters.layouts import DFLASH, DSPARK, EAGLE3, Fields, Layout, check_common, common_config
from drafters.method import Drafter, all_methods
from drafters.target import Target
from drafters.vocab import DraftVocab, from_maps

OURS = "vllm"
FORMATS: dict[str, dict[str, Layout]] = {  # format=, and the layout it has for a method
    "zlab": {"dflash": DFLASH},
    "deepspec": {"dspark": DSPARK, "dflash": DSPARK},
    "sglang": {"eagle3": EAGLE3, "dflash": DFLASH},
}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def write_as(drafter: Drafter, directory: Path, format: str, notes: dict[str, Any] | None = None) -> None:
    """Write a directory in another format, whole or not at all, after reading it back.

    ``notes`` stand under ``foredraft`` in config.json, which no engine reads. Errors: ``ValueError`` naming
    the field that the format cannot hold, or what is not the same after reading back.
    """
    layout = _layout(drafter, format)
    if reason := layout.refusal(drafter):
        raise ValueError(f"format={format}: {layout.title} cannot hold this drafter. {reason}")
    if drafter.own_head_ND is not None and not layout.own_head:
        raise ValueError(f"format={format}: {layout.title} has no head, this drafter has one of its own")
    found = {
        "architectures": [layout.architecture],
        **common_config(drafter),
        **layout.config(drafter),
        "foredraft": {
            **(notes or {}),
            "target": drafter.target.fingerprint,
            "dtype": str(drafter.target.dtype).removeprefix("torch."),
            "max_drafts": drafter.max_drafts,
            "confidence_temperatures": drafter.temperatures,
        },
    }
    with new_directory(directory) as scratch:
        save_file(_tensors(drafter, layout), scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "config.json").write_text(json.dumps(found, indent=2) + "\n")
        check_same(drafter, read(found, scratch, drafter.target), format)


def recognise(found: dict[str, Any], directory: Path) -> Layout:
    """The layout of a directory by its config.json. Errors: ``ValueError`` listing those that are known."""
    names = found.get("architectures") or ["LlamaForCausalLM"]
    for layout in (EAGLE3, DFLASH, DSPARK):
        if names == [layout.architecture]:
            return layout
    if names == ["LlamaForCausalLM"] and "draft_vocab_size" in found:  # as SafeAILab calls it
        return EAGLE3
    known = ", ".join(f"{layout.architecture} ({layout.title})" for layout in (EAGLE3, DFLASH, DSPARK))
    raise ValueError(
        f"drafter={directory}: config.json has no speculators_model_type, and architectures={names} is not "
        f"one of {known}, LlamaForCausalLM with draft_vocab_size (EAGLE-3 of SafeAILab)"
    )


def read(found: dict[str, Any], directory: Path, target: Target) -> Drafter:
    """The drafter of a directory that others wrote, for the target it was made for.

    ``found`` is its config.json. Errors: ``ValueError`` naming key or tensor, its value, and what is wanted.
    """
    layout = recognise(found, directory)
    fields = Fields(found, layout.defaults, directory)
    settings = layout.settings(fields, target)
    if (directory / "mask_embedding.pt").exists():
        raise ValueError(f"{directory}/mask_embedding.pt: empty slots have no embedding of their own here")
    held = load_tensors(directory)
    shared = {name: held.pop(name, None) for name in (EMBEDDING, HEAD, "d2t", "t2d")}
    vocab = _read_vocab(fields, shared["d2t"], shared["t2d"], target)
    settings.draft_vocab = None if vocab is None else len(vocab)
    drafter = all_methods()[settings.name](settings, target, vocab)
    check_common(fields, drafter)
    theirs = {name: name if name in held else _their_name(name, layout) for name in drafter.state_dict()}
    # float16 becomes float32
    dtype = torch.bfloat16 if {v.dtype for v in held.values()} == {torch.bfloat16} else torch.float32
    load_strictly(drafter, held, theirs, dtype, directory)
    check_embedding(shared[EMBEDDING], target, directory)
    _read_head(shared[HEAD], drafter, layout, directory)
    drafter.temperatures = found.get("foredraft", {}).get("confidence_temperatures")
    return drafter.eval()


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor of model.safetensors, of the parts that its index names, or of pytorch_model.bin.

    A pickle is read as tensors only. Errors: ``ValueError`` for a file that is torn or holds code.
    """
    index, pickled = directory / "model.safetensors.index.json", directory / "pytorch_model.bin"
    if pickled.exists() and not (directory / "model.safetensors").exists() and not index.exists():
        return _load_pickle(pickled)
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    held: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is not a file beside it; download the directory again")
        try:
            held |= load_file(directory / name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{directory}/{name} cannot be read: {error}; download it again") from error
    return held


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path}: torn, or holds more than tensors, which may be code and is not run; convert it to "
            f"model.safetensors where you trust it ({str(error).splitlines()[0]})"
        ) from error
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise ValueError(f"{path}: not tensors by name; save the model's state_dict()")
    return held


def check_same(drafter: Drafter, again: Drafter, format: str) -> None:
    """``ValueError`` for whatever is not the same after reading back: such a directory gets no name."""
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(drafter, name), getattr(again, name))
        for name in ("layer_ids", "mask_token", "max_drafts", "temperatures")
    }
    one, other = drafter.describe(), again.describe()
    pairs |= {name: (one[name], other[name]) for name in one.keys() & other.keys()}
    pairs["draft layers"] = drafter.layer_config(), again.layer_config()
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            raise ValueError(f"format={format}: {name} is {ours}, after reading back {theirs}")
    stored = {**again.state_dict(), HEAD: again.head_ND, **_kept(again)}
    for name, value in {**drafter.state_dict(), HEAD: drafter.head_ND, **_kept(drafter)}.items():
        if not torch.equal(value.cpu(), stored[name].cpu()):
            raise ValueError(
                f"format={format}: {name} is another after reading back; are its numbers finite?"
            )


# Parts ------------------------------------------------------------------------------------------------------


def _layout(drafter: Drafter, format: str) -> Layout:
    method = drafter.config.name
    if format not in FORMATS:
        raise ValueError(f"format={format}: write one of {', '.join(sorted({OURS, *FORMATS}))}")
    if method not in FORMATS[format]:
        others = [OURS, *(name for name, layouts in FORMATS.items() if method in layouts)]
        raise ValueError(
            f"format={format}: it has no layout for a {method} drafter; {', '.join(others)} have one"
        )
    return FORMATS[format][method]


def _tensors(drafter: Drafter, layout: Layout) -> dict[str, Tensor]:
    out = {
        _their_name(name, layout): value.detach().cpu().contiguous()
        for name, value in drafter.state_dict().items()
    }
    like = next(drafter.parameters())
    if layout.saves_embedding:
        out[EMBEDDING] = drafter.target.embedding.weight.detach().to("cpu", like.dtype, copy=True)
    if layout.saves_head:
        out[HEAD] = drafter.head_ND.detach().to("cpu", copy=True).contiguous()
    if layout.saves_maps:
        vocab = drafter.vocab or DraftVocab(
            torch.arange(drafter.target.vocab_size), drafter.target.vocab_size
        )
        out |= {"d2t": vocab.d2t_N, "t2d": vocab.t2d_V}
    return out


def _their_name(name: str, layout: Layout) -> str:
    for ours, theirs in layout.renamed.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _kept(drafter: Drafter) -> dict[str, Tensor]:
    return {"draft vocabulary": torch.empty(0) if drafter.vocab is None else drafter.vocab.kept_N}


def _read_vocab(
    fields: Fields, d2t_N: Tensor | None, t2d_V: Tensor | None, target: Target
) -> DraftVocab | None:
    num = fields["draft_vocab_size"]
    num = target.vocab_size if num is None else num
    if d2t_N is None and num == target.vocab_size:
        return None
    if d2t_N is None or len(d2t_N) != num:
        raise ValueError(
            f"{fields.directory}: draft_vocab_size={num} of {target.vocab_size} tokens, but d2t maps "
            f"{'none' if d2t_N is None else len(d2t_N)}"
        )
    try:
        vocab = from_maps(d2t_N, t2d_V, target.vocab_size)
    except ValueError as error:
        raise ValueError(f"{fields.directory}: {error}") from error
    return None if len(vocab) == target.vocab_size else vocab


def load_strictly(
    drafter: Drafter,
    held: Mapping[str, Tensor],
    theirs: Mapping[str, str],
    dtype: torch.dtype,
    directory: Path,
) -> None:
    """Load every tensor of a file, each wanted, there, and of the shape that the config asks for.

    ``theirs`` are the file's names by ours; the drafter becomes ``dtype``. Errors: ``ValueError`` naming
    missing, unexpected or mis-shaped tensors, by both names where they differ.
    """
    wanted = drafter.state_dict()
    both = {name: name if name == their else f"{their} (here {name})" for name, their in theirs.items()}
    missing = [both[name] for name in wanted if theirs[name] not in held]
    extra = sorted(held.keys() - set(theirs.values()))
    if missing or extra:
        raise ValueError(
            f"{directory}: missing tensors [{', '.join(missing)}], unexpected tensors [{', '.join(extra)}]"
        )
    for name, value in wanted.items():
        found = held[theirs[name]]
        if found.shape != value.shape:
            raise ValueError(
                f"{directory}: {both[name]} has shape {tuple(found.shape)}, its config asks for "
                f"{tuple(value.shape)}"
            )
    drafter.to(dtype)
    drafter.load_state_dict({name: held[theirs[name]] for name in wanted})


def check_embedding(embedding_VD: Tensor | None, target: Target, directory: Path) -> None:
    """``ValueError`` for an embedding in the file that is not the target's."""
    if embedding_VD is not None and not alike(embedding_VD, target.embedding.weight):
        raise ValueError(
            f"{directory}: {EMBEDDING} is not that of {target.name}; give target= the model it was made for "
            "(a drafter has no embedding of its own here)"
        )


def _read_head(head_ND: Tensor | None, drafter: Drafter, layout: Layout, directory: Path) -> None:
    """Share the target's head where the file has the same or none; take another where the format has one."""
    if head_ND is None:
        if drafter.vocab is not None:
            raise ValueError(
                f"{directory}: missing tensors [{HEAD}], which the draft vocabulary of d2t needs"
            )
        return
    if alike(head_ND, drafter.head_ND):
        return
    wanted = drafter.head_ND.shape
    if head_ND.shape != wanted:
        raise ValueError(f"{directory}: {HEAD} has shape {tuple(head_ND.shape)}, not {tuple(wanted)}")
    if not layout.own_head:
        raise ValueError(
            f"{directory}: {HEAD} is not that of {drafter.target.name}; give target= the model it is for"
        )
    drafter.take_head(head_ND.to(next(drafter.parameters()).dtype))


def alike(one: Tensor, other: Tensor) -> bool:
    """Equal in bfloat16, the coarser of the dtypes that a target may have been loaded in, then and now."""
    return torch.equal(one.bfloat16(), other.detach().cpu().bfloat16())
