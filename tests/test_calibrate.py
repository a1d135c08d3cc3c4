"""Sequential temperature scaling: right temperatures come back, and only known rounds speak."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import tensor

from drafters.checkpoint import read_config, write
from drafters.target import Target
from eval.calibrate import Evidence, auc, calibrate, calibration_error, evidence, fit, survival, table
from eval.replay import paths
from tests import tiny
from tests.commands import CPU, command, refusal


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layers=4)


def made_up(heat: list[float], rounds: int = 40000) -> Evidence:
    """Rounds whose true conditional acceptance at position k is sigmoid(logit / heat[k])."""
    generator = torch.Generator().manual_seed(0)
    logits_RK = torch.randn(rounds, len(heat), generator=generator).double() * 2
    chance_RK = torch.sigmoid(logits_RK / tensor(heat))
    survived_RK = (torch.rand(chance_RK.shape, generator=generator) < chance_RK).cumprod(1).bool()
    return Evidence(logits_RK, survived_RK, torch.ones_like(survived_RK))


def test_the_temperatures_that_made_the_rounds_are_found_left_to_right():
    found = made_up([2.0, 0.7, 1.0])
    temperatures = fit(found)
    assert temperatures == pytest.approx([2.0, 0.7, 1.0], rel=0.15)
    for k in range(3):
        before, after = (
            calibration_error(survival(found.logits_RK, t)[:, k], found.survived_RK[:, k])
            for t in ([1.0, 1.0, 1.0], temperatures)
        )
        assert after < 0.01
        assert before > 0.02 or k == 2


def test_a_position_fitted_first_does_not_see_those_after_it():
    found = made_up([2.0, 0.7])
    other = Evidence(found.logits_RK.clone(), found.survived_RK.clone(), found.known_RK)
    other.survived_RK[:, 1] = False
    assert fit(found)[0] == fit(other)[0]
    assert fit(found)[1] != fit(other)[1]


def test_rounds_of_which_nothing_is_known_do_not_count():
    found = made_up([1.5, 1.5], 4000)
    lying = Evidence(
        torch.cat([found.logits_RK, torch.full((4000, 2), 5.0).double()]),
        torch.cat([found.survived_RK, torch.zeros(4000, 2, dtype=torch.bool)]),
        torch.cat([found.known_RK, torch.zeros(4000, 2, dtype=torch.bool)]),
    )
    assert fit(lying) == fit(found)
    nothing = Evidence(found.logits_RK, found.survived_RK, torch.zeros_like(found.known_RK))
    assert fit(nothing) == [1.0, 1.0]


def test_the_calibration_error_of_a_hand_made_case():
    """Two bins: 0.9 said of four, three came true (gap 0.15); 0.1 said of one, none did (gap 0.1)."""
    estimate_R = tensor([0.9, 0.9, 0.9, 0.9, 0.1])
    happened_R = tensor([True, True, True, False, False])
    assert calibration_error(estimate_R, happened_R) == pytest.approx((4 * 0.15 + 0.1) / 5)
    assert calibration_error(tensor([1.0]), tensor([True])) == 0


def test_auc_counts_pairs_and_ties_half():
    assert auc(tensor([0.1, 0.4, 0.35, 0.8]), tensor([False, False, True, True])) == pytest.approx(0.75)
    assert auc(tensor([0.5, 0.5]), tensor([True, False])) == 0.5
    assert auc(tensor([0.5, 0.7]), tensor([True, True])) is None


def test_evidence_is_the_rounds_of_replay_and_knows_what_lies_behind_the_end(target):
    known = tiny.answered(target, num=23, prompt=8, seed=1)
    drafter = tiny.trained(target, [known], steps=90, method="dspark", anchor_share=1.0, decay=None)
    (path,) = paths(target, [known], drafter.layer_ids)
    found = evidence(drafter, path)
    # 22 tokens after the first, six a round: three whole rounds, and one of four tokens.
    assert found.survived_RK.sum(1).tolist() == [5, 5, 5, 4]
    assert found.known_RK.tolist() == [[True] * 5] * 3 + [[True] * 4 + [False]]


def test_near_the_end_a_refusal_is_known_only_where_acceptance_would_be(target):
    """Else drafts that no answer is long enough for would be known by their failures alone."""
    (path,) = paths(target, [tiny.answered(target, num=6, prompt=8, seed=1)], [0, 1])
    drafter = tiny.untrained(target, "dspark", layer_ids=[0, 1])
    found = evidence(drafter, path)
    assert not found.survived_RK.any()  # so that every token starts a round
    assert found.known_RK.sum(1).tolist() == [5, 4, 3, 2, 1]


def test_a_drafter_is_calibrated_on_its_raw_confidences_and_judged_on_other_conversations(target):
    known = [tiny.answered(target, num=24, prompt=8, seed=s, domain="mc"[s % 2] * 4) for s in range(8)]
    drafter = tiny.trained(target, known[:3], steps=40, method="dspark")
    found = list(paths(target, known, drafter.layer_ids))
    once = calibrate(drafter, found)
    drafter.temperatures = [3.0] * drafter.max_drafts
    assert calibrate(drafter, found) == once
    assert drafter.temperatures == [3.0] * drafter.max_drafts
    assert (once["fitted_on"], once["judged_on"]) == (4, 4)
    assert set(once["domains"]) == {"mmmm", "cccc", "overall"}
    assert len(once["temperatures"]) == drafter.max_drafts
    assert "overall" in table(once)


def test_the_turns_of_a_conversation_are_on_one_side(target):
    """Four answers of two conversations: one of them fits, the other is judged."""
    known = [tiny.answered(target, num=12, prompt=8, seed=s) for s in range(4)]
    named = [replace(one, name=f"row {at // 2} (turn {at % 2 + 1})") for at, one in enumerate(known)]
    drafter = tiny.untrained(target, "dspark")
    found = list(paths(target, named, drafter.layer_ids))
    result = calibrate(drafter, found)
    assert (result["fitted_on"], result["judged_on"]) == (1, 1)
    rounds = [len(evidence(drafter, path).logits_RK) for path in found]
    assert result["domains"]["overall"][0]["rounds"] == sum(rounds[2:])


def test_a_drafter_without_confidences_is_refused(target):
    known = tiny.answered(target)
    for drafter in (tiny.dflash(target), tiny.untrained(target, "dspark", confidence=0.0)):
        found = list(paths(target, [known, known], drafter.layer_ids))
        with pytest.raises(ValueError, match="no confidences to calibrate"):
            calibrate(drafter, found)


def test_one_conversation_is_too_few(target):
    drafter = tiny.untrained(target, "dspark")
    with pytest.raises(ValueError, match="two held-out answers"):
        calibrate(drafter, list(paths(target, [tiny.answered(target)], drafter.layer_ids)))


def test_the_command_writes_temperatures_and_what_they_are_worth(workshop, tmp_path, monkeypatch, capsys):
    """Greedy rows, and rows sampled at a temperature: there the path is the whole answer."""
    monkeypatch.chdir(tmp_path)
    of = tiny.target(layers=8)
    write(tiny.untrained(of, "dspark", init="random", mask_token=3), tmp_path / "d")
    common = ("drafter=d", f"target={workshop / 'target'}", "data.split=null", *CPU)
    rows = workshop / "rows.jsonl"
    assert command("eval", "task=calibrate", *common, f"data.path={rows}", "out=greedy") == 0
    quality = json.loads((tmp_path / "greedy" / "calibration.json").read_text())
    assert read_config(tmp_path / "d")["foredraft"]["confidence_temperatures"] == quality["temperatures"]
    assert "confidence temperatures" in capsys.readouterr().out
    again = ("regenerate.temperature=0.9", "regenerate.max_new_tokens=12", "out=sampled.jsonl")
    assert command("data", "task=regenerate", *again, *common[1:], f"data.path={rows}") == 0
    warm = ("eval.temperature=0.9", "data.path=sampled.jsonl", "out=warm")
    assert command("eval", "task=calibrate", *common, *warm) == 0
    found = json.loads((tmp_path / "warm" / "calibration.json").read_text())
    # At temperature 0 a sampled answer would be cut where it leaves the target's argmax, near its start.
    assert found["domains"]["overall"][0]["rounds"] > 3 * found["judged_on"]


def test_the_command_refuses_a_drafter_without_confidences(workshop, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tiny.dflash(tiny.target(layers=8), mask_token=3), tmp_path / "d")
    asked = ("drafter=d", f"target={workshop / 'target'}", f"data.path={workshop / 'rows.jsonl'}", *CPU)
    assert "no confidences to calibrate" in refusal(capsys, "eval", "task=calibrate", *asked, "out=o")
    assert not (tmp_path / "o" / "calibration.json").exists()
