"""Directories of others: read back to the bit when written, and refused by name when they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import tensor
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from drafters import checkpoint, formats
from drafters.layouts import EAGLE3, Fields, rope_of
from drafters.method import Drafter, all_methods, build
from drafters.target import Target
from drafters.vocab import choose, from_maps
from tests import tiny
from tests.commands import CPU, command, refusal
from train.check import examine

CASES = Path(__file__).parent / "cases"
KEPT = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layers=8)


def make(of: Target, method: str, **settings) -> Drafter:
    """A drafter no tensor of which is as it was initialised."""
    defaults = {"eagle3": {"layer_type": "llama", "unroll": 4, "draft_vocab": None}}
    usual = {"init": "random", **defaults.get(method, {"num_states": 2, "block_size": 5})}
    config = all_methods()[method].config_class(**{**usual, **settings})
    num = config.kept_tokens(of.vocab_size)
    vocab = None if num is None else choose(torch.arange(of.vocab_size), num, of.stop_ids)
    torch.manual_seed(1)
    drafter = build(config, of, vocab).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return drafter


@torch.no_grad()
def logits(drafter: Drafter) -> torch.Tensor:
    batch = tiny.packed(drafter, tiny.documents()[:1])
    return drafter.draft_logits(batch, tensor([1, 8, 16]), drafter.max_drafts)


def config_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def edit(directory: Path, **keys) -> None:
    """Other values in config.json; ``...`` takes a key out."""
    found = {key: value for key, value in {**config_of(directory), **keys}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(found))


def edit_tensors(directory: Path, change) -> None:
    held = load_file(directory / "model.safetensors")
    change(held)
    save_file(held, directory / "model.safetensors")


# Round trips ---------------------------------------------------------------------------------------------

HELD = [
    ("zlab", "dflash", {}),
    ("zlab", "dflash", {"sliding_window": 6, "num_layers": 1, "layer_ids": [0, 3, 7], "mask_token": 3}),
    ("sglang", "dflash", {"block_size": 8}),
    ("deepspec", "dflash", {"anchor_predicts": True}),
    ("deepspec", "dspark", {"markov_rank": 6}),
    ("deepspec", "dspark", {"markov": "gated", "markov_rank": 6}),
    ("deepspec", "dspark", {"markov": "rnn", "markov_rank": 6, "confidence": 0.0}),
    ("deepspec", "dspark", {"markov": "none"}),
    ("deepspec", "dspark", {"markov": "none", "confidence": 0.0}),
    ("sglang", "eagle3", {}),
    ("sglang", "eagle3", {"draft_vocab": 60, "fc_norm": True, "norm_output": True, "kv_heads": 4}),
]


@pytest.mark.parametrize(("format", "method", "settings"), HELD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_back_drafts_the_same_logits_to_the_bit(
    target, tmp_path, format, method, settings, dtype
):
    drafter = make(target, method, **settings).to(dtype)
    formats.write_as(drafter, tmp_path / "theirs", format)
    again = checkpoint.read(tmp_path / "theirs", target)
    assert torch.equal(logits(again), logits(drafter))
    assert (again.max_drafts, again.layer_ids) == (drafter.max_drafts, drafter.layer_ids)
    assert not again.training
    assert again.own_head_ND is None
    formats.write_as(again, tmp_path / "again", format)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_tensors_have_the_names_and_shapes_of_each_format(target, tmp_path):
    names = {}
    for format, method in (("zlab", "dflash"), ("deepspec", "dspark"), ("sglang", "eagle3")):
        settings = {"anchor_predicts": method == "dspark"} if method != "eagle3" else {"draft_vocab": 60}
        formats.write_as(make(target, method, **settings), tmp_path / format, format)
        held = load_file(tmp_path / format / "model.safetensors")
        names[format] = {name: tuple(value.shape) for name, value in held.items()}
    block = {"fc.weight": (32, 64), "hidden_norm.weight": (32,), "norm.weight": (32,)}
    for i in range(2):
        block |= {f"layers.{i}.self_attn.{n}_proj.weight": (32, 32) for n in "qo"}
        block |= {f"layers.{i}.self_attn.{n}_proj.weight": (16, 32) for n in "kv"}
        block |= {f"layers.{i}.self_attn.{n}_norm.weight": (8,) for n in "qk"}
        block |= {f"layers.{i}.mlp.{n}_proj.weight": (64, 32) for n in ("gate", "up")}
        block |= {f"layers.{i}.mlp.down_proj.weight": (32, 64)}
        block |= {f"layers.{i}.{n}_layernorm.weight": (32,) for n in ("input", "post_attention")}
    assert names["zlab"] == block
    assert names["deepspec"] == block | {
        "embed_tokens.weight": (265, 32),
        "lm_head.weight": (265, 32),
        "markov_head.markov_w1.weight": (265, 256),
        "markov_head.markov_w2.weight": (265, 256),
        "confidence_head.proj.weight": (1, 288),
        "confidence_head.proj.bias": (1,),
    }
    assert names["sglang"]["midlayer.self_attn.q_proj.weight"] == (32, 64)
    rest = {name: shape for name, shape in names["sglang"].items() if not name.startswith("midlayer.")}
    assert rest == {
        "fc.weight": (32, 96), "norm.weight": (32,), "lm_head.weight": (60, 32), "d2t": (60,), "t2d": (265,),
    }  # fmt: skip


def test_layer_ids_stand_in_the_convention_of_each_reader(target, tmp_path):
    formats.write_as(make(target, "dflash", layer_ids=[1, 5]), tmp_path / "zlab", "zlab")
    assert config_of(tmp_path / "zlab")["dflash_config"]["target_layer_ids"] == [1, 5]
    dspark = make(target, "dspark", layer_ids=[1, 5])
    formats.write_as(dspark, tmp_path / "deepspec", "deepspec")
    assert config_of(tmp_path / "deepspec")["target_layer_ids"] == [1, 5]
    formats.write_as(make(target, "eagle3", layer_ids=[1, 3, 4]), tmp_path / "sglang", "sglang")
    found = config_of(tmp_path / "sglang")
    assert (found["eagle_config"][KEPT], found[KEPT]) == ([1, 3, 4], [2, 4, 5])
    edit(tmp_path / "sglang", **{KEPT: ...})
    assert checkpoint.read(tmp_path / "sglang", target).layer_ids == [1, 3, 4]
    edit(tmp_path / "sglang", **{KEPT: [2, 4, 5], "eagle_config": ...})
    assert checkpoint.read(tmp_path / "sglang", target).layer_ids == [1, 3, 4]
    edit(tmp_path / "sglang", **{KEPT: ...})
    assert checkpoint.read(tmp_path / "sglang", target).layer_ids == [1, 3, 4]  # 8 layers: 1, 8/2-1, 8-4
    edit(tmp_path / "sglang", **{KEPT: [1, 3, 4], "eagle_config": {KEPT: [1, 3, 4]}})
    with pytest.raises(ValueError, match=r"eagle_config\.eagle_aux.*outputs.*inputs \(\+1\)"):
        checkpoint.read(tmp_path / "sglang", target)


def test_temperatures_go_with_the_drafter(target, tmp_path):
    drafter = make(target, "dspark")
    drafter.temperatures = [1.5, 1.25, 1.0, 1.0, 2.0]
    formats.write_as(drafter, tmp_path / "theirs", "deepspec")
    assert checkpoint.read(tmp_path / "theirs", target).temperatures == drafter.temperatures


# What a format cannot hold -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "method", "settings", "words"),
    [
        ("zlab", "dflash", {"anchor_predicts": True}, r"method\.anchor_predicts=true.*format=deepspec"),
        ("zlab", "dflash", {"draft_vocab": 60}, r"method\.draft_vocab=60"),
        ("zlab", "dspark", {}, "no layout for a dspark drafter; vllm, deepspec have one"),
        ("zlab", "eagle3", {}, "no layout for a eagle3 drafter; vllm, sglang have one"),
        ("sglang", "dspark", {}, "no layout for a dspark drafter"),
        ("deepspec", "dflash", {}, r"method\.anchor_predicts=false.*format=zlab"),
        ("deepspec", "dspark", {"draft_vocab": 60}, r"method\.draft_vocab=60"),
        ("deepspec", "dspark", {"sliding_window": 6}, r"method\.sliding_window=6"),
        ("sglang", "eagle3", {"layer_type": "qwen3"}, r"method\.layer_type=qwen3.*no norms on queries"),
        ("sglang", "eagle3", {"norm_before_residual": True}, r"method\.norm_before_residual=true"),
        ("sglang", "eagle3", {"norm_before_fc": True}, r"method\.norm_before_fc=true"),
        ("sglang", "eagle3", {"layer_ids": [1, 4]}, r"method\.layer_ids=\[1, 4\].*three kept layers"),
        ("tensorrt", "eagle3", {}, "write one of deepspec, sglang, vllm, zlab"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_field(target, tmp_path, format, method, settings, words):
    with pytest.raises(ValueError, match=words):
        formats.write_as(make(target, method, **settings), tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_leave_no_directory(target, tmp_path):
    drafter = make(target, "dflash")
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"fc\.weight is another after reading back; are its numbers finite"):
        formats.write_as(drafter, tmp_path / "out", "zlab")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_left_alone(target, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        formats.write_as(make(target, "dflash"), tmp_path / "out", "zlab")


# Reading strictly ----------------------------------------------------------------------------------------


@pytest.fixture
def zlab(target, tmp_path) -> Path:
    formats.write_as(make(target, "dflash"), tmp_path / "zlab", "zlab")
    return tmp_path / "zlab"


@pytest.fixture
def sglang(target, tmp_path) -> Path:
    formats.write_as(make(target, "eagle3", draft_vocab=60), tmp_path / "sglang", "sglang")
    return tmp_path / "sglang"


@pytest.fixture
def deepspec(target, tmp_path) -> Path:
    formats.write_as(make(target, "dspark", markov_rank=6), tmp_path / "deepspec", "deepspec")
    return tmp_path / "deepspec"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"block_size": ...}, "no 'block_size'"),
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, "no 'mask_token_id'"),
        ({"dflash_config": {"target_layer_ids": [1, 8], "mask_token_id": 3}}, r"method\.layer_ids=\[1, 8\]"),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 3}}, r"fc\.weight .*shape"),
        ({"dflash_config": {"target_layer_ids": [1, 5], "mask_token_id": 300}}, "mask_token=300"),
        ({"dflash_config": {"projector_type": "domino"}}, r"dflash_config\.projector_type='domino'"),
        ({"dflash_config": {"conv_kernel_size": 2}}, r"dflash_config\.conv_kernel_size=2"),
        ({"shift_label": True}, "shift_label=True"),
        ({"is_causal": True}, "is_causal=True.*full ones are not"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*one kind"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types=.*not known"),
        ({"layer_types": None, "use_sliding_window": True}, "use_sliding_window=True"),
        ({"num_target_layers": 9}, "num_target_layers=9"),
        ({"num_hidden_layers": 3, "layer_types": None}, r"missing tensors \[layers\.2\."),
        ({"num_hidden_layers": 1, "layer_types": None}, r"unexpected tensors \[layers\.1\."),
        ({"vocab_size": 266}, "vocab_size=266"),
        ({"intermediate_size": 63}, "intermediate_size=63"),
        ({"head_dim": 4}, "head_dim=4"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps=0.1"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"draft_vocab_size": 60}, "draft_vocab_size=60.*d2t maps none"),
        ({"rope_theta": 5e5}, "beside rope_theta"),
        ({"rope_theta": 5e5, "rope_parameters": None}, "rotary positions"),
        ({"architectures": ["DFlash2DraftModel"]}, "is not one of LlamaForCausalLMEagle3.*DFlashDraftModel"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_key(target, zlab, keys, words):
    edit(zlab, **keys)
    with pytest.raises(ValueError, match=words):
        checkpoint.read(zlab, target)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True.*not the embedding"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states=4"),
        ({"eagle_config": {"parallel_draft_step": 4}}, r"eagle_config\.parallel_draft_step=4"),
        ({"fc_norm": True}, r"missing tensors \[fc_norm\.0\.weight"),
        ({"draft_vocab_size": 61}, "draft_vocab_size=61.*d2t maps 60"),
        ({"target_hidden_size": 64}, "target_hidden_size=64"),
    ],
)
def test_an_eagle_config_that_does_not_fit_is_refused_by_key(target, sglang, keys, words):
    edit(sglang, **keys)
    with pytest.raises(ValueError, match=words):
        checkpoint.read(sglang, target)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"target_layer_ids": ...}, "no 'target_layer_ids'"),
        ({"target_layer_ids": [-1, 5]}, r"method\.layer_ids=\[-1, 5\]"),
        ({"markov_head_type": ...}, "no 'markov_head_type'"),
        ({"markov_head_type": "gated"}, r"missing tensors \[markov_head\.gate_proj\.weight"),
        ({"markov_head_type": "lstm"}, "markov=lstm"),
        ({"markov_rank": 5}, r"markov_w1\.weight.*shape"),
        ({"enable_confidence_head": False}, r"unexpected tensors \[confidence_head\.proj\.bias"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov=False"),
        ({"sample_from_anchor": False}, "sample_from_anchor=False"),
    ],
)
def test_a_dspark_config_that_does_not_fit_is_refused_by_key(target, deepspec, keys, words):
    edit(deepspec, **keys)
    with pytest.raises(ValueError, match=words):
        checkpoint.read(deepspec, target)


def test_a_tensor_that_does_not_fit_is_named_as_there_and_as_here(target, sglang):
    edit_tensors(sglang, lambda held: held.pop("midlayer.hidden_norm.weight"))
    both = r"midlayer\.hidden_norm\.weight \(here layers\.0\.hidden_norm\.weight\)"
    with pytest.raises(ValueError, match=rf"missing tensors \[{both}\]"):
        checkpoint.read(sglang, target)
    edit_tensors(sglang, lambda held: held.update({"midlayer.hidden_norm.weight": torch.ones(31)}))
    with pytest.raises(ValueError, match=rf"{both} has shape \(31,\)"):
        checkpoint.read(sglang, target)
    edit_tensors(
        sglang, lambda held: held.update({"midlayer.hidden_norm.weight": torch.ones(32), "x": torch.ones(1)})
    )
    with pytest.raises(ValueError, match=r"unexpected tensors \[x\]"):
        checkpoint.read(sglang, target)


def test_a_head_and_an_embedding_of_another_target_are_refused(target, deepspec, sglang):
    for name in ("embed_tokens.weight", "lm_head.weight"):
        edit_tensors(deepspec, lambda held, name=name: held.update({name: held[name] + 1}))
        with pytest.raises(ValueError, match=f"{name} is not that of tiny"):
            checkpoint.read(deepspec, target)
        edit_tensors(deepspec, lambda held, name=name: held.pop(name))  # without it the target's is shared
    checkpoint.read(deepspec, target)
    edit_tensors(sglang, lambda held: held.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"missing tensors \[lm_head\.weight\]"):
        checkpoint.read(sglang, target)


def test_a_head_that_others_trained_is_kept_in_every_format(target, sglang, tmp_path):
    edit_tensors(sglang, lambda held: held.update({"lm_head.weight": held["lm_head.weight"] * 1.5}))
    drafter = checkpoint.read(sglang, target)
    with pytest.raises(AssertionError, match="another head"):  # nothing trains one today
        drafter(drafter.place(tiny.packed(drafter, tiny.documents()), torch.Generator()))
    assert torch.equal(drafter.head_ND, load_file(sglang / "model.safetensors")["lm_head.weight"])
    formats.write_as(drafter, tmp_path / "again", "sglang")
    checkpoint.write(drafter, tmp_path / "ours")
    for name in ("again", "ours"):
        again = checkpoint.read(tmp_path / name, target)
        assert torch.equal(again.head_ND, drafter.head_ND)
        assert (
            tiny.difference(logits(again), logits(drafter)) <= 1e-5
        )  # not bit for bit: memory is laid out anew


def test_another_target_is_refused_by_what_differs(zlab):
    with pytest.raises(ValueError, match="made for another target: its hidden_size is 32"):
        checkpoint.read(zlab, tiny.target(layers=8, hidden=64))


# SafeAILab -----------------------------------------------------------------------------------------------


def as_safeailab(directory: Path, extra: dict | None = None) -> Path:
    """The directory as SafeAILab/EAGLE leaves one: float16 in a pickle, an older config of a Llama."""
    held = load_file(directory / "model.safetensors")
    half = {name: value.half() if value.is_floating_point() else value for name, value in held.items()}
    torch.save({**half, **(extra or {})}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    keys = ("rope_parameters", KEPT, "eagle_config", "num_aux_hidden_states", "norm_before_residual", "dtype",
            "norm_before_fc", "fc_norm", "norm_output", "foredraft", "head_dim")  # fmt: skip
    edit(directory, architectures=["LlamaForCausalLM"], torch_dtype="float16", **dict.fromkeys(keys, ...))
    return directory


def test_a_drafter_of_safeailab_is_read_and_written_again(target, sglang, tmp_path):
    held = load_file(sglang / "model.safetensors")
    drafter = checkpoint.read(as_safeailab(sglang), target)
    assert (drafter.layer_ids, drafter.max_drafts, len(drafter.vocab)) == ([1, 3, 4], 7, 60)
    wanted = held["midlayer.self_attn.q_proj.weight"].half().float()
    assert torch.equal(drafter.state_dict()["layers.0.self_attn.q_proj.weight"], wanted)
    formats.write_as(drafter, tmp_path / "again", "sglang")
    assert torch.equal(logits(checkpoint.read(tmp_path / "again", target)), logits(drafter))


@pytest.mark.parametrize("fixture", ["zlab", "deepspec", "sglang", "safeailab"])
def test_a_directory_of_others_is_checked_like_ours(target, sglang, request, fixture):
    """Read, drafts served as in training, replay as decoding; what only our exports record cannot be."""
    directory = as_safeailab(sglang) if fixture == "safeailab" else request.getfixturevalue(fixture)
    findings = examine(directory, target, [tiny.answered(target, num=12, seed=seed) for seed in (0, 1)])
    done = {finding.check: finding.possible for finding in findings}
    assert all(done[check] for check in ("tensors", "fields", "drafts", "acceptance"))
    assert not done["recorded drafts"]


def test_training_starts_from_a_directory_of_others(target, deepspec):
    theirs = checkpoint.read(deepspec, target)
    config = replace(theirs.config, start_from=str(deepspec))
    started = build(config, target)
    for name, value in theirs.state_dict().items():
        assert torch.equal(started.state_dict()[name], value), name


class Trap:
    """What a pickle with code holds."""

    def __reduce__(self):
        return print, ("this must never be printed",)


def test_code_in_a_pickle_is_refused_and_not_run(target, sglang, capsys):
    as_safeailab(sglang, {"trap": Trap()})
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: torn, or holds more than tensors"):
        checkpoint.read(sglang, target)
    assert "never be printed" not in capsys.readouterr().out


def test_a_torn_pickle_is_refused(target, sglang):
    path = as_safeailab(sglang) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(ValueError, match="torn, or holds more than tensors"):
        checkpoint.read(sglang, target)


# The handed cases ----------------------------------------------------------------------------------------


def test_the_import_case_is_read_and_written_as_it_says(tmp_path):
    case = json.loads((CASES / "x01_export_in.json").read_text())
    settings = {k: v for k, v in case["target_config"].items() if k != "architectures"}
    model = Qwen3ForCausalLM(Qwen3Config(**settings, intermediate_size=20)).bfloat16()
    target, want = Target(model, None, "toy"), case["expect"]
    drafter = make(
        target, "eagle3", draft_vocab=case["draft"]["draft_vocab_size"], layer_ids=[1, 5, 8]
    ).bfloat16()
    formats.write_as(drafter, tmp_path / "theirs", "sglang")
    held, found = load_file(tmp_path / "theirs" / "model.safetensors"), config_of(tmp_path / "theirs")
    assert set(case["draft_keys"]) <= held.keys()
    assert held["midlayer.self_attn.q_proj.weight"].shape[0] == want["q_proj_rows"]
    for key in ("head_dim", "vocab_size", "draft_vocab_size", "tie_word_embeddings"):
        assert found[key] == want[f"{key}_written"]
    assert {key: found[key] for key in want["dtype_keys"]} == want["dtype_keys"]
    assert found["max_position_embeddings"] == want["max_position_embeddings"]
    assert found[KEPT] == case["draft"]["aux_layers"] == want["aux_layer_ids_written"]
    assert found["rope_parameters"] == case["target_config"]["rope_parameters"]
    assert {**found["rope_scaling"], "rope_theta": found["rope_theta"]} == found["rope_parameters"]
    sizes = {key: value for key, value in found.items() if key not in ("hidden_size", "num_attention_heads")}
    assert LlamaConfig(**sizes).rope_parameters == found["rope_parameters"]  # the case's sizes fit no Llama
    edit(
        tmp_path / "theirs", eagle_config=..., rope_parameters=...
    )  # the old rotary fields, vLLM's ids alone
    again = checkpoint.read(tmp_path / "theirs", target)
    assert again.layer_ids == [1, 5, 8]
    assert set(want["key_map"].values()) <= again.state_dict().keys()
    assert (
        make(target, "dflash", block_size=8, mask_token=3).max_drafts == want["num_speculative_tokens_dflash"]
    )


def test_absolute_ids_in_place_of_offsets_are_recognised():
    case = json.loads((CASES / "d12_vocab_counts.json").read_text())
    kept, size = tensor(case["expect_without_forced"]["kept"]), case["target_vocab"]
    flags = torch.zeros(size, dtype=torch.bool)
    flags[kept] = True
    for maps in ((kept, flags), (kept, None), (torch.arange(size), None)):
        with pytest.raises(ValueError, match="looks like absolute target ids; it must hold offsets"):
            from_maps(*maps, size)
    offsets = tensor(case["expect_without_forced"]["d2t_offsets"])
    assert from_maps(offsets, flags, size).kept_N.tolist() == kept.tolist()
    sparse = torch.zeros(size, dtype=torch.bool)
    sparse[[0, 2, 4, 6]] = True  # offsets that rise at every id, with the flags that say so
    assert from_maps(tensor([0, 1, 2, 3]), sparse, size).kept_N.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("at", range(5))
def test_rotary_fields_old_and_new_are_read_as_the_case_says(at):
    form = json.loads((CASES / "t03_rope.json").read_text())["config_forms"][at]
    fields = Fields(form, EAGLE3.defaults, Path("theirs"))
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    if at in (0, 1):
        assert rope_of(fields, "full_attention", "theirs") == plain
    elif at == 2:
        assert rope_of(fields, "sliding_attention", "theirs") == {**plain, "rope_theta": 10000.0}
        with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5"):
            rope_of(fields, "full_attention", "theirs")
    elif at == 3:
        linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        assert rope_of(fields, "full_attention", "theirs") == linear
    else:
        with pytest.raises(ValueError, match="rope_type='unheard_of' is none of default, "):
            rope_of(fields, "full_attention", "theirs")


@pytest.mark.parametrize("factor", [4, 32])
def test_yarn_scales_attention_as_the_case_says(factor):
    case = json.loads((CASES / "t03_rope.json").read_text())["yarn"]
    kind = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    }
    drafter = make(tiny.target(layers=4, rope_parameters=kind), "eagle3")
    scaling = drafter.rotary.embedding.attention_scaling
    assert scaling == pytest.approx(case[f"attention_factor_for_factor_{factor}"], abs=1e-6)


# The command ---------------------------------------------------------------------------------------------


def test_the_command_goes_through_every_format_and_back(target, tmp_path, capsys):
    model = tiny.save(target, tmp_path / "model")
    checkpoint.write(make(target, "dflash"), tmp_path / "ours")
    given = (f"target={model}", *CPU, "task=export")
    steps = [("ours", "zlab"), ("zlab", "sglang"), ("sglang", "vllm")]
    for source, format in steps:
        arguments = (f"drafter={tmp_path / source}", f"format={format}", f"out={tmp_path / format}")
        assert command("train", *given, *arguments) == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "vllm"))
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    findings = examine(tmp_path / "vllm", target, [tiny.answered(target, num=12)])
    assert {finding.check for finding in findings if finding.possible} >= {"recorded drafts", "digests"}
    again = refusal(capsys, "train", *given, *arguments)
    assert "exists already" in again


def test_the_command_says_what_it_needs_and_what_vllm_cannot_serve(target, tmp_path, capsys):
    model = tiny.save(target, tmp_path / "model")
    checkpoint.write(make(target, "dspark", markov="gated"), tmp_path / "ours")
    given = [f"target={model}", *CPU, "task=export"]
    for argument, words in (
        (f"drafter={tmp_path / 'ours'}", "drafter: task=export needs"),
        (f"out={tmp_path / 'out'}", "out: task=export needs"),
        ("format=gguf", "format: task=export needs one of deepspec, sglang, vllm, zlab"),
    ):
        assert words in refusal(capsys, "train", *given)
        given.append(argument)
    assert "format=gguf: write one of" in refusal(capsys, "train", *given)
    given[-1] = "format=vllm"
    assert "vanilla Markov heads only" in refusal(capsys, "train", *given)
    assert not (tmp_path / "out").exists()
