"""Weights: shares of supervised tokens, exact in expectation, the same for every order of asking and rank."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import yaml

from data.mix import Mix, chosen
from data.sources import DataConfig
from data.stream import Stream, seen_table
from drafters.types import Example, States
from tests import runs, tiny
from tests.commands import CPU, command, refusal
from train.loop import TrainConfig

WEIGHTS = {"math": 3.0, "code": 1.0, "tools": 1.0}


def document(domain: str, at: int, supervised: int, prompt: int = 5, source: str = "") -> Example:
    mask = [False] * prompt + [True] * supervised
    return Example([9] * len(mask), mask, domain, f"{domain} {at}", source or f"{domain}-set")


def documents() -> list[Example]:
    """Long answers in one domain, short ones in another, long prompts and few rows in the third."""
    return [
        *(document("math", at, 3 + at % 5) for at in range(40)),
        *(document("code", at, 60 + at) for at in range(25)),
        *(document("tools", at, 20 + 7 * at, prompt=90) for at in range(3)),
        *(document("chat", at, 30) for at in range(9)),
    ]


def states(examples) -> list[States]:
    return [States(torch.tensor(e.ids).float()[None, :, None, None]) for e in examples]


def stream(seed: int = 0, packs: int = 2, weights=WEIGHTS, **more) -> Stream:
    return Stream(documents(), states, budget=100, packs=packs, seed=seed, weights=weights, **more)


def supervised(examples) -> Counter[str]:
    out: Counter[str] = Counter()
    for example in examples:
        out[example.domain] += sum(example.mask)
    return out


# Shares ---------------------------------------------------------------------------------------------


def test_tokens_of_a_round_are_in_expectation_what_the_weights_say():
    """Over many seeds, within four standard errors; counts of documents would be out by hundreds."""
    rows = chosen(documents(), WEIGHTS)
    drawn = [supervised(rows[at] for at in Mix(rows, WEIGHTS, seed).order(seed % 3)) for seed in range(400)]
    means = {name: torch.tensor([float(each[name]) for each in drawn]) for name in WEIGHTS}
    total = sum(float(value.mean()) for value in means.values())
    for name, weight in WEIGHTS.items():
        error = float(means[name].std()) / 20
        assert float(means[name].mean()) == pytest.approx(total * weight / 5, abs=4 * error + 1e-9)


def test_a_long_run_has_the_shares_of_the_weights():
    seen = {
        name: sum(s["supervised_tokens"] for s in sums.values()) for name, sums in stream().seen(400).items()
    }
    assert seen.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        assert seen[name] / sum(seen.values()) == pytest.approx(weight / 5, abs=0.01)


def test_packing_shifts_no_share_of_the_first_steps():
    """Packs of long documents close first when they are planned."""
    shares = []
    for seed in range(100):
        seen = stream(seed, packs=1).seen(6)
        tokens = {name: sum(s["supervised_tokens"] for s in sums.values()) for name, sums in seen.items()}
        shares.append([tokens.get(name, 0) / sum(tokens.values()) for name in WEIGHTS])
    means, errors = torch.tensor(shares).mean(0), torch.tensor(shares).std(0) / 10
    assert bool(((means - torch.tensor([0.6, 0.2, 0.2])).abs() < 4 * errors).all())


def test_packs_are_mixtures_and_a_run_has_its_shares_wherever_it_ends():
    rows = [document(domain, at, 20) for domain in ("math", "code") for at in range(40)]
    found = Stream(rows, states, budget=100, packs=1, seed=0, weights={"math": 1.0, "code": 1.0})
    packs = [[name.split()[0] for name in found.step(at)[0].names] for at in range(40)]
    assert sum(len({*pack}) == 2 for pack in packs) > 25
    for end in range(41):
        seen = Counter(sum(packs[:end], []))
        assert abs(seen["math"] - seen["code"]) <= 4


def test_rounds_are_never_off_by_more_than_a_document():
    rows = chosen(documents(), WEIGHTS)
    mix = Mix(rows, WEIGHTS, 0)
    for round in range(30):
        counts = Counter(rows[at].domain for at in mix.order(round))
        for name, rate in mix.rates.items():
            assert abs(counts[name] - rate) < 1
    assert sum(mix.rates.values()) == pytest.approx(len(rows))


def test_a_small_domain_repeats_but_no_document_before_all_others():
    rows = chosen(documents(), WEIGHTS)
    mix, counts = Mix(rows, WEIGHTS, 0), Counter()
    for round in range(9):
        counts.update(mix.order(round))
        for name in WEIGHTS:
            seen = [counts[at] for at, row in enumerate(rows) if row.domain == name]
            assert max(seen) - min(seen) <= 1
    assert min(counts[at] for at, row in enumerate(rows) if row.domain == "math") > 3


def test_a_source_is_weighted_apart_from_the_rest_of_its_domain():
    rows = [document("math", at, 10, source="gsm8k" if at < 4 else "own") for at in range(20)]
    mix = Mix(rows, {"math": 1.0, "gsm8k": 1.0}, 0)
    drawn = Counter(rows[at].source for round in range(10) for at in mix.order(round))
    assert drawn["gsm8k"] == pytest.approx(100, abs=1)
    assert drawn["own"] == pytest.approx(100, abs=1)


# A pure function of seed and step --------------------------------------------------------------------


def names(batches) -> list[list[str]]:
    return [batch.names for batch in batches]


def test_a_step_is_the_same_whatever_was_asked_before_and_however_weights_are_written():
    one = stream()
    wanted = [names(one.step(at)) for at in range(60)]
    assert one.epoch_of(59) > 2
    other = stream(weights=dict(reversed({key: 7 * value for key, value in WEIGHTS.items()}.items())))
    assert [names(other.step(at)) for at in (59, 3, 17)] == [wanted[59], wanted[3], wanted[17]]
    assert names(stream(seed=1).step(0)) != wanted[0]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_out_the_packs_of_a_weighted_step(world):
    alone = names(stream(packs=4).step(9))
    shared = [names(stream(packs=4, rank=rank, world=world).step(9)) for rank in range(world)]
    assert [shared[at % world][at // world] for at in range(4)] == alone
    assert stream(packs=4, rank=1, world=world).seen(7) == stream(packs=4).seen(7)


def test_a_row_that_no_weight_names_is_never_drawn():
    assert "chat" not in stream().seen(200)
    assert "chat" in stream(weights={}).seen(200)


# Budgets and counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [{}, WEIGHTS, {"tools": 1.0}, {"math": 1.0}], ids=str)
def test_a_budget_in_tokens_is_met_by_every_mix_within_a_step(weights):
    found = stream(weights=weights)
    steps = found.steps_of(3000)

    def learned(steps: int) -> int:
        return sum(s["supervised_tokens"] for sums in found.seen(steps).values() for s in sums.values())

    assert learned(steps - 1) < 3000 <= learned(steps)


def test_what_was_seen_is_what_the_batches_held():
    found = stream()
    batches = [batch for step in range(11) for batch in found.step(step)]
    seen = [sums for sources in found.seen(11).values() for sums in sources.values()]
    assert sum(sums["documents"] for sums in seen) == sum(len(batch.names) for batch in batches)
    assert sum(sums["tokens"] for sums in seen) == sum(batch.tokens_BT.numel() for batch in batches)
    assert sum(sums["supervised_tokens"] for sums in seen) == sum(int(b.mask_BT.sum()) for b in batches)
    assert list(found.seen(11)["tools"]) == ["tools-set"]


def test_the_table_has_a_line_a_domain_and_source():
    seen = Stream(
        [document("math", 0, 30, source="gsm8k"), document("math", 1, 10, source="own")],
        states, budget=100, packs=1, seed=0,
    ).seen(1)  # fmt: skip
    head, *lines = seen_table(seen).splitlines()
    assert [line.split() for line in lines] == [
        ["math", "gsm8k", "1", "35", "30", "75.0%"],
        ["math", "own", "1", "15", "10", "25.0%"],
    ]
    assert head.split()[-2:] == ["supervised", "share"]


# Refusals --------------------------------------------------------------------------------------------


def test_a_name_without_rows_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"no row to train on for mth; .*math 40.*math-set 40.*mean math\?"):
        chosen(documents(), {"mth": 1.0, "code": 1.0})
    with pytest.raises(
        ValueError, match="no row to train on for code"
    ):  # all of them have a weight of their own
        chosen(documents(), {"code-set": 1.0, "code": 1.0})


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_a_number_above_0(weight):
    with pytest.raises(ValueError, match=r"data\.weights\.math=.*above 0, or leave it out"):
        DataConfig(weights={"code": 1.0, "math": weight})


def test_two_budgets_are_refused():
    with pytest.raises(ValueError, match=r"train\.steps=3 train\.tokens=9: one budget"):
        TrainConfig(steps=3, tokens=9)
    with pytest.raises(ValueError, match=r"train\.tokens=0"):
        TrainConfig(tokens=0)


def test_rows_whose_states_were_refused_leave_a_domain_that_is_missed():
    rows = [row for row in documents() if row.domain != "tools"]
    with pytest.raises(ValueError, match="no row to train on for tools"):
        Stream(rows, states, budget=100, packs=1, seed=0, weights=WEIGHTS)


# Whole runs ------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_weighted_run_goes_on_as_if_it_had_never_stopped(workshop, here):
    weights = ("+data.weights.chat=3", "+data.weights.code=1")
    whole = runs.train(workshop, *weights)
    (here / "runs").rename(here / "whole")
    runs.train(workshop, *weights)
    for path in (here / "runs/one/checkpoints/step_00000006", here / "runs/one/drafter"):
        for file in sorted(path.iterdir()):
            file.unlink()
        path.rmdir()
    runs.train(workshop, *weights)
    assert runs.same(runs.held(here / "whole" / "one", 6), runs.held(whole, 6))


def test_the_record_says_what_a_run_learned_from(workshop, here, capsys):
    run = runs.train(workshop, "+data.weights.chat=1", "train.steps=4", "train.eval_every=4")
    record = yaml.safe_load((run / "recipe.yaml").read_text())
    seen = record["data"]["seen"]
    assert seen.keys() == {"chat"}
    lines = [line for line in runs.metrics(run) if "tokens" in line]
    assert sum(line["tokens"] for line in lines) == seen["chat"]["rows"]["tokens"]
    assert record["data"]["train_rows"] < 12  # chat's alone
    assert f"{seen['chat']['rows']['supervised_tokens']} 100.0%" in capsys.readouterr().out


def test_mixes_are_compared_with_one_draft_vocabulary(workshop, here):
    from train import rows

    loaded = [
        rows.load_data(runs.run_of(*runs.settings(workshop, *more)), here, torch.device("cpu"))
        for more in ((), ("+data.weights.chat=1",))
    ]
    assert loaded[0].all_rows == loaded[1].all_rows == loaded[0].train
    assert {example.domain for example in loaded[1].train} == {"chat"}
    assert {example.domain for example in loaded[1].held} == {"chat", "code"}
    assert loaded[0].data_key != loaded[1].data_key


def test_a_misspelt_domain_leaves_no_run(workshop, here, capsys):
    asked = ["+recipe=dflash", f"target={workshop / 'target'}", f"data.path={workshop / 'rows.jsonl'}"]
    message = refusal(capsys, "train", *asked, *CPU, "data.weights={caht: 1}")
    assert "no row to train on for caht" in message
    assert "Did you mean chat?" in message
    assert not list((here / "runs").iterdir())


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["data.weights={math: 2, code: 1}"], {"math": 2.0, "code": 1.0}),
        (["data.weights.math=2"], {"math": 2.0}),
        (["data/mix=code"], {"code": 1.0}),
        (["data/mix=code", "data.weights.math=3"], {"code": 1.0, "math": 3.0}),
        ([], {}),
    ],
    ids=str,
)
def test_weights_are_written_without_a_plus(given, found, capsys):
    assert command("train", "--cfg", "job", "+recipe=dflash", *given) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["weights"] == found


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["-m", "data/mix=math,code"], ["dflash-math", "dflash-code"]),
        (["-m", "data/mix=math,code", "seed=0"], ["dflash-math", "dflash-code"]),
        (["-m", "data/mix=math,code", "seed=0,1"],
         ["dflash-math-0", "dflash-math-1", "dflash-code-2", "dflash-code-3"]),
        (["-m", "data/mix=natural,math"], ["dflash", "dflash-math"]),
        (["data/mix=math"], ["dflash-math"]),
        ([], ["dflash"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_run_is_named_after_its_mix(given, named, here, monkeypatch):
    import train.__main__ as main

    seen = []
    monkeypatch.setattr(main, "run_training", lambda run, recipe: seen.append(recipe))
    assert command("train", *given, "+recipe=dflash") == 0
    assert seen == named


def test_language_and_source_of_a_row_reach_its_examples(workshop, here):
    from train import rows

    of = rows.load(str(workshop / "target"), runs.run_of(*runs.settings(workshop)).hardware)
    given = [{**row, "lang": "de", "source": "mgsm_de"} for row in tiny.answered_rows(of, 4)]
    del given[3]["source"]
    del given[3]["answers"]
    path = tiny.write_rows(here / "german.jsonl", given)
    run = runs.run_of(*runs.settings(workshop, f"data.path={path}", "data.holdout=0.3"))
    loaded = rows.load_data(run, here, torch.device("cpu"))
    found = {e.name.split(" (turn")[0].rpartition(":")[2]: e for e in (*loaded.train, *loaded.held)}
    assert [(found[at].source, found[at].lang) for at in "1234"] == [
        *[("mgsm_de", "de")] * 3,
        ("german", "de"),
    ]


def test_a_mix_and_weights_beside_it_are_refused_and_one_of_its_weights_may_change(capsys):
    given = ["--cfg", "job", "+recipe=dflash", "data/mix=code"]
    assert command("train", *given, "data.weights.tools=2") == 0
    assert "both say what to train on" in refusal(
        capsys, "train", "+recipe=dflash", "data/mix=code", "data.weights={chat: 1}"
    )
