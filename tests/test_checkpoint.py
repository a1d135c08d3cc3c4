"""The drafter directory: written whole or not at all, read strictly, laid out as vLLM reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from data.capture import capture
from data.pack import pack
from drafters.checkpoint import hardware_for, note, read, read_config, write
from drafters.dflash import DFlashConfig
from drafters.method import Drafter, build
from drafters.target import EMBEDDED, HardwareConfig, Target
from drafters.vocab import choose
from tests import tiny
from train.card import serving

KINDS = {
    "plain": {},
    "anchor_predicts": {"anchor_predicts": True},
    "sliding_window": {"sliding_window": 6},
    "reduced_vocabulary": {"draft_vocab": 50},
    "other_sizes": {"num_layers": 3, "layer_ids": [0, 3], "block_size": 9, "mask_token": 3},
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layers=5)


def make(of: Target, **settings) -> Drafter:
    """A drafter no tensor of which is as it was initialised."""
    chosen = {"init": "random", "num_states": 2, "block_size": 5, **settings}
    num = settings.get("draft_vocab")
    vocab = None if num is None else choose(torch.arange(of.vocab_size), num, of.stop_ids)
    drafter = build(DFlashConfig(**chosen), of, vocab).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


def logits(drafter: Drafter) -> torch.Tensor:
    example = tiny.example(30)
    batch = pack([example], capture(drafter.target, [example], drafter.layer_ids, True))
    with torch.no_grad():
        return drafter.draft_logits(batch, torch.tensor([0, 8, 15, 29]), drafter.max_drafts)


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def edit_config(directory: Path, **keys) -> None:
    (directory / "config.json").write_text(json.dumps({**config_of(directory), **keys}))


def edit_tensors(directory: Path, change) -> None:
    held = load_file(directory / "model.safetensors")
    change(held)
    save_file(held, directory / "model.safetensors")


@pytest.fixture
def written(target, tmp_path) -> Path:
    """A directory with a reduced vocabulary, so that it holds every kind of tensor."""
    write(make(target, draft_vocab=50), tmp_path / "drafter")
    return tmp_path / "drafter"


# Round trip ----------------------------------------------------------------------------------------


@EVERY_KIND
def test_what_is_read_back_drafts_the_same_logits_to_the_bit(target, tmp_path, kind):
    drafter = make(target, **KINDS[kind])
    write(drafter, tmp_path / "drafter")
    again = read(tmp_path / "drafter", target)
    assert torch.equal(logits(again), logits(drafter))
    assert not again.training
    for key in ("block_size", "anchor_predicts", "num_layers", "sliding_window", "draft_vocab"):
        assert getattr(again.config, key) == getattr(drafter.config, key), key
    assert (again.layer_ids, again.mask_token) == (drafter.layer_ids, drafter.mask_token)
    assert again.max_drafts == drafter.max_drafts
    write(again, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "drafter" / name).read_bytes()


def test_a_bfloat16_drafter_is_read_as_one(target, tmp_path):
    drafter = make(target, draft_vocab=50).to(torch.bfloat16)
    write(drafter, tmp_path / "drafter")
    again = read(tmp_path / "drafter", target)
    assert config_of(tmp_path / "drafter")["dtype"] == "bfloat16"
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(again), logits(drafter))


@pytest.mark.parametrize(("trained", "loaded"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_drafter_is_read_with_its_target_in_the_other_dtype(tmp_path, trained, loaded):
    one, other = (
        Target(tiny.llama(layers=5).to(getattr(torch, dtype)), tiny.tokenizer(), "tiny")
        for dtype in (trained, loaded)
    )
    write(make(one, draft_vocab=50), tmp_path / "drafter")
    again = read(tmp_path / "drafter", other)
    assert torch.equal(again.head_ND.bfloat16(), one.head_weight_VD[again.vocab.kept_N].bfloat16())
    assert one.fingerprint == other.fingerprint
    assert hardware_for(tmp_path / "drafter", HardwareConfig()).dtype == trained
    assert hardware_for(tmp_path / "drafter", HardwareConfig(dtype=loaded)).dtype == loaded


# The layout of vLLM and speculators ----------------------------------------------------------------


@pytest.mark.parametrize("anchor_predicts", [False, True])
@pytest.mark.parametrize("name", [EMBEDDED, "org/model"])
def test_directory_and_card_say_whether_vllm_can_serve_it(target, tmp_path, anchor_predicts, name):
    write(make(target, anchor_predicts=anchor_predicts), tmp_path / "drafter")
    vllm = config_of(tmp_path / "drafter")["foredraft"]["vllm"]
    assert vllm["servable"] is not anchor_predicts
    assert vllm["why"]
    text = serving(name, {"method": "dflash", "max_n": 4}, vllm)
    place = "TARGET" if name == EMBEDDED else name
    assert (f"vllm serve {place} --speculative" in text) is not anchor_predicts
    assert ("Not for vLLM: " in text) is anchor_predicts


@EVERY_KIND
def test_tensors_have_the_names_and_shapes_that_vllm_reads(target, tmp_path, kind):
    drafter = make(target, **KINDS[kind])
    write(drafter, tmp_path / "drafter")
    held = load_file(tmp_path / "drafter" / "model.safetensors")
    hidden, inner, heads, kv, size = 32, 64, 4, 2, 8
    want = {"fc.weight": (hidden, 2 * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(drafter.config.num_layers):
        want |= {
            f"layers.{i}.self_attn.q_proj.weight": (heads * size, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (kv * size, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (kv * size, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, heads * size),
            f"layers.{i}.self_attn.q_norm.weight": (size,),
            f"layers.{i}.self_attn.k_norm.weight": (size,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
    if kind == "reduced_vocabulary":
        want |= {"lm_head.weight": (50, hidden), "d2t": (50,), "t2d": (target.vocab_size,)}
    assert {name: tuple(value.shape) for name, value in held.items()} == want


def test_the_maps_are_offsets_and_the_head_is_the_targets_rows(target, written):
    held = load_file(written / "model.safetensors")
    assert (held["d2t"].dtype, held["t2d"].dtype) == (torch.int64, torch.bool)
    kept = torch.arange(50) + held["d2t"]
    assert kept.tolist() == [1, *range(target.vocab_size - 49, target.vocab_size)]
    assert torch.equal(held["t2d"].nonzero().squeeze(1), kept)
    assert torch.equal(held["lm_head.weight"], target.head_weight_VD[kept])


@EVERY_KIND
def test_config_has_the_keys_of_the_speculators_format(target, tmp_path, kind):
    drafter = make(target, **KINDS[kind])
    write(drafter, tmp_path / "drafter")
    found = config_of(tmp_path / "drafter")
    sliding, anchor_predicts = kind == "sliding_window", kind == "anchor_predicts"
    block = drafter.config.block_size
    assert found["architectures"] == ["DFlashDraftModel"]
    assert found["speculators_model_type"] == "dflash"
    assert "model_type" not in found  # with it vLLM would read another format
    assert found["draft_vocab_size"] == (50 if kind == "reduced_vocabulary" else target.vocab_size)
    assert found["block_size"] == block
    assert found["mask_token_id"] == drafter.mask_token
    assert found["sample_from_anchor"] is anchor_predicts
    assert found["sliding_window_non_causal"] is (not sliding)  # else vLLM runs full layers causally
    assert found["target_hidden_size"] is None
    (method,) = found["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == (block if anchor_predicts else block - 1)
    assert found["speculators_config"]["algorithm"] == "dflash"
    assert found["speculators_config"]["verifier"] == {
        "name_or_path": "tiny",
        "architectures": ["LlamaForCausalLM"],
    }
    layers = Qwen3Config(**found["transformer_layer_config"])
    assert found["transformer_layer_config"]["model_type"] == "qwen3"
    assert layers.num_hidden_layers == drafter.config.num_layers
    assert (
        layers.layer_types
        == ["sliding_attention" if sliding else "full_attention"] * drafter.config.num_layers
    )
    assert layers.sliding_window == (6 if sliding else None)
    assert (layers.hidden_size, layers.head_dim, layers.num_key_value_heads) == (32, 8, 2)
    assert layers.vocab_size == target.vocab_size
    assert layers.rope_parameters == target.config.rope_parameters


def test_layer_ids_are_stored_one_higher_than_ours(target, tmp_path):
    write(make(target, layer_ids=[0, 3]), tmp_path / "drafter")
    assert config_of(tmp_path / "drafter")["aux_hidden_state_layer_ids"] == [1, 4]
    assert read(tmp_path / "drafter", target).layer_ids == [0, 3]


def test_what_only_we_know_stands_under_one_key(target, tmp_path):
    write(make(target), tmp_path / "drafter", {"held_out_tau": 2.5})
    note(tmp_path / "drafter", tau_by_n={"1": 1.5})
    found = config_of(tmp_path / "drafter")["foredraft"]
    assert (found["held_out_tau"], found["tau_by_n"]) == (2.5, {"1": 1.5})
    assert found["target"] == target.fingerprint
    assert sorted(path.name for path in (tmp_path / "drafter").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    read(tmp_path / "drafter", target)


# Whole or not at all -------------------------------------------------------------------------------


def listing(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()
    }


def refuse(_written: Path) -> None:
    raise ValueError("export refused: logits differ")


@pytest.mark.parametrize("there_before", [False, True])
@pytest.mark.parametrize("fault", ["check", "disk", "nan", "interrupt"])
def test_a_refused_export_leaves_what_was_there_and_nothing_half_written(
    target, tmp_path, monkeypatch, fault, there_before
):
    if there_before:
        write(make(target), tmp_path / "drafter")
    before = listing(tmp_path)
    drafter, check = make(target, block_size=4), None
    wanted: type[BaseException] = ValueError
    if fault == "check":
        check = refuse
    elif fault == "nan":
        drafter.fc.weight.data[0, 0] = float("nan")
    elif fault == "disk":

        def full(*_args, **_kwargs):
            raise OSError("no space left on device")

        monkeypatch.setattr("drafters.checkpoint.save_file", full)
        wanted = OSError
    else:

        def check(_written: Path) -> None:
            raise KeyboardInterrupt

        wanted = KeyboardInterrupt
    with pytest.raises(wanted):
        write(drafter, tmp_path / "drafter", check=check)
    assert listing(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"] * there_before


def test_the_check_sees_the_whole_directory_before_it_has_its_name(target, tmp_path):
    drafter, seen = make(target), []

    def check(directory: Path) -> None:
        assert not (tmp_path / "drafter").exists()
        seen.append(logits(read(directory, target)))

    write(drafter, tmp_path / "drafter", check=check)
    assert torch.equal(seen[0], logits(drafter))


def test_a_new_drafter_takes_the_place_of_an_old_one_and_of_an_abandoned_attempt(target, tmp_path):
    write(make(target, num_layers=3), tmp_path / "drafter")
    (tmp_path / "drafter" / "stale.txt").write_text("old")
    (tmp_path / "drafter.tmp").mkdir()
    (tmp_path / "drafter.tmp" / "model.safetensors").write_text("torn")
    write(make(target), tmp_path / "drafter")
    assert set(listing(tmp_path)) == {"drafter/config.json", "drafter/model.safetensors"}
    assert read(tmp_path / "drafter", target).config.num_layers == 2


def test_a_parameter_that_is_not_finite_is_named_and_not_exported(target, tmp_path):
    drafter = make(target)
    drafter.layers[1].mlp.up_proj.weight.data[3, 3] = float("inf")
    with pytest.raises(ValueError, match=r"refused.*layers\.1\.mlp\.up_proj\.weight"):
        write(drafter, tmp_path / "drafter")


# Strict reading ------------------------------------------------------------------------------------


def set_nan(held: dict) -> None:
    held["norm.weight"][3] = float("nan")


TENSOR_FAULTS = {
    "missing": (lambda held: held.pop("fc.weight"), r"missing tensors \[fc\.weight\]"),
    "unexpected": (
        lambda held: held.update({"mask_hidden": torch.zeros(3)}),
        r"unexpected tensors \[mask_hidden\]",
    ),
    "shape": (
        lambda held: held.update({"fc.weight": torch.zeros(32, 96)}),
        r"fc\.weight has shape \(32, 96\), its config asks for \(32, 64\)",
    ),
    "nan": (set_nan, r"NaN.*\['norm\.weight'\]"),
    "other_head": (lambda held: held["lm_head.weight"].add_(1), r"lm_head\.weight is not the rows"),
    "no_head": (lambda held: held.pop("lm_head.weight"), r"lm_head\.weight"),
    "no_map": (lambda held: held.pop("d2t"), r"draft_vocab_size=50"),
    "absolute_map": (
        lambda held: held.update({"d2t": (torch.arange(50) + held["d2t"]).flip(0)}),
        "must hold offsets",
    ),
    "map_out_of_range": (lambda held: held["d2t"].add_(40), r"outside the target's 265 ids"),
    "other_map": (lambda held: held["t2d"].logical_not_(), "t2d and d2t"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_that_do_not_belong_are_refused_by_name(target, written, fault):
    change, match = TENSOR_FAULTS[fault]
    edit_tensors(written, change)
    with pytest.raises(ValueError, match=match) as error:
        read(written, target)
    assert str(written) in str(error.value)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"speculators_model_type": "medusa"}, "method 'medusa' is not one of.*dflash"),
        ({"draft_vocab_size": 49}, "draft_vocab_size=49 but d2t maps 50"),
        ({"aux_hidden_state_layer_ids": [1, 6]}, "between 0 and 4"),
        ({"aux_hidden_state_layer_ids": [1, 2, 3]}, r"fc\.weight has shape"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "between 0 and 4"),  # the embeddings, which we do not keep
        ({"mask_token_id": 1}, r"mask_token=1: this token starts, ends or pads"),
        ({"mask_token_id": 999}, r"mask_token=999: the target has ids"),
        ({"block_size": 1}, r"block_size=1"),
        ({"block_size": 50}, r"speculative_tokens=4, but block_size=50, .* makes 49 drafts a round"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(target, written, keys, match):
    edit_config(written, **keys)
    with pytest.raises(ValueError, match=match):
        read(written, target)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 1e-3),
        ("num_attention_heads", 2),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 7.0}),
        ("hidden_act", "gelu"),
        ("head_dim", 16),
    ],
)
def test_draft_layers_of_other_sizes_or_positions_are_refused_by_key(target, written, key, value):
    layers = {**config_of(written)["transformer_layer_config"], key: value}
    edit_config(written, transformer_layer_config=layers)
    with pytest.raises(ValueError, match=rf"transformer_layer_config\.{key}="):
        read(written, target)


@pytest.mark.parametrize(
    "key",
    [
        "block_size", "mask_token_id", "sample_from_anchor", "aux_hidden_state_layer_ids", "draft_vocab_size",
        "transformer_layer_config",
    ],
)  # fmt: skip
def test_a_key_that_is_missing_is_named(target, written, key):
    found = config_of(written)
    del found[key]
    (written / "config.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=f"config.json has no '{key}'"):
        read(written, target)


OTHERS = {
    "num_layers": lambda: tiny.target(layers=6),
    "hidden_size": lambda: tiny.target(layers=5, hidden=64),
    "vocab_size": lambda: tiny.target(layers=5, vocab=300),
    "tokenizer": lambda: Target(tiny.llama(layers=5), None, "bare"),
}


@pytest.mark.parametrize("key", OTHERS)
def test_a_drafter_of_another_target_is_refused_and_says_what_differs(written, key):
    with pytest.raises(ValueError, match=f"made for another target: its {key} is"):
        read(written, OTHERS[key]())


def test_a_finetuned_target_of_the_same_family_takes_the_drafter(target, tmp_path):
    drafter = make(target)
    write(drafter, tmp_path / "drafter")
    other = tiny.target(layers=5, seed=1)
    assert not torch.allclose(logits(read(tmp_path / "drafter", other)), logits(drafter))


def test_directories_that_are_no_drafters_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match=f"drafter={tmp_path / 'none'}: no drafter directory"):
        read(tmp_path / "none", target)
    tiny.save(target, tmp_path / "model")
    with pytest.raises(ValueError, match="has no speculators_model_type"):
        read(tmp_path / "model", target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("size", [0, 40])
def test_a_torn_file_is_an_error_that_names_it(target, written, name, size):
    (written / name).write_bytes((written / name).read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{written}/{name}.*export the run again"):
        read(written, target)


def test_missing_weights_are_an_error_that_names_them(target, written):
    (written / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"{written}/model\.safetensors cannot be read"):
        read(written, target)
    assert read_config(written)["speculators_model_type"] == "dflash"


def test_a_drafter_is_read_to_where_its_target_is(tmp_path, monkeypatch):
    """A device that any machine has: it holds shapes alone."""
    of = tiny.target(layers=5)
    write(make(of, draft_vocab=50), tmp_path / "one")
    monkeypatch.setattr(Target, "device", torch.device("meta"))
    assert {value.device.type for value in read(tmp_path / "one", of).state_dict().values()} == {"meta"}
