"""``python -m serve engine=vllm``: vLLM, started with what a drafter needs.

vLLM is neither imported nor needed here: a command is made of what config.json of the drafter says, checked
as far as files can tell, and takes the place of this process. What vLLM reads is in drafters/checkpoint.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from drafters.checkpoint import hardware_for, read_config
from drafters.method import all_methods
from drafters.target import HardwareConfig, locate
from serve.settings import PORT, HttpConfig

if TYPE_CHECKING:
    from recipes.schema import Run
    from serve.proposers import ProposerConfig

# On ROCm vLLM's own choice for a draft layer can be ROCM_ATTN, where the acceptance of EAGLE-3 collapses
# (vllm#47854), or a backend that cannot look ahead in a block. This one serves all heads and both masks, and
# needs no AITER.
ROCM_DRAFT_ATTENTION = "TRITON_ATTN"
OURS = ("queue", "max_tokens", "max_body_bytes", "grace_seconds")  # http.*, for which vLLM has no word


@dataclass
class VllmConfig:
    """``vllm.*``: of ``engine=vllm``, beside ``http.*`` and ``serve.*``."""

    python: str | None = None  # of an environment with vLLM; None: the vllm command on the PATH
    args: list[str] = field(default_factory=list)  # more arguments of vllm serve; they win


def start(run: Run) -> None:
    """Become ``vllm serve``. Errors: ``ValueError`` where vLLM is not installed, or cannot serve this."""
    words = command(run, rocm=torch.version.hip is not None)
    if shutil.which(words[0]) is None:
        raise ValueError(
            f"{words[0]}: no such command. engine=vllm needs vLLM, best in an environment of its own: "
            "`pip install vllm`, on ROCm with --extra-index-url https://wheels.vllm.ai/rocm/ or in the image "
            "vllm/vllm-openai-rocm; then name its Python, vllm.python=ENV/bin/python, or put vllm on the PATH"
        )
    print(shlex.join(words), file=sys.stderr, flush=True)
    os.execvpe(words[0], words, environment(run.http))


def show(run: Run) -> None:
    """Print the command of ``start``, for a shell; a key is not shown, the shell has to have it."""
    key = 'VLLM_API_KEY="${FOREDRAFT_API_KEY:?}" ' if run.http.key else ""
    print(key + shlex.join(command(run, rocm=torch.version.hip is not None)))


def environment(config: HttpConfig) -> dict[str, str]:
    """That of this process, with the API key: everybody on a machine can read a command line."""
    return {**os.environ, **({"VLLM_API_KEY": config.key} if config.key else {})}


def command(run: Run, *, rocm: bool) -> list[str]:
    """The words of ``vllm serve`` for a target and what drafts for it.

    Errors: ``ValueError`` for a drafter that vLLM cannot serve, with the reason, one of another target, or a
    setting that vLLM has no word for.
    """
    if run.prompt is not None or run.prompt_file is not None:
        raise ValueError("engine=vllm starts a server; leave prompt and prompt_file out and ask it over HTTP")
    _check_settings(run)
    hardware = hardware_for(Path(run.drafter), run.hardware) if run.drafter else run.hardware
    target = str(locate(run.target, hardware))
    speculative = speculation(run, target, hardware)
    if speculative and rocm and "model" in speculative:
        speculative["attention_backend"] = ROCM_DRAFT_ATTENTION
    start = [run.vllm.python, "-m", "vllm.entrypoints.cli.main"] if run.vllm.python else ["vllm"]
    options = {
        "--host": run.http.host,
        "--port": str(PORT if run.port is None else run.port),
        "--served-model-name": run.http.model or run.target,
        "--dtype": hardware.dtype,
        "--max-num-seqs": str(run.http.slots),
        "--max-model-len": _context(run.http, _config(target, hardware)),
        "--speculative-config": json.dumps(speculative) if speculative else None,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    remote = ["--trust-remote-code"] if hardware.trust_remote_code else []
    return [*start, "serve", target, *given, *remote, *run.vllm.args]


def speculation(run: Run, target: str, hardware: HardwareConfig) -> dict[str, Any] | None:
    """vLLM's ``--speculative-config`` for a run; ``None`` where nothing drafts."""
    proposer, n, untrained = run.proposer, run.serve.n, lookups(run.serve)
    if proposer is not None and "+" in proposer:
        raise ValueError(
            f"proposer={proposer}: vLLM drafts in one way at a time; write proposer={'|'.join(untrained)}, "
            "or name a drafter, drafter=DIR, or leave engine=vllm out"
        )
    given = {} if n is None else {"num_speculative_tokens": n}
    if n == 0 or proposer == "none" or (proposer is None and run.drafter is None):
        return None
    if proposer in untrained:
        return {**untrained[proposer], **given}
    if run.drafter is None:
        raise ValueError(f"proposer={proposer}: write {'|'.join(untrained)}, or name a drafter, drafter=DIR")
    directory = Path(run.drafter).expanduser().resolve()
    method, most = _trained(directory, target, hardware)
    if proposer not in (None, method):
        raise ValueError(f"proposer={proposer}: the drafter in drafter= is {method}; leave proposer out")
    if n is not None and n > most:
        raise ValueError(f"serve.n={n}: this drafter was trained for at most {most} drafts a round")
    return {"method": method, "model": str(directory), "num_speculative_tokens": most, **given}


def lookups(config: ProposerConfig) -> dict[str, dict[str, Any]]:
    """The proposers that need no training, with their settings as vLLM calls them."""
    ngram, suffix = config.ngram, config.suffix
    return {
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": ngram.max_drafts,
            "prompt_lookup_max": ngram.longest,
            "prompt_lookup_min": ngram.shortest,
        },
        "suffix": {  # needs arctic-inference beside vLLM
            "method": "suffix",
            "num_speculative_tokens": suffix.max_drafts,
            "suffix_decoding_max_tree_depth": suffix.depth,
            "suffix_decoding_max_spec_factor": suffix.factor,
            "suffix_decoding_min_token_prob": suffix.min_probability,
            **({} if suffix.past else {"suffix_decoding_max_cached_requests": 0}),
        },
    }


def _check_settings(run: Run) -> None:
    """``ValueError`` for what was set for our own server and would silently be lost on vLLM."""
    settings: dict[str, tuple[Any, str]] = {f"http.{key}": (run.http, key) for key in OURS}
    if run.proposer == "suffix":
        settings["serve.suffix.memory"] = (run.serve.suffix, "memory")
    for name, (config, key) in settings.items():
        value, usual = vars(config)[key], vars(type(config))[key]
        if value != usual:
            raise ValueError(
                f"{name}={value}: vLLM has no such setting; leave it out, or say it in vLLM's own words with "
                "vllm.args=[...]"
            )


def _config(target: str, hardware: HardwareConfig) -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(target, trust_remote_code=hardware.trust_remote_code)
    return config.get_text_config()


def _context(config: HttpConfig, target: PreTrainedConfig) -> str | None:
    """Tokens of a prompt and its answer where they were set; vLLM's own choice is the target's limit."""
    if config.context == HttpConfig.context:
        return None
    return str(min(config.context, target.max_position_embeddings))


def _trained(directory: Path, target: str, hardware: HardwareConfig) -> tuple[str, int]:
    """Method and largest N of a drafter directory that vLLM can serve with this target."""
    found = read_config(directory)
    ours = found.get("foredraft", {})
    verdict = ours.get("vllm", {"servable": True})
    if not isinstance(verdict, dict) or not isinstance(verdict.get("servable"), bool):
        raise ValueError(
            f"{directory}/config.json: foredraft.vllm={verdict!r:.80} is no verdict; export it again"
        )
    if not verdict["servable"]:
        raise ValueError(f"drafter={directory}: {verdict.get('why')}; serve it without engine=vllm")
    if found.get("speculators_model_type") not in all_methods():
        raise ValueError(
            f"drafter={directory}: this layout is not tried with vLLM; convert it: "
            f"python -m train task=export drafter={directory} target=... format=vllm out=NEW"
        )
    if "target" in ours:
        _check_target(ours["target"], directory, target, hardware)
    try:
        most = found["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except KeyError as error:
        raise ValueError(f"{directory}/config.json has no {error}; export the run again") from error
    return found["speculators_model_type"], most


def _check_target(trained: dict[str, Any], directory: Path, target: str, hardware: HardwareConfig) -> None:
    """``ValueError`` for another target, as far as its config.json tells; vLLM would just accept no draft."""
    text = _config(target, hardware)
    served = {
        "model_type": text.model_type,
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
    }
    for key, value in served.items():
        if trained[key] != value:
            raise ValueError(
                f"drafter={directory} was made for another target: its {key} is {trained[key]}, that of "
                f"{target} is {value}; give target= the model it was trained on"
            )
