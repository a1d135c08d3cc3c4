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
from transformers import AutoConfig

from drafters.checkpoint import hardware_for, read_config
from drafters.method import all_methods
from drafters.target import HardwareConfig, locate

if TYPE_CHECKING:
    from recipes.schema import Run

PORT = 8000
# On ROCm vLLM's own choice for a draft layer can be ROCM_ATTN, where the acceptance of EAGLE-3 collapses
# (vllm#47854), or a backend that cannot look ahead in a block. This one serves all heads and both masks, and
# needs no AITER.
ROCM_DRAFT_ATTENTION = "TRITON_ATTN"
UNTRAINED: dict[str, dict[str, Any]] = {  # proposer=: what vLLM calls it, with its usual settings
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},  # needs arctic-inference beside vLLM
}


@dataclass
class VllmConfig:
    """``vllm.*``: of ``engine=vllm``."""

    python: str | None = None  # of an environment with vLLM; None: the vllm command on the PATH
    context: int | None = None  # tokens of a prompt and its answer; None: the target's own limit
    args: list[str] = field(default_factory=list)  # more arguments of vllm serve; they win

    def __post_init__(self) -> None:
        if self.context is not None and self.context < 2:
            raise ValueError(
                f"vllm.context={self.context}: give 2 tokens or more, or null for the target's own"
            )


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
    os.execvp(words[0], words)


def show(run: Run) -> None:
    """Print the command of ``start``, for a shell."""
    print(shlex.join(command(run, rocm=torch.version.hip is not None)))


def command(run: Run, *, rocm: bool) -> list[str]:
    """The words of ``vllm serve`` for a target and what drafts for it.

    Errors: ``ValueError`` for a drafter that vLLM cannot serve, with the reason, or one of another target.
    """
    if run.prompt is not None or run.prompt_file is not None:
        raise ValueError("engine=vllm starts a server; leave prompt and prompt_file out and ask it over HTTP")
    hardware = hardware_for(Path(run.drafter), run.hardware) if run.drafter else run.hardware
    target = str(locate(run.target, hardware))
    speculative = speculation(run, target, hardware)
    if speculative and rocm and "model" in speculative:
        speculative["attention_backend"] = ROCM_DRAFT_ATTENTION
    start = [run.vllm.python, "-m", "vllm.entrypoints.cli.main"] if run.vllm.python else ["vllm"]
    options = {
        "--host": "127.0.0.1",
        "--port": str(PORT if run.port is None else run.port),
        "--served-model-name": run.target,
        "--dtype": hardware.dtype,
        "--max-model-len": None if run.vllm.context is None else str(run.vllm.context),
        "--speculative-config": json.dumps(speculative) if speculative else None,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    remote = ["--trust-remote-code"] if hardware.trust_remote_code else []
    return [*start, "serve", target, *given, *remote, *run.vllm.args]


def speculation(run: Run, target: str, hardware: HardwareConfig) -> dict[str, Any] | None:
    """vLLM's ``--speculative-config`` for a run; ``None`` where nothing drafts."""
    proposer, n = run.proposer, run.serve.n
    if n is not None and n < 0:
        raise ValueError(f"serve.n={n}: give 0 (plain decoding) or more")
    if proposer is not None and "+" in proposer:
        raise ValueError(
            f"proposer={proposer}: vLLM drafts in one way at a time; write proposer={'|'.join(UNTRAINED)}, "
            "or name a drafter, drafter=DIR, or leave engine=vllm out"
        )
    given = {} if n is None else {"num_speculative_tokens": n}
    if n == 0 or proposer == "none" or (proposer is None and run.drafter is None):
        return None
    if proposer in UNTRAINED:
        return {**UNTRAINED[proposer], **given}
    if run.drafter is None:
        raise ValueError(f"proposer={proposer}: write {'|'.join(UNTRAINED)}, or name a drafter, drafter=DIR")
    directory = Path(run.drafter).expanduser().resolve()
    method, most = _trained(directory, target, hardware)
    if proposer not in (None, method):
        raise ValueError(f"proposer={proposer}: the drafter in drafter= is {method}; leave proposer out")
    if n is not None and n > most:
        raise ValueError(f"serve.n={n}: this drafter was trained for at most {most} drafts a round")
    return {"method": method, "model": str(directory), "num_speculative_tokens": most, **given}


def _trained(directory: Path, target: str, hardware: HardwareConfig) -> tuple[str, int]:
    """Method and largest N of a drafter directory that vLLM can serve with this target."""
    found = read_config(directory)
    ours = found.get("foredraft", {})
    if not ours.get("vllm", {}).get("servable", True):
        raise ValueError(f"drafter={directory}: {ours['vllm'].get('why')}; serve it without engine=vllm")
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
    config = AutoConfig.from_pretrained(target, trust_remote_code=hardware.trust_remote_code)
    text = config.get_text_config()
    served = {
        "model_type": text.model_type,
        "hidden_size": text.hidden_size,
        "num_layers": text.num_hidden_layers,
    }
    for key, value in served.items():
        if trained[key] != value:
            raise ValueError(
                f"drafter={directory} was made for another target: its {key} is {trained[key]}, that of "
                f"{target} is {value}; give target= the model it was trained on"
            )
