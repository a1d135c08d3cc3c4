"""The loop: one division a step, nothing lost at a checkpoint, acceptance checks that leave no trace."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.capture import capture
from data.pack import pack
from data.stream import Stream
from drafters.types import Loss
from eval.replay import Counts
from tests import runs, tiny
from train import checkpoint, loop
from train.log import Log, LogConfig
from train.loop import Job, TrainConfig, Window
from train.optim import OptimConfig, rate

CASE = json.loads((Path(__file__).parent / "cases" / "t01_loss_and_metrics.json").read_text())


@pytest.fixture
def unchecked(monkeypatch):
    """No acceptance checks: a ``Toy`` drafts nothing."""
    monkeypatch.setattr(loop, "check_acceptance", lambda job, progress: None)


def run(job: Job, progress: checkpoint.Progress | None = None, **settings) -> checkpoint.Progress:
    progress = progress or checkpoint.Progress()
    config = TrainConfig(steps=job.total, **{"save_every": 1000, **settings})
    loop.train(job, progress, config, job.engine.config, 1)
    return progress


def lines(job: Job) -> list[dict]:
    return [json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines()]


# The handed case ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_a_step_divides_by_the_tokens_of_all_micro_batches_and_averages_no_averages(tmp_path):
    case = CASE["accumulation"]
    packs = [runs.numbers(micro["token_losses"]) for micro in case["micro_batches"]]
    job = runs.toy_job(tmp_path, [packs])
    run(job)
    (line,) = lines(job)
    assert line["loss/ce"] == pytest.approx(case["expect_loss"])
    assert line["grad_norm"] == pytest.approx(case["expect_loss"])  # the loss is linear in the weight
    assert line["loss/ce"] != pytest.approx(case["mean_of_means_is_wrong"])


@pytest.mark.usefixtures("unchecked")
def test_masked_tokens_neither_add_to_a_mean_nor_to_what_it_is_divided_by(tmp_path):
    case = CASE["masked_mean"]
    job = runs.toy_job(tmp_path, [[runs.numbers(case["token_losses"], case["mask"])]])
    run(job)
    assert lines(job)[0]["loss/ce"] == pytest.approx(case["expect"])
    assert lines(job)[0]["grad_norm"] == pytest.approx(case["expect"])


@pytest.mark.usefixtures("unchecked")
def test_a_masked_pack_among_others_adds_nothing(tmp_path):
    case = CASE["all_masked"]
    masked = runs.numbers(case["token_losses"], case["mask"])
    (tmp_path / "with").mkdir()
    job = runs.toy_job(tmp_path, [[runs.numbers([4.0]), runs.numbers([1.0, 1.0])]])
    other = runs.toy_job(tmp_path / "with", [[masked, runs.numbers([4.0]), masked, runs.numbers([1.0, 1.0])]])
    run(job)
    run(other)
    assert runs.same(job.engine.gradients, other.engine.gradients)
    assert runs.same(job.drafter.state_dict(), other.drafter.state_dict())
    assert lines(other)[0]["loss/ce"] == pytest.approx(2.0)


@pytest.mark.usefixtures("unchecked")
def test_a_step_without_any_supervised_token_updates_nothing(tmp_path, capsys):
    case = CASE["all_masked"]
    good, masked = runs.numbers([3.0]), runs.numbers(case["token_losses"], case["mask"])
    before = runs.toy_job(tmp_path, [[good] * 4])
    run(before)
    (tmp_path / "next").mkdir()
    job = runs.toy_job(tmp_path / "next", [[good] * 4, [masked] * 4])
    run(job)
    assert runs.same(job.drafter.state_dict(), before.drafter.state_dict())
    assert runs.same(
        job.engine.optimizer.state_dict()["state"], before.engine.optimizer.state_dict()["state"]
    )
    assert len(job.engine.rates) == 1
    last = lines(job)[-1]
    assert all(math.isfinite(value) for value in last.values())
    assert "step 2: nothing to learn" in capsys.readouterr().out


def test_means_over_ranks_are_made_of_sums_and_reduced_once():
    case = CASE["aliased_metrics"]

    class Four(runs.Watched):
        """Four ranks that all saw the same."""

        def total(self, numbers: dict[str, float]) -> dict[str, float]:
            return {name: case["ranks"] * value for name, value in numbers.items()}

    window = Window(seconds=1.0)
    right, seen = torch.tensor(float(case["per_rank_correct"])), torch.tensor(float(case["per_rank_total"]))
    window.add(Loss(right, float(seen), {"accuracy": right}, {"accuracy": seen}), runs.numbers([1.0]))
    assert window.close(Four())["loss/accuracy"] == pytest.approx(case["expect_accuracy"])


# One step, however it is cut into packs --------------------------------------------------------------


@pytest.fixture(scope="module")
def of():
    return tiny.target(layers=5)


def answers(of) -> list:
    return [tiny.answered(of, num, seed=at) for at, num in enumerate((5, 9, 14, 20))]


def one_step(of, examples, budget: int, packs: int, directory: Path) -> dict[str, torch.Tensor]:
    """The gradient of the first optimizer step of a drafter that looks at every anchor."""
    torch.manual_seed(0)
    drafter = tiny.dflash(of, anchor_share=1.0).train()
    source = lambda some: capture(of, some, drafter.layer_ids, with_last=False)  # noqa: E731
    stream = Stream(examples, source, budget=budget, packs=packs, seed=0)
    engine = runs.Watched()
    engine.wrap(drafter)
    directory.mkdir()
    job = Job(drafter, engine, stream, [], directory, Log(LogConfig(), directory, {}, 1, 0, True), 1, 0)
    run(job)
    return engine.gradients[0]


def by_hand(of, examples) -> dict[str, torch.Tensor]:
    """The same from the definition: every anchor of every document by itself, autograd, one division."""
    torch.manual_seed(0)
    drafter = tiny.dflash(of, anchor_share=1.0).train()
    num, total, count = drafter.max_drafts, torch.zeros(()), 0.0
    for example in examples:
        batch = pack([example], capture(of, [example], drafter.layer_ids, with_last=False))
        for anchor in range(len(example.ids) - 1):
            if not (example.mask[anchor] and example.mask[anchor + 1]):
                continue
            logits_KV = drafter.draft_logits(batch, torch.tensor([anchor]), num)[0]
            for k, label in enumerate(example.ids[anchor + 1 : anchor + 1 + num]):
                weight = math.exp(-k / drafter.config.decay)
                total = total - weight * logits_KV[k].log_softmax(-1)[label]
                count += weight
    (total / count).backward()
    return {name: parameter.grad for name, parameter in drafter.named_parameters()}


@pytest.mark.usefixtures("unchecked")
def test_one_pack_of_four_documents_and_four_packs_of_one_give_the_same_gradient(of, tmp_path):
    examples = answers(of)
    together = one_step(of, examples, 1000, 1, tmp_path / "together")
    apart = one_step(of, examples, 1, 4, tmp_path / "apart")
    want = by_hand(of, examples)
    assert want.keys() == together.keys() == apart.keys()
    for name, value in want.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(together[name], value, rtol=0, atol=1e-5 * scale)
        torch.testing.assert_close(apart[name], value, rtol=0, atol=1e-5 * scale)


@pytest.mark.usefixtures("unchecked")
def test_a_pack_without_an_anchor_changes_no_gradient(of, tmp_path):
    examples = answers(of)
    short = tiny.example(length=9, prompt=8, seed=5)  # one supervised token: nothing to start a round from
    want = one_step(of, examples, 1000, 1, tmp_path / "alone")
    found = one_step(of, [*examples, short], 1, 5, tmp_path / "with a short one")
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * float(value.abs().max()))


def test_the_loss_of_a_pack_without_an_anchor_reaches_every_parameter(of):
    drafter = tiny.dflash(of)
    loss = loop.nothing(drafter)
    loss.sum.backward()
    assert loss.sum.item() == loss.count == 0
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_anchors_depend_on_the_number_of_the_pack_and_not_on_the_rank_that_has_it(of):
    examples = answers(of)
    drafter = tiny.dflash(of, anchor_share=0.3)
    source = lambda some: capture(of, some, drafter.layer_ids, with_last=False)  # noqa: E731

    def placed(world: int) -> dict[int, list[int]]:
        out = {}
        for rank in range(world):
            stream = Stream(examples, source, budget=1, packs=4, seed=3, rank=rank, world=world)
            job = Job(drafter, None, stream, [], Path(), None, 1, 3)
            for at, batch in enumerate(stream.step(2)):
                out[rank + at * world] = loop.place(job, batch, 2, at).anchors_A.tolist()
        return out

    assert placed(1) == placed(2) == placed(4)


# Checkpoints and the log -----------------------------------------------------------------------------

VALUES = [[[1.0], [2.0]], [[3.0], [5.0]], [[0.5], [1.5]], [[2.5], [2.0]], [[4.0], [1.0]]] * 2


def ten_steps(directory: Path, engine: runs.Watched | None = None) -> Job:
    directory.mkdir(exist_ok=True)
    return runs.toy_job(directory, [[runs.numbers(v) for v in step] for step in VALUES], engine)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("stop", range(1, 10))
def test_a_run_resumed_at_any_step_lists_the_rates_of_an_unbroken_one(tmp_path, stop):
    optim = OptimConfig(lr=1e-2, warmup=0.3, final=0.1)
    whole = ten_steps(tmp_path / "whole", runs.Watched(optim))
    run(whole)
    first = ten_steps(tmp_path / "broken", runs.Watched(optim))
    progress = checkpoint.Progress()
    first.total = stop  # the schedule is planned for ten steps all the same
    loop.train(first, progress, TrainConfig(steps=10), replace(optim), 1)
    assert progress.step == stop

    second = ten_steps(tmp_path / "broken", runs.Watched(optim))
    found = checkpoint.load(second.engine, second.checkpoints)
    run(second, found)
    want = [rate(step, 10, optim) for step in range(10)]
    assert whole.engine.rates == want
    assert second.engine.rates == want[stop:]
    groups = second.engine.optimizer.param_groups
    assert {group["lr"] for group in groups} == {want[-1]}


@pytest.mark.usefixtures("unchecked")
def test_a_checkpoint_between_two_log_lines_loses_nothing_of_the_next(tmp_path):
    whole = ten_steps(tmp_path / "whole")
    loop.train(whole, checkpoint.Progress(), TrainConfig(steps=10, save_every=3), whole.engine.config, 4)
    first = ten_steps(tmp_path / "broken")
    first.engine.step = stopping(first.engine.step, at=8)
    with pytest.raises(KeyboardInterrupt):
        loop.train(first, checkpoint.Progress(), TrainConfig(steps=10, save_every=3), first.engine.config, 4)
    first.log.close()
    second = ten_steps(tmp_path / "broken")
    progress = checkpoint.load(second.engine, second.checkpoints)
    assert progress.step == 6
    loop.train(second, progress, TrainConfig(steps=10, save_every=3), second.engine.config, 4)
    assert [line["step"] for line in runs.metrics(whole.directory)] == [3, 4, 6, 8, 9, 10]
    assert runs.metrics(second.directory) == runs.metrics(whole.directory)


def stopping(step, at: int):
    """Ctrl-C in the middle of a step."""
    taken = []

    def stopped(rate: float) -> float:
        taken.append(rate)
        if len(taken) == at:
            raise KeyboardInterrupt
        return step(rate)

    return stopped


@pytest.mark.usefixtures("unchecked")
def test_a_log_line_holds_the_mean_over_all_tokens_since_the_last_one(tmp_path):
    job = ten_steps(tmp_path / "run", runs.Watched(OptimConfig(lr=1e-9)))  # the weight stays at 1
    loop.train(job, checkpoint.Progress(), TrainConfig(steps=10), job.engine.config, 5)
    first = [value for step in VALUES[:5] for pack in step for value in pack]
    assert [line["step"] for line in lines(job)] == [5, 10]
    assert lines(job)[0]["loss/ce"] == pytest.approx(sum(first) / len(first), rel=1e-5)
    assert lines(job)[0]["tokens"] == len(first)


# Acceptance checks -----------------------------------------------------------------------------------


def accepting(monkeypatch, taus: list[float]) -> list[tuple[bool, float]]:
    """Checks that find these values in turn; returns the drafter's mode and weight as they found it."""
    found: list[tuple[bool, float]] = []
    left = iter(taus)

    def score(drafter, held, ns):
        found.append((drafter.training, drafter.weight.item()))
        return [{ns[0]: Counts(1, rounds=100, tokens=round(100 * next(left)))}]

    monkeypatch.setattr(loop.replay, "score", score)
    return found


def taus(job: Job) -> dict[int, float]:
    return {line["step"]: line["held_out/tau"] for line in lines(job) if "held_out/tau" in line}


def test_the_best_weights_are_those_that_accepted_most(tmp_path, monkeypatch):
    found = accepting(monkeypatch, [1.2, 1.7, 1.7, 1.4, 1.5])
    job = ten_steps(tmp_path / "run")
    progress = run(job, eval_every=2)
    assert taus(job) == {2: 1.2, 4: 1.7, 6: 1.7, 8: 1.4, 10: 1.5}
    assert (progress.best_step, progress.best_tau) == (4, 1.7)  # an equal later check replaces nothing
    weights = [weight for _, weight in found]
    assert len(set(weights)) == 5
    assert load_file(loop.best(job.directory, 4))["weight"].item() == weights[1]
    assert not any(training for training, _ in found)


def test_better_weights_replace_none_before_a_checkpoint_names_them(tmp_path, monkeypatch):
    accepting(monkeypatch, [1.2, 1.7, 1.4, 1.9])
    job, seen = ten_steps(tmp_path / "run"), {}
    save = checkpoint.save

    def watched(engine, directory, progress, keep):
        seen[progress.step] = sorted(path.name[-13:-12] for path in job.directory.glob("best_*"))
        save(engine, directory, progress, keep)

    monkeypatch.setattr(checkpoint, "save", watched)
    progress = checkpoint.Progress()
    job.total = 8
    loop.train(job, progress, TrainConfig(steps=8, eval_every=2, save_every=3), job.engine.config, 1)
    assert seen == {3: ["2"], 6: ["2", "4"], 8: ["4", "8"]}
    assert [path.name for path in job.directory.glob("best_*")] == ["best_00000008.safetensors"]


def test_the_drafter_trains_on_after_a_check(tmp_path, monkeypatch):
    accepting(monkeypatch, [1.0] * 5)
    job = ten_steps(tmp_path / "run")
    run(job, eval_every=2)
    assert job.drafter.training


def test_the_drafter_is_back_in_train_mode_after_a_check_that_raises(tmp_path, monkeypatch):
    def fails(drafter, held, ns):
        assert not drafter.training
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loop.replay, "score", fails)
    job = ten_steps(tmp_path / "run")
    with pytest.raises(RuntimeError, match="out of memory"):
        run(job, eval_every=2)
    assert job.drafter.training


def test_only_rank_0_measures_acceptance(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    found = accepting(monkeypatch, [])
    loop.check_acceptance(ten_steps(tmp_path / "run"), checkpoint.Progress())
    assert found == []


def test_a_fifth_of_the_run_lies_between_checks_where_nothing_is_said(tmp_path, monkeypatch):
    accepting(monkeypatch, [1.0] * 5)
    job = ten_steps(tmp_path / "run")
    run(job)
    assert list(taus(job)) == [2, 4, 6, 8, 10]
