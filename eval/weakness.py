"""What an honestly weak drafter lacks: the checks of task=diagnose that name no fault."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from operator import add

from eval import report
from eval.case import Case
from eval.replay import Counts
from eval.verdict import Verdict, held, not_asked, ok, suspicious, unread

FEW = 30  # rounds that a rate is read from
DECAYED = 0.5  # of the first draft's acceptance
GAP = 1.5  # accepted drafts of seen answers, or of other domains, beside these
TAIL = 0.02  # tokens a round that the drafts beyond some N still bring


def training(case: Case) -> Verdict:
    """Was there enough to learn from?"""
    seen, unseen = case.accepted_trained, held(case)
    if not seen or unseen is None:
        return not_asked("it takes a run with answers to train on and held-out ones")
    own, other = (one.tau - 1 for one in (reduce(add, seen), unseen))
    tokens = sum(sum(row.mask) for row in case.rows.train)
    found = f"{own:.2f} drafts a round accepted in answers it was trained on, {other:.2f} in others"
    found += f"; {tokens:,} supervised tokens, {case.passes:.1f} times"
    if own > GAP * other + 0.1:
        return suspicious(f"too little data: {found}", "more answers of the target, of the prompts you serve")
    if own < 0.5:
        return suspicious(
            f"too little training: {found}", "train.steps or train.epochs, optim.lr, more layers"
        )
    return ok(found)


def position_decay(case: Case) -> Verdict:
    """Do late drafts fall behind the first?"""
    counts = held(case)
    if counts is None:
        return not_asked("no held-out round")
    before = [counts.rounds, *counts.survived]
    known = [rate for rate, rounds in zip(counts.conditional, before, strict=False) if rounds >= FEW]
    found = f"accepted given those before: {' '.join(f'{rate:.2f}' for rate in known)}"
    weak = [k + 1 for k, rate in enumerate(known) if rate < DECAYED * known[0]]
    if weak:
        remedy = "fewer drafts a round, or more weight on late ones (method.decay, step_weight, lengths)"
        return suspicious(f"{found}; draft {weak[0]} less than half as often as the first", remedy)
    return ok(found) if known else not_asked(f"fewer than {FEW} held-out rounds")


def domain_gap(case: Case) -> Verdict:
    """Is one domain far behind the others?"""
    groups: dict[str, list[Counts]] = {}
    for path, by_n in zip(case.paths, case.accepted, strict=False):
        counts = by_n[max(by_n)]
        if counts.rounds:
            groups.setdefault(path.example.domain, []).append(counts)
    if len(groups) < 2:
        return not_asked("held-out answers are of one domain")
    accepted = {domain: reduce(add, some).tau - 1 for domain, some in groups.items()}
    least = min(accepted, key=lambda domain: accepted[domain])
    others = [one for domain, some in groups.items() if domain != least for one in some]
    found = ", ".join(f"{domain} {value:.2f}" for domain, value in accepted.items())
    found = f"drafts a round accepted: {found}"
    enough = len(groups[least]) > 2 and reduce(add, groups[least]).rounds >= FEW
    apart = report.bootstrap(groups[least])[1] < report.bootstrap(others)[0]
    if enough and apart and reduce(add, others).tau - 1 > GAP * accepted[least]:
        rows = Counter(row.domain for row in case.rows.train)
        told = f"; trained on {rows[least]} rows of it out of {rows.total()}" if rows else ""
        return suspicious(
            f"{least} is behind: {found}{told}", f"more answers of {least} among the training rows"
        )
    return ok(found)


def drafts_a_round(case: Case) -> Verdict:
    """Is N what the drafter was trained for, and what it is worth?"""
    if case.drafter is None or held(case) is None:
        return not_asked(unread(case) if case.drafter is None else "no held-out round")
    most = case.drafter.max_drafts
    taus = {n: reduce(add, (by_n[n] for by_n in case.accepted)).tau for n in case.accepted[0]}
    enough = min(n for n, tau in taus.items() if tau >= max(taus.values()) - TAIL)
    found = "tau by N: " + " ".join(f"{n}: {tau:.2f}" for n, tau in taus.items())
    lengths = None if case.method is None else vars(case.method).get("lengths")
    if lengths and max(lengths) < most:
        return suspicious(
            f"{found}; N = {most}, trained for {max(lengths)} at most", f"serve.n={max(lengths)}"
        )
    if enough < most:
        return suspicious(f"{found}; what comes after {enough} brings nothing", f"serve.n={enough}")
    return ok(found)
