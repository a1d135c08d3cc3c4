"""The gate and ``task=check``: twenty planted faults are refused by name, untouched exports pass."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import checkpoint
from drafters import target as targets
from drafters.checkpoint import read_config
from drafters.method import Drafter, all_methods, build
from drafters.ops import block_labels
from drafters.target import EMBEDDED, HardwareConfig, Target
from drafters.types import Example, Proposal
from drafters.vocab import choose
from eval import replay
from tests import runs, tiny
from tests.commands import CPU, command
from train.check import examine
from train.gate import deliver

BLOCK: dict[str, Any] = {"init": "random", "layer_ids": [1, 3], "block_size": 5, "mask_token": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", BLOCK),
    "window": ("dflash", {**BLOCK, "sliding_window": 6}),
    "reduced": ("dflash", {**BLOCK, "draft_vocab": 50}),
    "dspark": ("dspark", {**BLOCK, "markov_rank": 8}),
    "eagle3": ("eagle3", {"init": "random", "layer_ids": [1, 2, 4], "unroll": 4, "draft_vocab": 50}),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layers=5)


@pytest.fixture(scope="module")
def rows(target) -> list[Example]:
    found = [tiny.answered(target, num=12, seed=seed) for seed in range(12)]
    return [row for row in found if 3 not in row.ids[8:] and len(row.ids) > 12][:2]


def make(of: Target, kind: str) -> Drafter:
    """A drafter no tensor of which is as it was initialised, and every input of which matters."""
    torch.manual_seed(0)
    name, settings = KINDS[kind]
    num = settings.get("draft_vocab")
    vocab = None if num is None else choose(torch.arange(of.vocab_size), num, of.stop_ids)
    drafter = build(all_methods()[name].config_class(**settings), of, vocab).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return drafter


@pytest.fixture(scope="module")
def exports(target, rows, tmp_path_factory) -> Path:
    """One directory a kind, each through the gate."""
    out = tmp_path_factory.mktemp("exports")
    for kind in KINDS:
        drafter = make(target, kind)
        held = list(replay.paths(target, rows, drafter.layer_ids))
        deliver(drafter, out / kind, {"training_context": 64}, held)
    return out


def edited(source: Path, out: Path, change) -> Path:
    """A copy whose config and tensors ``change(config, tensors)`` has had."""
    shutil.copytree(source, out)
    found, held = read_config(out), load_file(out / "model.safetensors")
    change(found, held)
    (out / "config.json").write_text(json.dumps(found))
    save_file(held, out / "model.safetensors")
    return out


# The faults -------------------------------------------------------------------------------------------


def put(key: str, value):
    """Another value in config.json, under a dotted key."""

    def change(found, _held):
        *above, last = key.split(".")
        for name in above:
            found = found[name]
        assert found[last] != value
        found[last] = value

    return change


def shift(key: str, by: int):
    def change(found, _held):
        found[key] = [k + by for k in found[key]]

    return change


def shift_both_records(found, _held) -> None:
    for some, key in ((found, "aux_hidden_state_layer_ids"), (found["foredraft"], "layer_ids")):
        some[key] = [k + 1 for k in some[key]]


def tensor(name: str, value):
    """Another tensor: ``value(tensors)``, nothing for ``None``."""

    def change(_found, held):
        new = None if value is None else value(held)
        held.pop(name, None)
        if new is not None:
            held[name] = new.contiguous().clone()

    return change


def swap(one: str, other: str):
    def change(_found, held):
        held[one], held[other] = held[other], held[one]

    return change


def linear_rope(found, _held) -> None:
    found["transformer_layer_config"]["rope_parameters"].update(rope_type="linear", factor=2.0)


def ids_of(held) -> torch.Tensor:
    return held["d2t"] + torch.arange(len(held["d2t"]))


LAYERS, MARKOV, BIAS = "transformer_layer_config", "markov_head.markov_w", "confidence_head.proj.bias"
INPUT, AFTER = "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"
Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]
FAULTS: dict[str, tuple[str, Change, str]] = {
    "layer ids +1": ("dflash", shift("aux_hidden_state_layer_ids", 1), r"state_layer_ids=\[3, 5\] are the"),
    "layer ids -1": (
        "eagle3",
        shift("eagle_aux_hidden_state_layer_ids", -1),
        r"eagle_aux_hidden_state_layer_ids=\[1, 2, 4\] are the inputs .* foredraft\.layer_ids=\[1, 2, 4\]",
    ),
    "layer ids +1 in both records": (
        "dflash",
        shift_both_records,
        "not reproduced.* changed .*: aux_hidden_state_layer_ids, foredraft.layer_ids",
    ),
    "rope base": ("dflash", put(f"{LAYERS}.rope_parameters.rope_theta", 7.0), "rope_parameters=.*7.0"),
    "rope base under its old name": (
        "dflash",
        lambda found, _: found[LAYERS].update(rope_theta=7.0),
        "rope_theta=7.0, but rotary positions",
    ),
    "rope lost": ("dflash", lambda found, _: found[LAYERS].pop("rope_parameters"), "no rope_parameters"),
    "rope type": ("dflash", linear_rope, "rope_parameters=.*linear"),
    "head dim": ("dflash", put(f"{LAYERS}.head_dim", 16), r"head_dim=16"),
    "missing norm": ("dflash", tensor("norm.weight", None), r"missing tensors \[norm\.weight\]"),
    "swapped norms": ("dflash", swap(INPUT, AFTER), f"not reproduced.* changed .*: {INPUT}, {AFTER}"),
    "norm flags": (
        "eagle3", put("norm_before_residual", True), "not reproduced.* changed .*: norm_before_residual"
    ),
    "norm flag of the output": ("eagle3", put("norm_output", True), "not reproduced.*: norm_output"),
    "tied head": ("reduced", put(f"{LAYERS}.tie_word_embeddings", True), "tie_word_embeddings=True"),
    "another head": (
        "reduced", tensor("lm_head.weight", lambda held: -held["lm_head.weight"]), "lm_head.weight is not"
    ),
    "mask token": ("dflash", put("mask_token_id", 40), "not reproduced.* changed .*: mask_token_id"),
    "layout flag": (
        "dflash", put("sample_from_anchor", True), "speculative_tokens=4, but .*sample_from_anchor=True"
    ),
    "absolute d2t": ("reduced", tensor("d2t", ids_of), "d2t: looks like absolute target ids"),
    "shuffled t2d": ("eagle3", tensor("t2d", lambda held: held["t2d"].flip(0)), "t2d and d2t name different"),
    "wrong dtype": (
        "dflash", tensor("norm.weight", lambda held: held["norm.weight"].half()), "norm.weight of float16"
    ),
    "wrong dtype declared": ("dflash", put("dtype", "bfloat16"), "dtype='bfloat16', but"),
    "truncated tensor": (
        "dflash", tensor("fc.weight", lambda held: held["fc.weight"][:-1]), r"fc\.weight has shape \(31"
    ),
    "extra tensor": ("dflash", tensor("mask_hidden", lambda _: torch.ones(3)), r"unexpected .*mask_hidden"),
    "window": ("window", put(f"{LAYERS}.sliding_window", 5), f"not reproduced.*: {LAYERS}.sliding_window"),
    "causality": (
        "dflash", put("sliding_window_non_causal", False), "sliding_window_non_causal=False, but this drafter"
    ),
    "Markov transposed": (
        "dspark", tensor(f"{MARKOV}1.weight", lambda held: held[f"{MARKOV}1.weight"].T), "w1.* has shape"
    ),
    "Markov factors swapped": (
        "dspark", swap(f"{MARKOV}1.weight", f"{MARKOV}2.weight"), f"not reproduced.*: {MARKOV}1.weight"
    ),
    "confidence bias dropped": ("dspark", tensor(BIAS, None), rf"missing tensors \[{BIAS}\]"),
    "confidence bias zeroed": (
        "dspark", tensor(BIAS, lambda held: 0 * held[BIAS]), f"not reproduced.* changed .*: {BIAS}"
    ),
    "temperatures": (
        "dspark",
        lambda found, _: found["foredraft"].update(confidence_temperatures=[1.0, 0.0]),
        r"confidence_temperatures=\[1.0, 0.0\]",
    ),
    "what no draft shows": ("dflash", put("architectures", ["Other"]), "not as it was .*: architectures"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_refused_by_name(target, rows, exports, tmp_path, fault):
    kind, change, words = FAULTS[fault]
    with pytest.raises(ValueError, match=words):
        examine(edited(exports / kind, tmp_path / "drafter", change), target, rows)


def test_an_export_that_replays_other_acceptance_is_refused(target, rows, tmp_path, monkeypatch):
    """Its logits and what it serves are right, but the drafts that replay asks it for all hit."""
    drafter, read = make(target, "dflash"), checkpoint.read

    def hit(batch, anchors_A, n):
        return Proposal(block_labels(batch.tokens_BT, batch.mask_BT, batch.doc_BT, anchors_A, n)[0])

    def lucky(*given):
        again = read(*given)
        again.drafts = hit
        return again

    monkeypatch.setattr(checkpoint, "read", lucky)
    held = list(replay.paths(target, rows, drafter.layer_ids))
    with pytest.raises(ValueError, match="export refused: acceptance on row"):
        deliver(drafter, tmp_path / "drafter", {}, held)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speculators_model_type", ["dflash"]),
        ("block_size", None),
        ("mask_token_id", 1.5),
        ("sample_from_anchor", None),
        ("aux_hidden_state_layer_ids", 1),
        ("transformer_layer_config", None),
        ("transformer_layer_config.num_hidden_layers", True),
        ("transformer_layer_config.num_hidden_layers", 10**12),
        ("speculators_config.proposal_methods", []),
        ("foredraft", None),
        ("foredraft.target", "a string"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(target, rows, exports, tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"{re.escape(key)}={re.escape(repr(value))}, but"):
        examine(edited(exports / "dflash", tmp_path / "drafter", put(key, value)), target, rows)


def test_a_config_that_is_no_object_is_refused(target, rows, exports, tmp_path):
    shutil.copytree(exports / "dflash", tmp_path / "drafter")
    (tmp_path / "drafter" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        examine(tmp_path / "drafter", target, rows)


def test_another_target_of_the_same_sizes_is_refused(rows, exports):
    with pytest.raises(ValueError, match=r"foredraft\.target\.weights='\w+', but"):
        examine(exports / "dflash", tiny.target(layers=5, seed=1), rows)


def test_a_file_that_ends_early_is_refused(target, rows, exports, tmp_path):
    shutil.copytree(exports / "dflash", tmp_path / "drafter")
    file = tmp_path / "drafter" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        examine(tmp_path / "drafter", target, rows)


def test_a_mask_token_that_answers_hold_is_refused(target, rows, exports):
    ids = [*rows[0].ids[:-1], 3]
    with pytest.raises(ValueError, match="mask_token_id=3: the answer of row"):
        examine(exports / "dflash", target, [Example(ids, rows[0].mask, "chat", "row")])


# What passes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_untouched_export_passes_every_check(target, rows, exports, kind):
    assert all(finding.possible for finding in examine(exports / kind, target, rows))


def test_a_directory_of_others_is_checked_as_far_as_it_goes(target, rows, exports, tmp_path):
    other = edited(exports / "dspark", tmp_path / "other", lambda found, _: found.pop("foredraft"))
    left_out = [finding.check for finding in examine(other, target, rows) if not finding.possible]
    assert left_out == ["fields that are not stored", "recorded drafts", "digests"]


def test_a_run_leaves_a_directory_that_the_command_passes_and_a_card(workshop, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = runs.train(workshop, "train.report=true", "train.steps=2")
    found = read_config(run / "drafter")
    given = str(workshop / "target")
    assert found["speculators_config"]["verifier"]["name_or_path"] == given
    text = (run / "drafter" / "README.md").read_text()
    data = found["foredraft"]["data"]
    for word in (given, data["key"], f"{data['training_tokens']} supervised tokens", "overall", "Licence"):
        assert word in text, word
    assert "bonus token included" in text
    options = [f"target={given}", f"data.path={workshop / 'rows.jsonl'}", "data.split=null", *CPU]
    capsys.readouterr()
    assert command("train", "task=check", f"drafter={run / 'drafter'}", "out=found.json", *options) == 0
    assert "recorded drafts: reproduced" in capsys.readouterr().out
    assert {finding["possible"] for finding in json.loads(Path("found.json").read_text())} == {True}


def test_the_embedded_target_keeps_its_name_in_a_drafter_directory(workshop, monkeypatch):
    monkeypatch.setattr(targets, "embedded_directory", lambda: workshop / "target")
    of = targets.load(EMBEDDED, HardwareConfig(dtype="float32", device="cpu"))
    assert of.name == EMBEDDED


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("drafts", None, r"evidence\.drafts: no object"),
        ("fields", None, r"evidence\.fields: no object"),
        ("tensors", [], r"evidence\.tensors: no object"),
        ("drafts", {"ids": [[1, 2]], "logits": [[0.5]]}, "two tables of one shape"),
        ("drafts", {"ids": [[1], [1, 2]], "logits": [[0.5], [0.5, 0.5]]}, "two tables of one shape"),
        ("drafts", {"ids": [[1]], "logits": "x"}, "two tables of one shape"),
        ("drafts", {"ids": [[10**8]], "logits": [[0.5]]}, r"drafts\.ids: not all are between 0 and 264"),
        ("drafts", {"ids": [[1]], "logits": [[0.5]], "confidence": "x"}, "confidence: no list of numbers"),
        ("drafts", {"ids": [[1]], "logits": [[0.5]]}, "not reproduced"),
    ],
)
def test_damaged_evidence_is_refused_by_name(target, rows, exports, tmp_path, part, value, words):
    directory = tmp_path / "drafter"
    shutil.copytree(exports / "reduced", directory)
    found = json.loads((directory / "config.json").read_text())
    found["foredraft"]["evidence"][part] = value
    (directory / "config.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=words):
        examine(directory, target, rows)
