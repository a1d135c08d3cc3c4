"""What task=diagnose looks at: a run, its drafter, rows and states, each read when a check first asks.

A part that is not there, or cannot be read, is ``None`` with the reason beside it: other checks go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from data.capture import StatesConfig, store_root
from data.chat import Renderer
from data.examples import renderer
from data.sources import BUNDLED, DataConfig, read
from data.store import Spec
from drafters import checkpoint
from drafters.losses import LossWeights
from drafters.method import Drafter, MethodConfig, all_methods
from drafters.target import EMBEDDED, Target, load
from drafters.types import Example
from eval import replay, stored
from eval.alternatives import (
    AS_IS,
    AS_MENDED,
    LEAK,
    Alternative,
    Seen,
    alternatives,
    attempt,
    changed,
    loss,
    see,
)
from eval.evaluate import EvalConfig, held_out
from eval.mend import Opened, drafts_recorded, open_drafter, reproduces
from eval.readings import readings
from eval.replay import Counts
from eval.rows import Rows, conversations, spread
from eval.runs import read_record, run_directory
from eval.trials import Trial, best, explains

if TYPE_CHECKING:
    from recipes.schema import Run

ROWS = 16  # answers that alternatives are tried on, half of them trained on where that is known
HELD = 20  # held-out answers that acceptance is counted on
LONGEST = 2048  # tokens before an answer, where there are enough shorter ones
IN_CONFIG = ("layout", "mask token")  # what training cannot have had otherwise
TERMS = ("kl", "ce", "l1", "nla", "hybrid")  # of a loss, one of which every log has


@dataclass
class Case:
    """``method`` and ``states`` are settings of the run, ``rows`` its conversations, where it has them."""

    target: Target
    directory: Path | None
    run: Path | None
    record: dict[str, Any]
    data: DataConfig
    eval: EvalConfig
    render: Renderer
    rows: Rows
    no_rows: str | None = None
    other_rows: bool = False  # held-out rows are of data.path=, not the run's own
    method: MethodConfig | None = None
    states: StatesConfig | None = None

    @cached_property
    def served(self) -> Renderer | None:
        """As a server writes prompts that is told nothing; ``None`` where the tokenizer has no template."""
        own = self.target.tokenizer.chat_template
        return None if own is None else replace(self.render, template=None, settings={})

    # The drafter ------------------------------------------------------------------------------

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json of the drafter; empty where it cannot be read, see ``opened.refusal``."""
        try:
            return {} if self.directory is None else checkpoint.read_config(self.directory)
        except ValueError:
            return {}

    @cached_property
    def opened(self) -> Opened:
        if self.directory is None:
            return Opened(None, "there is no drafter directory")
        return open_drafter(self.directory, self.target)

    @property
    def drafter(self) -> Drafter | None:
        return self.opened.drafter

    @cached_property
    def trained_ids(self) -> list[int] | None:
        """The layers that the run's recipe asked for."""
        if self.method is None:
            return None
        return all_methods()[self.method.name].choose_layers(self.method, self.target.num_layers)

    # Trials -----------------------------------------------------------------------------------

    @cached_property
    def trials(self) -> list[Trial]:
        """The drafter as it is, or as mended, then every alternative; none without drafter and answers."""
        rows = self._some(self.rows.train, ROWS // 2)
        rows += self._some(self.rows.held, ROWS - len(rows))
        if self.drafter is None or not rows:
            return []
        some = self._alternatives
        seen = see(self.drafter, rows, some)
        out: list[Trial] = []
        for one in tqdm(some, desc="alternatives", unit="trial", mininterval=1):
            trial = attempt(self.drafter, seen, one)
            if not out or out[0].reproduces is False:  # else the directory is what it was
                trial = replace(trial, reproduces=self._reproduces(one))
            out.append(trial)
        return out

    @cached_property
    def better(self) -> Trial | None:
        """The alternative that explains the answers better than the drafter as it is.

        One that shows a drafter what it cannot know helps any: where the run kept a log, its loss has to be
        the one that training ended with.
        """
        if not self.trials:
            return None
        as_is, *others = self.trials
        return best(as_is, [one for one in others if self._may_be(one)])

    def _may_be(self, trial: Trial) -> bool:
        if self.trials[0].reproduces and trial.check in IN_CONFIG:  # then config.json is as it was
            return False
        if trial.limit != LEAK or self.taught is None or not explains(self.trials[0], trial):
            return True
        (other,) = (one for one in self._alternatives if one.name == trial.name)
        now, then = (abs(log(self.loss(one)) - log(self.taught[1])) for one in (AS_IS, other))
        return then < now

    @cached_property
    def taught(self) -> tuple[str, float] | None:
        """A term of the loss and what it was when the exported weights were trained, where the log says."""
        path = None if self.run is None else self.run / "metrics.jsonl"
        if path is None or not path.is_file() or self.drafter is None or not self.rows.train:
            return None
        lines = [
            json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")
        ]  # whole ones
        steps = self.config.get("foredraft", {}).get("trained_steps", 0)
        for term in TERMS:
            some = [
                line for line in lines if {f"loss/{term}", "step"} <= line.keys() and line["step"] <= steps
            ]
            if some:
                return term, some[-1][f"loss/{term}"]
        return None

    def loss(self, alternative: Alternative) -> float:
        """The term of ``taught`` on answers that the drafter was trained on, as the recipe weighs them."""
        assert self.drafter is not None
        assert self.taught is not None
        seen = self._seen_trained
        with changed(self.drafter, {"config": self.method}):  # a directory keeps nothing of its loss
            return max(loss(self.drafter, seen, alternative)[self.taught[0]], 1e-6)

    @cached_property
    def _seen_trained(self) -> Seen:
        assert self.drafter is not None
        return see(self.drafter, self._some(self.rows.train, ROWS), self._alternatives)

    @cached_property
    def _alternatives(self) -> list[Alternative]:
        assert self.drafter is not None
        return [AS_IS if self.opened.mend is None else AS_MENDED, *alternatives(self.drafter)]

    def _reproduces(self, alternative: Alternative) -> bool | None:
        recorded = drafts_recorded(self.config)
        if (
            recorded is None
            or self.drafter is None
            or alternative.shift
            or alternative.reach
            or alternative.before_norm
        ):
            return None
        with changed(self.drafter, alternative.put):
            return reproduces(recorded, self.config, self.drafter)

    @cached_property
    def readings(self) -> list[Trial]:
        """The rows as training read them, then as they could be read otherwise; see eval/readings.py."""
        return readings(self.target, self.rows.read, self.render, self.served, self.data.max_length)

    @cached_property
    def reads_better(self) -> Trial | None:
        """The reading under which the answers are more the target's own."""
        return best(self.readings[0], self.readings[1:]) if self.readings else None

    # States, acceptance -----------------------------------------------------------------------

    @cached_property
    def stored(self) -> stored.Stored | None:
        """What the disk store of the run holds of its documents; ``None`` where there is none."""
        if self.states is None or self.states.keep != "disk" or self.trained_ids is None:
            return None
        assert self.method is not None
        dtype = str(self.target.dtype).removeprefix("torch.")
        spec = Spec(self.target.fingerprint, tuple(self.trained_ids), dtype, self.method.needs_last)
        where = store_root(self.states) / spec.key
        return stored.examine(where, spec, self.target, self.rows.train) if where.is_dir() else None

    @property
    def other_than_trained(self) -> str | None:
        """The hash of the rows that were trained on, where these are others."""
        trained = self.record.get("data", {}).get("key")
        unknown = self.other_rows or not self.rows.held
        return None if unknown or trained == self.rows.key else trained

    @cached_property
    def paths(self) -> list[replay.Path]:
        """Held-out answers with what the drafter reads of them."""
        layer_ids = [0] if self.drafter is None else self.drafter.layer_ids
        rows = spread(self.rows.held, HELD)
        return list(replay.paths(self.target, rows, layer_ids, temperature=self.eval.temperature))

    @cached_property
    def accepted(self) -> list[dict[int, Counts]]:
        """Counts by N of each held-out answer, the largest N among them; none without a drafter."""
        if self.drafter is None:
            return []
        most = self.drafter.max_drafts
        ns = sorted({most, *(n for n in self.eval.n or range(1, most) if n < most)})
        some = tqdm(self.paths, desc="replay", unit="answer", mininterval=1)
        return [counts for path in some for counts in replay.score(self.drafter, [path], ns)]

    @cached_property
    def accepted_trained(self) -> list[Counts]:
        """Counts at the largest N of answers that it was trained on."""
        if self.drafter is None:
            return []
        rows = [row for row in self._some(self.rows.train, ROWS) if all(row.mask[row.mask.index(True) :])]
        most = self.drafter.max_drafts
        paths = list(
            replay.paths(self.target, rows, self.drafter.layer_ids, temperature=self.eval.temperature)
        )
        return [counts[most] for counts in replay.score(self.drafter, paths, [most])]

    @property
    def passes(self) -> float:
        """How often the exported weights have seen each token of the rows, about."""
        steps = self.config.get("foredraft", {}).get("trained_steps", 0)
        tokens = sum(len(row.ids) for row in self.rows.train)
        train = self.record["settings"]["train"]
        return steps * train["packs"] * train["pack_tokens"] / max(tokens, 1)

    def _some(self, rows: Sequence[Example], number: int) -> list[Example]:
        """A part that holds every domain alike, of answers after a prompt, not too far behind it."""
        good = [row for row in rows if row.mask.index(True) > 0]
        return spread([row for row in good if row.mask.index(True) <= LONGEST] or good, number)


def open_case(run: Run) -> Case:
    """The case of ``run=`` or ``drafter=``; ``target=``, ``drafter=``, ``data.path=`` replace the run's own.

    Errors: ``ValueError`` where there is neither, and for a target that cannot be loaded.
    """
    if run.run is None and run.drafter is None:
        raise ValueError("run: name a run or a drafter to diagnose, for example run=demo or drafter=DIR")
    where = None if run.run is None else run_directory(run.run)
    record = {} if where is None else read_record(run.run or "", where / "recipe.yaml")
    settings = {} if where is None else _settings(where / "recipe.yaml", record)
    directory = Path(run.drafter) if run.drafter else None
    if directory is None and where is not None and (where / "drafter").is_dir():
        directory = where / "drafter"
    hardware = replace(run.hardware)
    if hardware.dtype == "auto" and settings:
        hardware = replace(hardware, dtype=settings["hardware"]["dtype"])
    name = settings["target"] if settings and run.target == EMBEDDED else run.target
    if hardware.dtype == "auto" and directory is not None:
        hardware = checkpoint.hardware_for(directory, hardware)
    target = load(name, hardware)
    data = known(DataConfig, settings["data"]) if settings else run.data
    scored = known(EvalConfig, settings["eval"]) if settings else run.eval
    render = renderer(data, target.tokenizer, target.stop_ids, target.signature)
    other = where is not None and run.data.path not in (BUNDLED, data.path)
    rows, no_rows = _rows(run, data, scored, target, render, where)
    method, states = None, None
    if settings:
        loss = known(LossWeights, settings["method"]["loss"])
        chosen = all_methods()[settings["method"]["name"]].config_class
        method = known(chosen, settings["method"] | {"loss": loss})
        states = known(StatesConfig, settings["states"])
    return Case(target, directory, where, record, data, scored, render, rows, no_rows, other, method, states)


SECTIONS = ("method", "hardware", "data", "eval", "states", "train")  # of a record, that are looked at


def _settings(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Settings of a record. Errors: ``ValueError`` naming what they lack, or a method that is not here."""
    found = record["settings"]
    settings = found if isinstance(found, dict) else {}
    lacking = next((key for key in SECTIONS if not isinstance(settings.get(key), dict)), None)
    if lacking is not None or not {"name", "loss"} <= settings["method"].keys() or "target" not in settings:
        raise ValueError(
            f"{path}: settings of another version ({lacking or 'method'} is not as it is here); diagnose the "
            "drafter alone, drafter=DIR data.path=FILE"
        )
    name, methods = settings["method"]["name"], sorted(all_methods())
    if name not in methods:
        raise ValueError(f"{path}: method.name={name}; this version knows {', '.join(methods)}")
    return settings


def _rows(
    run: Run, data: DataConfig, scored: EvalConfig, target: Target, render: Renderer, where: Path | None
) -> tuple[Rows, str | None]:
    """The conversations, or none and why."""
    cache = where or Path(run.out or "report-diagnose")
    try:
        if where is None or run.data.path not in (BUNDLED, data.path):
            asked = run.data if where is None else replace(data, path=run.data.path, split=run.data.split)
            held = held_out(asked, target, render, scored, cache)
            if where is None:
                return Rows([], [], held, list(read(replace(asked, split=asked.split or "eval")))), None
            rows = conversations(data, scored, target, render, where, measured=False)
            return replace(rows, held=held), None
        return conversations(data, scored, target, render, where), None
    except ValueError as error:
        return Rows([], [], [], []), str(error)


def known(cls: Any, values: dict[str, Any]) -> Any:
    """Settings from a record, which may be of a version that knew others."""
    names = {each.name for each in fields(cls)}
    return cls(**{key: value for key, value in values.items() if key in names})
