"""What a check of task=diagnose says, and how it says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add

from eval.case import Case
from eval.replay import Counts
from eval.trials import Trial


@dataclass(frozen=True)
class Verdict:
    """What a check says, the figure it rests on, where that stands, and what to do."""

    verdict: str
    found: str
    where: str = ""
    remedy: str = ""


Check = Callable[[Case], Verdict]


def ok(found: str) -> Verdict:
    """Nothing wrong."""
    return Verdict("ok", found)


def not_asked(why: str) -> Verdict:
    """Nothing to compare with."""
    return Verdict("not asked", why)


def suspicious(found: str, remedy: str, where: str = "") -> Verdict:
    """Worth a look, and no proof of a mistake."""
    return Verdict("suspicious", found, where, remedy)


def fault(found: str, remedy: str, where: str = "") -> Verdict:
    """Wrong, with proof."""
    return Verdict("fault", found, where, remedy)


def unread(case: Case) -> str:
    """Why a check of the drafter cannot be asked."""
    return f"the drafter is not read: {case.opened.refusal}"


def held(case: Case) -> Counts | None:
    """Counts of held-out answers at the largest N, ``None`` where there is no round."""
    if not case.accepted:
        return None
    counts = reduce(add, (by_n[max(by_n)] for by_n in case.accepted))
    return counts if counts.rounds else None


def suspected(case: Case, check: str, remedy: str) -> Verdict | None:
    """A fault of this check that one mend of the directory, or one alternative, gives away."""
    mend = case.opened.mend
    if mend is not None and mend.check == check:
        return fault(mend.found, mend.remedy, config_file(case))
    return given_away(case, check, remedy)


def given_away(case: Case, check: str, remedy: str) -> Verdict | None:
    """A fault of this check that explains the answers better than the drafter as it is."""
    better = case.better
    if better is None or better.check != check:
        return None
    return fault(
        f"{case.trials[0].name} {_figures(case.trials[0])}; {better.name}: {_figures(better)}",
        remedy,
        config_file(case),
    )


def _figures(trial: Trial) -> str:
    out = f"{trial.hits:.2f} drafts accepted an anchor, log-probability {trial.nats:.2f} a draft"
    if trial.reproduces is None:
        return out
    return f"{out}, recorded drafts {'' if trial.reproduces else 'not '}made"


def nothing_found(case: Case, found: str) -> Verdict:
    """What a check says that found nothing: ``ok`` only where alternatives were tried."""
    if case.trials:
        return ok(found)
    return not_asked(unread(case) if case.drafter is None else "no answers to try")


def config_file(case: Case) -> str:
    """Where a fault of the drafter directory stands."""
    return "" if case.directory is None else f"{case.directory}/config.json"
