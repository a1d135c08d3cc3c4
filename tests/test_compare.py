"""``python -m eval task=compare``: two runs of a tiny target side by side."""

from __future__ import annotations

import json
import shutil
from functools import reduce
from operator import add
from pathlib import Path

import pytest
import yaml

from drafters.target import HardwareConfig, load
from eval import compare, report
from eval.replay import Counts
from eval.report import Scored, interval
from eval.runs import common_ns, load_runs
from tests import runs, tiny
from tests.commands import CPU, command, refusal
from tests.test_report import Resources


@pytest.fixture(scope="module")
def trained(workshop, tmp_path_factory) -> Path:
    """A working directory with runs ``one``, ``other`` (longer, fewer drafts), with held-out rows."""
    directory = tmp_path_factory.mktemp("compare")
    of = load(str(workshop / "target"), HardwareConfig("float32", "cpu"))
    tiny.write_rows(directory / "held.jsonl", tiny.answered_rows(of, 6, num=16))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        more = ["train.report=true", "data.eval_path=held.jsonl", "train.eval_every=99"]
        runs.train(workshop, *more)
        runs.train(workshop, *more, "run=other", "method.block_size=4", "train.steps=9")
    return directory


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> Path:
    """A copy to spoil."""
    return runs.spoilable(trained, tmp_path, monkeypatch)


ASKED = [*CPU, "task=compare", "runs=[one,other]"]


def change(path: Path, **values) -> None:
    """Other values of some keys of report.json; ``None``: the key is gone."""
    found = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


def counts(rounds: list[int]) -> Counts:
    out = Counts(1)
    for accepted in rounds:
        out.add_round(accepted, accepted + 1)
    return out


# What it says ---------------------------------------------------------------------------------------


def test_runs_are_laid_side_by_side(here, capsys):
    assert command("eval", *ASKED) == 0
    found = json.loads((here / "compare" / "compare.json").read_text())
    reports = {
        name: json.loads(Path(f"runs/{name}/report/report.json").read_text()) for name in ("one", "other")
    }
    assert found["ns"] == [1, 2, 3]  # of 7 and 3 drafts
    assert found["prompts"] == 6
    for name, run in found["runs"].items():
        for domain in ("chat", "code"):
            tau = {n: reports[name]["domains"][domain]["tau_by_n"][n] for n in "123"}
            assert run["domains"][domain]["tau_by_n"] == tau
        assert len(run["overall"]["survival"]) == 3
        assert set(run["drafting_cost"]) == {"1", "2", "3"}
        assert all(cost > 0 for cost in run["drafting_seconds"].values())
        assert run["drafting_cost"]["3"] == pytest.approx(
            run["drafting_seconds"]["3"] / run["target_step_seconds"], rel=0.01
        )
        weights = Path(f"runs/{name}/drafter/model.safetensors")
        assert 4 * run["trainable_parameters"] == pytest.approx(weights.stat().st_size, rel=0.05)
    assert found["runs"]["other"]["overall"]["survival"] == reports["other"]["overall"]["survival"]
    assert [run["trained_steps"] for run in found["runs"].values()] == [6, 9]
    out = capsys.readouterr().out
    assert "other less one" in out
    assert "compare/compare.html" in out


def test_tokens_and_seconds_are_summed_over_the_run(here):
    found = load_runs(["one", "other"], "bundled")
    lines = [json.loads(line) for line in Path("runs/one/metrics.jsonl").read_text().splitlines()]
    windows = [line for line in lines if "tokens" in line]
    assert found[0].trained["tokens"] == sum(line["tokens"] for line in windows) > 0
    assert found[0].trained["seconds"] == pytest.approx(
        sum(line["tokens"] / line["tokens_per_second"] for line in windows), abs=0.06
    )


def test_a_difference_is_resampled_over_pairs_of_conversations(here):
    assert command("eval", *ASKED, "seed=3") == 0
    found = json.loads((here / "compare" / "compare.json").read_text())
    one, other = load_runs(["one", "other"], "bundled")
    keys = sorted(one.rows)
    before, after = ([run.rows[key].by_n[2] for key in keys] for run in (one, other))
    (line,) = (d for d in found["differences"] if d["domain"] == "overall" and d["n"] == 2)
    assert (line["run"], line["from"]) == ("other", "one")
    assert line["tau"] == round(reduce(add, after).tau - reduce(add, before).tau, 4)
    taus = report.resampled(after, seed=3) - report.resampled(before, seed=3)
    assert line["ci95"] == interval(taus)
    assert {d["domain"] for d in found["differences"]} == {"chat", "code", "overall"}


def test_what_makes_a_conversation_easy_for_both_does_not_widen_the_interval():
    """Taus from 1 to 2 by conversation; the second run accepts one draft more in each."""
    before = [Scored(str(i), "chat", {1: counts([1] * i + [0] * (10 - i))}) for i in range(10)]
    after = [Scored(str(i), "chat", {1: counts([1] * (i + 1) + [0] * (9 - i))}) for i in range(10)]
    (line,) = compare._differences({"overall": before}, {"overall": after}, 0)
    assert line["tau"] == 0.1
    assert line["ci95"] == [0.1, 0.1]
    low, high = report.bootstrap([one.by_n[1] for one in before])
    assert high - low > 0.3


def test_the_files_open_offline_and_escape_names(here):
    Path("runs/other").rename("runs/<b>&")
    assert command("eval", *CPU, "task=compare", "runs=[one,'<b>&']", "out=here") == 0
    assert sorted(path.name for path in (here / "here").iterdir()) == ["compare.html", "compare.json"]
    page = (here / "here" / "compare.html").read_text()
    assert "http" not in page
    assert "url(" not in page
    resources = Resources(page)
    assert [found[:22] for found in resources.found] == ["data:image/png;base64,"]
    assert "<b>& less one" in resources.text
    assert "trained on" in resources.text


def test_a_run_may_be_a_directory_and_three_can_be_compared(here):
    shutil.copytree("runs/one", "third")
    assert command("eval", *CPU, "task=compare", "runs=[one,other,third]") == 0
    found = json.loads((here / "compare" / "compare.json").read_text())
    same = [d for d in found["differences"] if d["run"] == "third"]
    assert {(d["tau"], *d["ci95"]) for d in same} == {(0.0, 0.0, 0.0)}
    assert [note for note in found["notes"] if "third" in note] == []


def test_differences_that_do_not_forbid_a_comparison_are_noted(here):
    change(Path("runs/other/report/report.json"), dtype="bfloat16")
    rows = [json.loads(line) for line in Path("runs/other/report/rows.jsonl").read_text().splitlines()]
    rows[0]["by_n"]["3"]["tokens"] += 1
    tiny.write_rows(Path("runs/other/report/rows.jsonl"), rows)
    assert command("eval", *ASKED) == 0
    notes = json.loads(Path("compare/compare.json").read_text())["notes"]
    assert len(notes) == 3
    for word, note in zip(("trained on", "bfloat16", "1 of 6 prompts"), notes, strict=True):
        assert word in note


def test_reports_on_other_rows_are_found_by_the_rows(here, workshop):
    of = load(str(workshop / "target"), HardwareConfig("float32", "cpu"))
    tiny.write_rows(here / "more.jsonl", tiny.answered_rows(of, 2, num=8))
    asked = [*ASKED, "data.path=more.jsonl"]
    for name in ("one", "other"):
        words = [f"target={workshop / 'target'}", f"drafter=runs/{name}/drafter", "data.path=more.jsonl"]
        assert command("eval", *CPU, *words, "eval.n=[2]") == 0
    assert command("eval", *asked) == 0
    found = json.loads(Path("compare/compare.json").read_text())
    assert (found["prompts"], found["ns"]) == (2, [2])
    assert [list(run["overall"]["tau_by_n"]) for run in found["runs"].values()] == [["2"], ["2"]]


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("null", ["runs=[]", "two runs or more"]),
        ("[one]", ["runs=[one]", "two runs or more"]),
        ("[one,nowhere]", ["nowhere is no run", "runs/nowhere", "recipe.yaml"]),
        ("[one,runs/one]", ["runs/one is named twice"]),
    ],
)
def test_runs_that_cannot_be_found_are_refused(here, named, words, capsys):
    message = refusal(capsys, "eval", *CPU, "task=compare", f"runs={named}")
    for word in words:
        assert word in message
    assert not Path("compare").exists()


@pytest.mark.parametrize("file", ["report/report.json", "report/rows.jsonl", "metrics.jsonl"])
def test_a_file_that_is_missing_or_damaged_is_named_with_the_remedy(here, file, capsys):
    path = Path("runs/other") / file
    path.write_text("{")
    message = refusal(capsys, "eval", *ASKED)
    assert f"{path} is not valid JSON" in message
    path.unlink()
    message = refusal(capsys, "eval", *ASKED)
    assert f"run other: {path} is missing" in message
    if "report" in file:
        assert "drafter=runs/other/drafter data.path=FILE` and compare with data.path=FILE" in message


@pytest.mark.parametrize("text", ["", "- one", "{", "target: x"])
def test_a_record_that_is_none_is_refused(here, text, capsys):
    Path("runs/other/recipe.yaml").write_text(text)
    assert "runs/other/recipe.yaml is no record of a run" in refusal(capsys, "eval", *ASKED)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("report/rows.jsonl", "{}", "no row of a report; score it"),
        ("report/rows.jsonl", "[1]", "not valid JSON (no object); score it"),
        ("report/report.json", "[]", "not valid JSON (no object); score it"),
        ("metrics.jsonl", "1", "not valid JSON (no object); copy the run again"),
    ],
)
def test_a_file_of_something_else_is_named_with_the_remedy(here, file, text, words, capsys):
    (Path("runs/other") / file).write_text(text)
    message = refusal(capsys, "eval", *ASKED)
    assert f"runs/other/{file}" in message
    assert words in message


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 0.7}, ["temperature is 0.0 and 0.7", "eval.temperature=0.0"]),
        ({"drafts": "sampled"}, ["drafts is greedy and sampled", "eval.drafts=greedy"]),
        ({"target_signature": "0" * 16}, ["target_signature is", "of one target"]),
        ({"target_signature": None}, ["report.json has no target_signature", "score it again"]),
        ({"overall": {"tau_by_n": {"9": 1.0}}}, ["no N in common", "other at [9]", "eval.n="]),
    ],
)
def test_reports_that_differ_in_more_than_the_drafter_are_refused(here, values, words, capsys):
    change(Path("runs/other/report/report.json"), **values)
    message = refusal(capsys, "eval", *ASKED)
    assert "run other" in message or "and other" in message or "other at" in message
    for word in words:
        assert word in message


def test_reports_on_other_prompts_are_refused(here, capsys):
    path = Path("runs/other/report/rows.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    message = refusal(capsys, "eval", *ASKED)
    assert (
        "runs one and other were scored on other prompts: 6 and 5, of which 1 belong to one alone" in message
    )
    assert "drafter=runs/one/drafter" in message
    assert "drafter=runs/other/drafter" in message
    assert message.count("data.path=FILE`") == 2


def test_a_repeated_prompt_is_paired_by_its_turn(here):
    for name in ("one", "other"):
        path = Path(f"runs/{name}/report/rows.jsonl")
        path.write_text(path.read_text() + path.read_text().splitlines(keepends=True)[0])
    found = load_runs(["one", "other"], "bundled")
    assert [len(run.rows) for run in found] == [7, 7]
    assert common_ns(found) == [1, 2, 3]


def test_a_run_of_bundled_prompts_is_scored_again_on_those(here, capsys):
    record = yaml.safe_load(Path("runs/other/recipe.yaml").read_text())
    record["settings"]["data"]["path"] = "bundled"
    Path("runs/other/recipe.yaml").write_text(yaml.safe_dump(record))
    Path("runs/other/report/report.json").unlink()
    message = refusal(capsys, "eval", *ASKED)
    assert "drafter=runs/other/drafter data.path=bundled`" in message
    assert "FILE" not in message
