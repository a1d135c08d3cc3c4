"""Our engine, or Hugging Face's ``generate``, answers jobs in a process of its own.

``python -m benchmarks.own_speed SETTINGS`` (one JSON object); benchmarks/serving.py starts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.worker import answer_jobs
from drafters import checkpoint
from drafters.target import HardwareConfig, load
from serve.costs import costs_for
from serve.engine import Engine
from serve.proposers import ProposerConfig, build, drafts_asked
from serve.schedule import schedule_of
from serve.suffix import SuffixConfig
from serve.types import Request


def engine_of(asked: dict[str, Any]) -> Engine:
    """The engine of a job's target, dtype, slots, proposer, drafter, n, past answers and schedule."""
    target = load(asked["target"], HardwareConfig(dtype=asked["dtype"]))
    drafter = checkpoint.read(Path(asked["drafter"]), target) if asked["drafter"] else None
    suffix = SuffixConfig(past=asked["past"])
    config = ProposerConfig(suffix=suffix, n=asked["n"])
    proposer = build(asked["proposer"], drafter, config, apart=asked["schedule"])
    schedule, n = None, drafts_asked(proposer, asked["n"])
    if asked["schedule"] and proposer is not None:
        schedule, n = schedule_of(proposer, costs_for(target, proposer, asked["slots"]), {}), None
    return Engine(target, proposer, n, slots=asked["slots"], capacity=asked["capacity"], schedule=schedule)


def ours(asked: dict[str, Any]):
    """All prompts of a job at once, greedily."""
    engine = engine_of(asked)

    def answer(job: dict) -> dict:
        requests = [
            Request(prompt, job["tokens"], ignore_eos=job["ignore_eos"], name=str(at))
            for at, prompt in enumerate(job["prompts"])
        ]
        found = {int(a.request.name): a for a in engine.run(requests)}
        rounds = [r for a in found.values() for r in a.rounds]
        return {
            "ids": [found[at].tokens for at in range(len(requests))],
            "rounds": len(rounds),
            "emitted": sum(r.emitted for r in rounds),
        }

    return answer


def hugging_face(asked: dict[str, Any]):
    """One prompt after another through ``generate``, with its prompt lookup where ``lookup`` is not 0."""
    name = load(asked["target"], HardwareConfig(dtype=asked["dtype"])).model.name_or_path
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, asked["dtype"])).eval()
    more = {"prompt_lookup_num_tokens": asked["lookup"]} if asked["lookup"] else {}

    @torch.inference_mode()
    def answer(job: dict) -> dict:
        ids = []
        for prompt in job["prompts"]:
            ids_1T = torch.tensor([prompt])
            out_1T = model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                max_new_tokens=job["tokens"],
                min_new_tokens=job["tokens"] if job["ignore_eos"] else None,
                do_sample=False,
                **more,
            )
            ids.append(out_1T[0, len(prompt) :].tolist())
        return {"ids": ids}

    return answer


def main() -> None:
    asked = json.loads(sys.argv[1])
    answer = hugging_face(asked) if asked["proposer"] == "generate" else ours(asked)
    answer_jobs(answer, {"torch": torch.__version__, "threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
