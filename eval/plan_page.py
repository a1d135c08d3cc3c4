"""A plan as people read it: a table for a terminal, a page that opens offline, a picture; and plan.json."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafters.files import replace_file
from eval.plan import TRAFFIC, Candidate
from eval.report import as_png, columns, html_table, image, page


def _rows(result: Mapping[str, Any]) -> list[list[object]]:
    """A line a concurrency: the pick, its gain with interval, tokens a second without drafts and by N."""
    out: list[list[object]] = []
    for best in result["by_concurrency"]:
        here = [line for line in _served(result) if line["concurrency"] == best["concurrency"]]
        shown = max((line for line in here if line["n"]), key=lambda line: line["gain"])["method"]
        rates = {
            x["n"]: f"{x['n']}: {x['tokens_per_second']:.1f}" for x in here if x["method"] in ("none", shown)
        }
        gain = "{:.2f} ({:.2f} to {:.2f})".format(best["gain"], *best["gain_ci95"])
        row = [best["concurrency"], best["method"], best["n"], gain, f"{1e3 * best['seconds_per_token']:.1f}"]
        out.append([*row, "  ".join(rates.values())])
    return out


HEAD = ("requests", "method", "N", "gain over not drafting", "ms a token", "tokens a second by N")


def _served(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Predictions at the workload's own context and mix."""
    context = result["by_concurrency"][0]["context"]
    return [x for x in result["predictions"] if x["mix"] == TRAFFIC and x["context"] == context]


def table(result: Mapping[str, Any]) -> str:
    """The plan for a terminal."""
    return "\n".join([*columns([HEAD, *_rows(result)]), *_sentences(result)])


def _sentences(result: Mapping[str, Any]) -> list[str]:
    pick = result["pick"]
    static = f"{pick['method']} with N={pick['n']}, {pick['mean_gain']:.2f} times plain decoding"
    found = [f"one N for all loads: {static if pick['n'] else 'do not draft'}"]
    for name, method in result["methods"].items():
        runs = ", ".join(
            f"N={n} at {first}" + (f" to {last}" if last > first else "")
            for first, last, n in method["schedule"]
        )
        end = method["break_even_concurrency"]
        stops = f"does not pay from {end} requests on" if end else "pays at every load that was looked at"
        found.append(f"{name}: {runs} requests; it {stops}")
    for best in result["by_domain"]:
        if best["n"] == 0:
            found.append(f"{best['mix']}: below break-even at {best['concurrency']} requests, do not draft")
    if "vllm" in result:
        found.append(f"vLLM: {result['vllm'].get('arguments') or result['vllm']['why']}")
    return found


def write(result: Mapping[str, Any], candidates: Sequence[Candidate], directory: Path) -> None:
    """``plan.json``, ``plan.png``, ``plan.html`` (opens offline) and ``costs.json``."""
    directory.mkdir(parents=True, exist_ok=True)
    picture = draw(result)
    workload, traffic = result["workload"], result["traffic"]
    facts = {
        **{
            key: result[key] for key in ("target", "dtype", "device", "temperature", "costs") if key in result
        },
        "prompt and answer": f"{workload['prompt_tokens']} and {workload['answer_tokens']} tokens",
        "traffic": ", ".join(f"{domain} {share:.0%}" for domain, share in traffic.items()),
    }
    domains = [
        [x["mix"], *result["workloads"][x["mix"]].values(), x["method"], x["n"], f"{x['gain']:.2f}"]
        for x in result["by_domain"]
    ]
    domain_head = (
        "domain",
        "prompt",
        "answer",
        "method",
        "N",
        f"gain at {result['by_domain'][0]['concurrency']}",
    )
    parts = [
        "<h1>How many tokens to draft</h1>",
        *(f"<p>{html.escape(sentence)}</p>" for sentence in _sentences(result)),
        image(picture, "tokens a second over requests at once, a line an N"),
        html_table(HEAD, _rows(result)),
        "<h2>By domain</h2>",
        html_table(domain_head, domains),
        html_table([], [*facts.items()]),
    ]
    for name, content in (
        ("plan.json", json.dumps(result, indent=2, allow_nan=False).encode()),
        ("costs.json", json.dumps({one.name: asdict(one.costs) for one in candidates}, indent=2).encode()),
        ("plan.png", picture),
        ("plan.html", page("How many tokens to draft", *parts).encode()),
    ):
        replace_file(directory / name, content)


def draw(result: Mapping[str, Any]) -> bytes:
    """Tokens a second, and gain, over requests at once; a line an N of every method, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in _served(result):
        groups.setdefault((line["method"], line["n"]), []).append(line)
    several = len(result["methods"]) > 1
    for (method, n), lines in groups.items():
        lines = list({line["concurrency"]: line for line in lines}.values())
        rows = [line["concurrency"] for line in lines]
        label = "no drafts" if n == 0 else f"{method} N={n}" if several else f"N={n}"
        style = {"color": "black", "linestyle": "--"} if n == 0 else {"marker": "o"}
        left.plot(rows, [line["tokens_per_second"] for line in lines], label=label, **style)
        right.plot(rows, [line["gain"] for line in lines], **style)
    left.set(title="Predicted tokens a second", ylabel="tokens a second")
    right.set(title="Over not drafting", ylabel="gain")
    for axes in (left, right):
        axes.set(xlabel="requests at once", xscale="log")
        rows = result["by_concurrency"]
        axes.set_xticks([line["concurrency"] for line in rows], [str(line["concurrency"]) for line in rows])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    return as_png(figure)
