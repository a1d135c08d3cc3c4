"""``task=bench``: the closed loop, what is counted, and what it leaves behind. No clock is compared."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import partial

import pytest
import torch
from matplotlib.image import imread

from drafters import checkpoint
from drafters.target import HardwareConfig, load
from serve import bench
from serve import clients as module
from serve.bench import BenchConfig, all_there_are, engine_maker, measure
from serve.clients import Cell, Heard, Measured, closed_loop
from serve.costs import Costs, Table
from serve.engine import Engine
from serve.law import Sampling
from serve.prompts import built_in, read_prompts
from serve.proposers import ProposerConfig
from serve.schedule import Schedule
from serve.speeds import draw, row_of, summarise, table
from serve.types import Answer, Request, Round
from tests import tiny
from tests.commands import CPU, command, refusal

CELL = Cell("short", 0.0, 2)


def cheap(*_) -> Costs:
    """Drafting costs next to nothing."""
    one = Table((1,), (1,), ((1e-3,),))
    return Costs(Table((1,), (1, 2), ((1e-3, 1e-3),)), Table((1,), (1,), ((1e-6,),)), one)


@pytest.fixture(scope="module")
def target():
    return tiny.target()


def prompts(number: int, length: int = 9) -> list[list[int]]:
    found = torch.randint(10, 90, (number, length), generator=torch.Generator().manual_seed(0))
    return found.tolist()


# The loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_every_client_has_one_request_at_a_time_and_all_are_answered_in_order(target, clients):
    engine = Engine(target, slots=clients, capacity=64)
    requests = [Request(p, 3 + i) for i, p in enumerate(prompts(5))]
    open_at_once, ended = [], []
    submit = engine.submit

    def counted(*args):
        open_at_once.append(len(engine.active) + len(engine.waiting) + 1)
        return submit(*args)

    engine.submit = counted
    found = closed_loop(engine, requests, clients, lambda: ended.append(1))
    assert max(open_at_once) == clients
    assert len(ended) == 5
    assert [one.answer.request for one in found.heard] == requests
    assert all(one.answer.finish for one in found.heard)
    assert all(0 < one.asked <= one.first <= one.last for one in found.heard)
    assert max(one.last for one in found.heard) - found.heard[0].asked <= found.seconds


def test_times_are_those_of_the_first_and_the_last_tokens(target, monkeypatch):
    """A clock that moves by one a look: asked, then once for each batch of tokens."""
    ticks = itertools.count(1)
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(ticks)))
    (one,) = closed_loop(Engine(target, capacity=64), [Request(prompts(1)[0], 5, ignore_eos=True)], 1).heard
    assert (one.to_first, one.per_token) == (1.0, 1.0)  # without drafts a batch is a token


def test_an_answer_of_one_token_has_no_time_per_token(target):
    (one,) = closed_loop(Engine(target, capacity=64), [Request(prompts(1)[0], 1)], 1).heard
    assert one.per_token is None
    assert row_of(CELL, "none", Measured([one], 1.0), None)["time_per_token"] is None


# What is measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_all_proposers_get_the_same_requests_and_give_the_same_text(target, heat, monkeypatch):
    monkeypatch.setattr(bench, "costs_for", cheap)
    drafter = tiny.loud(target, "dflash")
    names = all_there_are("dflash")
    makers = {name: engine_maker(name, target, drafter, ProposerConfig(), 2) for name in names}
    config = BenchConfig(concurrency=[2], temperatures=[heat], requests=3, max_new_tokens=10)
    asked = {"one": prompts(4), "other": prompts(3, 12)}
    found = {(cell, name): measured for cell, name, measured in measure(makers, asked, config)}
    assert len(found) == 2 * len(names)
    for (cell, _), measured in found.items():
        assert [one.answer.request.prompt for one in measured.heard] == asked[cell.kind][:3]
    rows = summarise(found, names)
    assert [row["other_text"] for row in rows] == [0] * len(rows)
    drafted = {row["proposer"] for row in rows if row["drafted_per_round"] > 0}
    assert {"dflash", "suffix+dflash"} <= drafted <= {*names} - {"none"}


def test_a_scheduled_proposer_runs_as_the_server_runs_it(target, monkeypatch):
    """Costs are those of the largest concurrency; every engine has a schedule of its own, also of N."""
    asked = []
    monkeypatch.setattr(bench, "costs_for", lambda *given: asked.append(given[1:]) or cheap())
    drafter = tiny.loud(target, "dflash")
    config = ProposerConfig(n=2)
    make = engine_maker("dflash, scheduled", target, drafter, config, 7, {1: 1.5})
    one, other = make(2, 40), make(7, 50)
    assert asked == [(drafter, 7)]
    assert (one.slots, one.capacity, one.num_drafts) == (2, 40, 4)
    assert isinstance(one.schedule, Schedule)
    assert one.schedule is not other.schedule
    assert one.schedule._accepted.upto()[0] == 0.5
    combined = engine_maker("suffix+dflash, scheduled", target, drafter, config, 7, {1: 1.5})(2, 40)
    assert (combined.num_drafts, combined.proposer.n) == (16, 4)
    assert (
        combined.schedule._accepted.upto()[0] == 0.5
    )  # of the trained drafter's rows; copies are counted apart
    assert combined.schedule.copies == 16
    assert engine_maker("dflash", target, drafter, config, 7)(2, 40).schedule is None
    with pytest.raises(ValueError, match="'none, scheduled' has no drafts to schedule; write none"):
        engine_maker("none, scheduled", target, drafter, config, 7)


def test_measurements_are_shuffled_and_repeated_with_a_new_proposer_each(target):
    made = Counter()

    def make(name, slots, capacity):
        made[name] += 1
        return engine_maker(name, target, None, ProposerConfig(), 2)(slots, capacity)

    config = BenchConfig(concurrency=[1, 2], requests=2, max_new_tokens=1, repeats=2)
    makers = {name: partial(make, name) for name in ("none", "ngram", "suffix")}
    asked = {"a": prompts(2), "b": prompts(2, 5)}

    def order(seed):
        return [(cell, name) for cell, name, _ in measure(makers, asked, config, seed)]

    first = order(0)
    assert made == {"none": 8, "ngram": 8, "suffix": 8}
    assert first == order(0) != order(1)
    assert [*dict.fromkeys(first)] != [*itertools.product(dict.fromkeys(cell for cell, _ in first), makers)]
    assert set(Counter(first).values()) == {2}


@pytest.mark.parametrize(("n", "most"), [(None, 4), (2, 2), (0, 0)])
def test_n_is_the_number_of_drafts_of_a_round(target, n, most):
    drafter = tiny.loud(target, "dflash")
    assert drafter.max_drafts == 4
    config = BenchConfig(concurrency=[1], requests=1, max_new_tokens=20)
    maker = engine_maker("dflash", target, drafter, ProposerConfig(n=n), 1)
    ((_, _, measured),) = measure({"dflash": maker}, {"a": prompts(1)}, config)
    assert max(r.drafted for one in measured.heard for r in one.answer.rounds) == most


def test_more_drafts_than_the_drafter_was_trained_for_are_refused(target):
    make = engine_maker("dflash", target, tiny.loud(target, "dflash"), ProposerConfig(n=99), 1)
    with pytest.raises(ValueError, match="n=99: .* at most 4 drafts"):
        make(1, 40)


# What is counted --------------------------------------------------------------------------------------


def heard(
    seed: int, tokens: list[int], rounds: list[Round], asked: float, first: float, last: float
) -> Heard:
    answer = Answer(Request([1, 2, 3], 9, Sampling(seed=seed)), tokens, rounds, "length")
    return Heard(answer, asked, first, last)


def test_a_line_of_the_result_by_hand():
    plain = Measured(
        [heard(0, [5, 6, 7], [Round(0, 0, 1)] * 2, 0, 1, 3), heard(1, [5, 6], [Round(0, 0, 1)], 0, 2, 3)], 5.0
    )
    drafted = Measured(
        [
            heard(0, [5, 6, 7], [Round(3, 1, 2)], 0, 1, 2),
            heard(1, [5, 9], [Round(3, 0, 1)], 0, 3, 7),
            heard(0, [5, 6, 7], [Round(2, 1, 2)], 0, 2, 3),
        ],
        4.0,
    )
    row = row_of(CELL, "ngram", drafted, plain)
    assert row == {
        "kind": "short",
        "temperature": 0.0,
        "concurrency": 2,
        "proposer": "ngram",
        "prompt_tokens": 3.0,
        "answers": 3,
        "tokens": 8,
        "tokens_per_second": 2.0,
        "first_token_p50": 2.0,
        "first_token_p95": pytest.approx(2.9),
        "time_per_token": 0.5,
        "tau": round(5 / 3, 4),
        "drafted_per_round": round(8 / 3, 4),
        "accepted_per_round": round(2 / 3, 4),
        "speedup": 2.0,
        "other_text": 1,
    }
    assert "speedup" not in row_of(CELL, "ngram", drafted, None)


def rows_of(*names: str) -> list[dict]:
    one = heard(0, [5, 6, 7], [Round(3, 1, 2)], 0, 0.25, 2)
    cells = [Cell(kind, heat, clients) for kind in ("b", "a") for heat in (0.0, 1.0) for clients in (4, 1)]
    return summarise({(cell, name): Measured([one], 2.0) for cell in cells for name in names}, names)


def test_the_table_has_a_line_for_every_proposer_under_its_cell():
    lines = table(rows_of("none", "suffix+dspark")).splitlines()
    heads = [line for line in lines if "at a time" in line]
    assert heads[:3] == [
        "a, 3 prompt tokens, temperature 0, 1 at a time",
        "a, 3 prompt tokens, temperature 0, 4 at a time",
        "a, 3 prompt tokens, temperature 1, 1 at a time",
    ]
    assert len(heads) == 8
    assert [line.split()[0] for line in lines[1:4]] == ["proposer", "none", "suffix+dspark"]
    assert lines[3].split()[1:] == [
        *("1.5", "1.00", "0.250", "0.250", "s", "875.00", "2.00", "3.00", "1.00", "0", "of", "1"),
    ]
    assert " - " in table(rows_of("ngram")).splitlines()[2]  # plain decoding was not measured


def test_the_picture_has_a_panel_for_each_kind_and_temperature(tmp_path):
    for names in (("none", "ngram"), ("ngram",)):
        (tmp_path / "bench.png").write_bytes(draw(rows_of(*names)))
        height, width, _ = imread(tmp_path / "bench.png").shape
        assert width > 900
        assert height > 700


# Prompts ----------------------------------------------------------------------------------------------


def test_built_in_prompts_are_sixteen_different_ones_of_each_kind():
    found = built_in()
    assert list(found) == ["short", "edit", "long"]
    for some in found.values():
        assert len({json.dumps(messages) for messages in some}) == len(some) == 16
    length = {kind: max(len(m[0]["content"]) for m in some) for kind, some in found.items()}
    assert length["short"] < length["edit"] < length["long"]


def written(path, *rows) -> object:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_prompts_of_a_file_come_by_kind(tmp_path):
    user, answer = {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}
    path = written(
        tmp_path / "p.jsonl", {"prompt": "a"}, "", {"messages": [user, answer], "kind": "x"}, {"prompt": "d"}
    )
    assert read_prompts(path) == {
        "file": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "d"}]],
        "x": [[user]],
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"p\.jsonl:2: not valid JSON"),
        ("[1]", r"p\.jsonl:2: an object"),
        ('{"prompt": "\\ud800"}', r"p\.jsonl:2: not valid JSON in UTF-8"),
        ({"text": "a"}, r"p\.jsonl:2: give prompt"),
        ({"prompt": "  "}, r"p\.jsonl:2: give prompt"),
        ({"messages": ["a"]}, r"p\.jsonl:2: give prompt"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, r"p\.jsonl:2: messages ask for nothing"),
        ({"prompt": "a"}, r"p\.jsonl:2: this prompt stands there twice"),
    ],
)
def test_a_bad_line_of_a_file_is_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(written(tmp_path / "p.jsonl", {"prompt": "a"}, row))


def test_lines_end_where_json_lines_says_and_nowhere_else(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "one\u2028two\u0085three"}\n'.encode())
    assert [row[0]["content"] for row in read_prompts(path)["file"]] == ["one\u2028two\u0085three"]
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:1: not valid JSON in UTF-8"):
        read_prompts(path)


def test_a_file_without_prompts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(written(tmp_path / "p.jsonl", ""))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"requests": 0}, r"bench\.requests=0"),
        ({"max_new_tokens": 0}, r"bench\.max_new_tokens=0"),
        ({"repeats": 0}, r"bench\.repeats=0"),
        ({"concurrency": [1, 9]}, r"bench\.concurrency=\[1, 9\]: give numbers from 1 to the 8"),
        ({"concurrency": []}, r"bench\.concurrency=\[\]"),
        ({"temperatures": []}, r"bench\.temperatures is empty"),
        ({"temperatures": [-1.0]}, "temperature=-1"),
    ],
)
def test_settings_that_measure_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BenchConfig(**settings)


# On the command line ----------------------------------------------------------------------------------


@pytest.fixture
def asked(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    target = load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))
    checkpoint.write(tiny.dflash(target), tmp_path / "drafter")
    written(tmp_path / "p.jsonl", *({"prompt": f"question {i}"} for i in range(3)))
    settings = ["prompts=p.jsonl", "requests=2", "concurrency=[1,2]", "max_new_tokens=6"]
    return [
        *CPU,
        "task=bench",
        f"target={workshop / 'target'}",
        "drafter=drafter",
        *(f"bench.{setting}" for setting in settings),
    ]


def test_the_command_leaves_a_table_json_and_a_picture(asked, capsys, tmp_path):
    assert command("serve", *asked, "out=results", "bench.temperatures=[0.7]", "seed=3") == 0
    result = json.loads((tmp_path / "results" / "bench.json").read_text())
    trained = ["dflash", "dflash, scheduled", "suffix+dflash", "suffix+dflash, scheduled"]
    names = ["none", "ngram", "suffix", *trained]
    cells = itertools.product([0.7], [1, 2], names)
    assert [(r["temperature"], r["concurrency"], r["proposer"]) for r in result["rows"]] == [*cells]
    assert all(row["other_text"] == 0 and row["tokens_per_second"] > 0 for row in result["rows"])
    assert (result["seed"], result["settings"]["requests"], result["machine"]["dtype"]) == (3, 2, "float32")
    assert imread(tmp_path / "results" / "bench.png").ndim == 3
    assert table(result["rows"]) in capsys.readouterr().out


def test_the_drafts_that_were_asked_for_are_those_of_all_but_plain_decoding(asked, tmp_path):
    assert command("serve", *asked, "serve.n=2", "bench.proposers=[none,dflash]") == 0
    result = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert result["n"] == 2
    assert {row["proposer"] for row in result["rows"]} == {"none", "dflash"}


def test_without_a_drafter_the_proposers_that_need_none_are_measured(asked, tmp_path):
    asked.remove("drafter=drafter")
    assert command("serve", *asked) == 0
    rows = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    assert {row["proposer"] for row in rows} == {"none", "ngram", "suffix"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("bench.requests=4", "bench.requests=4, but there are 3 prompts of kind file"),
        ("bench.kinds=[short]", "['short'] is none of ['file']"),
        ("bench.proposers=[none,ngrm]", "Did you mean ngram?"),
        ("bench.proposers=['ngrm, scheduled']", "Did you mean ngram?"),
        ("bench.max_new_tokens=9999", "exceed the target's context of 512"),
        ("bench.prompts=nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("drafter=nowhere", "drafter=nowhere: no drafter directory"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked, capsys, tmp_path, setting, message):
    assert message in refusal(capsys, "serve", *asked, setting)
    assert not (tmp_path / "bench").exists()
