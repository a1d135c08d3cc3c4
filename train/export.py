"""What a run leaves: the drafter directory, through the gate; a report on it, and its card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file

from drafters import checkpoint as directory_format
from drafters.files import replace_file
from eval import calibrate, report
from eval.evaluate import evaluate
from train import checkpoint
from train.card import card
from train.directory import commit, versions
from train.gate import deliver
from train.loop import Job, best, evaluating
from train.rows import Loaded

if TYPE_CHECKING:
    from recipes.schema import Run


def export(run: Run, job: Job, loaded: Loaded, progress: checkpoint.Progress) -> None:
    """The best weights as ``drafter/``, through the gate."""
    drafter = job.drafter
    drafter.load_state_dict(load_file(best(job.directory, progress.best_step)))
    notes = {
        "recipe": run.method.name,
        "trained_steps": progress.best_step,
        "held_out_tau": progress.best_tau,
        "training_context": max(len(example.ids) for example in loaded.train),
        "data": {
            "file": Path(run.data.path).name,  # no path: a directory gets published
            "key": loaded.data_key,
            "template": loaded.template,
            "train_rows": len(loaded.train),
            "held_out_rows": len(loaded.held),
            "training_tokens": sum(sum(example.mask) for example in loaded.train),
        },
        "versions": versions(),
        "commit": commit(),
    }
    with evaluating(drafter):
        deliver(drafter, job.directory / "drafter", notes, job.held)


def write_report(run: Run, job: Job, loaded: Loaded) -> None:
    """Acceptance of the exported directory, read back, on all held-out rows; tau goes into its config."""
    drafter = job.directory / "drafter"
    again = directory_format.read(drafter, loaded.target)
    found = evaluate(loaded.target, again, loaded.held, run.eval, run.seed)
    found = {"target": found["target"], "drafter": str(drafter), **found}
    directory_format.note(drafter, tau_by_n=found["overall"]["tau_by_n"])
    facts = directory_format.read_config(drafter)["foredraft"]
    replace_file(drafter / "README.md", card(run.target, found, facts).encode())
    report.write(found, job.directory / "report")
    print(report.table(found))
    if again.has_confidence:
        judged = [path for path in job.held if path.length > 1]
        if len(judged) < 2:
            print("confidences stay uncalibrated: that takes two held-out answers, see train.eval_rows")
        else:
            print(
                calibrate.table(
                    calibrate.keep(again, drafter, judged, job.directory / "report" / calibrate.FILE)
                )
            )
    print(f"report: {job.directory / 'report' / 'report.html'}")
