"""Checks of task=diagnose on the drafter directory: what its config.json says, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch

from drafters.block import BlockConfig, BlockDrafter
from drafters.vocab import DraftVocab, choose, count_tokens
from eval import evidence
from eval.alternatives import AS_IS
from eval.case import Case
from eval.mend import drafts_recorded
from eval.verdict import (
    Verdict,
    config_file,
    fault,
    not_asked,
    nothing_found,
    ok,
    suspected,
    suspicious,
    unread,
)

COVERED = 0.9  # of a domain's answer tokens that can be drafted


def rope(case: Case) -> Verdict:
    """Are rotary positions those of the training?"""
    remedy = "give the drafter the rotary positions it was trained with, the target's own"
    return suspected(case, "rope", remedy) or nothing_found(case, "as the target's")


def layout(case: Case) -> Verdict:
    """Does slot s predict what it was trained to predict?"""
    remedy = "write sample_from_anchor as it was trained, or export the run again"
    if known := suspected(case, "layout", remedy):
        return known
    if not isinstance(case.drafter, BlockDrafter):
        return not_asked(unread(case) if case.drafter is None else "this method drafts no blocks")
    own, asked = case.drafter.config, case.method
    if isinstance(asked, BlockConfig) and (
        (asked.anchor_predicts, asked.block_size) != (own.anchor_predicts, own.block_size)
    ):
        found = f"anchor_predicts={own.anchor_predicts}, block_size={own.block_size}; the recipe asked for"
        return fault(f"{found} {asked.anchor_predicts}, {asked.block_size}", remedy, config_file(case))
    return ok(f"anchor_predicts={str(own.anchor_predicts).lower()}, blocks of {own.block_size}")


def vocabulary_map(case: Case) -> Verdict:
    """Does d2t hold offsets?"""
    if known := suspected(case, "vocabulary map", ""):
        return known
    if case.drafter is None:
        return not_asked(unread(case))
    if case.drafter.vocab is None:
        return not_asked("every token of the target can be drafted")
    return ok(f"offsets of {len(case.drafter.vocab)} tokens")


def vocabulary(case: Case) -> Verdict:
    """Are the tokens that can be drafted those of these answers?"""
    remedy = "choose it from this target's answers: train again, or put back the map of the export"
    if known := suspected(case, "vocabulary", remedy):
        return known
    if case.drafter is None or case.drafter.vocab is None:
        return not_asked(unread(case) if case.drafter is None else "every token of the target can be drafted")
    vocab, where = case.drafter.vocab, config_file(case)
    since = [name for name in _changed(case) if name in ("d2t", "t2d", "draft_vocab_size")]
    if since:
        return fault(f"{', '.join(since)} are not those of the export: a map of another run", remedy, where)
    if case.rows.train and case.other_than_trained is None:
        counts_V = _counts(case, case.rows.all)  # as training counts it, whatever the mix
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
        return fault(f"{found}, which hold only {kinds} different ones", remedy, config_file(case))
    least, share = min(((d, vocab.covers(c)) for d, c in by_domain.items()), key=lambda pair: pair[1])
    if share < COVERED:
        return suspicious(
            f"{found}, {share:.1%} of {least}", f"method.draft_vocab above {len(vocab)}, or more {least} rows"
        )
    return ok(found)


def mask_token(case: Case) -> Verdict:
    """Is the token that fills slots one that no answer holds, and the one trained with?"""
    remedy = "name the token that the drafter was trained with in mask_token_id"
    if known := suspected(case, "mask token", remedy):
        return known
    if case.drafter is None or case.drafter.mask_token is None:
        return not_asked(unread(case) if case.drafter is None else "this method fills no slots")
    token, where = case.drafter.mask_token, config_file(case)
    if isinstance(case.method, BlockConfig) and case.method.mask_token not in (None, token):
        return fault(f"token {token}, the recipe asked for {case.method.mask_token}", remedy, where)
    for row in (*case.rows.train, *case.rows.held):
        if token in row.ids[row.mask.index(True) :]:
            return fault(f"token {token} stands in an answer, where it marks no gap", remedy, row.name)
    return ok(f"token {token}, in no answer")


def as_exported(case: Case) -> Verdict:
    """Is the directory what its export wrote?"""
    again = "export the run again"
    if case.directory is None:
        return not_asked(unread(case))
    if case.opened.refusal is not None:
        return fault(case.opened.refusal, again, str(case.directory))
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
        return not_asked("no log of the training" if case.drafter is not None else unread(case))
    (term, then), now = case.taught, case.loss(AS_IS)
    found = f"{term} of the answers trained on: {then:.2f} when training ended, {now:.2f} now"
    if now > 2 * then + 0.5:
        remedy = "what training saw is not what stands here: capture and train again with states.keep=memory"
        return suspicious(found, remedy)
    return ok(found)


def _changed(case: Case) -> list[str]:
    return [] if case.directory is None else evidence.changed(case.directory, case.config)


def _counts(case: Case, rows: Sequence) -> torch.Tensor:
    ids = (torch.tensor(row.ids)[torch.tensor(row.mask)] for row in rows)
    return count_tokens(ids, case.target.vocab_size)
