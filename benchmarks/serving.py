"""Tokens a second of the engine: plain beside vLLM, drafts beside plain, lookups beside transformers.

Also what drafters that accept nothing cost a schedule in its worst minute.

``python -m benchmarks.serving vllm=PYTHON drafter=DIR``. Each side is a process of its own; all take turns on
the same jobs. A rate is the tokens between a short and a long run of the same prompts over the seconds
between them, so that neither prefill nor start-up counts. ``parts=plain,drafts,lookup,guard`` chooses.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import environment, options
from benchmarks.vllm_parity import prompts_of
from benchmarks.worker import ROOT, Worker
from data.examples import renderer
from data.sources import DataConfig
from drafters import checkpoint
from drafters.checkpoint import read_config
from drafters.eagle3 import Eagle3Config
from drafters.method import build
from drafters.target import HardwareConfig, Target, load
from drafters.vocab import choose
from serve.prompts import built_in


class Side:
    """A process that answers, and the rates that were seen."""

    def __init__(self, settings: dict[str, Any], vllm: str, threads: int) -> None:
        ours = settings["proposer"] != "vllm"
        python, module = (
            (sys.executable, "benchmarks.own_speed") if ours else (vllm, f"{ROOT}/benchmarks/vllm_speed.py")
        )
        self.worker = Worker(python, module, [json.dumps(settings)], threads)
        self.seconds, self.tokens = 0.0, 0
        self.ids: list[list[int]] = []
        self.rates: list[float] = []
        self.rounds = self.emitted = 0

    def measure(self, prompts: list[list[int]], short: int, long: int, ignore_eos: bool) -> None:
        """Note the rate between the short and the long run."""
        job = {"prompts": prompts, "ignore_eos": ignore_eos}
        first = self.worker.ask({**job, "tokens": short})
        second = self.worker.ask({**job, "tokens": long})
        tokens = sum(map(len, second["ids"])) - sum(map(len, first["ids"]))
        seconds = second["seconds"] - first["seconds"]
        if tokens == 0:
            return
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        self.rates.append(tokens / seconds)
        self.rounds += second.get("rounds", 0)
        self.emitted += second.get("emitted", 0)
        self.ids += second["ids"]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def tau(self) -> float | None:
        return self.emitted / self.rounds if self.rounds else None


def in_turns(
    sides: dict[str, Side],
    jobs: list[list[list[int]]],
    *,
    short: int,
    long: int,
    ignore_eos: bool,
    name: str,
    warm: int = 8,
) -> None:
    """Every side answers every job, each time in another order; ``warm`` tokens of the first warm them up."""
    chance = random.Random(0)
    for side in sides.values():
        side.measure(jobs[0], short, short + warm, True)
        side.__dict__.update(seconds=0.0, tokens=0, ids=[], rates=[], rounds=0, emitted=0)
    for job in tqdm(jobs, desc=name, mininterval=5):
        for each in chance.sample(list(sides), len(sides)):
            sides[each].measure(job, short, long, ignore_eos)


def plain(chosen: dict[str, Any], target: Target) -> list[dict[str, Any]]:
    """Plain decoding of 1 and of 24 requests, beside vLLM eager and, with ``compiled``, compiled."""
    rows = []
    for dtype in chosen["dtypes"].split(","):
        about = {"target": target.model.name_or_path, "dtype": dtype, "slots": 24, "capacity": 512}
        none = {"drafter": "", "n": None, "lookup": 0, "schedule": False, "past": True}
        names = {"ours": {**none, "proposer": "none"}}
        if chosen["vllm"]:
            names |= {"vllm": {"proposer": "vllm", "compiled": False, "speculative": None}}
            if chosen["compiled"]:
                names |= {"vllm compiled": {"proposer": "vllm", "compiled": True, "speculative": None}}
        sides = {
            name: Side({**about, **more}, chosen["vllm"], chosen["threads"]) for name, more in names.items()
        }
        for requests in (1, 24):
            jobs = [
                [[100 + 7 * at + 31 * repeat + i for i in range(48)] for at in range(requests)]
                for repeat in range(chosen["repeats"])
            ]
            in_turns(sides, jobs, short=8, long=72, ignore_eos=True, name=f"{dtype}, {requests} requests")
            row = {
                "dtype": dtype,
                "requests": requests,
                **{n: statistics.median(s.rates) for n, s in sides.items()},
            }
            rows.append(
                row | {f"ours over {name}": row["ours"] / row[name] for name in sides if name != "ours"}
            )
        for side in sides.values():
            side.worker.close()
    return rows


def drafting(chosen: dict[str, Any], target: Target) -> list[dict[str, Any]]:
    """One request at a time, greedy, on bundled evaluation prompts; everything beside our plain decoding."""
    asked = [example.ids for example in prompts_of(target, chosen["prompts"])]
    drafter, n = chosen["drafter"], chosen["n"]
    method = read_config(Path(drafter))["speculators_model_type"]
    about = {"target": target.model.name_or_path, "dtype": "float32", "slots": 1}
    about |= {"capacity": max(map(len, asked)) + chosen["tokens"] + 16}
    own = {"drafter": drafter, "n": n, "lookup": 0, "schedule": False, "past": True}
    names = {name: {**own, "proposer": name} for name in ("none", "suffix", method, f"suffix+{method}")}
    names["suffix"]["n"] = names["none"]["n"] = None
    for name in ("suffix", method, f"suffix+{method}"):
        names[f"{name}, scheduled"] = {**own, "proposer": name, "n": None, "schedule": True}
    if chosen["vllm"]:
        speculative = {"method": method, "model": drafter, "num_speculative_tokens": n}
        theirs = {"proposer": "vllm"}
        names |= {
            "vllm compiled": {**theirs, "compiled": True, "speculative": None},
            f"vllm {method}": {**theirs, "compiled": False, "speculative": speculative},
        }
    return _beside(names, about, chosen, [[prompt] for prompt in asked], "none", "drafts")


def lookup(chosen: dict[str, Any], target: Target) -> list[dict[str, Any]]:
    """Copy-heavy prompts (edits of code), beside transformers' ``prompt_lookup_num_tokens``.

    The suffix side forgets other answers: these are edits of few files, and lookup in the prompt cannot know.
    """
    render = renderer(DataConfig(), target.tokenizer, target.stop_ids)
    edits = built_in()["edit"]
    edits = edits[:: max(1, len(edits) // chosen["prompts"])]
    asked = [render.prompt_ids(messages) for messages in edits]
    about = {"target": target.model.name_or_path, "dtype": "float32", "slots": 1}
    about |= {"capacity": max(map(len, asked)) + chosen["tokens"] + 16, "drafter": "", "n": None}
    own = {"lookup": 0, "schedule": False, "past": False}
    names = {name: {**own, "proposer": name} for name in ("none", "ngram", "suffix", "generate")}
    names |= {"generate, prompt lookup": {**own, "proposer": "generate", "lookup": 10}}
    return _beside(names, about, chosen, [[prompt] for prompt in asked], "generate, prompt lookup", "lookup")


def guard(chosen: dict[str, Any], target: Target) -> list[dict[str, Any]]:
    """What a schedule loses, in its worst minute, to a drafter of which nothing is accepted.

    An untrained EAGLE-3, one request at a time on made-up prompts; nothing is drafted before the first round
    that counts. A minute is any run of answers that plain decoding needs 60 seconds for.
    """
    about = {"target": target.model.name_or_path, "dtype": "float32", "slots": 1}
    about |= {"capacity": 64 + chosen["tokens"] + 16}
    jobs = [[[100 + 7 * at + i for i in range(48)]] for at in range(chosen["answers"])]
    none = {"drafter": "", "n": None, "lookup": 0, "schedule": False, "past": True, "proposer": "none"}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "drafter"
        config = Eagle3Config(init="random")
        vocab = choose(torch.ones(target.vocab_size), config.kept_tokens(target.vocab_size))
        checkpoint.write(build(config, target, vocab), directory)
        own = {**none, "schedule": True, "drafter": str(directory), "proposer": "eagle3"}
        names = {"none": none, "untrained eagle3, scheduled": own}
        sides = {name: Side({**about, **more}, "", chosen["threads"]) for name, more in names.items()}
        in_turns(sides, jobs, short=1, long=chosen["tokens"] + 1, ignore_eos=True, name="guard", warm=0)
    rows = []
    for name, side in sides.items():
        plain_seconds, seconds = ([1 / rate for rate in one.rates] for one in (sides["none"], side))
        rows.append(
            {
                "side": name,
                "rate": side.rate,
                "tau": side.tau,
                "seconds": side.seconds,
                "worst minute": worst_minute(plain_seconds, seconds, chosen["tokens"]),
            }
        )
        side.worker.close()
    return rows


def worst_minute(plain: list[float], other: list[float], tokens: int, minute: float = 60.0) -> float:
    """The least of plain over other seconds, a token each, of runs of answers that are a minute of plain."""
    num = next((k for k in range(1, len(plain) + 1) if tokens * sum(plain[:k]) >= minute), None)
    if num is None:
        raise ValueError(
            f"answers={len(plain)} tokens={tokens}: plain decoding took {tokens * sum(plain):.0f} seconds of "
            f"the {minute:.0f} that are asked for; give more answers"
        )
    runs = range(len(plain) - num + 1)
    return min(sum(plain[at : at + num]) / sum(other[at : at + num]) for at in runs)


def _beside(
    names: dict[str, dict], about: dict, chosen: dict, jobs: list, base: str, name: str
) -> list[dict]:
    sides = {each: Side({**about, **more}, chosen["vllm"], chosen["threads"]) for each, more in names.items()}
    in_turns(sides, jobs, short=1, long=chosen["tokens"] + 1, ignore_eos=False, name=name)
    rows = [
        {
            "side": each,
            "rate": side.rate,
            f"over {base}": side.rate / sides[base].rate,
            "tau": side.tau,
            "ids equal": sum(a == b for a, b in zip(side.ids, sides[base].ids, strict=True)) / len(side.ids),
        }
        for each, side in sides.items()
    ]
    for side in sides.values():
        side.worker.close()
    return rows


PARTS = {"plain": plain, "drafts": drafting, "lookup": lookup, "guard": guard}


def main() -> None:
    chosen = options(
        sys.argv[1:],
        parts="plain,drafts,lookup,guard",
        vllm="",
        drafter="",
        n=4,
        dtypes="bfloat16,float32",
        compiled=False,
        prompts=24,
        tokens=128,
        repeats=5,
        answers=16,
        threads=2,
    )
    parts = chosen["parts"].split(",")
    for part in parts:
        if part not in PARTS:
            raise ValueError(f"parts={chosen['parts']}: write some of {', '.join(PARTS)}")
    if "drafts" in parts and not chosen["drafter"]:
        raise ValueError("drafter=: name a drafter directory, or leave drafts out of parts=")
    target = load("smollm2-embedded", HardwareConfig(dtype="float32"))
    result: dict[str, Any] = {"benchmark": "serving", "n": chosen["n"]}
    for part in parts:
        result[part] = PARTS[part](chosen, target)
        _print(part, result[part])
    print(json.dumps({**result, **environment(), "threads": chosen["threads"]}))


def _print(part: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{part} (rates in tokens/s)")
    for row in rows:
        cells = (
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
        )
        print("  " + ", ".join(cells))


if __name__ == "__main__":
    main()
