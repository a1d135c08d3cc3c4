"""Runs that are to be compared: what each left behind, and whether their reports can be laid side by side."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from data.sources import BUNDLED
from eval import report
from eval.report import Scored

# What reports must have in common, and the setting that makes it so.
SAME = {"target_signature": None, "temperature": "eval.temperature", "drafts": "eval.drafts"}
Key = tuple[str, int]  # the hash of what a conversation asks, and how many before it ask the same


@dataclass(frozen=True)
class Compared:
    """One run: its name as given, the record of its training, its report, its counts by conversation."""

    name: str
    directory: Path
    record: dict[str, Any]
    trained: dict[str, int | float]  # steps, tokens, seconds; supervised_tokens where the record says
    report: dict[str, Any]
    rows: dict[Key, Scored]

    @property
    def drafter(self) -> Path:
        return self.directory / "drafter"


def load_runs(names: Sequence[str], data: str) -> list[Compared]:
    """The runs of these names under runs/, or directories, with their reports on the rows of ``data``.

    Errors: ``ValueError`` for fewer than two runs, one named twice, and what a run lacks.
    """
    if len(names) < 2:
        raise ValueError(f"runs=[{','.join(names)}]: name two runs or more, for example runs=[one,other]")
    directories = [run_directory(name) for name in names]
    for at, directory in enumerate(directories):
        if directory.resolve() in [other.resolve() for other in directories[:at]]:
            raise ValueError(f"runs=[{','.join(names)}]: {names[at]} is named twice")
    return [_load(*pair, data) for pair in zip(names, directories, strict=True)]


def run_directory(name: str) -> Path:
    """Where a run is. Errors: ``ValueError`` for a name that is none."""
    for directory in (Path("runs") / name, Path(name)):
        if (directory / "recipe.yaml").is_file():
            return directory
    raise ValueError(f"runs: {name} is no run: neither runs/{name} nor {name} holds a recipe.yaml")


def _load(name: str, directory: Path, data: str) -> Compared:
    record = read_record(name, directory / "recipe.yaml")
    where = directory / "report" if data == BUNDLED else report.beside(directory / "drafter", data)
    remedy = f"score it: {_command(directory, record, data)}"
    for file in (where / "report.json", where / "rows.jsonl"):
        if not file.is_file():
            raise ValueError(f"run {name}: {file} is missing; {remedy}")
    found = _json((where / "report.json").read_text(), where / "report.json", remedy)
    rows = [
        _row(line, where / "rows.jsonl", remedy) for line in (where / "rows.jsonl").read_text().splitlines()
    ]
    seen: Counter[str] = Counter()
    by_key = {}
    if "tau_by_n" not in found.get("overall", {}):
        raise ValueError(f"{where / 'report.json'} has no overall.tau_by_n; {remedy}")
    for row in rows:
        by_key[row.prompt, seen[row.prompt]] = row
        seen[row.prompt] += 1
    counts = trained(name, directory)
    if by_domain := learned_from(record):
        counts["supervised_tokens"] = sum(by_domain.values())
    return Compared(name, directory, record, counts, found, by_key)


def learned_from(record: Mapping[str, Any]) -> dict[str, int]:
    """Supervised tokens by domain of a run that has ended; empty where its record does not say."""
    return {
        domain: sum(sums["supervised_tokens"] for sums in sources.values())
        for domain, sources in record.get("data", {}).get("seen", {}).items()
    }


def read_record(name: str, path: Path) -> dict[str, Any]:
    """recipe.yaml. Errors: ``ValueError`` for a file that is no record of a run."""
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError):
        found = None
    if not isinstance(found, dict) or "settings" not in found:
        raise ValueError(f"run {name}: {path} is no record of a run; copy the run again, or train it again")
    return found


def _row(line: str, path: Path, remedy: str) -> Scored:
    try:
        return report.from_row(_json(line, path, remedy))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds a line that is no row of a report; {remedy}") from error


def _json(text: str, path: Path, remedy: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not valid JSON (no object); {remedy}")
    return found


def _command(directory: Path, record: Mapping[str, Any], data: str, *more: str) -> str:
    """What scores a run again. Rows that a run held out of its own training data have no file to name."""
    settings = record["settings"]
    file = "FILE" if data == BUNDLED and settings["data"]["path"] != BUNDLED else data
    target = f"target={settings['target']}"
    words = ["python -m eval", target, f"drafter={directory / 'drafter'}", f"data.path={file}", *more]
    return f"`{' '.join(words)}`" + (" and compare with data.path=FILE" if file == "FILE" else "")


def trained(name: str, directory: Path) -> dict[str, int | float]:
    """Optimizer steps, tokens over all ranks, and seconds of the steps; from metrics.jsonl.

    Seconds that an interrupted run lost are not among them. Errors: ``ValueError`` for a damaged file.
    """
    path = directory / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"run {name}: {path} is missing; copy it along with the run, or train it again")
    remedy = "copy the run again"
    lines = [_json(line, path, remedy) for line in path.read_text().splitlines()]
    windows = [line for line in lines if line.get("tokens_per_second")]
    if lacking := [key for line in windows for key in ("step", "tokens") if key not in line]:
        raise ValueError(f"run {name}: {path} has a line without {lacking[0]}; {remedy}")
    if not windows:
        raise ValueError(f"run {name}: {path} tells of no step; train it first")
    return {
        "steps": windows[-1]["step"],
        "tokens": round(sum(line["tokens"] for line in windows)),
        "seconds": round(sum(line["tokens"] / line["tokens_per_second"] for line in windows), 1),
    }


def check_comparable(runs: Sequence[Compared], data: str) -> None:
    """``ValueError`` where reports are of other targets, temperatures, numbers of drafts or conversations."""
    first = runs[0]
    for run in runs:
        pair = f"runs {first.name} and {run.name}"
        for key, setting in SAME.items():
            if key not in run.report:
                again = _command(run.directory, run.record, data)
                raise ValueError(f"run {run.name}: its report.json has no {key}; score it again: {again}")
            if first.report[key] != run.report[key]:
                other = f"{pair} cannot be compared: {key} is {first.report[key]} and {run.report[key]}"
                if setting is None:
                    raise ValueError(f"{other}; compare drafters of one target")
                again = _command(run.directory, run.record, data, f"{setting}={first.report[key]}")
                raise ValueError(f"{other}; score them alike, for example {again}")
        if alone := first.rows.keys() ^ run.rows.keys():
            file = "FILE" if data == BUNDLED else data  # what both held out is not the same
            again = "; ".join(_command(one.directory, one.record, file) for one in (first, run))
            raise ValueError(
                f"{pair} were scored on other prompts: {len(first.rows)} and {len(run.rows)}, of which "
                f"{len(alone)} belong to one alone; score both on one file: {again}"
            )
    if not common_ns(runs):
        scored = "; ".join(f"{run.name} at {common_ns([run])}" for run in runs)
        raise ValueError(f"runs: scored at no N in common ({scored}); score them again with eval.n=[…]")


def common_ns(runs: Sequence[Compared]) -> list[int]:
    """Every N that all of these runs were scored at, ascending."""
    scored = [{int(n) for n in run.report["overall"]["tau_by_n"]} for run in runs]
    return sorted(set.intersection(*scored))
