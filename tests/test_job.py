"""Around the loop: whose directory a run may touch, what it holds out, and what its export is held to."""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import drafters.checkpoint as directory_format
from data.sources import Row
from drafters.target import HardwareConfig, load
from drafters.types import Example, Proposal
from eval import replay
from eval import rows as of_a_run
from tests import runs, tiny
from train import engine, job
from train import rows as loading
from train.gate import serving_difference


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def trained(workshop, tmp_path) -> Path:
    """A run that has ended."""
    return runs.train(workshop)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# The run directory ------------------------------------------------------------------------------------


def test_a_run_leaves_what_the_design_lists(trained):
    (best,) = trained.glob("best_*.safetensors")
    assert names(trained) == {*("recipe.yaml", "metrics.jsonl", "checkpoints", "drafter", ".lock", best.name)}


def test_a_mistake_before_the_first_step_leaves_no_directory(workshop):
    with pytest.raises(ValueError, match="no such file"):
        runs.train(workshop, "data.path=nowhere.jsonl")
    assert not Path("runs/one").exists()


def test_a_mistake_removes_no_directory_that_was_there(workshop):
    Path("runs/one").mkdir(parents=True)
    with pytest.raises(ValueError, match="no such file"):
        runs.train(workshop, "data.path=nowhere.jsonl")
    assert names(Path("runs/one")) == {".lock"}  # no record: the mended command is not one of other settings
    runs.train(workshop, "train.steps=2", "train.eval_every=2")


@pytest.mark.parametrize("text", ["", "- one", "{", "settings: x", "settings: {}"])
def test_a_record_that_is_none_is_refused_and_kept(workshop, text):
    Path("runs/one").mkdir(parents=True)
    record = Path("runs/one/recipe.yaml")
    record.write_text(text)
    for dtype in ("auto", "float32"):
        with pytest.raises(ValueError, match=r"recipe\.yaml is no record of a run; .* run=NAME"):
            runs.train(workshop, f"hardware.dtype={dtype}")
    assert record.read_text() == text


def test_a_mistake_leaves_a_run_as_it_was(workshop, trained):
    before = names(trained)
    with pytest.raises(ValueError, match="other settings"):
        runs.train(workshop, "optim.lr=0.5")
    assert names(trained) == before


@pytest.mark.parametrize("name", ["../elsewhere", "..", ".", "a/b", "/tmp/one", "one/"])
def test_a_run_name_is_no_path(workshop, name):
    with pytest.raises(ValueError, match=rf"run={name}: a name under runs/, not a path"):
        runs.train(workshop, f"run={name}", "overwrite=true")
    assert not Path("runs").exists()


def test_overwrite_starts_again_from_nothing(workshop, trained):
    again = runs.train(workshop, "overwrite=true", "train.steps=2", "train.eval_every=2")
    assert [path.name for path in (again / "checkpoints").iterdir()] == ["step_00000002"]
    assert {line["step"] for line in runs.metrics(again)} == {2}


def test_overwrite_keeps_the_old_run_until_the_new_one_has_begun(workshop, trained):
    before = names(trained)
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        runs.train(workshop, "overwrite=true", "data.path=nowhere.jsonl")
    assert names(trained) == before
    halfway = trained / ".replaced.tmp"  # killed while files were moved
    halfway.mkdir()
    (trained / "drafter").rename(halfway / "drafter")
    assert runs.train(workshop) == trained
    assert names(trained) == before


def test_overwrite_deletes_nothing_that_is_not_a_runs(workshop, trained):
    thesis = trained / "thesis.txt"
    thesis.write_text("mine")
    before = names(trained)
    with pytest.raises(
        ValueError, match=r"overwrite=true: runs/one/thesis\.txt is nothing that a run leaves"
    ):
        runs.train(workshop, "overwrite=true")
    assert names(trained) == before


def test_two_processes_never_train_one_run(workshop, trained):
    with open(trained / ".lock") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"runs/one: another process trains this run.*run=NAME"):
            runs.train(workshop, "overwrite=true")
    assert (trained / "drafter").is_dir()
    assert runs.train(workshop) == trained


def test_numbers_of_drafts_that_the_report_would_refuse_are_refused_first(workshop):
    with pytest.raises(ValueError, match=r"eval\.n=\[99\].*trained for 1 to 7"):
        runs.train(workshop, "eval.n=[99]")
    assert not Path("runs/one").exists()


def test_an_answer_that_holds_the_mask_token_is_refused_by_row(workshop):
    row = json.loads((workshop / "rows.jsonl").read_text().splitlines()[0])
    held = row["answers"][0][1][2]
    with pytest.raises(ValueError, match=rf"rows\.jsonl:\d+: the answer holds token {held}.*mask_token=ID"):
        runs.train(workshop, f"method.mask_token={held}")


# The device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "given"), [("cuda", "cuda:3"), ("cuda:1", "cuda:1"), ("cpu", "cpu"), ("auto", "cpu")]
)
def test_a_ranks_device_is_its_own_gpu_or_the_one_that_is_named(monkeypatch, asked, given):
    current = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert engine.local_device(asked) == torch.device(given)
    assert current == ([torch.device(given)] if "cuda" in given else [])


def test_ranks_do_not_share_one_gpu(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"hardware\.device=cuda:1: 2 ranks would share.*write cuda"):
        engine.local_device("cuda:1")


def test_the_target_is_loaded_onto_the_device_of_the_rank(workshop, monkeypatch):
    asked = []

    def load(name, hardware):
        asked.append(hardware.device)
        raise ValueError("enough")

    monkeypatch.setattr(job, "local_device", lambda device: torch.device(f"{device}:3"))
    monkeypatch.setattr(loading, "load", load)
    with pytest.raises(ValueError, match="enough"):
        runs.train(workshop, "hardware.device=cuda")
    assert asked == ["cuda:3"]


# What is held out -------------------------------------------------------------------------------------


def rows(**domains: int) -> list[Row]:
    return [
        Row(at, f"{domain}:{at}", domain=domain, messages=[{"role": "user", "content": f"{domain} {at}"}])
        for domain, number in domains.items()
        for at in range(number)
    ]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_every_domain_is_held_out_and_trained_on(share):
    found = rows(chat=40, code=7, tools=2, rare=1)
    held = Counter(where.split(":")[0] for where in of_a_run.hold_out(found, share, 0))
    assert held == {"chat": max(1, 40 * share), "code": 4 if share == 0.5 else 1, "tools": 1}


def test_a_share_that_leaves_a_domain_nothing_to_train_on_is_refused_by_key_and_domain():
    with pytest.raises(ValueError, match=r"data\.holdout=0\.8: of 4 conversations of domain code none"):
        of_a_run.hold_out(rows(chat=40, code=4), 0.8, 0)


def test_opening_words_of_an_assistant_are_no_answer_to_replay():
    """d03: before the first token of a conversation there is no state to draft from."""
    mask = [True, False, False, True, True]
    (turn,) = of_a_run.turns(Example([20, 21, 22, 23, 24], mask, "chat", "row 0"))
    assert turn.mask == [False, False, False, True, True]


def test_the_seed_of_the_data_draws_what_is_held_out():
    found = rows(chat=40)
    assert (
        of_a_run.hold_out(found, 0.2, 1)
        == of_a_run.hold_out(found, 0.2, 1)
        != of_a_run.hold_out(found, 0.2, 2)
    )


def test_rows_that_ask_the_same_stay_together():
    found = rows(chat=30)
    for row in found:
        row.messages[0]["content"] = str(row.index // 3)
    held = of_a_run.hold_out(found, 0.3, 0)
    assert len(held) == 9
    assert all(len({f"chat:{at + k}" for k in range(3)} & held) in (0, 3) for at in range(0, 30, 3))


def test_all_answers_of_a_conversation_are_on_one_side(workshop, tmp_path):
    of = load(str(workshop / "target"), runs.run_of(*runs.settings(workshop)).hardware)
    both = []
    for row in tiny.answered_rows(of, 8):
        first, answer = row["messages"]
        both.append(
            {
                **row,
                "messages": [first, answer, {"role": "user", "content": "and then?"}, answer],
                "answers": [row["answers"][0], [3, row["answers"][0][1]]],
            }
        )
    path = tiny.write_rows(tmp_path / "both.jsonl", both)
    run = runs.run_of(*runs.settings(workshop, f"data.path={path}"))
    loaded = loading.load_data(run, tmp_path, torch.device("cpu"))
    sides = [{e.name.split(" (turn")[0] for e in some} for some in (loaded.train, loaded.held)]
    assert not sides[0] & sides[1]
    assert (len(sides[0]), len(sides[1])) == (6, 2)
    assert (len(loaded.train), len(loaded.held)) == (12, 4)


def test_held_out_answers_of_another_model_are_counted(workshop, tmp_path, capsys):
    changed = []
    for line in (workshop / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        row["answers"][0][1][5] = 40
        changed.append(row)
    path = tiny.write_rows(tmp_path / "changed.jsonl", changed)
    runs.train(workshop, f"data.path={path}", "train.steps=1")
    assert "6 of 6 held-out answers (100%) leave the target's own path" in capsys.readouterr().out


def test_held_out_answers_are_replayed_at_the_temperature_that_is_asked_for(workshop, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"rows.jsonl:\d+: eval.temperature=0.7.*does not say what it was"):
        runs.train(workshop, "eval.temperature=0.7")
    rows = [json.loads(line) for line in (workshop / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["answers"][0][1][5] = 40  # no argmax of the target: a sampled answer is not cut there
        row["made_by"] = f"{load(str(workshop / 'target'), HardwareConfig(device='cpu')).signature}/0.7/abc"
    path = tiny.write_rows(tmp_path / "sampled.jsonl", rows)
    run = runs.train(
        workshop, f"data.path={path}", "train.steps=1", "eval.temperature=0.7", "train.report=true"
    )
    assert "leave the target's own path" not in capsys.readouterr().out
    report = json.loads((run / "report" / "report.json").read_text())
    assert (report["temperature"], report["drafts"], report["off_path"]) == (0.7, "greedy", 0)


# The export gate --------------------------------------------------------------------------------------


def corrupt_writer(monkeypatch):
    save = directory_format.save_file

    def wrong(tensors, path, **more):
        save({**tensors, "norm.weight": tensors["norm.weight"] * 1.01}, path, **more)

    monkeypatch.setattr(directory_format, "save_file", wrong)


def corrupt_reader(change):
    def corrupt(monkeypatch):
        read = directory_format.read

        def wrong(directory, target):
            drafter = read(directory, target)
            change(drafter)
            return drafter

        monkeypatch.setattr(directory_format, "read", wrong)

    return corrupt


def other_window(drafter) -> None:
    drafter.config.sliding_window = 2


def other_serving(drafter) -> None:
    """Its states arrive one position late."""
    advance = drafter.advance
    drafter.advance = lambda state, rows, states, tokens_BJ, kept: advance(
        state, rows, states[:, : kept[0] - 1], tokens_BJ, [kept[0] - 1]
    )


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (corrupt_writer, "norm.weight differs"),
        (corrupt_reader(other_window), "draft logits of .* differ by"),
        (corrupt_reader(other_serving), "drafts served in .* are not those of training"),
        (corrupt_reader(lambda d: d.layer_ids.append(9)), r"layer_ids is \[.*9\]"),
        (corrupt_reader(lambda d: setattr(d, "mask_token", 7)), "mask_token is 3, .* 7"),
        (corrupt_reader(lambda d: setattr(d.config, "block_size", 4)), "max_drafts is 7, .* 3"),
    ],
    ids=["tensors", "window", "serving", "layers", "mask token", "drafts"],
)
def test_a_directory_that_is_not_the_trained_drafter_is_refused(workshop, monkeypatch, corrupt, words):
    with monkeypatch.context() as patched:
        corrupt(patched)
        with pytest.raises(ValueError, match=f"export refused: {words}"):
            runs.train(workshop, "train.steps=20", "train.eval_every=20")
    run = Path("runs/one")
    assert {"checkpoints", "metrics.jsonl"} <= names(run)
    assert not [path for path in run.iterdir() if path.name.startswith("drafter")]
    runs.train(workshop, "train.steps=20", "train.eval_every=20")  # nothing left to train, only to export
    assert names(run / "drafter") == {"config.json", "model.safetensors"}


def test_a_tie_of_two_logits_is_no_difference_in_serving():
    of = tiny.target()
    head = of.head_weight_VD
    with torch.no_grad():
        head[1:264:2], head[264] = head[0:263:2].clone(), 0.0  # tokens 2 i and 2 i + 1 tie
    drafter = tiny.dflash(of)
    (path,) = replay.paths(of, [tiny.answered(of)], drafter.layer_ids)
    again = tiny.dflash(of)
    again.load_state_dict(drafter.state_dict())
    propose = again.propose
    again.propose = lambda *given: Proposal(propose(*given).tokens_BK ^ 1)
    assert serving_difference(drafter, again, path) <= 1e-5
    again.propose = lambda *given: Proposal((propose(*given).tokens_BK + 2) % 264)
    assert serving_difference(drafter, again, path) > 1e-5
