"""The command line: what it prints, what it refuses and which exit code it ends with."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors import SafetensorError

from recipes import cli
from recipes.schema import register
from tests import runs
from tests.commands import command, refusal

COMMANDS = ("train", "eval", "data", "serve")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOREDRAFT_TRACEBACK", raising=False)


# Help and settings ------------------------------------------------------------------------------------


def test_the_resolved_recipe_is_printed(capsys):
    assert command("train", "--cfg", "job", "+recipe=dflash") == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["method"]["name"] == "dflash"
    assert (found["method"]["block_size"], found["method"]["anchor_predicts"]) == (8, False)
    assert found["target"] == "smollm2-embedded"
    assert found["optim"]["lr"] > 0
    assert "hydra" not in found


def test_overrides_replace_a_recipes_values(capsys):
    assert command("train", "--cfg", "job", "+recipe=dflash", "method.block_size=5", "optim.lr=1e-2") == 0
    found = yaml.safe_load(capsys.readouterr().out)
    assert (found["method"]["block_size"], found["optim"]["lr"]) == (5, 0.01)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_its_settings_and_its_help(name, capsys):
    assert command(name, "--cfg", "job") == 0
    assert {"target", "drafter", "data", "eval", "serve"} <= yaml.safe_load(capsys.readouterr().out).keys()
    assert command(name, "--help") == 0
    assert "target: smollm2-embedded" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", sorted((Path(cli.__file__).parent / "recipe").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_recipe_composes_into_settings(path):
    assert runs.run_of(recipe=path.stem).method.name != "none"


def test_a_command_leaves_nothing_of_hydras_behind(tmp_path):
    assert command("train", "--cfg", "job", "+recipe=dflash") == 0
    assert command("eval") == 1
    assert list(tmp_path.iterdir()) == []


# Unknown names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named", "nearest"),
    [
        (["+recipe=dflsh"], "dflsh", "dflash"),
        (["+recipe=dfalsh"], "dfalsh", "dflash"),
        (["method=dflsh"], "dflsh", "dflash"),
        (["+recipe=dflash", "train.stpes=3"], "train.stpes", "train.steps"),
        (["+recipe=dflash", "lr=3"], "lr", "optim.lr"),
        (["+recipe=dflash", "method.blocksize=4"], "blocksize", "method.block_size"),
        (["+recipe=dflash", "trget=x"], "trget", "target"),
        (["+recipe=dflash", "+train.stpes=3"], "train.stpes", "train.steps"),
        (["+recipe=dflash", "+data.pth=x"], "data.pth", "data.path"),
        (["+recipe=dflash", "+method.block=4"], "method.block", "method.block_size"),
        (["+recipe=dflash", "+method.loss.cee=1"], "method.loss.cee", "method.loss.ce"),
        (["+recipe=dflash", "task=trian"], "trian", "train"),
        (["+recipe=dflash", "opt.lr=1"], "opt", "optim"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_name_is_refused_and_the_nearest_one_is_named(arguments, named, nearest, capsys):
    message = refusal(capsys, "train", *arguments)
    assert named in message
    assert re.search(rf"Did you mean (\S+ or )*{re.escape(nearest)}\b", message), message
    assert "full_key" not in message
    assert "object_type" not in message


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_its_tasks(name, capsys):
    assert "task=nonsense: write one of" in refusal(capsys, name, "task=nonsense")


@pytest.mark.parametrize("arguments", [["+nonsense=1"], ["+qqq.www=1"], ["nonsense=1"]])
def test_a_name_that_is_like_no_other_is_refused_without_advice(arguments, capsys):
    message = refusal(capsys, "train", "+recipe=dflash", *arguments)
    assert "Did you mean" not in message
    assert "append" not in message  # +key=value is refused as well


def test_template_settings_take_any_key(capsys):
    assert (
        command("train", "--cfg", "job", "+recipe=dflash", "+data.template_settings.enable_thinking=false")
        == 0
    )
    found = yaml.safe_load(capsys.readouterr().out)
    assert found["data"]["template_settings"] == {"enable_thinking": False}


# Bad values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.steps=many", ["train.steps", "many"]),
        ("optim.lr=fast", ["optim.lr", "fast"]),
        ("eval.n=all", ["eval.n", "all"]),
        ("serve.compare=perhaps", ["serve.compare", "perhaps"]),
        ("method.init=magic", ["method.init=magic", "target or random"]),
        ("method.block_size=1", ["method.block_size=1", "at least 2"]),
        ("serve.max_new_tokens=0", ["serve.max_new_tokens=0", "at least 1"]),
        ("serve.temperature=-1", ["serve.temperature=-1.0", "0 (greedy) or more"]),
        ("serve.temperature=nan", ["serve.temperature=nan", "0 (greedy) or more"]),
        ("regenerate.temperature=inf", ["temperature at least 0", "found 16, 512, inf"]),
        ("seed=-1", ["seed=-1", "from 0 to"]),
        ("seed=99999999999999999999", ["seed=99999999999999999999", "from 0 to"]),
        ("log.every=0", ["log.every=0", "at least 1"]),
        ("train.steps=[", ["train.steps=[", "Quote"]),
        ("prompt=It's raining, again", ["prompt=It's raining, again", "prompt_file=FILE"]),
        ("prompt=is 3=4?", ["prompt=is 3=4?", "prompt_file=FILE"]),
        ("prompt", ["prompt: ", "key=value"]),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_key_and_value(setting, words, capsys):
    message = refusal(capsys, "train", "+recipe=dflash", setting)
    for word in words:
        assert word in message
    assert len(message.strip().splitlines()) <= 3


def test_training_asks_for_a_recipe(capsys):
    assert "+recipe=dflash" in refusal(capsys, "train")


@pytest.mark.parametrize("name", ["eval", "serve"])
def test_a_missing_drafter_is_asked_for(name, capsys):
    assert "drafter=runs/demo/drafter" in refusal(capsys, name, "prompt=hello")


# The run directory ------------------------------------------------------------------------------------


def test_a_run_directory_of_another_recipe_is_refused_with_the_remedy(workshop, tmp_path, capsys):
    target = f"target={workshop / 'target'}"
    run = runs.run_of(target, "hardware.dtype=float32", "run=one", "optim.lr=0.25")
    from train.directory import open_directory

    with open_directory(run, "dflash", torch.device("cpu")) as directory:
        record = directory / "recipe.yaml"
    before = record.read_bytes()
    more = ["+recipe=dflash", target, "hardware.dtype=float32", "run=one", "optim.lr=0.5"]
    message = refusal(capsys, "train", *more)
    assert "runs/one holds a run with other settings" in message
    assert "optim.lr: 0.25 there, 0.5 now" in message
    assert "run=NAME" in message
    assert "overwrite=true" in message
    assert record.read_bytes() == before


def test_a_directory_that_is_no_run_is_left_alone(workshop, tmp_path, capsys):
    thesis = tmp_path / "runs" / "one" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("mine")
    message = refusal(
        capsys, "train", "+recipe=dflash", f"target={workshop / 'target'}", "run=one", "overwrite=true"
    )
    assert "is no run" in message
    assert "run=NAME" in message
    assert thesis.read_text() == "mine"


def test_a_run_is_named_after_recipe_and_target(workshop, tmp_path, monkeypatch, capsys):
    """The data cannot be read, so that nothing is trained and nothing is left."""
    from train import directory

    seen = []
    monkeypatch.setattr(directory, "write_record", lambda run, directory: seen.append(directory))
    refusal(capsys, "train", "+recipe=dflash", f"target={workshop / 'target'}", "data.path=nowhere.jsonl")
    assert seen == [Path("runs/dflash-target")]
    assert not seen[0].exists()


def test_runs_of_a_multirun_have_names_of_their_own(workshop, monkeypatch):
    names = []
    main = importlib.import_module("train.__main__")
    monkeypatch.setattr(main, "run_training", lambda run, recipe: names.append((recipe, run.seed)))
    assert command("train", "-m", "+recipe=dflash", "seed=3,4") == 0
    assert names == [("dflash-0", 3), ("dflash-1", 4)]


# Exit codes -------------------------------------------------------------------------------------------


def raising(error: BaseException):
    def main() -> None:
        raise error

    return main


def test_a_users_mistake_is_one_message_and_exit_code_1(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.start(raising(ValueError("key=value: write another")))
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", "error: key=value: write another\n")


def test_control_c_is_exit_code_130(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.start(raising(KeyboardInterrupt()))
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize(
    ("error", "free"),
    [
        (OSError(28, "No space left on device"), 10**12),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 10**12),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), 0),  # torch.save
    ],
)
def test_a_full_disk_is_named_with_the_remedy(error, free, monkeypatch, capsys):
    monkeypatch.setattr(cli.shutil, "disk_usage", lambda where: SimpleNamespace(free=free))
    with pytest.raises(SystemExit) as ended:
        cli.start(raising(error))
    assert ended.value.code == 1
    assert re.match("error: no space left on the disk .* same command again", capsys.readouterr().err)


def test_a_path_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in ("folder", "file/out.jsonl"):

        def main(path=path) -> None:
            where = tmp_path / path
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text("")

        with pytest.raises(SystemExit) as ended:
            cli.start(main)
        assert ended.value.code == 1
        assert re.fullmatch(
            r"error: .*(folder|file): .*; name another file or directory\n", capsys.readouterr().err
        )


def test_other_failures_are_not_taken_for_a_full_disk():
    with pytest.raises(RuntimeError, match="shapes"):
        cli.start(raising(RuntimeError("shapes do not fit")))


def test_our_own_mistakes_keep_their_traceback():
    with pytest.raises(AssertionError, match="ours"):
        cli.start(raising(AssertionError("ours")))


def test_a_traceback_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("FOREDRAFT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="theirs"):
        cli.start(raising(ValueError("theirs")))


def test_every_key_of_the_tree_is_known():
    register()
    keys = cli.known_keys()
    assert {"target", "optim.lr", "method.block_size", "method.loss.ce", "eval.n", "serve.n"} <= set(keys)
    assert len(keys) == len(set(keys))
