"""What to deploy: method and number of drafts at each load, from what is accepted and what rounds cost.

``rows`` requests that decode together commit ``rows x tau`` tokens a round; each answer also had its prompt
read, which holds the others up. Tokens a second are therefore

    rows x answer / (rows x prompt seconds + (answer - 1) / tau(N) x round seconds(rows, N, context))

where tau is pooled over the traffic: a domain's share of tokens is a share of 1 / tau. Intervals resample the
conversations that acceptance was counted on; costs are taken as they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import add
from typing import Any

import numpy as np

from drafters.types import Example
from eval import sweeps
from eval.costs import CostModel
from eval.replay import answers
from eval.report import Scored, interval, resampled
from eval.sweeps import FAR, Panel, Point

SCHEMA_VERSION = 1
BEYOND = 1.25  # a measured rate over tau times plain decoding: what noise may be taken for
TRAFFIC = "traffic"  # the mix of domains that is served


@dataclass
class PlanConfig:
    """``plan.*``"""

    concurrency: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16])  # requests decoded together
    contexts: list[int] = field(default_factory=list)  # tokens in a slot, to measure and predict at as well
    prompt_tokens: int | None = None  # of a request; None: the mean of the evaluated ones
    answer_tokens: int | None = None
    costs: str | None = None  # costs.json of another plan; None: measured on this machine
    # Tokens a second of somebody's engine by N, 0 for no drafts; empty: costs are measured or read.
    points: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("concurrency", "contexts"):
            values = sorted({*getattr(self, key)})
            if min(values, default=1) < 1:
                raise ValueError(f"plan.{key}={values}: give numbers from 1")
            setattr(self, key, values)
        if not self.concurrency:
            raise ValueError("plan.concurrency=[]: give a number of requests or more")
        for key in ("prompt_tokens", "answer_tokens"):
            value = getattr(self, key)
            if value is not None and value < 2:
                raise ValueError(f"plan.{key}={value}: give at least 2")
        if self.points:
            _check_points(self.points)


def _check_points(points: Mapping[int, float]) -> None:
    if 0 not in points or len(points) < 3:
        raise ValueError(
            f"plan.points={dict(points)}: give tokens a second of 0 (no drafts) and of two N or more"
        )
    for n, rate in points.items():
        if n < 0 or not 0 < rate < math.inf or not 1 / FAR < rate / points[0] < FAR:
            raise ValueError(
                f"plan.points: {rate} tokens a second at N={n}, {points[0]} at 0; give measured ones"
            )


# What is known -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A drafter that could be deployed: its conversations with their counts by N, and what it costs."""

    name: str
    directory: str
    scored: Sequence[Scored]
    costs: CostModel

    @property
    def ns(self) -> list[int]:
        return sorted(self.scored[0].by_n)


@dataclass(frozen=True)
class Workload:
    """Mean tokens of a prompt and of its answer."""

    prompt: float
    answer: float

    @property
    def context(self) -> float:
        """Tokens in a slot in the middle of an answer."""
        return self.prompt + self.answer / 2


def workloads(config: PlanConfig, held: Sequence[Example]) -> dict[str, Workload]:
    """By domain, as the settings say, else the means of the evaluated answers; each turn is a request."""
    asked: dict[str, list[tuple[int, int]]] = {}
    for example in answers(held):
        asked.setdefault(example.domain, []).append((example.mask.index(True), len(example.ids)))
    found = {}
    for domain, some in asked.items():
        prompt = sum(first for first, _ in some) / len(some)
        answer = sum(end - first for first, end in some) / len(some)
        found[domain] = Workload(config.prompt_tokens or prompt, config.answer_tokens or answer)
    return found


def check_contexts(config: PlanConfig, loads: Mapping[str, Workload]) -> None:
    """``ValueError`` for contexts that answers of these domains do not fit in."""
    for domain, load in loads.items():
        least = math.ceil(load.answer / 2) + 1
        if short := [context for context in config.contexts if context < least]:
            raise ValueError(
                f"plan.contexts={short}: {domain} answers of {load.answer:.0f} tokens are at {least} or more "
                "in their middle; give longer contexts, or plan.answer_tokens"
            )


def mixed_workload(mix: Mapping[str, float], loads: Mapping[str, Workload]) -> Workload:
    """The mean request of a mix: a domain has as many requests as its share of tokens holds answers."""
    requests = {domain: share / loads[domain].answer for domain, share in mix.items()}
    prompt, answer = (
        sum(number * getattr(loads[domain], name) for domain, number in requests.items())
        for name in ("prompt", "answer")
    )
    return Workload(prompt / sum(requests.values()), answer / sum(requests.values()))


def at_contexts(config: PlanConfig, load: Workload) -> list[Workload]:
    """The workload, and its answers at every context of the settings."""
    others = {*config.contexts} - {round(load.context)}
    return [load, *(Workload(context - load.answer / 2, load.answer) for context in sorted(others))]


def shares(traffic: Mapping[str, float], scored: Sequence[Scored]) -> dict[str, float]:
    """Each domain's share of the tokens that are served; of those that were evaluated, where nothing is said.

    Errors: ``ValueError`` for a domain in which nothing was drafted.
    """
    most = max(scored[0].by_n)
    tokens = {
        domain: sum(one.by_n[most].tokens for one in scored if one.domain == domain)
        for domain in dict.fromkeys(one.domain for one in scored)
    }
    given = traffic or {domain: float(number) for domain, number in tokens.items() if number}
    if unknown := [domain for domain in given if not tokens.get(domain)]:
        raise ValueError(
            f"eval.traffic: nothing was drafted in {', '.join(unknown)}; the evaluated domains are "
            f"{', '.join(tokens)}"
        )
    return {domain: share / sum(given.values()) for domain, share in given.items()}


def check_domains(traffic: Mapping[str, float], held: Sequence[Example]) -> None:
    """``ValueError`` for shares of domains that no conversation is of, or that cannot be added."""
    if not math.isfinite(sum(traffic.values())):
        raise ValueError(f"eval.traffic={dict(traffic)}: too large to be added; give shares like 3 and 1")
    known = {example.domain for example in held}
    if unknown := [domain for domain in traffic if domain not in known]:
        raise ValueError(
            f"eval.traffic: no conversation is of {', '.join(unknown)}; there are {', '.join(sorted(known))}"
        )


def mixed_taus(
    candidate: Candidate, mix: Mapping[str, float], seed: int
) -> dict[int, tuple[float, np.ndarray]]:
    """By N, tau of a mix of domains and its resamples."""
    found = {}
    for n in candidate.ns:
        slowness, resampled_slowness = 0.0, np.zeros(1)
        for at, (domain, share) in enumerate(mix.items()):  # domains are drawn apart
            counts = [one.by_n[n] for one in candidate.scored if one.domain == domain]
            slowness += share / reduce(add, counts).tau
            resampled_slowness = resampled_slowness + share / resampled(counts, seed=seed + at)
        found[n] = (1 / slowness, 1 / resampled_slowness)
    return found


# Predicting --------------------------------------------------------------------------------------


def rate(costs: CostModel, load: Workload, tau: Any, n: int, rows: int) -> Any:
    """Tokens a second of ``rows`` requests that are always at work; an array for an array of taus."""
    rounds = (load.answer - 1) / tau * costs.round(rows, n, load.context)
    return rows * load.answer / (rows * costs.prompt(load.prompt, n) + rounds)


def predict(
    candidates: Sequence[Candidate],
    mixes: Mapping[str, Mapping[str, float]],
    loads: Mapping[str, Sequence[Workload]],
    concurrency: Sequence[int],
    seed: int,
) -> list[dict[str, Any]]:
    """Tokens a second and seconds a token for every mix, context, concurrency, method and N.

    ``loads`` are those of each mix.

    N=0 does not draft; it is the fastest plain decoding that was measured beside any of the candidates.
    """
    found = []
    for mix, domains in mixes.items():
        taus = {one.name: mixed_taus(one, domains, seed) for one in candidates}
        for load in loads[mix]:
            for rows in concurrency:
                plain = max(rate(one.costs, load, 1.0, 0, rows) for one in candidates)
                where = {"concurrency": rows, "context": round(load.context), "mix": mix}
                found.append(_prediction("none", 0, where, 1.0, plain, plain, np.array([plain])))
                for one in candidates:
                    for n, (tau, resamples) in taus[one.name].items():
                        speed, some = (rate(one.costs, load, each, n, rows) for each in (tau, resamples))
                        found.append(_prediction(one.name, n, where, tau, speed, plain, some))
    return found


def _prediction(
    method: str,
    n: int,
    where: Mapping[str, Any],
    tau: float,
    speed: float,
    plain: float,
    resamples: np.ndarray,
) -> dict[str, Any]:
    return {
        "method": method,
        "n": n,
        **where,
        "tau": round(tau, 4),
        "tokens_per_second": round(speed, 3),
        "seconds_per_token": round(where["concurrency"] / speed, 6),
        "gain": round(speed / plain, 4),
        "gain_ci95": interval(resamples / plain),
    }


def build(
    candidates: Sequence[Candidate],
    loads: Mapping[str, Workload],
    traffic: Mapping[str, float],
    config: PlanConfig,
    seed: int,
    **facts: Any,
) -> dict[str, Any]:
    """plan.json: predictions, the pick at every load and in every domain, and where drafting stops to pay.

    ``loads`` are the requests of each domain.
    """
    mix = shares(traffic, candidates[0].scored)
    mixes = {TRAFFIC: mix, **{domain: {domain: 1.0} for domain in mix}}
    means = {name: mixed_workload(some, loads) for name, some in mixes.items()}
    load = means[TRAFFIC]
    every = {name: at_contexts(config, mean) for name, mean in means.items()}
    predictions = predict(candidates, mixes, every, config.concurrency, seed)
    here = [line for line in predictions if line["context"] == round(means[line["mix"]].context)]
    served = [line for line in here if line["mix"] == TRAFFIC]
    static = _static(served)
    schedules = {one.name: _schedule(one, mix, load, max(config.concurrency), seed) for one in candidates}
    return {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "workload": _described(load),
        "workloads": {domain: _described(means[domain]) for domain in mix},
        "traffic": {domain: round(share, 4) for domain, share in mix.items()},
        "pick": static,
        "by_concurrency": [_best(served, concurrency=rows) for rows in config.concurrency],
        "by_domain": [
            _best(here, mix=domain, concurrency=config.concurrency[0])
            for domain in mixes
            if domain != TRAFFIC
        ],
        "methods": {
            one.name: {
                "drafter": one.directory,
                "schedule": schedules[one.name],
                "break_even_concurrency": _break_even(schedules[one.name]),
            }
            for one in candidates
        },
        "predictions": predictions,
    }


def _described(load: Workload) -> dict[str, float]:
    return {"prompt_tokens": round(load.prompt, 1), "answer_tokens": round(load.answer, 1)}


def _best(lines: Sequence[dict[str, Any]], **where: Any) -> dict[str, Any]:
    """The fastest prediction among those with these values."""
    some = [line for line in lines if all(line[key] == value for key, value in where.items())]
    return max(some, key=lambda line: line["tokens_per_second"])


def _static(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One method and N for all loads: the largest product of gains."""
    gains: dict[tuple[str, int], list[float]] = {}
    for line in lines:
        gains.setdefault((line["method"], line["n"]), []).append(line["gain"])
    means = {key: math.exp(float(np.mean(np.log(some)))) for key, some in gains.items()}
    method, n = max(means, key=means.__getitem__)
    return {"method": method, "n": n, "mean_gain": round(means[method, n], 4)}


def _schedule(
    candidate: Candidate, mix: Mapping[str, float], load: Workload, most: int, seed: int
) -> list[list[int]]:
    """Runs of batch sizes with their fastest N: ``[first, last, N]``, from 1 on."""
    taus = {0: 1.0, **{n: tau for n, (tau, _) in mixed_taus(candidate, mix, seed).items()}}

    def fastest(rows: int) -> int:
        return max(taus, key=lambda n: rate(candidate.costs, load, taus[n], n, rows))

    runs = [(n, list(some)) for n, some in groupby(range(1, most + 1), key=fastest)]
    return [[sizes[0], sizes[-1], n] for n, sizes in runs]


def _break_even(schedule: Sequence[Sequence[int]]) -> int | None:
    """The batch size from which on no N pays; ``None`` where one still does at the largest."""
    return schedule[-1][0] if schedule[-1][2] == 0 else None


# From somebody's engine ----------------------------------------------------------------------------


def from_points(
    scored: Sequence[Scored], traffic: Mapping[str, float], points: Mapping[int, float], method: str
) -> dict[str, Any]:
    """A plan from tokens a second of an engine at a few N: the cost of its rounds is a line through them.

    Errors: ``ValueError`` for a point at an N that the drafter was not scored at, or well beyond what was
    accepted there.
    """
    ns, mix = sorted(scored[0].by_n), shares(traffic, scored)
    if unknown := sorted({*points} - {*ns, 0}):
        raise ValueError(f"plan.points: N={unknown[0]} was not scored; the scored N are {ns}")
    found = tuple(Point(n, points.get(n), _survival(scored, mix, n)) for n in ns)
    for point in found:
        tau = 1 + sum(point.survival)
        if point.rate and point.rate > BEYOND * tau * points[0]:
            raise ValueError(
                f"plan.points: {point.rate:g} tokens a second at N={point.n} are "
                f"{point.rate / points[0]:.2f} times those without drafts, but tau is {tau:.2f} here; score "
                "the drafter on the prompts that were measured"
            )
    return sweeps.plan([Panel("", method, TRAFFIC, points[0], found)])


def _survival(scored: Sequence[Scored], mix: Mapping[str, float], n: int) -> tuple[float, ...]:
    """By position, over the rounds of a mix: a domain has as many as its share of tokens takes."""
    pooled = {domain: reduce(add, (one.by_n[n] for one in scored if one.domain == domain)) for domain in mix}
    rounds = np.array([share / pooled[domain].tau for domain, share in mix.items()])
    return tuple((rounds / rounds.sum()) @ np.array([pooled[domain].survival for domain in mix]))
