"""``task=diagnose``: twelve planted faults are the likely cause; healthy and weak drafters have none."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.capture import capture
from data.sources import DataConfig
from data.store import Spec, Store
from drafters import block, formats, vocab
from drafters.files import replace_file
from drafters.target import HardwareConfig, Target, load
from drafters.types import Example, States
from drafters.vocab import DraftVocab
from eval import alternatives, diagnose
from eval.case import open_case
from recipes.schema import Run
from tests import runs, tiny
from tests.commands import CPU, command, refusal
from train.job import run_training
from train.rows import Loaded, load_data

THINKING = tiny.CHATML.replace(
    "{{ '<|assistant|>' }}", "{{ '<|assistant|>' }}{% if enable_thinking %}{{ '<think>' }}{% endif %}"
)
LOUD = 4  # <|user|>: the first token of every prompt has a state beyond what float16 holds
COMMON = [
    "method.layer_ids=[1,3]", "method.init=random", "method.loss.ce=0", "method.loss.kl=1", "optim.lr=1e-2",
    "train.pack_tokens=400", "train.save_every=999", "train.eval_every=999", "states.keep=disk",
    "states.directory=states",
]  # fmt: skip
OF_METHOD = {
    "dflash": ["train.steps=60", "method.block_size=5", "method.draft_vocab=100"],
    "dspark": ["train.steps=40", "method.block_size=4", "method.markov_rank=8", "method.loss.l1=0"],
    "eagle3": ["train.steps=25", "method.unroll=3", "method.draft_vocab=100"],
}


def random_target() -> Target:
    """One whose final norm matters, that answers with no marker, and whose first states are huge."""
    of = tiny.target(layers=6)
    with torch.no_grad():
        of.decoder.norm.weight.copy_(torch.rand(32, generator=torch.Generator().manual_seed(3)) * 2 + 0.1)
        of.head_weight_VD[2:9] = 0
        of.embedding.weight[LOUD, 0] = 1e5
    of.tokenizer.chat_template = THINKING
    return of


def trained(name: str, *more: str, method: str = "dflash") -> Path:
    """A run under ``runs/`` of the working directory, of ``target/`` and ``rows.jsonl``."""
    chosen = runs.settings(Path("."), *COMMON, *OF_METHOD[method], *more, f"run={name}")
    chosen = [text for text in chosen if method != "eagle3" or "mask_token" not in text]
    return run_training(runs.run_of(*chosen, recipe=method), method)


@pytest.fixture(scope="module")
def works(tmp_path_factory) -> Path:
    """A working directory with a target, answers, and one healthy run of each method."""
    where = tmp_path_factory.mktemp("works")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        of = random_target()
        tiny.save(of, where / "target")
        tiny.write_rows(where / "rows.jsonl", tiny.answered_rows(of, 10, num=16))
        for method in OF_METHOD:
            trained(method, method=method)
        some = examples()
        theirs = tiny.trained(some.target, some.train, 60, layer_ids=[1, 3], num_layers=2, mask_token=3)
        formats.write_as(theirs, Path("theirs"), "zlab")
    return where


def examples() -> Loaded:
    """What a run trains on and holds out."""
    run = runs.run_of(*runs.settings(Path("."), *COMMON, *OF_METHOD["dflash"]))
    return load_data(run, Path("."), torch.device("cpu"))


@pytest.fixture
def here(works, tmp_path, monkeypatch) -> Path:
    """A copy to spoil."""
    return runs.spoilable(works, tmp_path, monkeypatch)


def found(**asked: Any) -> dict[str, Any]:
    """diagnose.json of a run or a drafter."""
    data = asked.pop("data", DataConfig())
    run = Run(method=None, hardware=HardwareConfig("float32", "cpu"), data=data, **asked)
    case = open_case(run)
    return diagnose.build(case, diagnose.examine(case))


def faults(result: dict[str, Any]) -> list[str]:
    return [f"{one['check']}: {one['found']}" for one in result["findings"] if one["verdict"] == "fault"]


def assert_cause(result: dict[str, Any], check: str, words: str = "") -> None:
    cause = result["cause"]
    assert cause is not None
    assert (cause["verdict"], cause["check"]) == ("fault", check), faults(result)
    assert words in cause["found"], cause["found"]
    assert cause["remedy"]


# The drafter directory --------------------------------------------------------------------------------


def edit(run: str, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Change config.json and the tensors of a run's drafter."""
    directory = Path("runs") / run / "drafter"
    config, held = (
        json.loads((directory / "config.json").read_text()),
        load_file(directory / "model.safetensors"),
    )
    change(config, held)
    replace_file(directory / "config.json", json.dumps(config).encode())
    save_file(held, directory / "model.safetensors")


def forget(config: dict[str, Any], _held: dict[str, Tensor]) -> None:
    """As others write a directory: no record of the export."""
    del config["foredraft"]


def one_more(config, held) -> None:
    key = next(key for key in config if key.endswith("_layer_ids"))
    config[key] = [k + 1 for k in config[key]]


def one_more_in_both(config, held) -> None:
    one_more(config, held)
    config["foredraft"]["layer_ids"] = [k + 1 for k in config["foredraft"]["layer_ids"]]


def other_base(config, held) -> None:
    config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 7.0


def absolute(config, held) -> None:
    held["d2t"] += torch.arange(len(held["d2t"]))


def pad(config, held) -> None:
    config["mask_token_id"] = 2


def another_mask_token(config, held) -> None:
    config["mask_token_id"] = 8


def flipped(config, held) -> None:
    config["sample_from_anchor"] ^= True


def flipped_with_its_number(config, held) -> None:
    flipped(config, held)
    num = config["block_size"] - (not config["sample_from_anchor"])
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = num


def stale(config, held) -> None:
    """The map of another corpus, beside the rows of this one."""
    other = DraftVocab(torch.arange(9, 9 + len(held["d2t"])), len(held["t2d"]))
    held |= {"d2t": other.d2t_N, "t2d": other.t2d_V}


def stale_with_its_head(config, held) -> None:
    of = load("target", HardwareConfig("float32", "cpu"))
    stale(config, held)
    held["lm_head.weight"] = of.head_weight_VD[9 : 9 + len(held["d2t"])].clone()


DIRECTORY: dict[str, tuple[str, Callable, str]] = {
    "layer ids +1": ("dflash", one_more, "layer ids"),
    "layer ids +1 in both records": ("dspark", one_more_in_both, "layer ids"),
    "rope base": ("dflash", other_base, "rope"),
    "absolute d2t": ("eagle3", absolute, "vocabulary map"),
    "mask token is pad": ("dflash", pad, "mask token"),
    "layout flag": ("dflash", flipped, "layout"),
    "layout flag with its number of drafts": ("dspark", flipped_with_its_number, "layout"),
    "stale map": ("dflash", stale, "vocabulary"),
    "stale map with its head": ("eagle3", stale_with_its_head, "vocabulary"),
}


@pytest.mark.parametrize("fault", DIRECTORY)
def test_a_fault_of_the_drafter_directory_is_the_likely_cause(here, fault):
    run, change, check = DIRECTORY[fault]
    edit(run, change)
    assert_cause(found(run=run), check)


@pytest.mark.parametrize(
    ("change", "check"),
    [(one_more, "layer ids"), (another_mask_token, "mask token"), (flipped_with_its_number, "layout")],
)
def test_a_directory_of_others_is_tried_on_answers(here, change, check):
    """No record, no run: the answers alone tell."""
    edit("dflash", forget)
    edit("dflash", change)
    result = found(drafter="runs/dflash/drafter", target="target", data=DataConfig(path="rows.jsonl"))
    assert_cause(result, check)
    asked = {one["check"] for one in result["findings"] if one["verdict"] == "not asked"}
    assert asked >= {"states", "number range", "as exported", "training"}


def other_target_layers(config: dict[str, Any]) -> None:
    config["dflash_config"]["target_layer_ids"] = [2, 4]


def other_rope(config: dict[str, Any]) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 7.0


def pad_in_theirs(config: dict[str, Any]) -> None:
    config["dflash_config"]["mask_token_id"] = 2


@pytest.mark.parametrize(
    ("change", "check"),
    [(other_target_layers, "layer ids"), (other_rope, "rope"), (pad_in_theirs, "mask token")],
)
def test_a_fault_of_a_directory_in_another_layout_is_the_likely_cause(here, change, check):
    config = json.loads(Path("theirs/config.json").read_text())
    change(config)
    Path("theirs/config.json").write_text(json.dumps(config))
    assert_cause(found(drafter="theirs", target="target", data=DataConfig(path="rows.jsonl")), check)


def test_a_directory_in_another_layout_has_no_fault(here):
    result = found(drafter="theirs", target="target", data=DataConfig(path="rows.jsonl"))
    assert faults(result) == []


# States -----------------------------------------------------------------------------------------------


def fill(change: Callable[[Target, Example, States], States], where: Path = Path("states")) -> None:
    """A store as another pipeline made it, which the next training finds and trusts."""
    shutil.rmtree(where)
    loaded = examples()
    of = loaded.target
    store = Store(where, Spec(of.fingerprint, (1, 3), "float32", with_last=True))
    for row in loaded.train:
        store.write([row], [change(of, row, capture(of, [row], [1, 3], with_last=True)[0])])


def other_layers(of: Target, row: Example, _states: States) -> States:
    return capture(of, [row], [2, 4], with_last=True)[0]


def earlier(of: Target, row: Example, states: States) -> States:
    return States(states.layers_BTLD.roll(1, 1), states.last_BTD)


def later(of: Target, row: Example, states: States) -> States:
    return States(states.layers_BTLD.roll(-1, 1), states.last_BTD)


def before_norm(of: Target, row: Example, states: States) -> States:
    (raw,) = capture(of, [row], [of.num_layers - 1], with_last=False)
    return States(states.layers_BTLD, raw.layers_BTLD[:, :, 0])


def narrow(of: Target, row: Example, states: States) -> States:
    assert states.layers_BTLD.abs().max() > 65504
    return States(states.layers_BTLD.half().clamp(-65504, 65504).float(), states.last_BTD)


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        (other_layers, "layer ids", "states of layer 1 are those of layer 2"),
        (later, "context", "the position after"),
        (before_norm, "last state", "the state before the final norm"),
    ],
)
def test_a_fault_of_the_states_is_the_likely_cause_even_when_they_are_gone(here, change, check, words):
    fill(change)
    trained("spoilt")
    assert_cause(found(run="spoilt"), check, words)
    shutil.rmtree("states")
    assert_cause(found(run="spoilt"), check, "drafts accepted an anchor")


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [(earlier, "context", "the position before"), (narrow, "number range", "which ends at 65504")],
)
def test_what_is_wrong_with_states_does_not_take_a_good_drafter_to_see(here, change, check, words):
    fill(change)
    trained("spoilt", "train.steps=2")
    assert_cause(found(run="spoilt"), check, words)


def shards() -> list[Path]:
    return sorted(Path("states").glob("*/*.safetensors"))


def cut_file() -> str:
    shards()[0].write_bytes(shards()[0].read_bytes()[:-100])
    return shards()[0].name


def cut_document() -> str:
    held = load_file(shards()[0])
    name = next(name for name in held if name.endswith(".layers"))
    save_file(held | {name: held[name][:-3].clone()}, shards()[0])
    return "layers of"


def overflow() -> str:
    held = load_file(shards()[0])
    halves = {name: value.half().float() for name, value in held.items() if name.endswith(".layers")}
    save_file(held | halves, shards()[0])
    return "inf"


@pytest.mark.parametrize(
    ("damage", "check"), [(cut_file, "states"), (cut_document, "states"), (overflow, "number range")]
)
def test_damaged_states_are_the_likely_cause_and_are_left_as_they_are(here, damage, check):
    words = damage()
    before = [path.read_bytes() for path in shards()]
    assert_cause(found(run="dflash"), check, words)
    assert [path.read_bytes() for path in shards()] == before


def test_states_of_another_target_are_the_likely_cause(here):
    fill(lambda _of, _row, states: States(torch.randn_like(states.layers_BTLD), states.last_BTD))
    assert_cause(found(run="dflash"), "states", "no output of this target")


# Data -------------------------------------------------------------------------------------------------


def rewritten(change: Callable[[list[int]], list[int]]) -> str:
    """A file of the rows with other ids for each answer."""
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    for row in rows:
        row["answers"] = [[1, change(row["answers"][0][1])]]
    return str(tiny.write_rows(Path("other.jsonl"), rows))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: [tiny.MARKERS.index("<|assistant|>"), *ids[:-1]], "without their first token 100%"),
        (lambda ids: ids[1:], "after a token that is missing 100%"),
    ],
    ids=["begins too early", "begins too late"],
)
def test_a_shifted_mask_is_the_likely_cause(here, change, words):
    path = rewritten(change)
    trained("spoilt", f"data.path={path}", "data.eval_path=rows.jsonl", "train.steps=2")
    assert_cause(found(run="spoilt"), "mask", words)


def test_answers_without_the_token_that_ends_them_are_the_likely_cause(here):
    rows = [
        json.loads(line) | {"finish_reason": "stop"} for line in Path("rows.jsonl").read_text().splitlines()
    ]
    tiny.write_rows(Path("rows.jsonl"), rows)
    assert_cause(found(run="dflash"), "mask", "lack their last token")


def answered_with(of: Target, template: str, **settings: Any) -> Path:
    """Rows that the target answers after prompts of another template."""
    apply = of.tokenizer.apply_chat_template
    of.tokenizer.apply_chat_template = lambda *given, **named: apply(
        *given, chat_template=template, **named, **settings
    )
    return tiny.write_rows(Path("eval.jsonl"), tiny.answered_rows(of, 4, num=12))


@pytest.mark.parametrize("where", ["thinking", "template"])
def test_a_template_swapped_in_the_recipe_is_the_likely_cause(here, where):
    """What is held out was answered as the recipe says, what is trained on with the target's own."""
    of = load("target", HardwareConfig("float32", "cpu"))
    if where == "thinking":
        asked = "++data.template_settings.enable_thinking=true"
        answered_with(of, THINKING, enable_thinking=True)
    else:
        other = tiny.CHATML.replace("{% for m", "<|system|>be brief<|end|>{% for m")
        Path("other.jinja").write_text(other)
        asked = "data.chat_template=other.jinja"
        answered_with(of, other)
    trained("spoilt", asked, "data.eval_path=eval.jsonl", "train.steps=2")
    assert_cause(found(run="spoilt"), "template", "100% with the target's own template")


def test_a_template_swapped_in_the_target_is_the_likely_cause(here):
    text = Path("target/chat_template.jinja").read_text()
    Path("target/chat_template.jinja").write_text(text.replace("{% for m", "<|system|>{% for m"))
    assert_cause(found(run="dflash"), "template", "training wrote prompts with template")


def test_answers_made_with_another_template_are_the_likely_cause(here):
    rows = [json.loads(line) | {"made_by": None} for line in Path("rows.jsonl").read_text().splitlines()]
    of = load("target", HardwareConfig("float32", "cpu"))
    for row in rows[::2]:
        row["made_by"] = f"{of.signature}/0/0123456789ab"
    tiny.write_rows(Path("rows.jsonl"), rows)
    assert_cause(found(run="dflash"), "template", "5 of 5 answers were made with template 0123456789ab")


# Faults of training that leave a directory as it was exported -----------------------------------------


def test_a_vocabulary_of_another_corpus_is_the_likely_cause(here, monkeypatch):
    monkeypatch.setattr(
        vocab, "choose", lambda counts_V, num, *_: DraftVocab(torch.arange(num), len(counts_V))
    )
    trained("spoilt", "train.steps=2")
    assert_cause(found(run="spoilt"), "vocabulary", "one chosen from them 100.0%")


# No false alarm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", OF_METHOD)
def test_a_healthy_run_has_no_fault(here, method):
    (shards()[0].parent / "captured_again.damaged").write_bytes(
        b""
    )  # a file that a training found and replaced
    result = found(run=method)
    assert faults(result) == []
    first, *others = result["trials"]["drafter"]
    assert first["reproduces"]
    assert all(other["log_probability"] < first["log_probability"] for other in others)
    asked = {one["check"] for one in result["findings"] if one["verdict"] != "not asked"}
    assert asked >= {
        "template",
        "mask",
        "states",
        "number range",
        "last state",
        "layer ids",
        "context",
        "rope",
    }


WEAK = [("dflash", "random"), ("dspark", "target"), ("eagle3", "target")]


@pytest.mark.parametrize(("method", "init"), WEAK)
def test_a_drafter_that_is_merely_weak_has_no_fault(here, method, init):
    trained("weak", f"method.init={init}", "train.steps=6", "optim.lr=1e-3", method=method)
    result = found(run="weak")
    assert faults(result) == []
    (finding,) = (one for one in result["findings"] if one["check"] == "training")
    assert finding["verdict"] == "suspicious"


# Alternatives -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [1, -1])
def test_blocks_that_see_another_number_of_states_are_those_of_a_wrong_mask(monkeypatch, by):
    """Our gate refuses to export a drafter that was trained so; those of others may have been."""
    of = tiny.target(layers=4)
    drafter = tiny.loud(of, "dflash", layer_ids=[1, 2], mask_token=3)
    seen = alternatives.see(drafter, [tiny.example(30), tiny.example(20, seed=1)], [])
    anchors_A = torch.tensor([9, 12, 20, 28, 39, 41, 45])
    as_is = drafter.path_logits(seen.read(drafter.layer_ids, 0, 0), anchors_A, 4)
    tried = drafter.path_logits(seen.read(drafter.layer_ids, 0, by), anchors_A, 4)
    mask, spans = block.context_mask, block.document_spans
    monkeypatch.setattr(block, "context_mask", lambda span, before_A, *more: mask(span, before_A + by, *more))
    monkeypatch.setattr(
        block, "document_spans", lambda *given: [replace(one, end=one.end + 1) for one in spans(*given)]
    )
    wrong = drafter.path_logits(seen.read(drafter.layer_ids, 0, 0), anchors_A, 4)
    last_of_a_document = [3, 6] if by > 0 else []  # its own state lies behind the end of the context
    same = [at for at in range(7) if at not in last_of_a_document]
    assert tiny.difference(tried[same], wrong[same]) < 1e-5
    assert tiny.difference(tried, as_is) > 0.01


def test_states_of_another_position_stay_in_their_document():
    of = tiny.target(layers=4)
    drafter = tiny.dflash(of, layer_ids=[1, 2], mask_token=3)
    rows = [tiny.example(30), tiny.example(20, seed=1)]
    seen = alternatives.see(drafter, rows, [])
    states = [capture(of, [row], [1, 2], with_last=False)[0].layers_BTLD for row in rows]
    later = torch.cat([torch.cat([one[:, 1:], one[:, -1:]], 1) for one in states], 1)
    assert tiny.difference(seen.read([1, 2], 1, 0).states.layers_BTLD, later) < 1e-5


# What it says of weak drafters ------------------------------------------------------------------------


def finding(result: dict[str, Any], check: str) -> dict[str, Any]:
    (one,) = (one for one in result["findings"] if one["check"] == check)
    return one


def test_too_little_data_is_said_with_figures(here):
    one = finding(found(run="dflash"), "training")
    assert one["verdict"] == "suspicious"
    words = r"too little data: (\S+) drafts a round accepted in answers it was trained on, (\S+) in others; "
    own, other, tokens, passes = re.match(
        words + r"(\d+) supervised tokens, (\S+) times", one["found"]
    ).groups()
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert int(tokens) == sum(len(row["answers"][0][1]) for row in rows) * 8 // 10
    assert float(own) > 2 * float(other)
    assert float(passes) > 10


def test_a_domain_that_was_never_trained_on_is_named(here):
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    tiny.write_rows(Path("chat.jsonl"), [row for row in rows if row["domain"] == "chat"])
    trained("narrow", "data.path=chat.jsonl", "data.eval_path=chat.jsonl", "train.steps=40")
    result = found(run="narrow", data=DataConfig(path="rows.jsonl"))
    one = finding(result, "domain gap")
    assert one["verdict"] == "suspicious"
    assert one["found"].startswith("code is behind: ")
    assert one["found"].endswith("trained on 0 rows of it out of 5")
    assert faults(result) == []


def test_late_drafts_and_lengths_that_were_not_trained_are_named(here):
    trained("short", "method.lengths=[1]", "data.eval_path=rows.jsonl", "train.steps=30")
    result = found(run="short")
    assert finding(result, "position decay")["verdict"] == "suspicious"
    assert "N = 4, trained for 1 at most" in finding(result, "drafts a round")["found"]
    assert finding(result, "drafts a round")["remedy"] == "serve.n=1"
    assert faults(result) == []


# The command ------------------------------------------------------------------------------------------


def test_the_command_leaves_a_table_a_file_and_a_page(here, capsys):
    edit("dflash", other_base)
    assert command("eval", "task=diagnose", "run=dflash", *CPU) == 0
    out = capsys.readouterr().out
    assert "likely cause: rope (runs/dflash/drafter/config.json): config.json has" in out
    where = Path("runs/dflash/report-diagnose")
    result = json.loads((where / "diagnose.json").read_text())
    assert [one["check"] for one in result["findings"]] == list(diagnose.CHECKS)
    assert {one["verdict"] for one in result["findings"]} <= {"ok", "suspicious", "fault", "not asked"}
    page = (where / "diagnose.html").read_text()
    assert "<img" in page
    assert "rope base 1e+06" in page
    assert not re.search(r"(src|href)=.http", page)


def test_a_run_that_left_no_drafter_is_diagnosed_as_far_as_it_goes(here):
    shutil.rmtree("runs/dflash/drafter")
    result = found(run="dflash")
    assert faults(result) == []
    assert {finding(result, check)["verdict"] for check in ("template", "mask", "states", "last state")} == {
        "ok"
    }
    assert "no drafter directory" in finding(result, "layer ids")["found"]


def test_rows_that_cannot_be_read_are_named(here):
    Path("rows.jsonl").rename("elsewhere.jsonl")
    result = found(run="dflash")
    assert_cause(result, "answers", "rows.jsonl: no such file")
    assert finding(result, "vocabulary map")["verdict"] == "ok"


def test_another_target_is_the_likely_cause(here):
    of = random_target()
    with torch.no_grad():
        of.head_weight_VD.mul_(-1)
    tiny.save(of, Path("other"))
    assert_cause(found(run="dflash", target="other"), "target", "trained on another target: weights")


def test_a_command_that_names_nothing_is_refused(capsys):
    assert "name a run or a drafter to diagnose" in refusal(capsys, "eval", "task=diagnose")
    assert "neither runs/none nor none holds a recipe.yaml" in refusal(
        capsys, "eval", "task=diagnose", "run=none"
    )


# Records ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda record: record.update(settings=[1, 2]), "settings of another version"),
        (lambda record: record["settings"].pop("eval"), "eval is not as it is here"),
        (lambda record: record["settings"].update(data=None), "data is not as it is here"),
        (lambda record: record["settings"]["method"].pop("loss"), "method is not as it is here"),
        (
            lambda record: record["settings"]["method"].update(name="medusa"),
            "method.name=medusa; this version knows",
        ),
    ],
)
def test_a_record_of_another_version_is_refused_by_what_it_lacks(here, change, words):
    path = here / "runs" / "dflash" / "recipe.yaml"
    record = yaml.safe_load(path.read_text())
    change(record)
    path.write_text(yaml.safe_dump(record))
    with pytest.raises(ValueError, match=r"recipe.yaml") as refused:
        found(run="dflash")
    assert words in str(refused.value)


def test_a_log_whose_last_line_was_cut_off_is_read(here):
    with open("runs/dflash/metrics.jsonl", "a") as file:
        file.write('{"loss/kl": 1}\n{"step": 3, "los')
    assert faults(found(run="dflash")) == []
