"""Checks of task=diagnose on the rows: whose target, which template, what mask, whose answers."""

from __future__ import annotations

from collections import Counter

from drafters import checkpoint
from eval.case import Case
from eval.verdict import Verdict, fault, not_asked, ok, suspicious


def target(case: Case) -> Verdict:
    """Is this the target that the drafter was trained on?"""
    now = case.target.fingerprint
    stored = case.config.get("foredraft", {}).get("target") or case.record.get("target")
    if stored is None:
        return not_asked("neither drafter nor run says which target it was trained on")
    other = [key for key in (*checkpoint.FINGERPRINT, "weights") if stored.get(key, now[key]) != now[key]]
    if other:
        told = ", ".join(f"{key} {stored[key]}, now {now[key]}" for key in other)
        return fault(f"trained on another target: {told}", "give target= the model it was trained on")
    return ok(f"weights {now['weights']}, as trained on")


def template(case: Case) -> Verdict:
    """Are prompts written as they were for these answers, and as a server writes them?"""
    render = case.render
    remedy = (
        "train and serve with the template and settings that the answers were made with (data.chat_template, "
        "data.template_settings), or let the target answer again (task=regenerate)"
    )
    trained = case.record.get("data", {}).get("template")
    if trained not in (None, render.template_hash):
        told = f"training wrote prompts with template {trained}, the same settings now give"
        return fault(f"{told} {render.template_hash}", remedy, f"chat template of {case.target.name}")
    own = [row for row in case.rows.read if row.skip is None and row.answered_by(render.signature)]
    made = Counter(str(row.made_by).split("/")[2] for row in own if str(row.made_by).count("/") == 2)
    if odd := {name: num for name, num in made.items() if name != render.template_hash}:
        name, num = next(iter(odd.items()))
        told = f"{num} of {made.total()} answers were made with template {name}, prompts are written with"
        return fault(f"{told} {render.template_hash}", remedy, case.data.path)
    if not case.readings:
        return not_asked(case.no_rows or "no row holds an answer after a prompt")
    told = f"{case.readings[0].hits:.0%} of the first tokens of answers are the target's own choice"
    if (better := case.reads_better) is not None and better.check == "template":
        found = f"{told}, {better.hits:.0%} with {better.name}"
        answered = any(row.answers for row in case.rows.read)
        return fault(found, remedy, case.data.path) if answered else suspicious(found, remedy, case.data.path)
    if case.record and (case.served is None or case.served.template_hash != render.template_hash):
        asked = {"data.chat_template": case.data.chat_template, "data.template_settings": render.settings}
        settings = " ".join(f"{key}={value}" for key, value in asked.items() if value)
        return suspicious(
            f"{told}; a server that is not told {settings} writes other prompts",
            f"serve with {settings}, or train on what the target's own template writes",
        )
    return ok(f"{told}, template {render.template_hash}")


def mask(case: Case) -> Verdict:
    """Does the mask begin with the first token of an answer and end with the one that ends it?"""
    if not case.readings:
        return not_asked(case.no_rows or "no row holds an answer after a prompt")
    remedy = "write each answer's ids from its first token to its end-of-turn token, or run task=regenerate"
    if (better := case.reads_better) is not None and better.check == "mask":
        own = case.readings[0].hits
        found = f"answers are shifted: {own:.0%} of their tokens are the target's own choice, {better.name}"
        return fault(f"{found} {better.hits:.0%}", remedy, case.data.path)
    stops = set(case.target.stop_ids)
    ended = [row for row in case.rows.read if row.answers and row.finish == "stop"]
    without = [row for row in ended if row.answers[-1][1][-1] not in stops]
    if without and stops:
        found = f"{len(without)} of {len(ended)} answers that stopped lack their last token, {sorted(stops)}"
        say = fault if len(without) > len(ended) / 2 else suspicious
        return say(found, remedy, without[0].where)
    return ok(f"answers begin after their prompts, {len(ended)} end in {sorted(stops)}")


def answers(case: Case) -> Verdict:
    """Are the answers the target's own?"""
    if case.no_rows is not None:
        return fault(case.no_rows, "mend data.path, or name another file with data.path=FILE")
    if (trained := case.other_than_trained) is not None:
        found = f"rows are other ids or masks than those trained on: {trained}, now {case.rows.key}"
        return suspicious(found, "put back the file of the training, or train on this one", case.data.path)
    if not case.paths:
        return not_asked("there are no held-out answers")
    off, num = sum(path.off_path for path in case.paths), len(case.paths)
    kept = sum(path.length for path in case.paths) / sum(sum(path.example.mask) for path in case.paths)
    found = (
        f"{off} of {num} held-out answers leave the target's own path, {kept:.0%} of their tokens are on it"
    )
    if kept < 0.5:
        return suspicious(found, "let the target answer: python -m data task=regenerate", case.data.path)
    return ok(found)
