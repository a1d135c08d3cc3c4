"""Two processes under torchrun learn what one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import runs

ROOT = Path(__file__).parent.parent
SHORT = ("train.packs=2", "train.steps=3", "train.save_every=2", "log.every=1", "states.keep=disk")


def test_two_ranks_learn_what_one_does(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = runs.train(workshop, *SHORT, "run=plain", "states.directory=one")
    launched = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "train", "+recipe=dflash"),
            *runs.settings(workshop, *SHORT, "run=two", "states.directory=two"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr[-3000:]
    for one, two in zip(runs.metrics(plain), runs.metrics(Path("runs/two")), strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    theirs = load_file("runs/two/drafter/model.safetensors")
    for name, weight in load_file(plain / "drafter" / "model.safetensors").items():
        assert float((weight - theirs[name]).abs().max()) <= 1e-5 * float(weight.abs().max()), name
