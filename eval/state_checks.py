"""Checks of task=diagnose on states: as a store holds them, and as the drafter was taught by them."""

from __future__ import annotations

from dataclasses import replace

from eval.alternatives import LEAK
from eval.case import Case
from eval.stored import LAST, Stored
from eval.verdict import (
    Verdict,
    config_file,
    fault,
    given_away,
    not_asked,
    nothing_found,
    ok,
    suspected,
    suspicious,
    unread,
)


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
    return given_away(case, "last state", remedy) or ok("the state after the final norm")


def layer_ids(case: Case) -> Verdict:
    """Do the states come from the layers that the drafter reads?"""
    held = case.stored
    if held is not None and (told := _other_layers(held)):
        return fault(told, "capture again with these layer ids, and train again", str(held.directory))
    remedy = "put back the ids it was trained with; vLLM and speculators count the inputs of layers, one more"
    if found := suspected(case, "layer ids", remedy):
        return found
    if case.drafter is None:
        return not_asked(unread(case))
    own = case.drafter.layer_ids
    if case.trained_ids not in (None, own):
        return fault(
            f"the drafter reads {own}, the recipe asked for {case.trained_ids}", remedy, config_file(case)
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
    if held is not None and (told := _other_positions(held)):
        remedy = "store a token's state at its own position, and train again"
        return fault(told, remedy, str(held.directory))
    remedy = "train again: the context of anchor a are the states before a, none at a"
    tried = given_away(case, "context", remedy)
    if tried is not None and case.taught is None and case.better is not None and case.better.limit == LEAK:
        return replace(tried, verdict="suspicious")  # without a log, what any drafter would profit from
    return tried or nothing_found(case, "the states before the anchor, and no other")


def _other_positions(held: Stored) -> str | None:
    """Which positions stored states are of, where it is not their own."""
    for kept in held.errors:
        place = held.found(kept)
        if place is not None and place[1] != 0:
            way = "after, which do not exist yet when a round starts" if place[1] > 0 else "before"
            return f"states of {_output(kept)} are those of the position {way}"
    return None


def _output(kept: int | str) -> str:
    return f"layer {kept}" if isinstance(kept, int) else str(kept)
