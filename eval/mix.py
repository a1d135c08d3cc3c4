"""Runs of different mixes side by side: tau by mix and domain, what tokens of a domain bought, a better mix.

Intervals hold 95 % of resamples of the held-out conversations, drawn alike for all runs, and nothing of the
chance of training: two runs of one mix with different seeds show that (``seed=0,1``).

Axes: S resamples, of which the first one is all conversations as they are; R runs; D domains.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from eval.curves import Curves, fit, harmonic, suggest
from eval.report import Scored, as_png, html_table, image, interval, resampled
from eval.runs import Compared, learned_from

ANEW = ("data/mix", "data.weights", "run", "overwrite")  # what the next run does not take over
Scores = Sequence[Mapping[str, Sequence[Scored]]]  # of each run, by domain


@dataclass(frozen=True)
class Runs:
    """What runs learned from, and what came of it."""

    names: list[str]
    domains: list[str]
    weights: list[dict[str, float]]  # of each run, as shares
    tokens_RD: np.ndarray  # supervised
    total_R: np.ndarray  # supervised; of domains that were not scored too
    taus_SRD: np.ndarray
    traffic_D: np.ndarray  # shares of the answer tokens

    @property
    def traffic_SR(self) -> np.ndarray:
        """Tau of the traffic."""
        return harmonic(self.taus_SRD, self.traffic_D)

    def curves(self, without: int | None = None, resamples: int | None = None) -> Curves:
        kept = [at for at in range(len(self.names)) if at != without]
        return fit(self.tokens_RD[kept], self.total_R[kept], self.taus_SRD[:resamples, kept])


def differ(runs: Sequence[Compared]) -> bool:
    """Whether runs drew their rows by different weights."""
    return any(_weights(run) != _weights(runs[0]) for run in runs)


def build(
    compared: Sequence[Compared], scored: Scores, traffic: Mapping[str, float], seed: int
) -> dict[str, Any]:
    """``mix`` of compare.json. Errors: ``ValueError`` for traffic of domains that were not scored."""
    runs = _gather(compared, scored, traffic, seed)
    confirming = _confirming(runs)
    curves = runs.curves(without=confirming)
    hundredths_SD = suggest(curves, runs.traffic_D)
    result: dict[str, Any] = {
        "n": max(scored[0]["overall"][0].by_n),
        "traffic": {d: round(float(p), 4) for d, p in zip(runs.domains, runs.traffic_D, strict=True)},
        "tokens": {
            name: dict(zip(runs.domains, map(int, row), strict=True))
            for name, row in zip(runs.names, runs.tokens_RD, strict=True)
        },
        "tau": {name: _by_domain(runs, runs.taus_SRD[:, r]) for r, name in enumerate(runs.names)},
        "gains": _gains(runs, curves),
        "suggested": None,
        "confirmed": None,
        "notes": list(_notes(runs, curves, confirming)),
    }
    if hundredths_SD is not None:
        taus_SD = curves.taus(hundredths_SD[0] / 100)
        others = [at for at in range(len(runs.names)) if at != confirming]
        top = max(others, key=lambda at: runs.traffic_SR[0, at])
        weights = {
            domain: {"value": some_S[0] / 100, "ci95": interval(some_S[1:] / 100)}
            for domain, some_S in zip(runs.domains, hundredths_SD.T, strict=True)
            if some_S[0]
        }
        result["suggested"] = {
            "weights": weights,
            "predicted": _by_domain(runs, taus_SD),
            "best_run": runs.names[top],
            "less_best_run": _estimate(harmonic(taus_SD, runs.traffic_D) - runs.traffic_SR[:, top]),
            "command": _command({domain: each["value"] for domain, each in weights.items()}, compared[0]),
        }
        if confirming is not None:
            measured_SD = runs.taus_SRD[:, confirming]
            more_S = runs.traffic_SR[:, confirming] - harmonic(taus_SD, runs.traffic_D)
            result["confirmed"] = {
                "run": runs.names[confirming],
                "measured": _by_domain(runs, measured_SD),
                "difference": {**_by_domain(runs, measured_SD - taus_SD), "traffic": _estimate(more_S)},
            }
    return result


def _gather(compared: Sequence[Compared], scored: Scores, traffic: Mapping[str, float], seed: int) -> Runs:
    domains = [domain for domain in scored[0] if domain != "overall"]
    if unknown := sorted(traffic.keys() - set(domains)):
        raise ValueError(
            f"eval.traffic: {', '.join(unknown)} was not scored; give shares of {', '.join(domains)}"
        )
    shares_D = np.array([traffic.get(domain, 0.0) if traffic else 1.0 for domain in domains])
    n = max(scored[0]["overall"][0].by_n)

    def taus_S(some: Sequence[Scored], at: int) -> np.ndarray:
        counts = [one.by_n[n] for one in some]
        return np.concatenate([[reduce(add, counts).tau], resampled(counts, seed=seed + at)])

    taus_RDS = [[taus_S(run[domain], at) for at, domain in enumerate(domains)] for run in scored]
    seen = [_seen(run) for run in compared]
    return Runs(
        [run.name for run in compared],
        domains,
        [_weights(run) for run in compared],
        np.array([[float(tokens.get(domain, 0)) for domain in domains] for tokens in seen]),
        np.array([float(sum(tokens.values())) for tokens in seen]),
        np.moveaxis(np.array(taus_RDS), 2, 0),
        shares_D / shares_D.sum(),
    )


def _weights(run: Compared) -> dict[str, float]:
    weights = run.record["settings"]["data"].get("weights", {})  # runs of before there were weights have none
    return {name: weight / sum(weights.values()) for name, weight in sorted(weights.items())}


def _seen(run: Compared) -> dict[str, int]:
    by_domain = learned_from(run.record)
    if not by_domain:
        raise ValueError(
            f"run {run.name}: its recipe.yaml does not say what it learned from (data.seen), as it does when "
            "a run has ended; give its command again"
        )
    return by_domain


def _gains(runs: Runs, curves: Curves) -> dict[str, dict[str, Any] | None]:
    """Tau of each domain by a million more tokens: its own, others', and its own in place of others'.

    ``None`` where the runs do not tell.
    """
    own_SD, others_SD = curves.slopes()
    kinds = {"own": own_SD, "others": others_SD, "exchanged": own_SD - others_SD}
    return {
        domain: {kind: _estimate(slope_SD[:, d]) for kind, slope_SD in kinds.items()} if known else None
        for d, (domain, known) in enumerate(zip(runs.domains, curves.known_D, strict=True))
    }


def _confirming(runs: Runs) -> int | None:
    """The run whose mix is what the others suggest."""
    for at, weights in enumerate(runs.weights):
        hundredths_SD = suggest(runs.curves(without=at, resamples=1), runs.traffic_D)
        if hundredths_SD is None:
            continue
        shares = {d: share / 100 for d, share in zip(runs.domains, hundredths_SD[0], strict=True) if share}
        if shares.keys() == weights.keys() and all(abs(weights[d] - shares[d]) < 0.005 for d in shares):
            return at
    return None


def _command(weights: Mapping[str, float], like: Compared) -> str:
    """What trains a run as ``like`` was trained, on other weights."""
    keys = [word.split("=")[0].lstrip("+") for word in like.record.get("overrides", [])]
    given = [
        word
        for key, word in zip(keys, like.record.get("overrides", []), strict=True)
        if key not in ANEW and not key.startswith("data.weights.")
    ]
    named = ", ".join(f"{domain}: {weight:g}" for domain, weight in weights.items())
    return shlex.join(["python", "-m", "train", *given, f"data.weights={{{named}}}", "run=confirm"])


def _notes(runs: Runs, curves: Curves, confirming: int | None) -> Iterator[str]:
    """What the figures do not say by themselves."""
    for at, name in enumerate(runs.names):
        for before in range(at):
            if runs.weights[at] == runs.weights[before] and _alike(runs.total_R[[before, at]]):
                by = _shown(_estimate(runs.traffic_SR[:, at] - runs.traffic_SR[:, before]), "+.3f")
                more_D = runs.taus_SRD[0, at] - runs.taus_SRD[0, before]
                most = int(np.abs(more_D).argmax())
                yield (
                    f"{runs.names[before]} and {name} are one mix: by chance of training the traffic's tau "
                    f"differs by {by}, that of {runs.domains[most]} by {more_D[most]:+.3f}"
                )
    fitted = len(runs.names) - (confirming is not None)
    if curves.known_D.any() and fitted > 3:
        miss = float((curves.miss_D[curves.known_D] ** 2).mean() ** 0.5)
        yield f"the curves miss the taus of the {fitted} runs that they fit by {miss:.3f} (root mean square)"
    elif curves.known_D.any():
        yield f"{fitted} runs are as many as a curve has numbers: nothing is left to check the fit with"
    if _alike(runs.total_R):
        yield (
            "all runs had one budget: `exchanged` was varied, while `own` and `others` are told apart by the "
            "form of the curve alone"
        )
    if unknown := [d for d, known in zip(runs.domains, curves.known_D, strict=True) if not known]:
        yield (
            f"{', '.join(unknown)}: not three different amounts of its tokens, so no gain is known and no "
            "mix is suggested; add runs of data/mix=balanced, of the domain alone and without it"
        )


def _alike(total_R: np.ndarray) -> bool:
    return bool(total_R.max() < 1.02 * total_R.min())


def _estimate(values_S: np.ndarray) -> dict[str, Any]:
    return {"value": round(float(values_S[0]), 4), "ci95": interval(values_S[1:])}


def _by_domain(runs: Runs, taus_SD: np.ndarray) -> dict[str, Any]:
    """Estimates by domain, and of the traffic."""
    by_domain = {domain: _estimate(taus_SD[:, d]) for d, domain in enumerate(runs.domains)}
    return {**by_domain, "traffic": _estimate(harmonic(taus_SD, runs.traffic_D))}


# Showing ----------------------------------------------------------------------------------------


def _shown(estimate: Mapping[str, Any], form: str = ".3f") -> str:
    low, high = estimate["ci95"]
    return f"{estimate['value']:{form}} ({low:{form}} to {high:{form}})"


def tables(mix: Mapping[str, Any]) -> Iterator[tuple[str, list[list[object]]]]:
    """Titles and tables, heads first: the matrix, tokens, gains, the suggestion, its confirmation."""
    domains, best, done = list(mix["traffic"]), mix["suggested"], mix["confirmed"]
    columns, kinds = [*domains, "traffic"], ("own", "others", "exchanged")

    def matrix(rows: Mapping[str, Mapping[str, Any]], form: str = ".3f") -> list[list[object]]:
        return [[name, *(_shown(row[key], form) for key in columns)] for name, row in rows.items()]

    yield f"tau by mix and domain, N={mix['n']}", [["run", *columns], *matrix(mix["tau"])]
    rows = [[name, *(f"{row[d]:,}" for d in domains)] for name, row in mix["tokens"].items()]
    yield "supervised tokens learned from", [["run", *domains], *rows]
    gains = {domain: row for domain, row in mix["gains"].items() if row}
    rows = [[domain, *(_shown(row[kind], "+.2f") for kind in kinds)] for domain, row in gains.items()]
    if gains:
        yield "tau by a million more tokens, where all domains have one share", [["domain", *kinds], *rows]
    if best:
        weights = {d: f"{each['value']:.2f}" for d, each in best["weights"].items()}
        ranges = {d: "{:.2f} to {:.2f}".format(*each["ci95"]) for d, each in best["weights"].items()}
        rows = [
            ["share of the traffic", *(f"{mix['traffic'][d]:.2f}" for d in domains), ""],
            ["weight", *(weights.get(d, "0") for d in domains), ""],
            ["in 95 % of resamples", *(ranges.get(d, "") for d in domains), ""],
            *matrix({"predicted tau": best["predicted"]}),
        ]
        if done:
            rows += matrix({f"measured, {done['run']}": done["measured"]})
            rows += matrix({"difference": done["difference"]}, "+.3f")
        yield "suggested mix", [["", *columns], *rows]


def remarks(mix: Mapping[str, Any]) -> list[str]:
    """Sentences below the tables."""
    out = [f"note: {note}" for note in mix["notes"]]
    if best := mix["suggested"]:
        out.append(
            f"predicted, less the best run ({best['best_run']}): {_shown(best['less_best_run'], '+.3f')}"
        )
        if not mix["confirmed"]:
            out.append(f"to confirm it: {best['command']}")
    return out


def html(mix: Mapping[str, Any]) -> Iterator[str]:
    """Parts of a page."""
    yield "<h2>Mixes</h2>"
    yield image(draw(mix), "tau by mix and domain, as colours")
    for title, (head, *rows) in tables(mix):
        yield f"<h3>{title}</h3>"
        yield html_table(head, rows)
    yield html_table([], [[line] for line in remarks(mix)])


def draw(mix: Mapping[str, Any]) -> bytes:
    """The matrix as a heat map, as PNG: a cell is coloured by its place between its column's extremes."""
    from matplotlib.figure import Figure

    columns = [*mix["traffic"], "traffic"]
    taus_RD = np.array([[row[key]["value"] for key in columns] for row in mix["tau"].values()])
    low_D, high_D = taus_RD.min(0), taus_RD.max(0)
    figure = Figure(figsize=(2 + 1.3 * len(columns), 1 + 0.5 * len(taus_RD)), layout="constrained")
    axes = figure.subplots()
    axes.imshow((taus_RD - low_D) / np.maximum(high_D - low_D, 1e-9), cmap="YlGn", aspect="auto", vmax=1.4)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(taus_RD)), list(mix["tau"]))
    axes.set_title("tau by mix and domain, and half its 95 % interval")
    for r, row in enumerate(mix["tau"].values()):
        for d, key in enumerate(columns):
            low, high = row[key]["ci95"]
            text = f"{row[key]['value']:.3f}\n±{(high - low) / 2:.3f}"
            axes.text(d, r, text, ha="center", va="center", fontsize=8)
    return as_png(figure)
