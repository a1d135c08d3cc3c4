"""The questions of task=diagnose, in the order in which one fault hides another.

A check says ``ok``, ``suspicious``, ``fault``, or ``not asked`` where there is nothing to ask. What stands on
disk is compared first, exactly; then the drafter is tried under other assumptions (eval/alternatives.py). The
last four name no fault: they describe a drafter that is honestly weak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch

from drafters import checkpoint
from drafters.block import BlockConfig, BlockDrafter
from drafters.vocab import DraftVocab, choose, count_tokens
from eval import evidence, report
from eval.alternatives import AS_IS, LEAK
from eval.case import Case
from eval.mend import drafts_recorded
from eval.replay import Counts
from eval.stored import LAST, Stored
from eval.trials import Trial

FEW = 30  # rounds that a rate is read from
COVERED = 0.9  # of a domain's answer tokens that can be drafted
DECAYED = 0.5  # of the first draft's acceptance
GAP = 1.5  # accepted drafts of seen answers, or of other domains, beside these
TAIL = 0.02  # tokens a round that the drafts beyond some N still bring


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


# Data -----------------------------------------------------------------------------------------------


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


# States on disk -------------------------------------------------------------------------------------


def states(case: Case) -> Verdict:
    """Are the stored states whole, and this target's?"""
    held = case.stored
    if held is None:
        kept = None if case.states is None else case.states.keep
        return not_asked("no run is named" if kept is None else f"states.keep={kept}, and none are on disk")
    again = f"delete that file in {held.directory}; what it held is captured anew"
    if held.broken:
        return fault(
            f"{len(held.broken)} files or documents are not whole: {held.broken[0]}",
            again,
            str(held.directory),
        )
    foreign = [kept for kept in held.errors if held.found(kept) is None]
    if foreign and not held.narrow:
        error = min(held.errors[foreign[0]].values())
        return fault(
            f"states of {foreign[0]} are no output of this target: the nearest is {error:.0%} off",
            f"delete {held.directory} and capture again with this target, template and dtype",
            str(held.directory),
        )
    if held.documents == 0 and case.rows.train:
        return suspicious(f"{held.directory} holds none of the run's documents", "see whether rows changed")
    return ok(
        f"{held.documents} documents of the run in {held.directory}, layers {list(held.spec.layer_ids)}"
    )


def number_range(case: Case) -> Verdict:
    """Do stored numbers fit the dtype that they went through?"""
    held = case.stored
    if held is None:
        return not_asked("no states on disk")
    if held.narrow:
        return fault(
            f"states went through float16, which ends at 65504: {held.narrow[0]}; {len(held.narrow)} tensors",
            "capture in bfloat16 or float32",
            str(held.directory),
        )
    return ok(f"the target's largest number there is {held.largest:.4g}, stored as it is")


def last_state(case: Case) -> Verdict:
    """Is what the head reads the state after the final norm?"""
    held, final = case.stored, case.target.num_layers - 1
    remedy = "store the state after the target's final norm as last, and train again"
    if held is not None and LAST in held.errors:
        place = held.found(LAST)
        read = (
            "" if held.agree is None else f"; the head reads {held.agree:.0%} of the answers' tokens off it"
        )
        if place is not None and place[0] == final:
            return fault(f"last is the state before the final norm{read}", remedy, str(held.directory))
    return _tried(case, "last state", remedy) or ok("the state after the final norm")


def layer_ids(case: Case) -> Verdict:
    """Do the states come from the layers that the drafter reads?"""
    held = case.stored
    if held is not None and (found := _other_layers(held)):
        return fault(found, "capture again with these layer ids, and train again", str(held.directory))
    remedy = "put back the ids it was trained with; vLLM and speculators count the inputs of layers, one more"
    if suspected := _suspected(case, "layer ids", remedy):
        return suspected
    if case.drafter is None:
        return not_asked(_unread(case))
    own = case.drafter.layer_ids
    if case.trained_ids not in (None, own):
        return fault(
            f"the drafter reads {own}, the recipe asked for {case.trained_ids}", remedy, _config(case)
        )
    return ok(f"outputs of layers {own}")


def _other_layers(held: Stored) -> str | None:
    """What stored layers are, where that is not what they are called."""
    for kept in held.errors:
        place = held.found(kept)
        if kept != LAST and place is not None and place[0] != kept:
            return f"states of layer {kept} are those of {_output(place[0])} (id k is the output of layer k)"
    return None


def context(case: Case) -> Verdict:
    """Does a round see exactly the states before its anchor?"""
    held = case.stored
    for kept, place in [] if held is None else [(kept, held.found(kept)) for kept in held.errors]:
        if held is not None and place is not None and place[1] != 0:
            way = "after, which do not exist yet when a round starts" if place[1] > 0 else "before"
            found = f"states of {_output(kept)} are those of the position {way}"
            return fault(
                found, "store a token's state at its own position, and train again", str(held.directory)
            )
    remedy = "train again: the context of anchor a are the states before a, none at a"
    tried = _tried(case, "context", remedy)
    if tried is not None and case.taught is None and case.better is not None and case.better.limit == LEAK:
        return replace(tried, verdict="suspicious")  # without a log, what any drafter would profit from
    return tried or _asked(case, "the states before the anchor, and no other")


# The drafter directory ------------------------------------------------------------------------------


def rope(case: Case) -> Verdict:
    """Are rotary positions those of the training?"""
    remedy = "give the drafter the rotary positions it was trained with, the target's own"
    return _suspected(case, "rope", remedy) or _asked(case, "as the target's")


def layout(case: Case) -> Verdict:
    """Does slot s predict what it was trained to predict?"""
    remedy = "write sample_from_anchor as it was trained, or export the run again"
    if suspected := _suspected(case, "layout", remedy):
        return suspected
    if not isinstance(case.drafter, BlockDrafter):
        return not_asked(_unread(case) if case.drafter is None else "this method drafts no blocks")
    own, asked = case.drafter.config, case.method
    if isinstance(asked, BlockConfig) and (
        (asked.anchor_predicts, asked.block_size) != (own.anchor_predicts, own.block_size)
    ):
        found = f"anchor_predicts={own.anchor_predicts}, block_size={own.block_size}; the recipe asked for"
        return fault(f"{found} {asked.anchor_predicts}, {asked.block_size}", remedy, _config(case))
    return ok(f"anchor_predicts={str(own.anchor_predicts).lower()}, blocks of {own.block_size}")


def vocabulary_map(case: Case) -> Verdict:
    """Does d2t hold offsets?"""
    if suspected := _suspected(case, "vocabulary map", ""):
        return suspected
    if case.drafter is None:
        return not_asked(_unread(case))
    if case.drafter.vocab is None:
        return not_asked("every token of the target can be drafted")
    return ok(f"offsets of {len(case.drafter.vocab)} tokens")


def vocabulary(case: Case) -> Verdict:
    """Are the tokens that can be drafted those of these answers?"""
    remedy = "choose it from this target's answers: train again, or put back the map of the export"
    if suspected := _suspected(case, "vocabulary", remedy):
        return suspected
    if case.drafter is None or case.drafter.vocab is None:
        return not_asked(
            _unread(case) if case.drafter is None else "every token of the target can be drafted"
        )
    vocab, where = case.drafter.vocab, _config(case)
    since = [name for name in _changed(case) if name in ("d2t", "t2d", "draft_vocab_size")]
    if since:
        return fault(f"{', '.join(since)} are not those of the export: a map of another run", remedy, where)
    if case.rows.train and case.other_than_trained is None:
        counts_V = _counts(case, case.rows.all)
        usable = len(case.target.tokenizer)
        fresh = choose(counts_V, len(vocab), case.target.stop_ids, usable)
        own, best = vocab.covers(counts_V), fresh.covers(counts_V)
        if own < best - 0.005:
            found = f"it covers {own:.1%} of the answers trained on, one chosen from them {best:.1%}"
            return fault(found, remedy, where)
    return _coverage(case, vocab, remedy)


def _coverage(case: Case, vocab: DraftVocab, remedy: str) -> Verdict:
    """Coverage of held-out answers by domain."""
    if not case.rows.held:
        return not_asked(case.no_rows or "there are no held-out answers")
    by_domain = {
        domain: _counts(case, [row for row in case.rows.held if row.domain == domain])
        for domain in dict.fromkeys(row.domain for row in case.rows.held)
    }
    counts_V = reduce(add, by_domain.values())
    whole, kinds = vocab.covers(counts_V), int((counts_V > 0).sum())
    found = f"{len(vocab)} tokens cover {whole:.1%} of held-out answers"
    if not case.rows.train and len(vocab) >= 2 * kinds and whole < 0.8:
        return fault(f"{found}, which hold only {kinds} different ones", remedy, _config(case))
    least, share = min(((d, vocab.covers(c)) for d, c in by_domain.items()), key=lambda pair: pair[1])
    if share < COVERED:
        return suspicious(
            f"{found}, {share:.1%} of {least}", f"method.draft_vocab above {len(vocab)}, or more {least} rows"
        )
    return ok(found)


def mask_token(case: Case) -> Verdict:
    """Is the token that fills slots one that no answer holds, and the one trained with?"""
    remedy = "name the token that the drafter was trained with in mask_token_id"
    if suspected := _suspected(case, "mask token", remedy):
        return suspected
    if case.drafter is None or case.drafter.mask_token is None:
        return not_asked(_unread(case) if case.drafter is None else "this method fills no slots")
    token, where = case.drafter.mask_token, _config(case)
    if isinstance(case.method, BlockConfig) and case.method.mask_token not in (None, token):
        return fault(f"token {token}, the recipe asked for {case.method.mask_token}", remedy, where)
    for row in (*case.rows.train, *case.rows.held):
        if token in row.ids[row.mask.index(True) :]:
            return fault(f"token {token} stands in an answer, where it marks no gap", remedy, row.name)
    return ok(f"token {token}, in no answer")


def as_exported(case: Case) -> Verdict:
    """Is the directory what its export wrote?"""
    again = "export the run again"
    if case.opened.refusal is not None:
        return (
            fault(case.opened.refusal, again, str(case.directory))
            if case.directory
            else not_asked(_unread(case))
        )
    if drafts_recorded(case.config) is None:
        return not_asked("the directory records nothing of its export")
    since = ", ".join(_changed(case))
    if case.trials and case.trials[0].reproduces is False:
        found = "drafts recorded at the export are not made any more"
        return fault(found + (f"; changed since: {since}" if since else ""), again, str(case.directory))
    if since:
        return suspicious(
            f"changed since the export, without another draft: {since}", again, str(case.directory)
        )
    return ok("it makes the drafts that its export recorded")


def as_taught(case: Case) -> Verdict:
    """Does the drafter do now what its training log says it did?"""
    if case.taught is None:
        return not_asked("no log of the training" if case.drafter is not None else _unread(case))
    (term, then), now = case.taught, case.loss(AS_IS)
    found = f"{term} of the answers trained on: {then:.2f} when training ended, {now:.2f} now"
    if now > 2 * then + 0.5:
        remedy = "what training saw is not what stands here: capture and train again with states.keep=memory"
        return suspicious(found, remedy)
    return ok(found)


# Honest weakness ------------------------------------------------------------------------------------


def training(case: Case) -> Verdict:
    """Was there enough to learn from?"""
    seen, held = case.accepted_trained, _held(case)
    if not seen or held is None:
        return not_asked("it takes a run with answers to train on and held-out ones")
    own, other = (one.tau - 1 for one in (reduce(add, seen), held))
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
    held = _held(case)
    if held is None:
        return not_asked("no held-out round")
    before = [held.rounds, *held.survived]
    known = [rate for rate, rounds in zip(held.conditional, before, strict=False) if rounds >= FEW]
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
    if case.drafter is None or _held(case) is None:
        return not_asked(_unread(case) if case.drafter is None else "no held-out round")
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


CHECKS: dict[str, Check] = {
    "target": target,
    "template": template,
    "mask": mask,
    "answers": answers,
    "states": states,
    "number range": number_range,
    "last state": last_state,
    "layer ids": layer_ids,
    "context": context,
    "rope": rope,
    "layout": layout,
    "vocabulary map": vocabulary_map,
    "vocabulary": vocabulary,
    "mask token": mask_token,
    "as exported": as_exported,
    "as taught": as_taught,
    "training": training,
    "position decay": position_decay,
    "domain gap": domain_gap,
    "drafts a round": drafts_a_round,
}


# What checks share ----------------------------------------------------------------------------------


def _suspected(case: Case, check: str, remedy: str) -> Verdict | None:
    """A fault of this check that one mend of the directory, or one alternative, gives away."""
    mend = case.opened.mend
    if mend is not None and mend.check == check:
        return fault(mend.found, mend.remedy, _config(case))
    return _tried(case, check, remedy)


def _tried(case: Case, check: str, remedy: str) -> Verdict | None:
    """A fault of this check that explains the answers better than the drafter as it is."""
    better = case.better
    if better is None or better.check != check:
        return None
    return fault(
        f"{case.trials[0].name} {_figures(case.trials[0])}; {better.name}: {_figures(better)}",
        remedy,
        _config(case),
    )


def _figures(trial: Trial) -> str:
    out = f"{trial.hits:.2f} drafts accepted an anchor, log-probability {trial.nats:.2f} a draft"
    return (
        out
        if trial.reproduces is None
        else f"{out}, recorded drafts {'' if trial.reproduces else 'not '}made"
    )


def _asked(case: Case, found: str) -> Verdict:
    """What a check says that found nothing: ``ok`` only where alternatives were tried."""
    return (
        ok(found)
        if case.trials
        else not_asked(_unread(case) if case.drafter is None else "no answers to try")
    )


def _unread(case: Case) -> str:
    return f"the drafter is not read: {case.opened.refusal}"


def _config(case: Case) -> str:
    return "" if case.directory is None else f"{case.directory}/config.json"


def _changed(case: Case) -> list[str]:
    return [] if case.directory is None else evidence.changed(case.directory, case.config)


def _counts(case: Case, rows: Sequence) -> torch.Tensor:
    ids = (torch.tensor(row.ids)[torch.tensor(row.mask)] for row in rows)
    return count_tokens(ids, case.target.vocab_size)


def _held(case: Case) -> Counts | None:
    """Counts of held-out answers at the largest N, ``None`` where there is no round."""
    if not case.accepted:
        return None
    counts = reduce(add, (by_n[max(by_n)] for by_n in case.accepted))
    return counts if counts.rounds else None


def _output(kept: int | str) -> str:
    return f"layer {kept}" if isinstance(kept, int) else str(kept)
