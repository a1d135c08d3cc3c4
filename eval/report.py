"""What an evaluation leaves behind: report.json (other programs read it), pictures, report.html.

``rows.jsonl`` holds the counts of each conversation, which runs are compared by (eval/compare.py).
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from data.sources import BUNDLED
from drafters.files import replace_file
from eval.replay import Counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from serve.costs import Costs

SCHEMA_VERSION = 1
COUNTING: dict[str, Any] = {"bonus": True, "pooled": True, "eos_rounds": "accepted tokens only"}


@dataclass(frozen=True)
class Scored:
    """One conversation of a domain: its counts by N, and what was odd about it.

    ``off_path`` counts its answers that are not the target's own; ``margin`` is the smallest top-2
    margin along them, ``None`` where it was not looked at, as is ``loops``. ``prompt`` is a hash of what was
    asked. Where a server counted, these are ``prompts`` conversations together.
    """

    name: str
    domain: str
    by_n: dict[int, Counts]
    off_path: int = 0
    margin: float | None = None
    loops: bool | None = False
    prompt: str = ""
    prompts: int = 1


def bootstrap(counts: Sequence[Counts], *, seed: int = 0, samples: int = 2000) -> list[float]:
    """95 % interval of the pooled tau, resampling whole conversations."""
    return interval(resampled(counts, seed=seed, samples=samples))


def resampled(counts: Sequence[Counts], *, seed: int, samples: int = 2000) -> np.ndarray:
    """Pooled taus of resamples; one seed picks the same places of every list of one length (pairs)."""
    tokens, rounds = (
        np.array([getattr(c, key) for c in counts], dtype=float) for key in ("tokens", "rounds")
    )
    picks = np.random.default_rng(seed).integers(0, len(counts), (samples, len(counts)))
    return tokens[picks].sum(1) / np.maximum(rounds[picks].sum(1), 1)


def interval(values: np.ndarray) -> list[float]:
    """What 95 % of the values lie between."""
    return [round(float(x), 4) for x in np.quantile(values, [0.025, 0.975])]


def summarise(scored: Sequence[Scored], max_n: int, seed: int, costs: Costs | None = None) -> dict[str, Any]:
    """One entry of ``domains``: pooled counts and rates at ``max_n``, and tau for every N.

    Where a proposer does not always propose, also what survived of rounds that proposed as much; with
    ``costs``, what ``break_even`` says.
    """
    pooled = {n: reduce(add, (s.by_n[n] for s in scored)) for n in scored[0].by_n}
    top = pooled[max_n]
    of_proposed = top.survival_of_proposed
    loop = [s.loops for s in scored]
    return {
        "prompts": sum(s.prompts for s in scored),
        "rounds": round(top.rounds),  # an expectation where path and drafts are both sampled
        "tokens": top.tokens,
        "tau": round(top.tau, 4),
        "tau_ci95": bootstrap([s.by_n[max_n] for s in scored], seed=seed),
        "survival": [round(x, 4) for x in top.survival],
        "conditional": [round(x, 4) for x in top.conditional],
        **({} if of_proposed is None else {"survival_of_proposed": [round(x, 4) for x in of_proposed]}),
        "tau_by_n": {str(n): round(c.tau, 4) for n, c in sorted(pooled.items())},
        "loops": None if None in loop else round(sum(map(bool, loop)) / len(loop), 4),
        **({} if costs is None else break_even(pooled, costs)),
    }


def break_even(pooled: Mapping[int, Counts], costs: Costs) -> dict[str, Any]:
    """The N that gains most for one request, the tau that pays for its rounds, and whether tau is below it.

    A round costs its drafting and a pass over the anchor and the drafts that were verified in the mean; it
    pays where it takes no longer than plain decoding of as many tokens.
    """
    needed = {
        n: (costs.draft(1, n) + costs.step(1, 1 + counts.drafted)) / costs.plain(1)
        for n, counts in pooled.items()
    }
    best = max(needed, key=lambda n: pooled[n].tau / needed[n])
    return {
        "best_n": best,
        "break_even": round(needed[best], 4),
        "below_break_even": pooled[best].tau < needed[best],
    }


def build(
    scored: Sequence[Scored],
    *,
    max_n: int,
    seed: int,
    costs: Costs | None = None,
    counting: Mapping[str, Any] = COUNTING,
    **facts: Any,
) -> dict[str, Any]:
    """The whole report; ``facts`` are target, drafter, method, temperature, mode and dtype.

    Its ``conversations`` go to a file of their own (``write``); ``empty_domains`` names the first of a domain
    in which none made a round. Errors: ``ValueError`` when no conversation could be scored.
    """
    first = {one.domain: one.name for one in reversed(scored)}
    off_path = sum(s.off_path for s in scored)
    margins = [s.margin for s in scored if s.margin is not None]
    scored = [s for s in scored if s.by_n[max_n].rounds]
    if not scored:
        raise ValueError("no conversation made a round of drafting; answers need two tokens or more")
    domains: dict[str, list[Scored]] = {}
    for one in scored:
        domains.setdefault(one.domain, []).append(one)
    table = {name: summarise(some, max_n, seed, costs) for name, some in domains.items()}
    below = [name for name, row in table.items() if row.get("below_break_even")]
    return {
        **facts,
        "max_n": max_n,
        "domains": table,
        "overall": summarise(scored, max_n, seed, costs),
        "worst_domain": min(table, key=lambda name: table[name]["tau"]),
        "below_break_even": None if costs is None else below,
        "empty_domains": {name: row for name, row in first.items() if name not in domains},
        "schema_version": SCHEMA_VERSION,
        "seed": seed,
        "off_path": off_path,
        "min_margin": min(margins, default=None),
        "counting": dict(counting),
        "conversations": [_row(one) for one in scored],
    }


def _row(one: Scored) -> dict[str, Any]:
    by_n = {str(n): _counts(counts) for n, counts in one.by_n.items()}
    return {"name": one.name, "domain": one.domain, "prompt": one.prompt, "loops": one.loops, "by_n": by_n}


def _counts(counts: Counts) -> dict[str, Any]:
    proposed = {} if counts.proposed is None else {"proposed": counts.proposed}
    return {"rounds": counts.rounds, "tokens": counts.tokens, "survived": counts.survived, **proposed}


def from_row(row: Mapping[str, Any]) -> Scored:
    """A line of ``rows.jsonl`` read back; what was odd about its path is not kept."""
    by_n = {int(n): Counts(int(n), **counts) for n, counts in row["by_n"].items()}
    return Scored(row["name"], row["domain"], by_n, loops=row["loops"], prompt=row["prompt"])


def loops(tokens: Sequence[int], *, least: int = 60, longest_period: int = 30) -> bool:
    """Whether an answer ends in a loop: its last ``least`` tokens repeat with some short period."""
    tail = tokens[-least:]
    if len(tail) < least:
        return False
    return any(all(tail[i] == tail[i - p] for i in range(p, least)) for p in range(1, longest_period + 1))


def table(report: Mapping[str, Any]) -> str:
    """The report for a terminal: a line a domain."""
    lines = [
        f"{'domain':14s} {'prompts':>7s} {'tau':>6s} {'95 % interval':>15s}  loops  survival by position"
    ]
    for name, row in [*report["domains"].items(), ("overall", report["overall"])]:
        low, high = row["tau_ci95"]
        curve = " ".join(f"{x:.3f}" for x in row["survival"])
        lines.append(
            f"{name:14s} {row['prompts']:7d} {row['tau']:6.3f} {low:7.3f}-{high:<7.3f} "
            f"{_share(row['loops']):>6s}  {curve}"
        )
    return "\n".join([*lines, *remarks(report)])


def _share(of: float | None) -> str:
    return "-" if of is None else f"{of:.0%}"


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What a table does not say: the worst domain, where drafting does not pay, where nothing was counted."""
    worst, domains = report["worst_domain"], report["domains"]
    out = [f"worst domain: {worst}, tau {domains[worst]['tau']:.3f}"]
    for name in report["below_break_even"] or []:
        row = domains[name]
        n, tau = row["best_n"], row["tau_by_n"][str(row["best_n"])]
        out.append(
            f"below break-even: {name}, tau {tau:.3f} at N = {n}; for one request on this machine drafting "
            f"pays from {row['break_even']:.3f} on"
        )
    if report.get("languages"):
        out.append("by language: " + ", ".join(f"{k} {x['tau']:.3f}" for k, x in report["languages"].items()))
    return out + [
        f"no round: {name} (first row {row}); answers need two tokens or more that are the target's own"
        for name, row in report["empty_domains"].items()
    ]


def columns(rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines in which the cells stand below one another."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def write(report: Mapping[str, Any], directory: Path) -> None:
    """``report.json``, ``rows.jsonl``, ``acceptance.png`` and ``report.html`` (opens offline).

    Each is renamed into place.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps(row) + "\n" for row in report["conversations"])
    report = {key: value for key, value in report.items() if key != "conversations"}
    picture = draw(report)
    replace_file(directory / "rows.jsonl", rows.encode())
    replace_file(directory / "report.json", json.dumps(report, indent=2).encode())
    replace_file(directory / "acceptance.png", picture)
    replace_file(directory / "report.html", _page(report, picture).encode())


def draw(report: Mapping[str, Any]) -> bytes:
    """Tau over N and survival over position, a line a domain, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, row in report["domains"].items():
        ns = [int(n) for n in row["tau_by_n"]]
        left.plot(ns, list(row["tau_by_n"].values()), marker="o", label=name)
        right.plot(range(1, len(row["survival"]) + 1), row["survival"], marker="o")
    left.set(
        xlabel="drafts a round (N)",
        ylabel="tokens per target pass (tau)",
        title="Acceptance length",
    )
    right.set(
        xlabel="draft position",
        ylabel="share of rounds accepted so far",
        title=f"Survival at N = {report['max_n']}",
    )
    right.set_ylim(0, 1)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return as_png(figure)


def as_png(figure: Figure) -> bytes:
    """A figure as the bytes of a picture."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _page(report: Mapping[str, Any], picture: bytes) -> str:
    head = ["domain", "prompts", "rounds", "tokens", "tau", "95 % interval", "loops"]
    lines, by_position = [], []
    for name, row in [*report["domains"].items(), ("overall", report["overall"])]:
        low, high = row["tau_ci95"]
        counts = [row[key] for key in ("prompts", "rounds", "tokens")]
        lines.append([name, *counts, f"{row['tau']:.3f}", f"{low:.3f} to {high:.3f}", _share(row["loops"])])
        for key in ("survival", "conditional"):
            by_position.append([name, key, *(f"{x:.3f}" for x in row[key])])
    facts = [(key, value) for key, value in report.items() if key not in PARTS]
    return page(
        f"Acceptance of {report['drafter']}",
        "<h1>Acceptance by domain</h1>",
        f"<p>{READ_AS}</p>",
        html_table(head, lines),
        *(f"<p>{html.escape(remark)}</p>" for remark in remarks(report)),
        image(picture, "tau over N, and survival over position"),
        f"<h2>By draft position, N = {report['max_n']}</h2>",
        "<p>Conditional at k is survival at k over survival at k - 1.</p>",
        html_table(["domain", "", *range(1, report["max_n"] + 1)], by_position),
        html_table([], facts),
    )


PARTS = ("domains", "overall", "counting", "languages", "sources")  # what stands in tables, or in words

READ_AS = (
    "tau is the number of tokens committed per target pass, the bonus token included, pooled over rounds;\n"
    "a round that an end-of-turn token ends counts its accepted tokens only.\n"
    "Survival at k is the share of rounds in which drafts 1 to k were all accepted."
)


def page(title: str, *parts: str) -> str:
    """A page that opens offline, of parts that are HTML already."""
    return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}}
table{{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}}
td,th{{border-bottom:1px solid #ddd;padding:.3rem .5rem;text-align:left;font-variant-numeric:tabular-nums}}
.figures{{white-space:nowrap}}
img{{max-width:100%}}</style>
{chr(10).join(parts)}</html>"""


def html_table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Rows of plain text as a table; without a head where that is empty."""

    def cell(text: str, tag: str) -> str:
        figures = ' class="figures"' if re.fullmatch(r"([-+.,%()\d ]|to)+", text) else ""
        return f"<{tag}{figures}>{html.escape(text)}</{tag}>"

    def cells(row: Sequence[object], tag: str = "td") -> str:
        return "<tr>" + "".join(cell(str(x), tag) for x in row) + "</tr>"

    return f"<table>{cells(head, 'th') if head else ''}{''.join(map(cells, rows))}</table>"


def image(picture: bytes, alt: str) -> str:
    """A picture that stands in the page itself."""
    inline = base64.b64encode(picture).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{inline}">'


def beside(directory: Path, data: str) -> Path:
    """The report folder of the run that a drafter directory belongs to, else one here.

    ``report/`` is of the file that the run itself held out; others get a folder of their name.
    """
    run = directory.resolve().parent
    if not (run / "recipe.yaml").exists():
        return Path(f"report-{directory.resolve().name}")
    trained = yaml.safe_load((run / "recipe.yaml").read_text())["settings"]["data"]
    own = trained["eval_path"] or (BUNDLED if trained["path"] == BUNDLED else None)
    return run / ("report" if data == own else f"report-{Path(data).name.split('.')[0]}")
