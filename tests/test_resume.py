"""A run that is killed and started again ends as one that was never stopped."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import runs

LONG = ("train.steps=8", "train.save_every=2", "train.eval_every=3", "log.every=3")  # of no common step


def arguments(workshop: Path, *more: str) -> list[str]:
    return ["+recipe=dflash", *runs.settings(workshop, *LONG, *more)]


@pytest.fixture(scope="module")
def unbroken(workshop, tmp_path_factory) -> Path:
    """Trained once, by the same command, and never stopped."""
    directory = tmp_path_factory.mktemp("unbroken")
    assert ended(directory, arguments(workshop)) == 0
    return directory / "runs" / "one"


def ended(directory: Path, given: list[str], event: int | None = None, name: str = "SIGKILL") -> int | None:
    process = runs.started(directory, given, event, name)
    process.join(120)
    assert process.exitcode is not None, (directory / "output.txt").read_text()
    return process.exitcode


def as_if_never_stopped(run: Path, unbroken: Path) -> bool:
    weights = (load_file(at / "drafter" / "model.safetensors") for at in (run, unbroken))
    kept = [sorted(path.name for path in at.glob("best_*")) for at in (run, unbroken)]
    return (
        runs.same(*weights)
        and runs.metrics(run) == runs.metrics(unbroken)
        and runs.same(runs.held(run, 8), runs.held(unbroken, 8))
        and kept[0] == kept[1]
    )


def steps_saved(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").glob("step_*"))


def test_a_run_killed_twice_ends_as_one_never_stopped(workshop, tmp_path, unbroken):
    run = tmp_path / "runs" / "one"
    for event in (40, 30):  # the first between a check of acceptance and the checkpoint that names it
        assert ended(tmp_path, arguments(workshop), event) == -signal.SIGKILL
        assert 0 < len(steps_saved(run)) < 4
        assert not (run / "drafter").exists()
    assert ended(tmp_path, arguments(workshop)) == 0
    assert as_if_never_stopped(run, unbroken)


def test_control_c_ends_with_130_and_the_run_goes_on_where_it_was(workshop, tmp_path, unbroken):
    run = tmp_path / "runs" / "one"
    assert ended(tmp_path, arguments(workshop), 50, "SIGINT") == 130
    assert 0 < len(steps_saved(run)) < 4
    assert (tmp_path / "output.txt").read_text().endswith("stopped\n")
    assert ended(tmp_path, arguments(workshop)) == 0
    assert as_if_never_stopped(run, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_five_times_at_random_moments_ends_as_one_never_stopped(
    workshop, tmp_path, unbroken, seed
):
    """Between a start's first look at the run and its last, and at any time between two looks."""
    draw = random.Random(seed)
    for _ in range(5):
        process = runs.started(tmp_path, arguments(workshop), draw.randrange(1, 100))
        process.join(draw.uniform(0.5, 3))
        process.kill()
        process.join()
    assert ended(tmp_path, arguments(workshop)) == 0
    assert as_if_never_stopped(tmp_path / "runs" / "one", unbroken)
