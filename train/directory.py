"""The run directory ``runs/<name>``: who may write to it, and the record of what a run is.

Nothing here deletes what a run did not make.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from hydra.core.hydra_config import HydraConfig

from drafters import checkpoint as directory_format
from drafters.files import replace_file
from drafters.target import pick_dtype
from train.engine import rank, world_size

if TYPE_CHECKING:
    from recipes.schema import Run
    from train.rows import Loaded

PACKAGES = ("torch", "transformers", "deepspeed", "safetensors", "numpy")
LEFT_BY_A_RUN = (
    "recipe.yaml*", "metrics.*", "checkpoints", "best*.safetensors", "best*.tmp", "drafter", "drafter.tmp",
    "report*", "answers-*", "wandb", ".lock",
)  # fmt: skip
REPLACED = ".replaced"  # in a run's directory: the run that overwrite=true is about to replace


@contextmanager
def open_directory(run: Run, recipe: str | None, device: torch.device) -> Iterator[Path]:
    """``runs/<name>``, for this process alone; refused when it holds a run of other settings.

    A directory or record made here is gone again when a user's mistake keeps the run from its first step.
    """
    name = run.run or f"{recipe or run.method.name}-{Path(run.target).resolve().name}"
    if name == ".." or Path(name).name != name:
        raise ValueError(f"run={name}: a name under runs/, not a path; write for example run=mine")
    directory = Path("runs") / name
    record = directory / "recipe.yaml"
    settle_dtype(run, record, device)
    if rank() != 0:
        yield directory
        return
    made = not directory.exists()
    own = (".lock", REPLACED, REPLACED + ".tmp")
    if not made and not record.exists() and any(path.name not in own for path in directory.iterdir()):
        raise ValueError(
            f"{directory} exists and is no run (it has no recipe.yaml); choose another with run=NAME"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        new = False
        try:
            _bring_back(directory)
            if record.exists() and run.overwrite:
                _set_aside(directory)
            new = not record.exists()
            if not new:
                _refuse_other(run, _settings_in(record), directory)
            else:
                write_record(run, directory)
            yield directory
        except ValueError:
            if made and not (directory / "metrics.jsonl").exists():
                shutil.rmtree(directory)
            elif new and {path.name for path in directory.iterdir()} <= {record.name, ".lock"}:
                record.unlink(missing_ok=True)  # else the mended command would be one of other settings
            raise
        finally:
            _bring_back(directory)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Two processes never write to one run; the system drops the lock of one that was killed."""
    with open(directory / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{directory}: another process trains this run; wait for it, or choose another with run=NAME"
            ) from error
        yield


def _set_aside(directory: Path) -> None:
    """Move what a run left into ``REPLACED``, for ``overwrite=true``; refused where there is more."""
    for path in directory.iterdir():
        if not any(fnmatch(path.name, pattern) for pattern in LEFT_BY_A_RUN):
            raise ValueError(
                f"overwrite=true: {path} is nothing that a run leaves; move it away, or choose another "
                "directory with run=NAME"
            )
    scratch = directory / (REPLACED + ".tmp")
    scratch.mkdir()
    for path in directory.iterdir():
        if path != scratch and path.name != ".lock":
            path.rename(scratch / path.name)
    scratch.rename(directory / REPLACED)


def _bring_back(directory: Path) -> None:
    """A replaced run goes when the new one has begun; until then a mistake in the command brings it back."""
    replaced, halfway = directory / REPLACED, directory / (REPLACED + ".tmp")
    if halfway.exists():  # killed while it was moved: the rest is still in its place
        for path in halfway.iterdir():
            path.rename(directory / path.name)
        halfway.rmdir()
    if not (directory / "metrics.jsonl").exists() and replaced.exists():
        for path in directory.iterdir():
            if path != replaced and path.name != ".lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in replaced.iterdir():
            path.rename(directory / path.name)
    shutil.rmtree(replaced, ignore_errors=True)


def settle_dtype(run: Run, record: Path, device: torch.device) -> None:
    """``auto`` is measured, so it is decided once: a resumed run and all ranks compute as the first did."""
    if run.hardware.dtype != "auto":
        return
    if device.type == "cpu" and world_size() > 1:
        run.hardware.dtype = "float32"
    elif record.exists() and not run.overwrite:
        run.hardware.dtype = _settings_in(record)["hardware"]["dtype"]
    else:
        run.hardware.dtype = str(pick_dtype("auto", device)).removeprefix("torch.")


def _settings_in(record: Path) -> dict[str, Any]:
    """The settings that a recipe.yaml records. Errors: ``ValueError`` for a file that is none of ours."""
    try:
        found = yaml.safe_load(record.read_text())
        return {**found["settings"], "hardware": {**found["settings"]["hardware"]}}
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{record} is no record of a run; choose another directory with run=NAME, or overwrite=true to "
            "start this one again"
        ) from error


def settings_of(run: Run) -> dict[str, Any]:
    """What must not differ between a run and its resumption: all but names of outputs and logging."""
    free = (
        "task",
        "run",
        "overwrite",
        "runs",
        "out",
        "prompt",
        "prompt_file",
        "drafter",
        "log",
        "serve",
        "regenerate",
    )
    return {key: value for key, value in json.loads(json.dumps(asdict(run))).items() if key not in free}


def _refuse_other(run: Run, stored: dict[str, Any], directory: Path) -> None:
    mine, theirs = directory_format.flat(settings_of(run)), directory_format.flat(stored)
    other = [key for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    if other:
        shown = "\n".join(f"  {key}: {theirs.get(key)!r} there, {mine.get(key)!r} now" for key in other[:12])
        raise ValueError(
            f"{directory} holds a run with other settings:\n{shown}\n"
            "Give this run another name with run=NAME, or overwrite=true to start it again."
        )


def write_record(
    run: Run, directory: Path, loaded: Loaded | None = None, seen: dict[str, Any] | None = None
) -> None:
    """recipe.yaml: resolved settings, versions, commit; target and data hash as soon as they are known.

    ``seen`` is what a finished run learned from, by domain and source (``Stream.seen``).
    """
    record = {
        "settings": settings_of(run),
        "overrides": list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else [],
        "versions": versions(),
        "commit": commit(),
        "ranks": world_size(),
    }
    if loaded is not None:
        record["target"] = loaded.target.fingerprint
        record["data"] = {
            "key": loaded.data_key,
            "template": loaded.template,
            "train_rows": len(loaded.train),
            "held_out_rows": len(loaded.held),
            **({} if seen is None else {"seen": seen}),
        }
    replace_file(directory / "recipe.yaml", yaml.safe_dump(record, sort_keys=False).encode())


def versions() -> dict[str, str]:
    """Installed versions of what a result depends on."""
    out = {"foredraft": directory_format.own_version()}
    for name in PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            out[name] = "absent"
    return {**out, "hip": str(torch.version.hip), "cuda": str(torch.version.cuda)}


def commit() -> str:
    """The commit of the source, ``unknown`` outside a repository."""
    where = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
