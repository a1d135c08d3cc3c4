"""Do the shipped answers come out again? ``python -m benchmarks.bundled out=answers.jsonl``

``answers.jsonl`` is what the commands below wrote, in fp32 and one request at a time (resumable, over an hour
on two cores); without ``out=`` only the margins along the shipped answers are measured::

    python -m data task=regenerate data.split=train hardware.dtype=float32 regenerate.batch=1 \
        regenerate.max_new_tokens=200 out=answers.jsonl
    (and again with data.split=eval)

An answer whose two best logits are everywhere further apart than rounding cannot come out otherwise.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hydra
from omegaconf import DictConfig
from tqdm import tqdm

from benchmarks import environment
from data.examples import examples, renderer
from data.sources import DataConfig, read
from drafters.target import load
from eval.replay import paths
from recipes.cli import perform, start
from recipes.schema import Run
from serve.tasks import ROUNDING


def measure(run: Run) -> None:
    """Print how many shipped answers come out again, and how close the others are to a tie."""
    target = load(run.target, run.hardware)
    render = renderer(run.data, target.tokenizer, target.stop_ids)
    rows = [row for split in ("train", "eval") for row in read(replace(run.data, split=split))]
    made = _answers(Path(run.out)) if run.out else {}
    result: dict = {"benchmark": "bundled", "rows": len(rows), "tokens": 0, "leave_the_path": 0, "close": 0}
    parted = []
    for row in tqdm(rows, unit="row"):
        found, _ = examples([row], render, None, strict=True)
        walked = list(paths(target, found, [0]))
        margin = min(path.margin for path in walked)
        result["tokens"] += sum(len(ids) for _, ids in row.answers)
        result["leave_the_path"] += any(path.off_path for path in walked)
        result["close"] += margin < ROUNDING
        if row.key in made and made[row.key] != row.answers:
            parted.append({"id": row.id, "margin": margin})
    again = sum(row.key in made for row in rows)
    result |= {"answered_again": again, "parted": parted, "dtype": str(target.dtype), **environment()}
    if again:
        print(f"{again - len(parted)} of {again} rows come out again ({1 - len(parted) / again:.2%})")
    print(f"{result['close']} of {len(rows)} rows have a margin below {ROUNDING} somewhere")
    print(json.dumps(result))


def _answers(path: Path) -> dict:
    sources = (DataConfig(path=str(path), split=split) for split in ("train", "eval"))
    return {row.key: row.answers for source in sources for row in read(source)}


@hydra.main(version_base="1.3", config_path="../recipes", config_name="run")
def main(config: DictConfig) -> None:
    perform(config, {"bundled": measure}, "bundled")


if __name__ == "__main__":
    start(main)
