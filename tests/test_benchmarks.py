"""Benchmarks of a training step at tiny shapes: that they run and what they print, never how fast."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import device_step, options, peer_parity, serving, train_step, vllm_parity
from benchmarks.step import Shapes, Step
from data.pack import pack
from drafters.method import all_methods, build
from drafters.types import Example
from eval.replay import paths, rounds
from tests import tiny

SHAPES = Shapes(
    hidden=48, inner=96, heads=6, kv_heads=2, head_size=8, vocab=300, tokens=96, anchors=16, drafts=3
)


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_train_step_prints_one_row_a_method_and_dtype(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "small=true", "steps=1", "methods=dflash,nosuch", "dtypes=float32"])
    train_step.main()
    found = last_line(capsys)
    (row,) = found["rows"]
    assert found["peer"] is None
    assert (row["method"], row["dtype"]) == ("dflash", "float32")
    assert row["seconds"] > 0
    assert row["megabytes"] > 0


def test_device_step_prints_one_row_a_method(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "small=true", "steps=1"])
    device_step.main()
    rows = last_line(capsys)["rows"]
    assert [row["method"] for row in rows] == sorted(all_methods())
    assert all(row["seconds"] > 0 and row["anchors"] > 0 for row in rows)


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_the_work_of_a_step_is_what_torch_counts_but_for_what_is_masked(method):
    """torch counts whole attention products, half of which nobody sees, and recomputed scores."""
    step = Step(method, SHAPES, torch.device("cpu"), torch.float32)
    with FlopCounterMode(display=False) as counted:
        step()
    attention = sum(
        flops for kind, flops in counted.get_flop_counts()["Global"].items() if "attention" in str(kind)
    )
    assert step.anchors == SHAPES.anchors
    assert train_step.work(method, SHAPES, attention=False) == pytest.approx(
        counted.get_total_flops() - attention, rel=0.02
    )


def test_an_option_is_known_and_of_its_type():
    assert options(["steps=3", "small=true"], steps=5, small=False) == {"steps": 3, "small": True}
    for wrong in ("step=3", "small", "small=yes", "steps=many"):
        with pytest.raises(ValueError, match=wrong.partition("=")[2] or wrong):
            options([wrong], steps=5, small=False)


ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]  # 11 is the prefill's
DRAFTS = torch.tensor(  # of two tokens, made at each of them
    [[12, 13], [0, 0], [0, 0], [0, 0], [16, 0], [0, 0], [18, 19], [0, 0]]
)
ACCEPTED = [2, 0, 1, 1]  # the engine's rounds start at 11, 14, 15 and 17; the last one ends the answer


def test_rounds_of_the_engine_are_those_of_replay_but_for_the_last():
    theirs = vllm_parity.engine_rounds(ACCEPTED, len(ANSWER))
    ours = [(at, accepted) for at, accepted, _ in rounds(DRAFTS, ANSWER)]
    assert theirs == [(0, 2), (3, 0), (4, 1), (6, 1)]
    assert ours == theirs
    whole = vllm_parity.before_end(ours, len(ANSWER))
    assert whole == [(0, 2), (3, 0), (4, 1)]
    counted = vllm_parity.counts(whole, 2)
    assert (counted.rounds, counted.tokens, counted.survived) == (3, 6, [2, 1])


def test_a_last_round_that_accepts_beyond_the_answer_is_left_out():
    theirs = vllm_parity.engine_rounds([2, 0, 1, 2], len(ANSWER))
    assert vllm_parity.before_end(theirs, len(ANSWER)) == [(0, 2), (3, 0), (4, 1)]
    assert vllm_parity.engine_rounds([], 1) == []
    for wrong in ([2, 0, 1], [*ACCEPTED, 0]):
        with pytest.raises(AssertionError):
            vllm_parity.engine_rounds(wrong, len(ANSWER))


def test_an_answer_is_cut_on_both_sides_where_it_leaves_our_path():
    length = 6  # the target goes on otherwise after 16
    theirs = vllm_parity.before_end(vllm_parity.engine_rounds(ACCEPTED, len(ANSWER)), length)
    walked = [(at, accepted) for at, accepted, _ in rounds(DRAFTS[:length], ANSWER[:length])]
    assert theirs == vllm_parity.before_end(walked, length) == [(0, 2), (3, 0)]


def test_a_round_that_parts_is_seen_in_the_comparison():
    ours, theirs = [(0, 2), (3, 0), (4, 1)], [(0, 1), (2, 0), (3, 0), (4, 1)]
    assert vllm_parity.parted(ours, theirs) == 1
    assert vllm_parity.parted(ours, ours) == 0
    same = vllm_parity.compare(vllm_parity.counts(ours, 2), vllm_parity.counts(ours, 2))
    assert same["within_goal"]
    assert (same["largest_difference"], same["tau"]["vllm"]) == (0.0, 2.0)
    found = vllm_parity.compare(vllm_parity.counts(ours, 2), vllm_parity.counts(theirs, 2))
    assert not found["within_goal"]
    assert found["largest_difference"] == pytest.approx(1 / 3)
    assert found["tau_difference"] == pytest.approx(2 / 1.5 - 1)


def test_prompts_are_taken_from_the_domains_in_turns():
    found = [Example([1], [False], domain, f"{domain}{i}") for domain in ("code", "chat") for i in range(3)]
    names = [example.name for example in vllm_parity.spread(found, 3)]
    assert names == ["code0", "chat0", "code1"]
    assert len(vllm_parity.spread(found, 0)) == 6


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_an_engine_that_does_as_we_do_has_our_acceptance(method):
    target = tiny.target()
    drafter = build(all_methods()[method].config_class(init="random", layer_ids=[0, 1]), target).eval()
    (path,) = paths(target, [tiny.answered(target)], drafter.layer_ids)
    walked = vllm_parity.replayed(drafter, path, 3)
    answer = {"tokens": path.tokens, "accepted": [a for _, a in walked], "drafted": [3] * len(walked)}
    row = vllm_parity.judge(drafter, [answer], [path], 3)
    assert (row["off_path"], row["parted"], row["largest_difference"]) == (0, 0, 0.0)
    assert row["rounds"]["vllm"] == len(walked) - 1


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_logits_that_a_peer_lays_out_its_own_way_are_compared_anchor_by_anchor(method):
    target = tiny.target()
    drafter = build(all_methods()[method].config_class(init="random", layer_ids=[0, 1]), target).eval()
    num = drafter.max_drafts
    (path,) = paths(target, [tiny.answered(target)], drafter.layer_ids)
    asked = peer_parity.given(drafter, [path])
    anchors_A = peer_parity.anchors_of(path, num)
    batch = pack([path.example], [path.states])
    ours_AKN = drafter.path_logits(batch, anchors_A, num)
    if method == "eagle3":  # its row t of step k predicts what follows the pair (state t, token t + 1)
        theirs = torch.zeros(num, asked["tokens.0"].shape[0], ours_AKN.shape[-1])
        theirs[:, anchors_A - 1] = ours_AKN.transpose(0, 1)
        assert asked["tokens.0"].tolist() == path.example.ids[1:]
    else:
        anchor_slot = torch.zeros(len(anchors_A), drafter.config.first_slot, ours_AKN.shape[-1])
        theirs = torch.cat([anchor_slot, ours_AKN], 1).flatten(0, 1)[None]
        assert asked["tokens.0"].tolist() == path.example.ids
        assert asked["mask.0"].nonzero()[:, 0].tolist() == anchors_A.tolist()
    theirs_AKN = peer_parity.of_anchors(drafter, theirs, anchors_A)
    assert peer_parity.compare(drafter, batch, anchors_A, theirs_AKN) == (0.0, 1.0)


def test_the_worst_minute_is_of_answers_one_after_another():
    """Plain decoding needs 10 seconds an answer of 100 tokens, so six of them are a minute."""
    plain, other = [0.1] * 9, [0.1] * 3 + [0.2] * 2 + [0.1] * 4
    assert serving.worst_minute(plain, plain, 100) == 1
    assert serving.worst_minute(plain, other, 100) == pytest.approx(6 / 8)
    with pytest.raises(ValueError, match="answers=9 tokens=50: plain decoding took .* give more answers"):
        serving.worst_minute(plain, other, 50)
    assert serving.worst_minute(plain, other, 300) == pytest.approx(2 / 4)
