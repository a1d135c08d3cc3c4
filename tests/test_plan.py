"""What to deploy at which load: predictions by hand, picks by brute force, the command on a tiny target."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from data.examples import examples as to_examples
from data.examples import renderer
from data.sources import DataConfig, read
from drafters import checkpoint
from drafters.target import EMBEDDED, HardwareConfig, load
from drafters.types import Example
from eval import costs as module
from eval import plan, tasks
from eval.costs import CostModel
from eval.plan import TRAFFIC, Candidate, PlanConfig, Workload
from eval.replay import Counts
from eval.report import Scored
from recipes.schema import Run
from serve.costs import Costs, Table, sizes_of
from serve.suffix import Suffix, SuffixConfig
from tests import tiny
from tests.commands import CPU, command, refusal

SIZES = (1, 2, 4, 8, 16)
SUFFIX = Suffix(SuffixConfig())
MADE_FOR = ("signature", "torch.float32", sizes_of(SUFFIX), "a machine")


def table(seconds, columns=(1, 2, 3, 5, 8), rows=SIZES) -> Table:
    return Table(rows, columns, tuple(tuple(seconds(r, c) for c in columns) for r in rows))


def model(*, at_context=(100, 300), per_token=0.01, per_context=1e-4) -> CostModel:
    """A pass costs 1 second until eight tokens, then in proportion; context costs each row its length."""

    def costs(context: int) -> Costs:
        def step(rows, tokens):
            return max(1.0, rows * tokens / 8) + rows * context * per_context

        return Costs(table(step), table(lambda r, n: 0.1 + per_token * n), table(step, (1,)))

    reading = table(lambda _, tokens: 0.5 + tokens / 100, (16, 512), (1,))
    return CostModel(at_context, tuple(costs(c) for c in at_context), reading, reading, *MADE_FOR)


def scored(name: str, domain: str, accepted: float, rounds: int = 100) -> Scored:
    """A conversation whose drafts survive with a probability each."""
    by_n = {}
    for n in (1, 2, 4):
        survived = [rounds * accepted**k for k in range(1, n + 1)]
        by_n[n] = Counts(n, rounds, round(rounds + sum(survived)), survived)
    return Scored(name, domain, by_n)


SOME = [scored(f"m{i}", "math", 0.8 + 0.02 * i) for i in range(5)] + [
    scored(f"c{i}", "chat", 0.2 + 0.02 * i) for i in range(5)
]
LOAD = Workload(prompt=50, answer=101)
LOADS = {"math": LOAD, "chat": LOAD}


def candidate(**more) -> Candidate:
    return Candidate("dflash", "DIR", SOME, model(**more))


def built(config: PlanConfig | None = None, traffic: dict | None = None) -> dict:
    return plan.build([candidate()], LOADS, traffic or {}, config or PlanConfig(), 0)


def found(result: dict, **where) -> dict:
    (line,) = [x for x in result["predictions"] if all(x[key] == value for key, value in where.items())]
    return line


# Costs --------------------------------------------------------------------------------------------


def test_costs_are_read_between_contexts_and_go_on_beyond():
    costs = model()
    assert costs.round(2, 0, 100) == pytest.approx(1.02)
    assert costs.round(2, 0, 200) == pytest.approx(1.04)
    assert costs.round(2, 0, 500) == pytest.approx(1.10)
    assert costs.round(2, 0, 1) == costs.round(2, 0, 100)
    assert costs.round(4, 4, 100) == pytest.approx(0.14 + 2.5 + 0.04)
    assert costs.prompt(100, 3) == pytest.approx(1.5)


def test_a_longer_context_is_never_cheaper_whatever_was_measured():
    near, far = model().rounds
    costs = replace(model(), contexts=(100, 200, 300), rounds=(far, near, near))
    assert costs.round(2, 2, 900) == costs.round(2, 2, 201) == costs.round(2, 2, 150) == far.round(2, 2)


def test_costs_of_a_file_are_those_that_were_written(tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"dflash": asdict(model())}))
    target = SimpleNamespace(signature="signature", dtype=torch.float32)
    assert module.from_file(tmp_path / "costs.json", "dflash", target, SUFFIX) == model()
    with pytest.raises(ValueError, match=r"no costs of eagle3"):
        module.from_file(tmp_path / "costs.json", "eagle3", target, SUFFIX)
    other = Suffix(SuffixConfig(max_drafts=3))
    with pytest.raises(ValueError, match=r"measured with drafter .*Suffix.*; leave plan.costs out"):
        module.from_file(tmp_path / "costs.json", "dflash", target, other)
    for key, value in (("signature", "another"), ("dtype", torch.bfloat16)):
        with pytest.raises(ValueError, match=f"{value}; leave plan.costs out"):
            module.from_file(
                tmp_path / "costs.json", "dflash", SimpleNamespace(**{**vars(target), key: value}), SUFFIX
            )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"dflash": {"contexts": [1], "rounds": []}}', "null"])
def test_a_file_without_costs_is_refused(tmp_path, text):
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"plan.costs=.*costs.json"):
        module.from_file(tmp_path / "costs.json", "dflash", None, SUFFIX)


def test_costs_are_measured_at_every_context_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    target = tiny.target()
    drafter = tiny.dflash(target)
    costs = module.cost_model(target, drafter, 2, [1, 3], [8, 20])
    assert costs.contexts == (8, 20)
    assert costs.rounds[0].steps.columns == (1, 2, 4)
    assert costs.rounds[1].drafting.columns == (1, 3)
    assert costs.reading.columns == module.PROMPTS
    assert (costs.target, costs.dtype) == (target.signature, "torch.float32")
    monkeypatch.setattr(module, "measure", None)
    assert module.cost_model(target, drafter, 2, [1, 3], [8, 20]) == costs
    with pytest.raises(TypeError):
        module.cost_model(target, drafter, 2, [1, 3], [8, 30])


def test_a_longer_context_costs_more_by_lines_whatever_steps_the_short_one_has():
    short = Costs(
        table(lambda r, c: 1.0 if r * c <= 4 else 3.0, (1, 2, 4, 8), (1, 2, 4)),
        table(lambda r, n: 0.1 * n, (1, 3, 7), (1, 2, 4)),
        table(lambda r, c: 1.0, (1,), (1, 2, 4)),
    )

    def more(r, c):
        return 0.1 * r * (1 if c == 1 else 2 + c)  # attention of one token a row is a way of its own

    ends = (1, 4)
    some = Costs(
        table(lambda r, c: short.steps.at(r, c) + more(r, c), (1, 2, 8), ends),
        table(lambda r, n: 0.1 * n + 0.01 * r, (1, 7), ends),
        table(lambda r, c: 0.9, (1,), ends),  # noise: it is not cheaper
    )
    found = module.lengthened(short, some)
    for r in (1, 2, 4):
        for c in (1, 2, 4, 8):
            assert found.steps.at(r, c) == pytest.approx(short.steps.at(r, c) + more(r, c))
        assert found.drafting.at(r, 3) == pytest.approx(0.3 + 0.01 * r)
        assert found.alone.at(r, 1) == pytest.approx(1.0)


# Predicting ---------------------------------------------------------------------------------------


def test_every_turn_of_a_conversation_is_a_request_of_its_own():
    """Fifty tokens are answered by fifty, twice: the second prompt holds all that was said before."""
    mask = ([False] * 50 + [True] * 50) * 2
    one = Example([9] * 200, mask, "chat", "row")
    assert plan.workloads(PlanConfig(), [one]) == {"chat": Workload(100, 50)}
    assert plan.workloads(PlanConfig(prompt_tokens=7, answer_tokens=9), [one]) == {"chat": Workload(7, 9)}


def test_a_mix_has_as_many_requests_of_a_domain_as_its_tokens_hold_answers():
    """Of 1,000 tokens half are math, in five answers, and half chat, in fifty."""
    loads = {"math": Workload(20, 100), "chat": Workload(200, 10)}
    mean = plan.mixed_workload({"math": 0.5, "chat": 0.5}, loads)
    assert mean.prompt == pytest.approx((5 * 20 + 50 * 200) / 55)
    assert mean.answer == pytest.approx(1000 / 55)
    assert plan.mixed_workload({"chat": 1.0}, loads) == Workload(pytest.approx(200), pytest.approx(10))


def test_the_mix_that_was_evaluated_has_the_mean_request_of_all_its_answers():
    held = [
        Example([9] * 60, [False] * 40 + [True] * 20, "math", "a"),
        Example([9] * 30, [False] * 10 + [True] * 20, "math", "b"),
        Example([9] * 90, [False] * 30 + [True] * 60, "chat", "c"),
    ]
    mean = plan.mixed_workload({"math": 0.4, "chat": 0.6}, plan.workloads(PlanConfig(), held))
    assert mean == Workload(pytest.approx(80 / 3), pytest.approx(100 / 3))


def test_a_domain_is_predicted_with_its_own_requests():
    """Where a prompt takes a second for every hundred tokens, short answers to long prompts gain little."""
    long = {**LOADS, "math": Workload(2000, 11)}
    short = plan.build([candidate()], LOADS, {}, PlanConfig(), 0)
    result = plan.build([candidate()], long, {}, PlanConfig(), 0)
    gain, before = ({x["mix"]: x["gain"] for x in some["by_domain"]} for some in (result, short))
    assert gain["math"] < before["math"]
    assert gain["chat"] == before["chat"]
    assert result["workloads"]["math"] == {"prompt_tokens": 2000, "answer_tokens": 11}
    assert found(result, mix="math", n=4, concurrency=4)["context"] == round(2000 + 11 / 2)


def test_an_interval_does_not_hang_on_the_order_of_conversations():
    mix = {"math": 0.5, "chat": 0.5}
    turned = replace(candidate(), scored=[*SOME[:5], *SOME[:4:-1]])
    wide, other = (plan.mixed_taus(one, mix, 0)[4][1].std() for one in (candidate(), turned))
    assert other == pytest.approx(wide, rel=0.15)


def test_tokens_a_second_are_those_of_a_clock():
    """Two requests of 101 tokens after prompts of 50: a prompt holds both up, then they share rounds."""
    costs = model()
    prompt, round_ = 0.5 + 50 / 100, (0.1 + 0.02) + 1.0 + 2 * LOAD.context * 1e-4
    seconds = 2 * prompt + 100 / 1.6 * round_
    assert plan.rate(costs, LOAD, 1.6, 2, 2) == pytest.approx(2 * 101 / seconds, rel=1e-3)


def test_tau_of_a_mix_is_pooled_over_its_tokens():
    """Of 100 tokens 30 are math and 70 chat: so many rounds in each."""
    one = candidate()
    (math_tau, _), (chat_tau, _) = (plan.mixed_taus(one, {d: 1.0}, 0)[4] for d in ("math", "chat"))
    tau, resamples = plan.mixed_taus(one, {"math": 0.3, "chat": 0.7}, 0)[4]
    assert tau == pytest.approx(100 / (30 / math_tau + 70 / chat_tau))
    assert math_tau > 2.5 > 1.5 > chat_tau
    assert resamples.min() < tau < resamples.max()
    pooled = sum(one.by_n[4].tokens for one in SOME) / sum(one.by_n[4].rounds for one in SOME)
    assert plan.mixed_taus(one, plan.shares({}, SOME), 0)[4][0] == pytest.approx(pooled)


def test_predictions_are_made_for_every_mix_context_concurrency_and_number_of_drafts():
    config = PlanConfig(concurrency=[1, 4], contexts=[100, 300])
    result = built(config)
    assert len(result["predictions"]) == 3 * 2 * 2 * 4  # the workload's own context is 100
    slow, quick = (found(result, mix=TRAFFIC, n=2, concurrency=4, context=c) for c in (300, 100))
    assert slow["tokens_per_second"] < quick["tokens_per_second"]
    line = found(result, mix="math", n=4, concurrency=4, context=100)
    assert line["seconds_per_token"] == pytest.approx(4 / line["tokens_per_second"], rel=1e-3)
    low, high = line["gain_ci95"]
    assert low < line["gain"] < high


def test_a_context_that_an_answer_does_not_fit_in_is_refused():
    config = PlanConfig(contexts=[20, 300])
    with pytest.raises(ValueError, match=r"plan.contexts=\[20\]: chat answers of 101 tokens are at 52"):
        plan.check_contexts(config, {"math": Workload(50, 30), "chat": Workload(50, 101)})
    plan.check_contexts(config, {"math": Workload(50, 30)})


# Picking ------------------------------------------------------------------------------------------


def test_the_pick_of_every_load_is_the_fastest():
    result = built()
    for best in result["by_concurrency"]:
        some = [
            x["tokens_per_second"]
            for x in result["predictions"]
            if (x["mix"], x["concurrency"]) == (TRAFFIC, best["concurrency"])
        ]
        assert best["tokens_per_second"] == max(some)


def test_more_requests_take_fewer_drafts_until_none_pays():
    """Eight tokens a pass are free; from eight requests on every draft costs what it could save at most."""
    (method,) = built()["methods"].values()
    sizes = [size for first, last, _ in method["schedule"] for size in range(first, last + 1)]
    assert sizes == list(range(1, 17))
    ns = [n for _, _, n in method["schedule"]]
    assert ns == sorted(ns, reverse=True)
    assert (ns[0], ns[-1]) == (4, 0)
    assert method["break_even_concurrency"] == method["schedule"][-1][0]


def test_where_drafting_always_pays_nothing_breaks_even():
    result = built(PlanConfig(concurrency=[1, 2]))
    assert result["methods"]["dflash"]["break_even_concurrency"] is None
    assert result["pick"]["n"] > 0
    assert result["pick"]["mean_gain"] > 1


def test_one_number_for_all_loads_has_the_largest_product_of_gains():
    result = built()
    product = {
        n: math.prod(found(result, mix=TRAFFIC, n=n, concurrency=size)["gain"] for size in SIZES)
        for n in (0, 1, 2, 4)
    }
    assert result["pick"]["n"] == max(product, key=product.__getitem__)


def test_domains_that_accept_little_are_told_not_to_draft():
    dear = replace(candidate(), costs=model(per_token=0.3))
    picks = {x["mix"]: x["n"] for x in plan.build([dear], LOADS, {}, PlanConfig(), 0)["by_domain"]}
    assert picks["math"] > 0
    assert picks["chat"] == 0


def test_two_drafters_share_a_plan():
    weak = Candidate("eagle3", "OTHER", [replace(one, by_n=SOME[-1].by_n) for one in SOME], model())
    result = plan.build([weak, candidate()], LOADS, {}, PlanConfig(concurrency=[1]), 0)
    assert result["by_concurrency"][0]["method"] == "dflash"
    assert set(result["methods"]) == {"dflash", "eagle3"}
    assert [x["method"] for x in result["predictions"] if x["mix"] == TRAFFIC].count("none") == 1


def test_a_share_of_traffic_moves_the_plan_and_must_be_known():
    all_math = built(traffic={"math": 2.0})
    assert all_math["traffic"] == {"math": 1.0}
    assert all_math["by_concurrency"][0]["gain"] > built()["by_concurrency"][0]["gain"]
    with pytest.raises(ValueError, match=r"eval.traffic: nothing was drafted in law; .* math, chat"):
        built(traffic={"law": 1.0})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"concurrency": []}, "plan.concurrency"),
        ({"concurrency": [0]}, "plan.concurrency"),
        ({"contexts": [-1]}, "plan.contexts"),
        ({"answer_tokens": 1}, "plan.answer_tokens=1"),
        ({"points": {1: 5.0, 2: 6.0, 3: 7.0}}, "of 0 (no drafts) and of two N"),
        ({"points": {0: 5.0, 2: 6.0}}, "of 0 (no drafts) and of two N"),
        ({"points": {0: 5.0, 2: 6.0, 3: 0.0}}, "0.0 tokens a second at N=3"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match="plan") as refused:
        PlanConfig(**settings)
    assert words in str(refused.value)


# From somebody's engine -----------------------------------------------------------------------------


def test_points_of_an_engine_give_its_other_numbers_of_drafts():
    """Its rounds cost 1.1 + 0.1 N plain ones; N=2 was not measured."""
    tau = {n: t for n, (t, _) in plan.mixed_taus(candidate(), plan.shares({}, SOME), 0).items()}
    points = {0: 50.0, **{n: 50 * tau[n] / (1.1 + 0.1 * n) for n in (1, 4)}}
    (panel,) = plan.from_points(SOME, {}, points, "dflash")["panels"]
    assert panel["predicted"]["2"] == pytest.approx(50 * tau[2] / 1.3, rel=0.03)
    assert panel["pick"] == max((1, 2, 4), key=lambda n: tau[n] / (1.1 + 0.1 * n))
    chat = {n: t for n, (t, _) in plan.mixed_taus(candidate(), {"chat": 1.0}, 0).items()}
    points = {0: 50.0, **{n: 50 * chat[n] / (1.1 + 0.1 * n) for n in (1, 4)}}
    (other,) = plan.from_points(SOME, {"chat": 1.0}, points, "dflash")["panels"]
    assert other["tau"]["4"] == pytest.approx(chat[4], rel=0.01)
    with pytest.raises(ValueError, match=r"90 tokens a second at N=1 are 1.80 times .* but tau is 1"):
        plan.from_points(SOME, {"chat": 1.0}, {**points, 1: 90.0}, "dflash")
    with pytest.raises(ValueError, match=r"plan.points: N=3 was not scored; the scored N are \[1, 2, 4\]"):
        plan.from_points(SOME, {}, {0: 5.0, 1: 6.0, 3: 7.0}, "dflash")


# The command ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drafted(workshop, tmp_path_factory):
    """The directory of a drafter that knows some of the tiny target's answers."""
    target = load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))
    config = DataConfig(path=str(workshop / "rows.jsonl"))
    examples, _ = to_examples(read(config), renderer(config, target.tokenizer, target.stop_ids), None)
    drafter = tiny.trained(target, examples[:4], steps=40, mask_token=3)
    directory = tmp_path_factory.mktemp("drafters") / "one"
    checkpoint.write(drafter, directory)
    return directory


def but(asked: list[str], *more: str) -> list[str]:
    """The arguments with some replaced."""
    return list({text.split("=")[0]: text for text in [*asked, *more]}.values())


@pytest.fixture
def asked(workshop, drafted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "REPEATS", 1)
    return [
        *CPU, "task=plan", f"target={workshop / 'target'}", f"data.path={workshop / 'rows.jsonl'}",
        f"drafter={drafted}", "out=plan", "eval.per_domain=1", "eval.n=[1,4]", "plan.concurrency=[1,2]",
    ]  # fmt: skip


def test_the_command_leaves_a_plan_with_its_evidence(asked, tmp_path, capsys):
    assert command("eval", *asked) == 0
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert {x["n"] for x in result["predictions"]} == {0, 1, 4}
    assert [best["concurrency"] for best in result["by_concurrency"]] == [1, 2]
    assert "one N for all loads" in out
    for name in ("report.json", "rows.jsonl", "plan.png", "plan.html", "costs.json"):
        assert (tmp_path / "plan" / name).stat().st_size > 0
    assert command("eval", *asked, "plan.costs=plan/costs.json", "out=again") == 0
    again = json.loads((tmp_path / "again" / "plan.json").read_text())
    assert again["predictions"] == result["predictions"]


def test_costs_that_favour_drafting_give_arguments_for_vllm(asked, drafted, workshop, tmp_path, capsys):
    """A batch size has its own number of drafts; the method and the directory are this drafter's."""

    def step(rows, tokens):
        return 1.0 if rows == 1 else rows * tokens

    cheap = Costs(
        table(step, (1, 2, 5), (1, 2)), table(lambda r, n: 1e-6, (1, 4), (1, 2)), table(step, (1,), (1, 2))
    )
    reading = table(lambda _, t: t / 1e6, (16, 512), (1,))
    target = load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))
    made_for = target.signature, "torch.float32", sizes_of(checkpoint.read(drafted, target)), "a machine"
    costs = CostModel((10,), (cheap,), reading, reading, *made_for)
    (tmp_path / "costs.json").write_text(json.dumps({"dflash": asdict(costs)}))
    assert command("eval", *asked, "plan.costs=costs.json") == 0
    result = json.loads((tmp_path / "plan" / "plan.json").read_text())
    given = result["vllm"]
    assert given["speculative_config"]["model"] == str(drafted)
    assert given["speculative_config"]["method"] == "dflash"
    assert given["speculative_config"]["num_speculative_tokens"] == 4
    assert given["speculative_config"]["num_speculative_tokens_per_batch_size"] == [[1, 1, 4], [2, 2, 0]]
    assert json.dumps(given["speculative_config"]) in given["arguments"]
    assert given["arguments"].endswith("--max-num-seqs 2"), "of larger batches nothing is known"
    assert "plan.concurrency=4: plan.costs=costs.json was measured up to 2" in refusal(
        capsys, "eval", *but(asked, "plan.concurrency=[4]"), "plan.costs=costs.json"
    )


def test_the_target_of_the_wheel_has_arguments_for_vllm_too(drafted, workshop, monkeypatch):
    """It has a name that only we know."""
    monkeypatch.setattr("drafters.target.embedded_directory", lambda: workshop / "target")
    run = Run(target=EMBEDDED, drafter=str(drafted))
    method = {"drafter": str(drafted), "schedule": [[1, 4, 3]]}
    given = tasks._vllm_arguments(run, {"pick": {"method": "dflash", "n": 3}, "methods": {"dflash": method}})
    assert given["speculative_config"]["num_speculative_tokens"] == 3


def test_the_drafters_of_runs_are_planned_together(asked, drafted, tmp_path, capsys):
    for name in ("one", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.yaml").write_text("settings: {}")
        shutil.copytree(drafted, tmp_path / "runs" / name / "drafter")
    without = [text for text in asked if not text.startswith("drafter=")]
    assert command("eval", *without, "runs=[one,other]") == 0
    result = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert set(result["methods"]) == {"one", "other"}
    assert {x["method"] for x in result["predictions"]} == {"none", "one", "other"}
    assert (tmp_path / "plan" / "other" / "report.json").exists()
    assert "drafter is of one drafter" in refusal(capsys, "eval", *asked, "runs=[one,other]")
    assert "no run" in refusal(capsys, "eval", *without, "runs=[gone]")


def test_points_come_by_the_command_line(asked, tmp_path, capsys):
    traffic = "eval.traffic={chat: 1, code: 2}"
    assert command("eval", *asked, "eval.n=null", "plan.points={0: 50, 1: 60, 3: 70}", traffic) == 0
    (panel,) = json.loads((tmp_path / "plan" / "plan.json").read_text())["panels"]
    assert list(panel["predicted"]) == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("eval.n=[]", "eval.n=[]: give numbers"),
        ("eval.traffic={law: 1}", "no conversation is of law; there are chat, code"),
        ("plan.contexts=[100000]", "the target has room for"),
        ("plan.costs=gone.json", "no costs of dflash"),
        ("plan.points={0: 1e300, 1: 1, 4: 1}", "give measured ones"),
        ("eval.traffic={chat: 1e308, code: 1e308}", "too large to be added"),
        ("plan.contexts=[2]", "plan.contexts=[2]: "),
        (
            "plan.points={0: 50, 1: 60, 4: 70}; plan.costs=costs.json",
            "points tell what rounds cost; leave one",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_scored(asked, more, words, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "evaluate", None)
    assert words in refusal(capsys, "eval", *but(asked, *more.split("; ")))


def test_a_number_of_drafts_beyond_the_block_is_refused(asked, capsys):
    assert "trained for 1 to 4 drafts" in refusal(capsys, "eval", *asked, "eval.n=[9]")


def test_a_plan_needs_a_drafter_or_sweeps(asked, capsys):
    without = [text for text in asked if not text.startswith("drafter=")]
    assert "name a drafter directory" in refusal(capsys, "eval", *without)
