"""report.json, its figures, and the page that opens offline."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from eval.evaluate import _by_conversation
from eval.replay import Counts
from eval.report import (
    Scored,
    bootstrap,
    break_even,
    build,
    from_row,
    interval,
    loops,
    replace_file,
    resampled,
    table,
    write,
)
from serve.costs import Costs, Table

FACTS = {
    "target": "tiny",
    "drafter": "runs/<b>&one/drafter",
    "method": "dflash",
    "temperature": 0.0,
    "mode": "replay",
    "dtype": "float32",
}
ROW = {"prompts": int, "rounds": int, "tokens": int, "tau": float, "tau_ci95": list, "survival": list,
       "conditional": list, "tau_by_n": dict}  # fmt: skip
SCHEMA = {"target": str, "drafter": str, "method": str, "max_n": int, "temperature": float, "mode": str,
          "domains": dict, "overall": dict, "worst_domain": str, "schema_version": int, "dtype": str,
          "seed": int, "off_path": int, "min_margin": float, "counting": dict}  # fmt: skip


def counts(accepted: list[int], n: int = 2) -> Counts:
    """Rounds that accepted so many drafts and emitted one token more."""
    out = Counts(n)
    for number in accepted:
        out.add_round(number, number + 1)
    return out


def scored(name: str, domain: str, accepted: list[int], **odd) -> Scored:
    return Scored(name, domain, {1: counts([min(a, 1) for a in accepted], 1), 2: counts(accepted)}, **odd)


@pytest.fixture
def report():
    return build(
        [
            scored("a", "math", [2, 0, 1], margin=0.5),
            scored("b", "math", [2], off_path=1, margin=0.25, loops=True),
            scored("c", "code", [0, 0], off_path=2),
            scored("d", "code", [0], loops=True),
        ],
        max_n=2,
        seed=3,
        **FACTS,
    )


# Figures --------------------------------------------------------------------------------------------


def test_the_report_has_every_field_that_other_programs_read(report):
    assert {key: type(report[key]) for key in SCHEMA} == SCHEMA
    for row in [*report["domains"].values(), report["overall"]]:
        assert {key: type(row[key]) for key in ROW} == ROW
        assert len(row["survival"]) == len(row["conditional"]) == report["max_n"]
        assert len(row["tau_ci95"]) == 2
        assert list(row["tau_by_n"]) == ["1", "2"]
    assert report["schema_version"] == 1
    assert report["counting"] == {"bonus": True, "pooled": True, "eos_rounds": "accepted tokens only"}
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_rates_are_pooled_over_the_rounds_of_a_domain(report):
    math = report["domains"]["math"]
    assert (math["prompts"], math["rounds"], math["tokens"]) == (2, 4, 9)
    assert math["tau"] == 2.25  # and not 2.5, the mean of two answers
    assert math["survival"] == [0.75, 0.5]
    assert math["conditional"] == [0.75, 0.6667]
    assert math["tau_by_n"] == {"1": 1.75, "2": 2.25}
    overall = report["overall"]
    assert (overall["prompts"], overall["rounds"], overall["tokens"]) == (4, 7, 12)
    assert overall["tau"] == round(12 / 7, 4)


def test_drafting_that_does_not_pay_is_flagged_by_the_n_that_loses_least():
    """A pass over one token costs 1, each more 0.5, a draft 0.1: N drafts take 1 + 0.6 N of a plain round."""
    line = Table((1,), (1, 9), ((1.0, 5.0),))
    costs = Costs(line, Table((1,), (1, 9), ((0.1, 0.9),)), line)
    found = build(
        [scored("a", "math", [2, 2, 1]), scored("c", "code", [0, 1])], max_n=2, seed=0, costs=costs, **FACTS
    )
    math, code = found["domains"]["math"], found["domains"]["code"]
    assert (math["best_n"], math["break_even"], math["below_break_even"]) == (1, 1.6, False)
    assert (code["best_n"], code["break_even"], code["below_break_even"]) == (1, 1.6, True)
    assert found["below_break_even"] == ["code"]
    assert (
        "below break-even: code, tau 1.500 at N = 1; for one request on this machine drafting pays from 1.600"
        in table(found)
    )
    rare = Counts(2, 4, 5, [1, 0], [1, 1])  # a lookup that proposed two drafts in one round of four
    row = break_even({2: rare}, costs)
    assert row["break_even"] == pytest.approx(0.2 + 1 + 0.5 * 0.5)


def test_a_domain_without_a_round_is_named_with_its_first_row():
    none = [Scored(name, "tools", {1: Counts(1), 2: Counts(2)}) for name in ("e", "f")]
    found = build([scored("a", "math", [1]), *none], max_n=2, seed=0, **FACTS)
    assert found["empty_domains"] == {"tools": "e"}
    assert "no round: tools (first row e)" in table(found)


def test_what_was_proposed_is_reported_and_kept():
    one = Scored("a", "math", {2: Counts(2, 4, 6, [2, 0], [3, 1])})
    found = build([one, one], max_n=2, seed=0, **FACTS)
    assert found["overall"]["survival"] == [0.5, 0.0]
    assert found["overall"]["survival_of_proposed"] == [0.6667, 0.0]
    assert from_row(json.loads(json.dumps(found["conversations"][0]))) == one


def test_the_domain_with_the_smallest_tau_is_the_worst(report):
    assert report["worst_domain"] == "code"


def test_the_share_of_answers_that_loop_stands_in_each_row(report):
    assert report["domains"]["math"]["loops"] == 0.5
    assert report["overall"]["loops"] == 0.5


def test_off_path_answers_are_counted_and_the_smallest_margin_is_kept(report):
    assert report["off_path"] == 3
    assert report["min_margin"] == 0.25


def test_answers_without_a_round_count_as_off_path_but_not_as_prompts():
    none = Scored("e", "math", {1: Counts(1), 2: Counts(2)}, off_path=1, margin=0.125)
    found = build([scored("a", "math", [1]), none], max_n=2, seed=0, **FACTS)
    assert found["overall"]["prompts"] == 1
    assert (found["off_path"], found["min_margin"]) == (1, 0.125)


def test_a_report_without_any_round_is_refused():
    with pytest.raises(ValueError, match="no conversation made a round.*two tokens or more"):
        build([Scored("e", "math", {2: Counts(2)})], max_n=2, seed=0, **FACTS)


def test_turns_of_one_conversation_are_one():
    turns = [
        scored("rows.jsonl:1 (turn 1)", "chat", [2], margin=0.5),
        scored("rows.jsonl:2", "chat", [0]),
        scored("rows.jsonl:1 (turn 3)", "chat", [0, 1], off_path=1, margin=0.25, loops=True),
    ]
    first, second = _by_conversation(turns)
    assert first == scored("rows.jsonl:1", "chat", [2, 0, 1], off_path=1, margin=0.25, loops=True)
    assert second == turns[1]


# Interval -------------------------------------------------------------------------------------------


def test_the_interval_is_the_same_for_the_same_seed_and_differs_for_another():
    many = [counts([i % 3] * (1 + i % 4)) for i in range(9)]
    assert bootstrap(many, seed=1) == bootstrap(many, seed=1)
    assert bootstrap(many, seed=1, samples=50) != bootstrap(many, seed=2, samples=50)


def test_the_interval_resamples_conversations_and_not_rounds():
    """Two conversations of ten rounds each: a quarter of the resamples are all of one of them."""
    assert bootstrap([counts([0] * 10), counts([2] * 10)]) == [1.0, 3.0]


def test_conversations_that_are_alike_leave_no_doubt():
    """However different the rounds within a conversation are."""
    assert bootstrap([counts([0, 1, 2])] * 5) == [2.0, 2.0]


def test_the_interval_pools_rounds_within_a_resample():
    _, high = bootstrap([counts([0] * 99)] * 40 + [counts([2])] * 40)
    assert high < 1.1  # a mean over conversations would be near 2


def test_the_interval_holds_tau_and_narrows_with_more_conversations():
    some = [counts([i % 3, 1]) for i in range(6)]
    few, many = bootstrap(some), bootstrap(some * 20)
    tau = sum(c.tokens for c in some) / sum(c.rounds for c in some)
    assert few[0] < many[0] < tau < many[1] < few[1]


def test_equal_places_of_two_lists_are_resampled_together():
    some = [counts([i % 3, 1]) for i in range(6)]
    same = resampled(some, seed=1) - resampled(some, seed=1)
    assert interval(same) == [0.0, 0.0]
    assert interval(resampled(some, seed=1) - resampled(some[::-1], seed=1)) != [0.0, 0.0]


# Loops ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [1, 2, 7, 30])
def test_an_answer_that_ends_in_a_repetition_loops(period):
    tail = [*range(period)] * 61
    assert loops([99, 98, 97, *tail[-60:]])
    assert not loops([99, *tail[-59:]]), "sixty tokens at least"
    assert not loops([*tail, 99]), "it got out of the loop"


def test_an_answer_that_does_not_repeat_soon_enough_does_not_loop():
    assert not loops([*range(31)] * 4)
    assert not loops([*range(100)])
    assert not loops([])


# Files ----------------------------------------------------------------------------------------------


class Resources(HTMLParser):
    """What a page would load or link to, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "iframe"), tag
        self.found += [value for key, value in attrs if key in ("src", "href", "srcset", "data", "poster")]

    def handle_data(self, data):
        self.text += data + "\n"


def test_the_files_are_written_whole_and_the_page_opens_offline(report, tmp_path):
    write(report, tmp_path / "new" / "report")
    files = {path.name: path for path in (tmp_path / "new" / "report").iterdir()}
    assert sorted(files) == ["acceptance.png", "report.html", "report.json", "rows.jsonl"]
    rows = [json.loads(line) for line in files["rows.jsonl"].read_text().splitlines()]
    assert {**json.loads(files["report.json"].read_text()), "conversations": rows} == report
    assert files["acceptance.png"].read_bytes().startswith(b"\x89PNG")
    page = files["report.html"].read_text()
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    assert "url(" not in page
    resources = Resources(page)
    assert len(resources.found) == 1
    assert resources.found[0].startswith("data:image/png;base64,")


def test_the_page_shows_every_domain_and_escapes_names(report, tmp_path):
    write(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<b>" not in page
    text = Resources(page).text
    for shown in ("math", "code", "overall", "2.25", FACTS["drafter"], "worst_domain"):
        assert shown in text


def test_the_table_has_a_line_a_domain_and_one_for_all(report):
    lines = table(report).splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["domain", "math", "code", "overall"]
    assert lines[-1] == "worst domain: code, tau 1.000"
    assert "2.250" in lines[1]
    assert "0.750 0.500" in lines[1]


def test_the_counts_of_a_conversation_are_read_back():
    one = scored("a", "math", [2, 0, 1], margin=0.5, prompt="abc", loops=True)
    (row,) = build([one], max_n=2, seed=0, **FACTS)["conversations"]
    assert from_row(json.loads(json.dumps(row))) == replace(one, margin=None)


def test_a_report_without_margins_is_drawn_too(tmp_path):
    found = build([scored("a", "chat", [0])], max_n=2, seed=0, **{**FACTS, "mode": "rollout"})
    write(found, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["min_margin"] is None


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("before, and much longer")
    replace_file(path, b"after")
    assert [found.name for found in tmp_path.iterdir()] == ["one.txt"]
    assert path.read_text() == "after"
