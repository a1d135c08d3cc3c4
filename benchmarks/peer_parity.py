"""Our draft logits beside those of ``speculators``: ``python -m benchmarks.peer_parity``

    python -m benchmarks.peer_parity peer=PYTHON drafters=DIR,DIR

The library reads each drafter directory itself, with our target's directory as verifier, and computes draft
logits with its own training forward from the states and tokens that we hand over in a file: bundled answers,
every anchor with a whole block of tokens after it, drafts conditioned on the answer's own tokens. Its
environment is that of benchmarks/train_step.py. Also ``prompts=5``, so many answers, taken from the domains
in turns.

Its forward has one length of block, the trained one, so shorter N are not compared; nor is the confidence.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path as File
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import environment, options
from benchmarks.vllm_parity import spread
from data.examples import examples, renderer
from data.pack import pack
from data.sources import DataConfig, read
from drafters import checkpoint
from drafters.block import BlockDrafter
from drafters.method import Drafter
from drafters.target import HardwareConfig, load
from drafters.types import Batch
from eval.replay import Path, paths

WORKER = File(__file__).with_name("peer_logits.py")
GOAL = 1e-4  # of the largest logit


def anchors_of(path: Path, num: int) -> Tensor:
    """Anchors that have a whole block of ``num`` drafts and one token more behind them, ``[A]``."""
    return torch.arange(path.first, len(path.example.ids) - num - 1)


def given(drafter: Drafter, found: Sequence[Path]) -> dict[str, Tensor]:
    """States, tokens and anchors as the library's trainer aligns them.

    Block methods take a document as it is; a chain pairs each state with the token after it.
    """
    shift = 0 if isinstance(drafter, BlockDrafter) else 1
    out = {}
    for row, path in enumerate(found):
        tokens_T = torch.tensor(path.example.ids)
        mask_T = torch.zeros(len(tokens_T), dtype=torch.bool)
        mask_T[anchors_of(path, drafter.max_drafts)] = True
        end = len(tokens_T) - shift
        out[f"states.{row}"] = path.states.layers_BTLD.flatten(-2)[0, :end].float().contiguous()
        out[f"last.{row}"] = path.states.last()[0, :end].float().contiguous()
        out[f"tokens.{row}"], out[f"mask.{row}"] = tokens_T[shift:].clone(), mask_T[shift:].clone()
    return out


def of_anchors(drafter: Drafter, logits_SPN: Tensor, anchors_A: Tensor) -> Tensor:
    """What the library's metrics were handed, ``[A, K, N]``: blocks at once, or a chain step by step."""
    if isinstance(drafter, BlockDrafter):
        return logits_SPN[0].unflatten(0, (len(anchors_A), -1))[:, -drafter.max_drafts :]
    return logits_SPN[:, anchors_A - 1].transpose(0, 1)


@torch.inference_mode()
def compare(drafter: Drafter, batch: Batch, anchors_A: Tensor, theirs_AKN: Tensor) -> tuple[float, float]:
    """The largest difference as a share of the largest logit, and the share of equal drafts."""
    ours_AKN = drafter.path_logits(batch, anchors_A, drafter.max_drafts)
    apart = (ours_AKN - theirs_AKN).abs().max() / ours_AKN.abs().max()
    return float(apart), float((ours_AKN.argmax(-1) == theirs_AKN.argmax(-1)).float().mean())


def judge(directory: File, chosen: dict[str, Any]) -> dict[str, Any]:
    """The library beside us on one drafter directory. Errors: ``ValueError`` when the peer fails."""
    about = checkpoint.read_config(directory)
    name = about["speculators_config"]["verifier"]["name_or_path"]
    target = load(name, HardwareConfig(dtype="float32"))
    drafter = checkpoint.read(directory, target).float()
    render = renderer(DataConfig(), target.tokenizer, target.stop_ids, target.signature)
    answered, _ = examples(read(DataConfig(split="eval")), render, None)
    found = list(paths(target, spread(answered, chosen["prompts"]), drafter.layer_ids))
    with TemporaryDirectory() as scratch:
        ours, theirs = File(scratch) / "given.safetensors", File(scratch) / "found.safetensors"
        save_file(given(drafter, found), ours)
        files = [str(directory.resolve()), target.model.name_or_path, str(ours), str(theirs)]
        command = [chosen["peer"], "-P", str(WORKER), *files, str(drafter.max_drafts)]
        if status := subprocess.run(command).returncode:
            raise ValueError(f"peer={chosen['peer']} ended with status {status}; its error is above")
        apart, same, anchors = 0.0, 0.0, 0
        with safe_open(theirs, "pt") as opened:
            versions = opened.metadata()
            for row, path in enumerate(found):
                anchors_A = anchors_of(path, drafter.max_drafts)
                theirs_AKN = of_anchors(drafter, opened.get_tensor(f"logits.{row}"), anchors_A)
                batch = pack([path.example], [path.states])
                far, equal = compare(drafter, batch, anchors_A, theirs_AKN)
                apart, same, anchors = (
                    max(apart, far),
                    same + equal * len(anchors_A),
                    anchors + len(anchors_A),
                )
    return {
        "method": about["speculators_model_type"],
        "drafts": drafter.max_drafts,
        "answers": len(found),
        "anchors": anchors,
        "largest_difference": apart,
        "equal_drafts": same / anchors,
        "within_goal": apart <= GOAL,
        "peer": versions,
    }


def main() -> None:
    chosen = options(sys.argv[1:], peer="", drafters="", prompts=5)
    for key, what in (("peer", "the python of the speculators environment"), ("drafters", "directories")):
        if not chosen[key]:
            raise ValueError(f"{key}=: name {what}")
    rows = [judge(File(directory), chosen) for directory in chosen["drafters"].split(",")]
    for row in rows:
        print(
            f"{row['method']}: {row['anchors']} anchors of {row['drafts']} drafts, logits differ by "
            f"{row['largest_difference']:.2g} of the largest, {row['equal_drafts']:.2%} of drafts equal"
        )
    print(json.dumps({"benchmark": "peer_parity", "rows": rows, **environment()}))


if __name__ == "__main__":
    main()
