"""``python -m eval`` on a tiny target and a tiny drafter directory."""

from __future__ import annotations

import json

import pytest

from data.regenerate import RegenerateConfig
from data.sources import DataConfig, Row, read
from drafters import checkpoint
from drafters.target import EMBEDDED, HardwareConfig, load
from drafters.types import Example
from eval import evaluate as module
from eval.evaluate import EvalConfig, evaluate
from eval.replay import paths, score
from eval.report import beside
from eval.rollout import rollout
from serve.costs import Costs, Table
from tests import tiny
from tests.commands import CPU, command, refusal


@pytest.fixture(scope="module")
def target(workshop):
    return load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def rows(target):
    """Two domains; the conversations of ``workshop`` without their answers and kept ids."""
    rows = tiny.answered_rows(target, 5, num=10)
    return [{**row, "messages": row["messages"][:1], "answers": None, "tokenizer": None} for row in rows]


@pytest.fixture(scope="module")
def directory(target, tmp_path_factory):
    """A drafter directory as training leaves it, of a drafter that knows two of the answers."""
    examples = [_example(target, row) for row in tiny.answered_rows(target, 2, num=12)]
    drafter = tiny.trained(target, examples, steps=20)
    directory = tmp_path_factory.mktemp("drafters") / "one"
    checkpoint.write(drafter, directory)
    return directory


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """Where costs of a round are kept between the evaluations here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def asked(workshop, directory, costs, tmp_path, monkeypatch):
    """Arguments of every evaluation here, which writes to ``report`` of an empty working directory."""
    monkeypatch.setenv("FOREDRAFT_CACHE", str(costs))
    monkeypatch.chdir(tmp_path)
    target, data = f"target={workshop / 'target'}", f"data.path={workshop / 'rows.jsonl'}"
    return [*CPU, target, data, f"drafter={directory}", "out=report", "eval.per_domain=2"]


def but(asked: list[str], *more: str) -> list[str]:
    """The arguments with some replaced."""
    return list({text.split("=")[0]: text for text in [*asked, *more]}.values())


def _example(target, row: dict) -> Example:
    prompt = target.tokenizer.apply_chat_template(
        row["messages"][:1], add_generation_prompt=True, tokenize=False
    )
    ids = target.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = row["answers"][0][1]
    return Example(ids + answer, [False] * len(ids) + [True] * len(answer), row["domain"], row["id"])


def report(where="report/report.json") -> dict:
    with open(where) as file:
        return json.load(file)


# What it says ---------------------------------------------------------------------------------------


def test_the_report_holds_the_counts_of_replay(asked, target, directory, capsys):
    assert command("eval", *asked, "seed=5") == 0
    found = report()
    drafter = checkpoint.read(directory, target)
    examples = [_example(target, row) for row in tiny.answered_rows(target, 4)]
    counted = score(drafter, list(paths(target, examples, drafter.layer_ids)), [1, 4])
    for domain, (one, other) in {"chat": (0, 2), "code": (1, 3)}.items():
        row = found["domains"][domain]
        pooled = counted[one][4] + counted[other][4]
        assert (row["prompts"], row["rounds"], row["tokens"]) == (2, pooled.rounds, pooled.tokens)
        assert row["survival"] == [round(x, 4) for x in pooled.survival]
        assert row["tau_by_n"]["1"] == round((counted[one][1] + counted[other][1]).tau, 4)
        assert list(row["tau_by_n"]) == ["1", "2", "3", "4"]
    assert found["drafter"] == str(directory)
    assert (found["method"], found["mode"], found["dtype"], found["seed"]) == (
        "dflash",
        "replay",
        "float32",
        5,
    )
    assert (found["max_n"], found["temperature"], found["off_path"]) == (4, 0.0, 0)
    out = capsys.readouterr().out
    assert "overall" in out
    assert "report/report.html" in out


def test_replay_and_rollout_report_the_same(asked):
    assert command("eval", *asked, "eval.n=[3]") == 0
    replayed = report()
    assert command("eval", *asked, "eval.n=[3]", "eval.mode=rollout") == 0
    decoded = report()
    assert decoded["domains"] == replayed["domains"]
    assert decoded["overall"] == replayed["overall"]
    assert (decoded["mode"], decoded["off_path"], decoded["min_margin"]) == ("rollout", 0, None)


def test_replay_and_rollout_report_the_same_of_a_sampled_answer_of_the_same_seed(target, directory):
    """The answers that a rollout gave, replayed: the same rounds, at a temperature too."""
    drafter = checkpoint.read(directory, target)
    asked = [_example(target, row) for row in tiny.answered_rows(target, 4)]
    hot = {"temperature": 0.7, "n": [1, 4], "max_new_tokens": 12}
    decoded = evaluate(target, drafter, asked, EvalConfig(mode="rollout", batch=3, **hot), 5)
    given = rollout(target, drafter, asked, 4, temperature=0.7, seed=5, max_new_tokens=12)
    answers = {example.name: answer.tokens for example, answer, _ in given}
    told = []
    for each in asked:
        ids = each.ids[: each.mask.index(True)] + answers[each.name]
        mask = [at >= each.mask.index(True) for at in range(len(ids))]
        told.append(Example(ids, mask, each.domain, each.name))
    replayed = evaluate(target, drafter, told, EvalConfig(**hot), 5)
    assert decoded["domains"] == replayed["domains"]
    assert decoded["conversations"] == replayed["conversations"], "in the order of the rows"
    assert decoded["overall"]["tokens"] == sum(len(tokens) - 1 for tokens in answers.values())
    assert (decoded["off_path"], decoded["mode"], decoded["temperature"]) == (0, "rollout", 0.7)


def test_the_rows_of_a_rollout_stand_in_their_order_and_not_in_that_in_which_they_finished(target, directory):
    rows = [_example(target, row) for row in tiny.answered_rows(target, 4)]
    rows[1:] = [Example(row.ids[:-18], row.mask[:-18], row.domain, row.name) for row in rows[1:]]
    drafter = checkpoint.read(directory, target)
    found = evaluate(target, drafter, rows, EvalConfig(mode="rollout", n=[1], batch=4), 0)
    assert [row["name"] for row in found["conversations"]] == [row.name for row in rows]


def test_what_is_looked_up_is_scored_without_a_drafter(asked, tmp_path):
    asked = [each for each in but(asked, "out=null") if not each.startswith("drafter=")]
    settings = ["proposer=ngram", "serve.ngram.shortest=1", "eval.batch=1"]
    assert command("eval", *asked, *settings) == 0
    replayed = report("report-ngram/report.json")
    assert command("eval", *asked, *settings, "eval.mode=rollout") == 0
    decoded = report("report-ngram/report.json")
    assert decoded["domains"] == replayed["domains"]
    assert (decoded["method"], decoded["drafter"], decoded["max_n"]) == ("ngram", "ngram", 8)
    row = decoded["overall"]
    assert list(row["tau_by_n"]) == ["8"]
    assert len(row["survival_of_proposed"]) == 8
    assert row["tau"] >= 1


@pytest.mark.parametrize(("proposer", "most"), [("suffix+dflash", 16), ("none", 0), ("dflash", 4)])
def test_any_proposer_is_decoded(asked, directory, tmp_path, proposer, most):
    settings = [f"proposer={proposer}", "eval.mode=rollout", "eval.per_domain=1"]
    assert command("eval", *but(asked, *settings, f"eval.n={[most] if most else 'null'}")) == 0
    found = report()
    drafter = "none" if proposer == "none" else str(directory)
    assert (found["method"], found["drafter"], found["max_n"]) == (proposer, drafter, most)
    assert ("survival_of_proposed" in found["overall"]) == (proposer != "dflash")
    assert (found["overall"]["tau"] == 1) == (proposer == "none")
    assert (found["below_break_even"] is None) == (proposer == "none")


def test_a_domain_in_which_rounds_cost_more_than_they_bring_is_named(asked, monkeypatch, capsys):
    for draft, step, below in ((1e-9, 0.0, []), (9.0, 0.0, ["chat", "code"]), (1e-9, 9.0, ["chat", "code"])):
        table = lambda each: Table((1,), (1, 5), ((1.0, 1.0 + each),))  # noqa: E731, B023
        costs = Costs(table(step), Table((1,), (1,), ((draft,),)), table(0.0))
        monkeypatch.setattr(module, "costs_for", lambda *_: costs)  # noqa: B023
        assert command("eval", *asked) == 0
        found = report()
        assert found["below_break_even"] == below
        assert [row["below_break_even"] for row in found["domains"].values()] == [bool(below)] * 2
        assert ("below break-even: chat, tau" in capsys.readouterr().out) == bool(below)
    row = found["domains"]["chat"]
    assert row["break_even"] == pytest.approx(1 + 9 * row["best_n"] / 4)


def test_costs_are_left_out_where_they_are_not_asked_for_or_cannot_be_timed(asked, monkeypatch, capsys):
    def never(*_):
        raise ValueError("no cache of this kind")

    monkeypatch.setattr(module, "costs_for", never)
    for settings in (["eval.break_even=false"], []):
        assert command("eval", *asked, *settings) == 0
        assert report()["below_break_even"] is None
        assert "break_even" not in report()["overall"]
    out, err = capsys.readouterr()
    assert (out + err).count("no cache of this kind") == 1


def test_the_numbers_of_drafts_may_be_chosen(asked):
    assert command("eval", *asked, "eval.n=[1,3]") == 0
    found = report()
    assert found["max_n"] == 3
    assert list(found["overall"]["tau_by_n"]) == ["1", "3"]
    assert len(found["overall"]["survival"]) == 3


@pytest.mark.parametrize("mode", ["replay", "rollout"])
def test_an_answer_of_another_model_counts_as_off_path(target, directory, mode):
    good, bad = [_example(target, row) for row in tiny.answered_rows(target, 2)]
    ids = [*bad.ids[:-3], *(9 + (i + 1) % 200 for i in bad.ids[-3:])]
    bad = Example(ids, bad.mask, bad.domain, bad.name)
    settings = EvalConfig(mode=mode, n=[2])
    found = evaluate(target, checkpoint.read(directory, target), [good, bad], settings, 0)
    assert found["off_path"] == 1


def test_without_a_place_the_report_goes_beside_the_drafter_of_a_run(asked, target, directory, tmp_path):
    drafter = checkpoint.read(directory, target)
    run = tmp_path / "runs" / "one"
    checkpoint.write(drafter, run / "drafter")
    data = json.dumps({"path": "bundled", "eval_path": None})
    (run / "recipe.yaml").write_text(f"settings: {{data: {data}}}\n")
    assert command("eval", *but(asked, "out=null", f"drafter={run / 'drafter'}", "eval.n=[1]")) == 0
    assert report(run / "report-rows" / "report.json")["max_n"] == 1
    assert not (run / "report").exists(), "the report of the run's own held-out rows"


@pytest.mark.parametrize(
    ("path", "eval_path", "scored", "name"),
    [
        ("bundled", None, "bundled", "report"),
        ("mine.jsonl", None, "bundled", "report-bundled"),
        ("mine.jsonl", None, "mine.jsonl", "report-mine"),
        ("mine.jsonl", "held.jsonl", "held.jsonl", "report"),
        ("bundled", None, "far/off.jsonl.xz", "report-off"),
    ],
)
def test_only_the_rows_that_a_run_held_out_are_its_report(tmp_path, path, eval_path, scored, name):
    data = json.dumps({"path": path, "eval_path": eval_path})
    (tmp_path / "recipe.yaml").write_text(f"settings: {{data: {data}}}\n")
    assert beside(tmp_path / "drafter", scored) == tmp_path / name


def test_without_a_run_the_report_goes_to_a_folder_named_after_the_drafter(asked, tmp_path):
    assert command("eval", *but(asked, "out=null", "eval.n=[1]")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report-one"]


# Rows without answers -------------------------------------------------------------------------------


def test_rows_without_answers_are_answered_by_the_target_once(asked, target, rows, tmp_path, monkeypatch):
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    asked = but(
        asked,
        "data.path=rows.jsonl",
        "eval.max_new_tokens=10",
        "eval.batch=3",
        "eval.n=[2]",
        "eval.per_domain=9",
    )
    assert command("eval", *asked) == 0
    first = report()
    assert first["overall"]["prompts"] == 5
    (kept,) = (tmp_path / "report").glob("answers-*.jsonl")
    by_id = {row["id"]: row for row in map(json.loads, kept.read_text().splitlines())}
    for want in tiny.answered_rows(target, 5, num=10):
        assert by_id[want["id"]]["answers"] == want["answers"]

    def never(*_args, **_settings):
        raise AssertionError("asked again")

    monkeypatch.setattr(module, "regenerate", never)
    assert command("eval", *asked) == 0
    assert report() == first


def test_every_assistant_turn_of_a_conversation_is_answered_and_scored(asked, target, tmp_path):
    """Text that came without ids is history; a question behind the last answer is a turn too."""
    talk = [
        {"role": role, "content": f"{role} {at}"}
        for at, role in enumerate(["system", "user", "assistant", "user", "assistant", "user"])
    ]
    tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": talk}, {"messages": talk[:3]}])
    asked = but(asked, "data.path=rows.jsonl", "eval.max_new_tokens=6", "eval.n=[2]")
    found = {}
    for mode in ("replay", "rollout"):
        assert command("eval", *asked, f"eval.mode={mode}") == 0
        found[mode] = report()["domains"]
    assert found["rollout"] == found["replay"]
    row = found["replay"]["chat"]
    assert (row["prompts"], row["tokens"]) == (2, 4 * 5), "turns of one conversation are resampled together"
    lines = map(json.loads, (tmp_path / "report" / "rows.jsonl").read_text().splitlines())
    assert [line["name"] for line in lines] == ["rows.jsonl:1", "rows.jsonl:2"]
    (kept,) = (tmp_path / "report").glob("answers-*.jsonl")
    asked_for = sorted(len(json.loads(line)["messages"]) - 1 for line in kept.read_text().splitlines())
    assert asked_for == [2, 2, 4, 6]


def test_only_what_a_stopped_evaluation_left_out_is_asked_again(asked, target, rows, tmp_path, monkeypatch):
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    asked = but(asked, "data.path=rows.jsonl", "eval.max_new_tokens=10", "eval.n=[2]")
    assert command("eval", *asked) == 0
    first = report()
    (kept,) = (tmp_path / "report").glob("answers-*.jsonl")
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:2]) + lines[2][:30])  # a line torn by a kill
    asked_again = []
    regenerate = module.regenerate

    def watched(target, render, rows, how: RegenerateConfig, **settings):
        asked_again.extend(row.id for row in rows)
        return regenerate(target, render, rows, how, **settings)

    monkeypatch.setattr(module, "regenerate", watched)
    assert command("eval", *asked) == 0
    assert sorted(asked_again) == sorted(json.loads(line)["id"] for line in lines[2:])
    assert report() == first


def test_answers_of_another_length_are_not_taken_for_these(asked, rows, tmp_path):
    tiny.write_rows(tmp_path / "rows.jsonl", rows[:2])
    asked = but(asked, "data.path=rows.jsonl")
    tokens = {}
    for limit in (4, 8):
        assert command("eval", *asked, f"eval.max_new_tokens={limit}", "eval.n=[1]") == 0
        tokens[limit] = report()["overall"]["tokens"]
    assert tokens == {4: 2 * 3, 8: 2 * 7}


@pytest.mark.parametrize("stranger", [{"tokenizer": "0" * 16}, {"made_by": "0" * 16 + "/0/abc"}], ids=str)
def test_ids_of_another_target_are_answered_anew(asked, target, tmp_path, stranger):
    foreign = [{**row, **stranger, "answers": [[1, [5, 5]]]} for row in tiny.answered_rows(target, 2)]
    tiny.write_rows(tmp_path / "rows.jsonl", foreign)
    asked = but(asked, "data.path=rows.jsonl")
    assert command("eval", *asked, "eval.max_new_tokens=6", "eval.n=[1]") == 0
    found = report()
    assert (found["overall"]["tokens"], found["off_path"]) == (2 * 5, 0)


def test_rows_of_the_training_split_are_not_scored(asked, rows, tmp_path):
    split = [{**row, "split": "eval" if at < 2 else "train"} for at, row in enumerate(rows)]
    tiny.write_rows(tmp_path / "rows.jsonl", split)
    asked = but(asked, "data.path=rows.jsonl")
    assert command("eval", *asked, "eval.max_new_tokens=4", "eval.n=[1]") == 0
    assert report()["overall"]["prompts"] == 2


# Answers sampled at a temperature -------------------------------------------------------------------


@pytest.fixture
def sampled(asked, rows, workshop, tmp_path):
    """Arguments over rows that ``task=regenerate`` answered at 0.7."""
    tiny.write_rows(tmp_path / "asked.jsonl", rows)
    settings = ["regenerate.temperature=0.7", "regenerate.max_new_tokens=10", "out=sampled.jsonl"]
    target = f"target={workshop / 'target'}"
    assert command("data", "task=regenerate", *CPU, target, "data.path=asked.jsonl", *settings) == 0
    return but(asked, "data.path=sampled.jsonl", "eval.temperature=0.7")


def test_sampled_answers_are_replayed_whole(sampled, target, directory, tmp_path):
    assert command("eval", *sampled, "eval.n=[1,4]") == 0
    found = report()
    assert (found["mode"], found["temperature"], found["drafts"]) == ("replay", 0.7, "greedy")
    assert (found["off_path"], found["min_margin"]) == (0, None)
    lines = map(json.loads, (tmp_path / "sampled.jsonl").read_text().splitlines())
    examples = [_example(target, row) for row in lines if row["id"] in ("row-0", "row-1", "row-2", "row-3")]
    assert found["overall"]["tokens"] == sum(sum(e.mask) - 1 for e in examples)
    drafter = checkpoint.read(directory, target)
    assert command("eval", *sampled, "eval.n=[1,4]", "eval.drafts=sampled") == 0
    drawn = report()
    assert (drawn["drafts"], drawn["overall"]["tokens"]) == ("sampled", found["overall"]["tokens"])
    assert isinstance(drawn["overall"]["rounds"], int)
    by_n = score(
        drafter, list(paths(target, examples, drafter.layer_ids, temperature=0.7)), [4], drafts="sampled"
    )
    rounds = sum(counts[4].rounds for counts in by_n)
    assert drawn["overall"]["tau"] == round(found["overall"]["tokens"] / rounds, 4)
    assert drawn["overall"]["survival"][0] == round(sum(c[4].survived[0] for c in by_n) / rounds, 4)


def test_answers_of_another_temperature_are_refused_with_the_remedy(sampled, capsys):
    message = refusal(capsys, "eval", *but(sampled, "eval.temperature=0.9"))
    assert "sampled.jsonl:1: eval.temperature=0.9" in message
    assert "was 0.7" in message
    remedy = "task=regenerate regenerate.temperature=0.9 data.path=sampled.jsonl data.split=eval"
    assert remedy in message


def test_decoding_takes_the_prompts_of_answers_of_any_temperature(sampled):
    settings = ["eval.temperature=0.9", "eval.mode=rollout", "eval.n=[2]", "eval.max_new_tokens=5"]
    assert command("eval", *but(sampled, *settings)) == 0
    found = report()
    assert (found["overall"]["tokens"], found["temperature"], found["off_path"]) == (4 * 4, 0.9, 0)


def test_answers_of_unknown_temperature_are_refused(asked, capsys):
    message = refusal(capsys, "eval", *asked, "eval.temperature=0.7")
    assert "rows.jsonl:1: eval.temperature=0.7" in message
    assert "does not say what it was" in message


def test_the_bundled_answers_are_greedy():
    row = next(iter(read(DataConfig(split="eval"))))
    assert row.temperature == 0.0
    assert row.answered_by(EMBEDDED)


@pytest.mark.parametrize(
    ("made_by", "temperature"),
    [(None, None), ("abc", None), ("org/model", None), ("abc/0.7/def", 0.7), ("abc/1e-05/def", 1e-5)],
)
def test_a_row_says_what_it_was_sampled_at(made_by, temperature):
    assert Row(0, "here", made_by=made_by).temperature == temperature


def test_rows_without_answers_are_sampled_at_the_temperature(asked, target, rows, tmp_path):
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    asked = but(asked, "data.path=rows.jsonl", "eval.max_new_tokens=10", "eval.n=[2]")
    for heat in ("0", "0.7"):
        assert command("eval", *asked, f"eval.temperature={heat}") == 0
        assert report()["off_path"] == 0
    files = [path.read_text().splitlines() for path in (tmp_path / "report").glob("answers-*.jsonl")]
    assert sorted(json.loads(lines[0])["made_by"].split("/")[1] for lines in files) == ["0", "0.7"]


# Bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("eval.mode=fast", ["eval.mode=fast", "replay or rollout"]),
        ("eval.per_domain=0", ["eval.per_domain=0", "at least 1"]),
        ("eval.max_new_tokens=0", ["eval.max_new_tokens=0", "at least 1"]),
        ("eval.batch=0", ["eval.batch=0", "at least 1"]),
        ("eval.temperature=-1", ["eval.temperature=-1", "0 (greedy) or more"]),
        ("eval.temperature=nan", ["eval.temperature=nan", "0 (greedy) or more"]),
        ("eval.temperature=inf", ["eval.temperature=inf", "0 (greedy) or more"]),
        ("eval.drafts=some", ["eval.drafts=some", "greedy or sampled"]),
        ("eval.drafts=sampled", ["eval.drafts=sampled", "above 0"]),
        ("eval.clients=0", ["eval.clients=0", "at least 1"]),
        ("proposer=suffix+dflash", ["eval.mode=replay", "eval.mode=rollout"]),
        ("proposer=none", ["eval.mode=replay", "eval.mode=rollout"]),
        ("proposer=sufix", ["proposer=sufix", "suffix"]),
        ("proposer=eagle3", ["proposer=eagle3", "dflash"]),
        ("eval.n=[9]", ["eval.n=[9]", "1 to 4 drafts"]),
        ("eval.n=[0]", ["eval.n=[0]", "1 to 4 drafts"]),
        ("eval.n=[1,5]", ["eval.n=[1, 5]", "1 to 4 drafts"]),
        ("drafter=nowhere", ["drafter=nowhere", "no drafter directory"]),
        ("data.path=nowhere.jsonl", ["data.path=nowhere.jsonl", "no such file"]),
        ("target=nowhere", ["target=nowhere", "hub name"]),
    ],
)
def test_a_bad_setting_is_refused_and_leaves_nothing(asked, setting, words, tmp_path, capsys):
    message = refusal(capsys, "eval", *but(asked, setting))
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [([11], "its answers have one token at most"), ([11, 11, 11], "that are the target's own")],
    ids=["one token", "another model's"],
)
def test_a_domain_without_a_round_is_refused_by_its_first_row(asked, target, tmp_path, capsys, answer, why):
    rows = tiny.answered_rows(target, 4)
    for row in rows[2:]:
        row |= {"domain": "tools", "answers": [[1, answer]]}
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    message = refusal(capsys, "eval", *but(asked, "data.path=rows.jsonl"))
    assert "rows.jsonl:3: domain tools is empty" in message
    assert why in message
    assert not (tmp_path / "report" / "report.json").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["eval.drafts=sampled", "eval.mode=rollout", "eval.temperature=0.7"], "write eval.mode=replay"),
        (["eval.drafts=sampled", "proposer=suffix", "eval.temperature=0.7"], "no law to draw from"),
        (["proposer=ngram", "eval.n=[9]"], "this proposer makes 1 to 8 drafts"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(asked, capsys, settings, words):
    assert words in refusal(capsys, "eval", *but(asked, *settings))


def test_a_number_of_drafts_is_refused_before_the_target_answers(asked, rows, tmp_path, capsys, monkeypatch):
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    asked = but(asked, "data.path=rows.jsonl")
    monkeypatch.setattr(module, "regenerate", None)
    assert "eval.n=[9]" in refusal(capsys, "eval", *asked, "eval.n=[9]", "eval.mode=rollout")


def test_a_drafter_of_another_target_is_refused(asked, tmp_path, capsys):
    tiny.save(tiny.target(layers=6), tmp_path / "other")
    message = refusal(capsys, "eval", *but(asked, "target=other"))
    assert "made for another target: its num_layers is 8, that of other is 6" in message
    assert "give target=" in message


def test_rows_that_cannot_be_used_stop_the_evaluation_with_a_table(asked, rows, tmp_path, capsys):
    text = tiny.write_rows(tmp_path / "rows.jsonl", rows[:2]).read_text()
    (tmp_path / "rows.jsonl").write_text(text + "not json\n")
    asked = but(asked, "data.path=rows.jsonl", "eval.max_new_tokens=4", "eval.n=[1]")
    message = refusal(capsys, "eval", *asked)
    assert "1 of 3 rows cannot be used" in message
    assert "rows.jsonl:3" in message
    assert command("eval", *asked, "data.max_skip=0.5") == 0


def test_a_file_without_rows_is_refused(asked, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    assert "it holds no row" in refusal(capsys, "eval", *but(asked, "data.path=empty.jsonl"))


def test_a_prompt_that_leaves_no_room_for_an_answer_is_counted(asked, rows, tmp_path, capsys):
    tiny.write_rows(tmp_path / "rows.jsonl", rows[:2])
    asked = but(asked, "data.path=rows.jsonl")
    message = refusal(capsys, "eval", *asked, "data.max_length=20")
    assert "2 of 2 rows" in message
    assert "leaves no room" in message
