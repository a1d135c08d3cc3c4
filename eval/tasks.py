"""What ``python -m eval`` does."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.examples import renderer
from drafters import checkpoint
from drafters.method import Drafter
from drafters.target import EMBEDDED, Target, load, locate
from drafters.types import Example
from eval import calibrate, compare, counters, plan, plan_page, report, sweeps
from eval import diagnose as diagnosis
from eval.case import open_case
from eval.costs import CONTEXTS, CostModel, cost_model, from_file
from eval.evaluate import evaluate, held_out, numbers_of_drafts
from eval.replay import paths
from eval.runs import check_comparable, common_ns, load_runs, run_directory
from serve import vllm
from serve.proposers import UNTRAINED, build

if TYPE_CHECKING:
    from recipes.schema import Run


def accept(run: Run) -> None:
    """Score ``drafter=`` or ``proposer=`` on ``data.path`` and write the report to ``out=``.

    With ``eval.server=`` a running server decodes, and its counters are read.
    """
    if run.eval.server is None:
        found, out = _scored(run)
    else:
        found = counters.measure(run.eval, run.data, run.drafter, run.seed)
        out = Path(run.out or "report-server")
    for domain, row in found["empty_domains"].items():
        raise ValueError(
            f"{row}: domain {domain} is empty, no answer has two tokens or more that are the target's own; "
            "leave its rows out, or give others"
        )
    report.write(found, out)
    print(report.table(found))
    print(f"report: {out / 'report.html'}")


def calibrated(run: Run) -> None:
    """Temperatures of ``drafter=``'s confidences from ``data.path``, into its config.json."""
    directory, target, drafter, held, out = _opened(run)
    found = list(paths(target, held, drafter.layer_ids, temperature=run.eval.temperature))
    print(calibrate.table(calibrate.keep(drafter, directory, found, out / calibrate.FILE)))
    print(f"{directory}/config.json: confidence_temperatures")


def _scored(run: Run) -> tuple[dict[str, Any], Path]:
    """The report of what is replayed or decoded here, and the folder for it."""
    if run.proposer is None:
        directory, target, drafter, held, out = _opened(run)
        found = evaluate(target, drafter, held, run.eval, run.seed)
        return {"target": found["target"], "drafter": str(directory), **found}, out
    target, trained = _loaded(run)
    proposer = build(run.proposer, trained, run.serve)
    numbers_of_drafts(run.eval, proposer)  # refused before the target answers anything
    out = Path(run.out or f"report-{run.proposer}")
    found = evaluate(target, proposer, _held_out(run, target, out), run.eval, run.seed, run.proposer)
    used = run.proposer if run.drafter is None or run.proposer in UNTRAINED else run.drafter
    return {"target": found["target"], "drafter": used, **found}, out


def _opened(run: Run) -> tuple[Path, Target, Drafter, list[Example], Path]:
    """The drafter directory, target, drafter, held-out conversations and the folder for what is found."""
    if run.drafter is None:
        raise ValueError("drafter: name a drafter directory, for example drafter=runs/demo/drafter")
    directory = Path(run.drafter)
    out = Path(run.out) if run.out else report.beside(directory, run.data.path)
    target, drafter = _loaded(run)
    assert drafter is not None
    numbers_of_drafts(run.eval, drafter)  # refused before the target answers anything
    return directory, target, drafter, _held_out(run, target, out), out


def _loaded(run: Run) -> tuple[Target, Drafter | None]:
    """The target, and the drafter where one is named."""
    if run.drafter is None:
        return load(run.target, run.hardware), None
    directory = Path(run.drafter)
    target = load(run.target, checkpoint.hardware_for(directory, run.hardware))
    return target, checkpoint.read(directory, target)


def _held_out(run: Run, target: Target, cache: Path) -> list[Example]:
    render = renderer(run.data, target.tokenizer, target.stop_ids)
    return held_out(run.data, target, render, run.eval, cache)


def compare_runs(run: Run) -> None:
    """Lay the reports of ``runs=[...]`` side by side; compare.json and compare.html go to ``out=``.

    Without ``data.path=`` these are the reports on what each run held out. ``target=`` says where the target
    is that costs are measured with; without it, the one that the first run names.
    """
    found = load_runs(run.runs or [], run.data.path)
    check_comparable(found, run.data.path)
    first = found[0]
    name = first.record["settings"]["target"] if run.target == EMBEDDED else run.target
    target = load(name, checkpoint.hardware_for(first.drafter, run.hardware))
    if target.signature != first.report["target_signature"]:
        raise ValueError(f"target={name}: the runs were scored on another one, {first.report['target']}")
    costs = [compare.measure(target, one, common_ns(found)) for one in found]
    result = compare.build(found, costs, run.seed, run.eval.traffic)
    out = Path(run.out or "compare")
    compare.write(result, out)
    print(compare.table(result))
    print(f"comparison: {out / 'compare.html'}")


def planned(run: Run) -> None:
    """What to deploy at which load, of ``drafter=``, of ``runs=[...]`` or of ``observed=``."""
    if run.observed is not None:
        for key, given in (("drafter", run.drafter), ("runs", run.runs)):
            if given:
                raise ValueError(
                    f"observed={run.observed} {key}={given}: a sweep is planned alone; leave one out"
                )
        _show_sweeps(sweeps.plan(sweeps.read(Path(run.observed))), Path(run.out or "plan"))
        return
    chosen = _to_choose_from(run)
    first = next(iter(chosen.values()))
    directory, target, drafter, held, out = _opened(replace(run, drafter=str(first)))
    loads = plan.workloads(run.plan, held)
    most = target.config.max_position_embeddings - numbers_of_drafts(run.eval, drafter)[-1]
    if run.plan.contexts and max(run.plan.contexts) > most:
        raise ValueError(
            f"plan.contexts={run.plan.contexts}: the target has room for {most} tokens and drafts"
        )
    plan.check_domains(run.eval.traffic, held)  # what cannot be is refused before anything is measured
    plan.check_contexts(run.plan, {domain: loads[domain] for domain in run.eval.traffic or loads})
    if run.plan.points and run.plan.costs is not None:
        raise ValueError(
            f"plan.points={dict(run.plan.points)} plan.costs={run.plan.costs}: points tell what rounds cost; "
            "leave one out"
        )
    if run.plan.costs is not None:
        _costs(run, next(iter(chosen)), target, drafter)
    candidates = []
    for name, directory in chosen.items():
        drafter = drafter if directory == first else checkpoint.read(directory, target)
        accepted = evaluate(target, drafter, held, replace(run.eval, break_even=False), run.seed)
        accepted = {"target": accepted["target"], "drafter": str(directory), **accepted}
        report.write(accepted, out if len(chosen) == 1 else out / name.replace("/", "-"))
        print(report.table(accepted))
        scored = [report.from_row(row) for row in accepted["conversations"]]
        if run.plan.points:
            _show_sweeps(plan.from_points(scored, run.eval.traffic, run.plan.points, name), out)
            return
        costs = _costs(run, name, target, drafter)
        candidates.append(plan.Candidate(name, str(directory), scored, costs))
    facts = {key: accepted[key] for key in ("target", "temperature", "dtype")}
    facts["costs"] = f"of the engine of python -m serve on {candidates[0].costs.machine}"
    found = plan.build(candidates, loads, run.eval.traffic, run.plan, run.seed, **facts)
    found["vllm"] = _vllm_arguments(run, found)
    plan_page.write(found, candidates, out)
    print(plan_page.table(found))
    print(f"plan: {out / 'plan.html'}")


def _to_choose_from(run: Run) -> dict[str, Path]:
    """Drafter directories by name: a method, or a run. Errors: ``ValueError`` where nothing fits together."""
    if not run.runs:
        if run.drafter is None:
            raise ValueError(
                "task=plan: name a drafter directory (drafter=runs/demo/drafter), runs=[...] or observed=FILE"
            )
        return {checkpoint.read_config(Path(run.drafter))["speculators_model_type"]: Path(run.drafter)}
    for key, given in (
        ("drafter", run.drafter),
        ("plan.costs", run.plan.costs),
        ("plan.points", run.plan.points),
    ):
        if given:
            raise ValueError(
                f"runs=[{','.join(run.runs)}] {key}={given}: {key} is of one drafter; leave one out"
            )
    return {name: run_directory(name) / "drafter" for name in run.runs}


def _costs(run: Run, name: str, target: Target, drafter: Drafter) -> CostModel:
    ns, most = numbers_of_drafts(run.eval, drafter), max(run.plan.concurrency)
    if run.plan.costs is None:
        return cost_model(target, drafter, most, ns, sorted({*CONTEXTS, *run.plan.contexts}))
    found = from_file(Path(run.plan.costs), name, target, drafter)
    table = found.rounds[0].drafting
    for key, asked, known in (
        ("plan.concurrency", most, table.rows[-1]),
        ("eval.n", max(ns), table.columns[-1]),
    ):
        if asked > known:
            raise ValueError(f"{key}={asked}: plan.costs={run.plan.costs} was measured up to {known}")
    return found


def _show_sweeps(found: dict[str, Any], out: Path) -> None:
    written = sweeps.write(found, out)
    print(sweeps.table(found))
    print(f"plan: {written}")


def _vllm_arguments(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """What ``vllm serve`` needs to draft as planned, or why it cannot."""
    pick = found["pick"]
    method = found["methods"].get(pick["method"]) or next(iter(found["methods"].values()))
    most = max(n for _, _, n in method["schedule"])
    if most == 0:
        return {"why": "drafting pays at no load; serve without it"}
    try:
        given = replace(run, drafter=method["drafter"], serve=replace(run.serve, n=pick["n"] or most))
        speculative = vllm.speculation(given, str(locate(run.target, run.hardware)), run.hardware)
    except ValueError as error:
        return {"why": str(error)}
    assert speculative is not None, given
    words = []
    if len(method["schedule"]) > 1:
        speculative |= {
            "num_speculative_tokens": most, "num_speculative_tokens_per_batch_size": method["schedule"]
        }  # fmt: skip
        # vLLM goes on with the last N at batches beyond the schedule, of which nothing is known.
        words = ["--max-num-seqs", str(method["schedule"][-1][1])]
    words = ["--speculative-config", json.dumps(speculative), *words]
    return {"speculative_config": speculative, "arguments": shlex.join(words)}


def diagnose(run: Run) -> None:
    """Why ``run=`` or ``drafter=`` accepts little; diagnose.json and diagnose.html go to ``out=``."""
    case = open_case(run)
    result = diagnosis.build(case, diagnosis.examine(case))
    out = Path(run.out) if run.out else (case.run or Path()) / "report-diagnose"
    diagnosis.write(result, out)
    print(diagnosis.table(result))
    print(f"diagnosis: {out / 'diagnose.html'}")
