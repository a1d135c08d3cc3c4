"""``task=compare`` of runs that differ in mix: the ablation, the suggestion, and the run that confirms it."""

from __future__ import annotations

import json
import shlex
import shutil
from functools import reduce
from operator import add
from pathlib import Path

import pytest
import yaml

from drafters.target import HardwareConfig, load
from eval import compare, mix
from eval.runs import Compared, load_runs
from tests import runs, tiny
from tests.commands import CPU, command, refusal
from tests.test_report import Resources

EVEN, CODE, CHAT = "dflash-target", "dflash-code-target", "dflash-chat-target"
ASKED = [*CPU, "task=compare", f"runs=[{EVEN},{CODE},{CHAT}]"]


@pytest.fixture(scope="module")
def trained(workshop, tmp_path_factory) -> Path:
    """A working directory with runs of three mixes of two domains, and of a fourth that mixes all rows."""
    directory = tmp_path_factory.mktemp("mixes")
    of = load(str(workshop / "target"), HardwareConfig("float32", "cpu"))
    tiny.write_rows(directory / "held.jsonl", tiny.answered_rows(of, 8, num=16))
    asked = ["+recipe=dflash", f"target={workshop / 'target'}", f"data.path={workshop / 'rows.jsonl'}", *CPU]
    asked += ["data.eval_path=held.jsonl", "method.mask_token=3", "train.tokens=600", "train.eval_every=99"]
    asked += ["train.pack_tokens=100", "optim.lr=3e-3", "eval.n=[1,3]"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert command("train", "-m", *asked, "data/mix=code,chat") == 0
        assert command("train", *asked, "data.weights={code: 1, chat: 1}") == 0
        assert command("train", *asked, "run=natural") == 0
    return directory


@pytest.fixture
def here(trained, tmp_path, monkeypatch) -> Path:
    """A copy to spoil."""
    return runs.spoilable(trained, tmp_path, monkeypatch)


def compared(*more: str) -> dict:
    assert command("eval", *ASKED, *more) == 0
    return json.loads(Path("compare/compare.json").read_text())


def scores(name: str, **taus: float) -> None:
    """Other rounds of a run on the held-out rows of each domain: as many drafts accepted as tau says."""
    path = Path(f"runs/{name}/report/rows.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for at, row in enumerate(rows):
        rounds = 100 + at  # conversations differ
        tokens = round(rounds * taus[row["domain"]])
        row["by_n"] = {
            n: {"rounds": rounds, "tokens": tokens, "survived": [tokens - rounds] + [0] * (int(n) - 1)}
            for n in row["by_n"]
        }
    tiny.write_rows(path, rows)


def known_scores() -> None:
    """Own tokens count in both domains, more in code; others' a little in chat."""
    scores(EVEN, code=1.7, chat=1.30)
    scores(CODE, code=1.8, chat=1.15)
    scores(CHAT, code=1.2, chat=1.35)


# What it says ---------------------------------------------------------------------------------------


def test_runs_of_one_sweep_differ_in_what_they_learned_from_and_not_in_how_much(here):
    found = compared()["mix"]["tokens"]
    assert list(found) == [EVEN, CODE, CHAT]
    totals = [sum(tokens.values()) for tokens in found.values()]
    assert min(totals) >= 600
    assert max(totals) <= 600 + 100  # within a pack
    assert found[CODE]["chat"] == found[CHAT]["code"] == 0
    assert found[EVEN]["code"] == pytest.approx(found[EVEN]["chat"], abs=60)


def test_the_matrix_has_the_taus_of_the_reports_and_those_of_the_traffic(here, capsys):
    found = compared("eval.traffic={code: 3, chat: 1}")["mix"]
    assert found["n"] == 3
    assert found["traffic"] == {"chat": 0.25, "code": 0.75}
    for name in (EVEN, CODE, CHAT):
        report = json.loads(Path(f"runs/{name}/report/report.json").read_text())
        taus = {domain: row["tau"] for domain, row in report["domains"].items()}
        row = found["tau"][name]
        assert {domain: row[domain]["value"] for domain in taus} == taus
        assert row["traffic"]["value"] == pytest.approx(
            1 / (0.75 / taus["code"] + 0.25 / taus["chat"]), abs=1e-4
        )
        for cell in row.values():
            assert cell["ci95"][0] <= cell["value"] <= cell["ci95"][1]
    out = capsys.readouterr().out
    assert "tau by mix and domain, N=3" in out
    assert "all runs had one budget" in out
    assert "3 runs are as many as a curve has numbers" in out


def test_a_suggestion_leans_to_the_traffic_and_comes_with_its_command(here, capsys):
    known_scores()
    even = compared()["mix"]["suggested"]
    skewed = compared("eval.traffic={chat: 9, code: 1}")["mix"]["suggested"]
    assert skewed["weights"]["chat"]["value"] > even["weights"]["chat"]["value"] > 0.05
    assert sum(each["value"] for each in even["weights"].values()) == pytest.approx(1)
    assert even["best_run"] == EVEN
    assert even["predicted"]["traffic"]["value"] >= 1.473  # the best run's
    words = shlex.split(skewed["command"])
    assert words[:3] == ["python", "-m", "train"]
    assert {"+recipe=dflash", "train.tokens=600", "data.eval_path=held.jsonl", "run=confirm"} <= set(words)
    weights = [word for word in words if word.startswith("data.weights=")]
    chat = skewed["weights"]["chat"]["value"]
    assert weights == [f"data.weights={{chat: {chat:g}, code: {1 - chat:g}}}"]
    assert f"to confirm it: {skewed['command']}" in capsys.readouterr().out


def test_the_run_that_the_command_makes_confirms_the_suggestion(here, capsys):
    known_scores()
    said = compared()["mix"]["suggested"]
    assert command("train", *shlex.split(said["command"])[3:]) == 0
    scores("confirm", code=1.72, chat=1.31)
    found = compared(f"runs=[{EVEN},{CODE},{CHAT},confirm]")["mix"]
    assert found["suggested"] == said  # of the others alone
    assert found["confirmed"]["run"] == "confirm"
    for name, measured in (("code", 1.72), ("chat", 1.31)):
        assert found["confirmed"]["measured"][name]["value"] == pytest.approx(measured, abs=0.005)
        difference = found["confirmed"]["difference"][name]["value"]
        assert difference == pytest.approx(measured - said["predicted"][name]["value"], abs=0.005)
    out = capsys.readouterr().out
    assert "measured, confirm" in out.split("suggested mix")[-1]
    assert "to confirm it" not in out.split("suggested mix")[-1]


def test_gains_are_of_the_fit_and_unknown_without_three_amounts(here, capsys):
    known_scores()
    gains = compared()["mix"]["gains"]
    assert gains["code"]["own"]["value"] > gains["chat"]["own"]["value"] > 0
    for row in gains.values():
        assert row["exchanged"]["value"] == pytest.approx(
            row["own"]["value"] - row["others"]["value"], abs=0.01
        )
        assert row["own"]["ci95"][0] <= row["own"]["value"] <= row["own"]["ci95"][1]
    capsys.readouterr()
    two = compared(f"runs=[{EVEN},{CODE}]")["mix"]
    assert two["gains"] == {"code": None, "chat": None}
    assert two["suggested"] is two["confirmed"] is None
    assert "not three different amounts" in capsys.readouterr().out


def test_two_runs_of_one_mix_show_the_chance_of_training(here, capsys):
    shutil.copytree(f"runs/{EVEN}", "runs/again")
    known_scores()
    scores("again", code=1.6, chat=1.30)
    notes = compared(f"runs=[{EVEN},{CODE},{CHAT},again]")["mix"]["notes"]
    assert f"{EVEN} and again are one mix" in notes[0]
    assert "the traffic's tau differs by -0.03" in notes[0]
    assert "that of code by -0.099" in notes[0]
    assert notes[1].startswith("the curves miss the taus of the 4 runs that they fit by 0.0")


def test_a_run_of_rows_as_they_are_is_a_mix_too(here):
    found = compared(f"runs=[natural,{CODE}]")["mix"]
    assert list(found["tokens"]) == ["natural", CODE]
    assert min(found["tokens"]["natural"].values()) > 0


def test_runs_of_one_mix_are_compared_as_before(here, capsys):
    shutil.copytree("runs/natural", "runs/other")
    assert compared("runs=[natural,other]")["mix"] is None
    assert "traffic" not in capsys.readouterr().out


def test_the_page_shows_the_matrix_as_a_picture_and_needs_no_network(here):
    known_scores()
    compared()
    page = Path("compare/compare.html").read_text()
    resources = Resources(page)
    assert [found[:22] for found in resources.found] == ["data:image/png;base64,"] * 2
    for words in ("Mixes", "suggested mix", "supervised tokens learned from", "to confirm it"):
        assert words in page


def test_equal_budgets_are_those_of_supervised_tokens(here):
    """Domains of long prompts see more tokens for as many that teach."""
    path = Path(f"runs/{CHAT}/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(
            json.dumps({k: 3 * v if k == "tokens" else v for k, v in line.items()}) + "\n" for line in lines
        )
    )
    assert not [note for note in compared()["notes"] if "trained on" in note]


# Refusals -------------------------------------------------------------------------------------------


def test_traffic_of_a_domain_that_was_not_scored_is_refused(here, capsys):
    message = refusal(capsys, "eval", *ASKED, "eval.traffic={maths: 1, code: 2}")
    assert "eval.traffic: maths was not scored; give shares of" in message
    assert "code" in message


@pytest.mark.parametrize("share", ["0", "-1", "nan"])
def test_shares_of_traffic_are_above_0(here, share, capsys):
    message = refusal(capsys, "eval", *ASKED, f"eval.traffic.code={share}")
    assert "eval.traffic.code=" in message
    assert "above 0, or leave it out" in message


def test_a_run_that_has_not_ended_is_refused(here, capsys):
    path = Path(f"runs/{CODE}/recipe.yaml")
    record = yaml.safe_load(path.read_text())
    del record["data"]["seen"]
    path.write_text(yaml.safe_dump(record))
    message = refusal(capsys, "eval", *ASKED)
    assert f"run {CODE}: its recipe.yaml does not say what it learned from" in message


# Pieces ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["+recipe=demo", "data/mix=math", "run=x", "overwrite=true"], ["+recipe=demo"]),
        (["data.weights={a: 1}", "+data.weights.b=2", "seed=1"], ["seed=1"]),
        (["data.path='a, b.jsonl'"], ["data.path='a, b.jsonl'"]),
    ],
)
def test_the_command_keeps_what_the_run_was_given_but_its_mix_and_name(given, kept):
    run = Compared("x", Path(), {"overrides": given}, {}, {}, {})
    words = shlex.split(mix._command({"math": 0.25, "code": 0.75}, run))
    assert words == ["python", "-m", "train", *kept, "data.weights={math: 0.25, code: 0.75}", "run=confirm"]


def test_intervals_pair_conversations_across_runs_and_not_across_domains(here):
    known_scores()
    runs = load_runs([EVEN, CODE], "bundled")
    rows = [{"code": [], "chat": [], "overall": []} for _ in runs]
    for run, some in zip(runs, rows, strict=True):
        for key in sorted(run.rows):
            some[run.rows[key].domain].append(run.rows[key])
        some["overall"] = some["code"] + some["chat"]
    found = mix._gather(runs, rows, {}, 3)
    for r, some in enumerate(rows):
        counts = [one.by_n[3] for one in some["chat"]]
        assert found.taus_SRD[0, r, 1] == reduce(add, counts).tau
        assert (found.taus_SRD[1:, r, 1] == compare.resampled(counts, seed=4)).all()
