"""What a round costs: tables from measured seconds, and files that keep them. Nothing is timed here."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.dspark import DSparkConfig
from drafters.eagle3 import Eagle3Config
from drafters.method import build
from serve import costs as module
from serve.costs import Costs, Table, costs_for, kept, key_of, measure, pieces, spread
from serve.engine import Engine
from serve.ngram import Ngram, NgramConfig
from serve.proposers import Combined
from serve.suffix import Suffix, SuffixConfig
from tests import tiny


def fake(seconds: dict[tuple[int, int], list[float]], order: list):
    """Something to measure that gives these seconds, one after another, and notes when it is called."""
    left = {point: list(values) for point, values in seconds.items()}

    def run(rows: int, column: int) -> float:
        order.append((rows, column))
        return left[rows, column].pop(0)

    return run


def test_points_take_turns_the_first_turn_warms_up_and_medians_count():
    order: list = []
    step = fake({(1, 1): [9, 1, 2, 8], (1, 3): [9, 5, 3, 4]}, order)
    draft = fake({(1, 2): [9, 1, 1, 7]}, order)
    plain = fake({(1, 1): [9, 1, 1.5, 8]}, order)
    found = measure(step, draft, plain, rows=[1], ns=[2], repeats=3)
    assert order == [(1, 1), (1, 3), (1, 2), (1, 1)] * 4
    assert (found.step(1, 1), found.step(1, 3), found.draft(1, 2), found.plain(1)) == (2, 4, 1, 1.5)
    assert found.draft(1, 0) == 0
    assert found.round(1, 2) == 5


def test_plain_decoding_never_costs_more_than_the_same_with_a_proposer():
    one, two, half = (Table((1,), (1,), ((seconds,),)) for seconds in (1.0, 2.0, 0.5))
    assert [Costs(one, half, alone).plain(1) for alone in (half, two)] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("rounds", "plain", "taus", "best"),
    [
        ((1.1, 1.2), 1.0, {1: 1.5, 2: 1.9}, 2),
        ((1.1, 1.9), 1.0, {1: 1.5, 2: 1.9}, 1),
        ((1.6, 2.0), 1.0, {1: 1.5, 2: 1.9}, 0),
        ((1.6, 2.0), 1.2, {1: 1.5, 2: 1.9}, 2),
        ((1.1, 1.1), 1.0, {1: 1.5}, 1),
        ((1.1, 1.1), 1.0, {2: 1.5}, 2),
        ((1.1, 1.2), 1.0, {}, 0),
        ((1.05, 1.05), 1.0, {1: 1.05}, 0),
    ],
)
def test_the_fastest_number_of_drafts_has_the_most_tokens_a_second(rounds, plain, taus, best):
    steps = Table((1,), (1, 2, 3), ((plain, *(seconds - 0.05 for seconds in rounds)),))
    drafting, alone = Table((1,), (1, 2), ((0.05, 0.05),)), Table((1,), (1,), ((plain,),))
    assert Costs(steps, drafting, alone).fastest(taus) == best


GRID = [(rows, column) for rows in (1, 2, 5) for column in (1, 2, 4)]


@given(st.lists(st.floats(1e-3, 1e3), min_size=len(GRID), max_size=len(GRID)))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_more_work_never_costs_less(values):
    table = Table.fit(dict(zip(GRID, values, strict=True)))
    points = [0.5, 1, 1.5, 2, 3, 4, 6, 9]
    for fixed in points:
        along = [table.at(rows, fixed) for rows in points], [table.at(fixed, column) for column in points]
        for line in along:
            assert all(more >= less * (1 - 1e-12) for less, more in zip(line, line[1:], strict=False))


def test_seconds_that_rise_already_are_kept_and_one_high_point_does_not_make_the_others_free():
    rising = {point: float(sum(point)) for point in GRID}
    table = Table.fit(rising)
    assert {point: table.at(*point) for point in GRID} == rising
    dented = Table.fit({(1, c): s for c, s in ((1, 1.0), (2, 9.0), (3, 3.0), (4, 10.0))})
    assert dented.seconds == ((1.0, 6.0, 6.0, 10.0),)


def test_seconds_between_points_lie_on_lines_and_go_on_with_the_last_slope():
    table = Table((1, 3), (1, 2, 4), ((1.0, 2.0, 6.0), (5.0, 6.0, 10.0)))
    assert table.at(1, 3) == 4
    assert table.at(2, 1) == 3
    assert table.at(2, 3) == 6
    assert table.at(1, 6) == 10
    assert table.at(6, 1) == 10
    assert table.at(0.5, 0) == 1
    assert Table((2,), (3,), ((7.0,),)).at(4, 9) == 14


@pytest.mark.parametrize(
    "seconds",
    [
        ((1.0, 2.0),),
        ((1.0,), (2.0,)),
        ((2.0, 1.0), (3.0, 4.0)),
        ((3.0, 4.0), (1.0, 5.0)),
        ((0.0, 1.0), (1.0, 2.0)),
        ((1.0, float("nan")), (2.0, 3.0)),
        ((1.0, 2.0), (3.0, float("inf"))),
    ],
    ids=str,
)
def test_what_is_no_table_of_costs_is_refused(seconds):
    with pytest.raises(ValueError, match="seconds|table"):
        Table((1, 2), (1, 2), seconds)


def test_the_points_to_measure_reach_the_last_and_are_few():
    assert [spread(most) for most in (0, 1, 2, 7, 8, 15)] == [
        [], [1], [1, 2], [1, 2, 4, 7], [1, 2, 4, 8], [1, 2, 4, 8, 15],
    ]  # fmt: skip


# Kept between starts ----------------------------------------------------------------------------------

SOME = Costs(
    Table((1, 2), (1, 2), ((1.0, 2.0), (2.0, 3.5))),
    Table((1, 2), (1,), ((0.1,), (0.2,))),
    Table((1,), (1,), ((0.75,),)),
)
OTHER = Costs(SOME.steps, Table((1,), (1,), ((9.0,),)), SOME.alone)
KEY = {"machine": "this", "slots": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    return tmp_path / "costs"


def never() -> Costs:
    raise AssertionError("measured again")


def test_costs_are_measured_once_for_a_key_and_again_for_another(folder):
    assert kept(KEY, lambda: SOME, Costs.read) == SOME
    assert kept(KEY, never, Costs.read) == SOME
    assert kept({**KEY, "slots": 4}, lambda: OTHER, Costs.read) == OTHER
    assert kept(KEY, never, Costs.read) == SOME
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json"]


def damaged(text: str) -> list[str]:
    """What may be found in place of a file that was written whole."""
    foreign = json.dumps({**json.loads(text), "key": {**KEY, "machine": "another"}})
    falling = text.replace("3.5", "0.5")
    words = text.replace("3.5", '"much"')
    return ["", "null", "[]", "{}", text[: len(text) // 2], foreign, falling, words,
            text.replace('"steps"', '"stops"'), text.replace("3.5", "NaN"), "\udcff"]  # fmt: skip


@pytest.mark.parametrize("at", range(11))
def test_a_damaged_or_foreign_file_is_measured_again_and_replaced(folder, at):
    kept(KEY, lambda: SOME, Costs.read)
    (path,) = folder.iterdir()
    text = path.read_text()
    broken = damaged(text)[at]
    assert broken != text
    path.write_bytes(broken.encode(errors="surrogateescape"))
    assert kept(KEY, lambda: OTHER, Costs.read) == OTHER
    assert kept(KEY, never, Costs.read) == OTHER


@pytest.mark.parametrize("where", ["costs", "costs/sub"])
def test_a_cache_that_cannot_be_written_is_said_and_ends_nothing(tmp_path, monkeypatch, caplog, where):
    (tmp_path / "costs").write_text("a file where a folder should be")
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / where))
    assert kept(KEY, lambda: SOME, Costs.read) == SOME
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "FOREDRAFT_CACHE" in record.getMessage()


def test_what_costs_depend_on_is_in_the_key(monkeypatch):
    target = tiny.target()
    drafter = build(DSparkConfig(block_size=4, num_layers=1, num_states=2), target)
    key = key_of(target, drafter, 2)
    assert json.loads(json.dumps(key)) == key
    assert key_of(target, build(DSparkConfig(block_size=4, num_layers=1, num_states=2), target), 2) == key
    others = [
        key_of(tiny.target(seed=1), drafter, 2),
        key_of(target, build(DSparkConfig(block_size=5, num_layers=1, num_states=2), target), 2),
        key_of(target, build(DSparkConfig(block_size=4, num_layers=2, num_states=2), target), 2),
        key_of(target, drafter, 4),
    ]
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 77)
    others.append(key_of(target, drafter, 2))
    monkeypatch.setattr(module.machine, "machine_name", lambda device: "another")
    others.append(key_of(target, drafter, 2))
    monkeypatch.setattr(target, "keeps_copies", not target.keeps_copies)
    others.append(key_of(target, drafter, 2))
    monkeypatch.setattr(target.config, "_attn_implementation", "another")
    others.append(key_of(target, drafter, 2))
    assert len({json.dumps(other) for other in [key, *others]}) == 9


def test_combinations_of_other_parts_have_other_keys():
    target = tiny.target()
    sizes = {
        "dspark": DSparkConfig(block_size=4, num_layers=1, num_states=2),
        "eagle3": Eagle3Config(unroll=4),
    }
    small, chain = (build(config, target) for config in sizes.values())
    large = build(DSparkConfig(block_size=4, num_layers=2, num_states=2), target)
    suffix, ngram = Suffix(SuffixConfig()), Ngram(NgramConfig())
    proposers = [
        Combined(suffix, small, 4),
        Combined(suffix, chain, 4),
        Combined(suffix, large, 4),
        Combined(ngram, small, 4),
        Combined(Suffix(SuffixConfig(max_drafts=9)), small, 4),
        Combined(suffix, small, 5),
        Combined(suffix, small, 4, n=2),
        small,
        suffix,
    ]
    assert len({json.dumps(key_of(target, proposer, 2)) for proposer in proposers}) == len(proposers)
    assert key_of(target, Combined(suffix, small, 4), 2) == key_of(target, proposers[0], 2)


# On an engine -----------------------------------------------------------------------------------------


def test_what_is_measured_is_what_an_engine_does(folder, monkeypatch):
    """A clock that moves with the tokens that the target and the drafter work on."""
    target = tiny.target(layers=3)
    drafter = build(DSparkConfig(block_size=3, num_layers=1, num_states=2), target)
    clock = {"now": 0.0}
    states, propose, advance, forward = target.states, drafter.propose, drafter.advance, Engine.forward

    def tick(kept):
        clock["now"] += 0.2 * len(kept)

    def stepped(tokens, *args, **settings):
        clock["now"] += 1 + 0.1 * tokens.numel()
        return states(tokens, *args, **settings)

    def drafted(state, rows, anchors_B, n):
        clock["now"] += 0.5 + 0.01 * len(rows) * n
        return propose(state, rows, anchors_B, n)

    monkeypatch.setattr(target, "states", stepped)
    monkeypatch.setattr(drafter, "propose", drafted)
    monkeypatch.setattr(module, "perf_counter", lambda: clock["now"])
    fed = []
    monkeypatch.setattr(drafter, "advance", lambda *given: tick(given[4]) or advance(*given))
    monkeypatch.setattr(Engine, "forward", lambda *given: fed.append(given[3:]) or forward(*given))
    found = costs_for(target, drafter, 2)
    assert found.plain(1) == pytest.approx(1.1)
    assert found.step(1, 1) == pytest.approx(1.3)
    assert found.step(2, 8) == pytest.approx(2.2)
    assert ([5, 3],) in fed  # rows of unequal lengths
    assert found.draft(1, 3) == pytest.approx(0.53)
    assert found.draft(2, 2) == pytest.approx(0.54)
    monkeypatch.setattr(module, "pieces", never)
    assert costs_for(target, drafter, 2) == found


@pytest.mark.parametrize("first", [Ngram(NgramConfig()), Suffix(SuffixConfig())], ids=["ngram", "suffix"])
def test_a_combination_pays_for_its_trained_drafter_at_every_number_of_drafts(first, monkeypatch):
    target = tiny.target(layers=3)
    second = build(DSparkConfig(block_size=3, num_layers=1, num_states=2), target)
    propose, asked = second.propose, []
    monkeypatch.setattr(
        second, "propose", lambda *given: asked.append((len(given[1]), given[3])) or propose(*given)
    )
    step, draft = pieces(target, Combined(first, second, 4), 2, 9)
    points = [(rows, n) for rows in (1, 2) for n in (1, 2, 3, 8)]
    for rows, n in points:
        step(rows, 1 + n)
        draft(rows, n)
    assert asked == [(rows, min(n, 3)) for rows, n in points]
