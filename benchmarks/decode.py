"""Tokens a second on five prompts: drafting, plain decoding of the same engine, Hugging Face ``generate``.

``python -m benchmarks.decode drafter=runs/demo/drafter``. One request at a time, greedy, the prefill left
out; the three take turns in an order that changes with the prompt, so that no one always runs first.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

import hydra
import torch
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM, PreTrainedModel, TextStreamer

from benchmarks import environment
from data.examples import renderer
from drafters import checkpoint
from drafters.target import load
from recipes.cli import perform, start
from recipes.schema import Run
from serve.answer import decode, drafts_for
from serve.engine import Engine

PROMPTS = (
    "A baker sells 36 rolls in the morning and twice as many after noon. How many rolls is that in all?",
    "Write a Python function that counts the vowels in a string.",
    "Give me three tips for sleeping better.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short e-mail that thanks a colleague for help with a report.",
)


class _Clock(TextStreamer):
    """Notes when the first and the last token arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def hugging_face(model: PreTrainedModel, prompt: list[int], num: int) -> tuple[list[int], float]:
    """Ids and tokens a second of ``generate`` after its first token."""
    clock = _Clock()
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, do_sample=False, streamer=clock
    )
    times = clock.times[1:]  # the first call hands over the prompt
    return out[0, len(prompt) :].tolist(), (len(times) - 1) / max(times[-1] - times[0], 1e-9)


def measure(run: Run) -> None:
    """Time all prompts in all three ways and print the table."""
    if run.drafter is None:
        raise ValueError("drafter: name a drafter directory, for example drafter=runs/demo/drafter")
    target = load(run.target, checkpoint.hardware_for(Path(run.drafter), run.hardware))
    drafter = checkpoint.read(Path(run.drafter), target)
    model = AutoModelForCausalLM.from_pretrained(target.model.name_or_path, dtype=target.dtype)
    model = model.to(target.device).eval()  # as it comes: ours has quicker linear layers
    render = renderer(run.data, target.tokenizer, target.stop_ids)
    settings = run.serve
    settings.max_new_tokens = min(settings.max_new_tokens, 64)
    n = drafts_for(target, drafter, Path(run.drafter), settings.n)
    engines = {"drafting": Engine(target, drafter, n), "plain": Engine(target)}
    rows = []
    for index, text in enumerate(PROMPTS):
        prompt = render.prompt_ids([{"role": "user", "content": text}])
        names = ["drafting", "plain", "generate"]
        row: dict = {}
        for name in names[index % 3 :] + names[: index % 3]:
            if name == "generate":
                row["ids"], row[name] = hugging_face(model, prompt, settings.max_new_tokens)
            else:
                timed = decode(engines[name], prompt, settings, run.seed)
                row[name], row[f"{name}_ids"] = timed.tokens_per_second, timed.answer.tokens
                row["tau"] = timed.answer.tau if name == "drafting" else row.get("tau")
        rows.append(row)
    _print(rows, n)


def _print(rows: list[dict], n: int) -> None:
    print(f"\n{'prompt':>6s} {'drafting':>9s} {'plain':>7s} {'generate':>9s}  tokens/s   tau   ids equal")
    for index, row in enumerate(rows):
        same = row["drafting_ids"] == row["plain_ids"]
        speeds = f"{row['drafting']:9.1f} {row['plain']:7.1f} {row['generate']:9.1f}"
        print(f"{index:6d} {speeds} {row['tau']:15.2f}   {same}")
    rate = {name: _harmonic([row[name] for row in rows]) for name in ("drafting", "plain", "generate")}
    result = {
        "benchmark": "decode",
        "n": n,
        "drafting_over_plain": round(rate["drafting"] / rate["plain"], 3),
        "plain_over_generate": round(rate["plain"] / rate["generate"], 3),
        "tau": [round(row["tau"], 3) for row in rows],
        "ids_equal": all(row["drafting_ids"] == row["plain_ids"] for row in rows),
        **environment(),
    }
    print(
        f"N={n}: drafting is {result['drafting_over_plain']} times plain decoding, "
        f"plain decoding {result['plain_over_generate']} times Hugging Face generate"
    )
    print(json.dumps(result))


def _harmonic(rates: list[float]) -> float:
    """The rate over all prompts, each of the same number of tokens."""
    return len(rates) / sum(1 / rate for rate in rates)


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    perform(config, {"decode": measure}, "decode")


if __name__ == "__main__":
    start(main)
