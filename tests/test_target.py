"""The frozen target: what is captured of each family, what its head does, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DeepseekV3Config,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from data.capture import capture
from data.pack import pack
from drafters.dflash import DFlashConfig
from drafters.method import build
from drafters.target import (
    HardwareConfig,
    Target,
    load,
    load_tokenizer,
    pick_device,
    pick_dtype,
    tokenizer_hash,
)
from drafters.types import Example
from tests import tiny

LAYERS, VOCAB = 4, 64
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "gemma4": lambda: Gemma4TextConfig(
        **SIZES, sliding_window=8, global_head_dim=16, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB, final_logit_softcapping=2.0,
    ),
    "gpt_oss": lambda: GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{k: v for k, v in {**SIZES, **EXPERTS, **LATENT}.items() if v is not None}
    ),
    "minimax_m2": lambda: MiniMaxM2Config(**SIZES, num_local_experts=4, num_experts_per_tok=2, rotary_dim=4),
}  # fmt: skip
FAMILIES = pytest.mark.parametrize("family", CONFIGS)
CPU = HardwareConfig(dtype="float32", device="cpu")


def of_family(family: str) -> Target:
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(CONFIGS[family]()), None, family)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return tiny.save(tiny.target(layers=2), tmp_path_factory.mktemp("saved") / "target")


# Families ------------------------------------------------------------------------------------------


@FAMILIES
@torch.no_grad()
def test_layer_k_is_hidden_states_k_plus_1_and_the_last_one_is_not_normed(family):
    target = of_family(family)
    tokens_BT = torch.randint(3, VOCAB, (2, 20))
    seen = []
    handle = target.decoder.layers[-1].register_forward_hook(lambda _m, _i, out: seen.append(out))
    full = target.model(input_ids=tokens_BT, output_hidden_states=True, use_cache=False)
    handle.remove()
    last_layer = seen[0][0] if isinstance(seen[0], tuple) else seen[0]

    found = target.states(tokens_BT, range(LAYERS))
    assert found.layers_BTLD.shape == (2, 20, LAYERS, 32)
    for k in range(LAYERS - 1):
        torch.testing.assert_close(found.layers_BTLD[:, :, k], full.hidden_states[k + 1])
    torch.testing.assert_close(found.layers_BTLD[:, :, -1], last_layer)
    torch.testing.assert_close(found.last_BTD, full.hidden_states[-1])
    assert not torch.allclose(found.layers_BTLD[:, :, -1], found.last_BTD, rtol=1e-2, atol=1e-2)


@FAMILIES
@torch.no_grad()
def test_the_head_of_last_gives_the_logits_of_the_model(family):
    target = of_family(family)
    tokens_BT = torch.randint(3, VOCAB, (2, 20))
    logits_BTV = target.model(input_ids=tokens_BT, use_cache=False).logits
    found_BTV = target.head(target.states(tokens_BT, [1]).last_BTD)
    torch.testing.assert_close(found_BTV, logits_BTV, rtol=1e-5, atol=1e-5)
    assert (target.softcap is not None) == (family == "gemma4")
    if target.softcap:  # it bites, or this would prove nothing
        raw_BTV = target.states(tokens_BT, [1]).last_BTD @ target.head_weight_VD.T
        assert float(found_BTV.abs().max()) < target.softcap < float(raw_BTV.abs().max())


@FAMILIES
@torch.no_grad()
def test_embeddings_are_what_the_first_layer_reads(family):
    target = of_family(family)
    tokens_BT = torch.randint(3, VOCAB, (1, 6))
    full = target.model(input_ids=tokens_BT, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(target.embed(tokens_BT), full.hidden_states[0])


@FAMILIES
def test_every_family_can_be_drafted_for_and_init_target_says_where_it_cannot_start(family):
    target = of_family(family)
    drafter = build(DFlashConfig(init="random", num_states=2), target)
    row = Example(torch.randint(3, VOCAB, (12,)).tolist(), [True] * 12, "chat", family)
    batch = drafter.place(
        pack([row], capture(target, [row], drafter.layer_ids, True)), torch.Generator().manual_seed(0)
    )
    loss = drafter(batch)
    loss.sum.backward()
    assert float(loss.sum.detach()) > 0
    assert all(float(p.grad.abs().sum()) > 0 for p in drafter.parameters())
    if family in ("llama", "qwen3"):
        build(DFlashConfig(init="target", num_states=2), target)
    else:
        with pytest.raises(ValueError, match=r"use method\.init=random"):
            build(DFlashConfig(init="target", num_states=2), target)


# Capture -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target(layers=4)


def test_kept_layers_come_in_the_order_asked_and_no_hook_stays(target):
    tokens_BT = torch.randint(9, 40, (1, 7))
    all_layers = target.states(tokens_BT, [0, 1, 2, 3]).layers_BTLD
    assert torch.equal(target.states(tokens_BT, [1, 3]).layers_BTLD, all_layers[:, :, [1, 3]])
    assert target.states(tokens_BT, []).layers_BTLD.shape == (1, 7, 0, 32)
    with pytest.raises(IndexError):
        target.states(torch.tensor([[target.vocab_size]]), [0])
    assert not any(layer._forward_hooks for layer in target.layers)


def test_states_do_not_depend_on_batch_mates_or_padding(target):
    tokens_BT = torch.randint(9, 40, (2, 12))
    real_BT = torch.ones(2, 12, dtype=torch.bool)
    real_BT[1, 5:] = False
    both = target.states(tokens_BT, [0, 2], attention_mask=real_BT)
    alone = target.states(tokens_BT[1:, :5], [0, 2])
    torch.testing.assert_close(both[1:, :5].layers_BTLD, alone.layers_BTLD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[1:, :5].last_BTD, alone.last_BTD, rtol=1e-4, atol=1e-4)


def test_no_logits_are_built_and_nothing_can_be_trained(target):
    calls = []
    handle = target.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    states = target.states(torch.randint(9, 40, (1, 7)), [0])
    handle.remove()
    assert calls == []
    assert not states.layers_BTLD.requires_grad
    assert not states.last_BTD.requires_grad
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training


@pytest.mark.parametrize("ids", [[], [-1, 2], [0, 4], [2, 1], [1, 1], [99]])
def test_layer_ids_that_are_absent_repeated_or_out_of_order_are_refused(target, ids):
    with pytest.raises(ValueError, match="ascending ids between 0 and 3; tiny has 4 decoder layers"):
        target.check_layers(ids)
    with pytest.raises(ValueError, match="between 0 and 3"):
        tiny.dflash(target, layer_ids=ids or [4])


# Identity and stop tokens --------------------------------------------------------------------------


def test_a_fingerprint_tells_weights_sizes_and_tokenizers_apart():
    one, same, other = tiny.target(layers=2), tiny.target(layers=2), tiny.target(layers=2, seed=1)
    assert one.fingerprint == same.fingerprint
    differing = {key for key in one.fingerprint if one.fingerprint[key] != other.fingerprint[key]}
    assert differing == {"weights"}
    assert tiny.target(layers=3).fingerprint["num_layers"] == 3
    more = tiny.tokenizer()
    more.add_tokens(["<new>"])
    assert tokenizer_hash(more) != tokenizer_hash(tiny.tokenizer()) != tokenizer_hash(None)


@pytest.mark.parametrize(("eos", "want"), [([1, 5], (1, 5)), (7, (7,)), (None, (1,))])
def test_every_stop_id_of_the_generation_config_counts_and_else_the_tokenizers(tmp_path, saved, eos, want):
    of = tiny.target(layers=2)
    of.model.generation_config.eos_token_id = eos
    assert of.stop_ids == want
    directory = shutil.copytree(saved, tmp_path / "target")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert load_tokenizer(str(directory), CPU)[1] == want


# Loading -------------------------------------------------------------------------------------------


def test_a_directory_loads_as_the_target_that_was_saved(saved):
    of, again = tiny.target(layers=2), load(str(saved), CPU)
    assert again.fingerprint == of.fingerprint
    assert (again.dtype, again.device.type, again.name) == (torch.float32, "cpu", str(saved))
    tokens_BT = torch.randint(9, 40, (1, 7))
    assert torch.equal(again.states(tokens_BT, [1]).last_BTD, of.states(tokens_BT, [1]).last_BTD)
    tokenizer, stop_ids = load_tokenizer(str(saved), CPU)
    assert tokenizer_hash(tokenizer) == of.fingerprint["tokenizer"]
    assert stop_ids == of.stop_ids


def edit(directory: Path, **keys) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


BROKEN = {
    "no_config": lambda d: (d / "config.json").unlink(),
    "torn_config": lambda d: cut(d / "config.json"),
    "unknown_type": lambda d: edit(d, model_type="no-such-model"),
    "no_language_model": lambda d: edit(d, model_type="vit"),
    "no_weights": lambda d: (d / "model.safetensors").unlink(),
    "torn_weights": lambda d: cut(d / "model.safetensors"),
    "layers_missing": lambda d: edit(d, num_hidden_layers=3),
    "no_tokenizer": lambda d: [path.unlink() for path in d.glob("token*")],
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_directory_is_an_error_that_names_it(tmp_path, saved, fault):
    directory = shutil.copytree(saved, tmp_path / "target")
    BROKEN[fault](directory)
    with pytest.raises(ValueError, match=f"target={directory}: .*[Gg]ive a|target={directory}: .*again"):
        load(str(directory), CPU)


@pytest.mark.parametrize("name", ["no-such-directory", "./no/such/directory", "nobody/no-such-model"])
def test_a_name_that_is_neither_a_directory_nor_on_the_hub_is_an_error(name):
    for read in (load, load_tokenizer):
        with pytest.raises(ValueError, match=f"target={name}: no model directory.*smollm2-embedded"):
            read(name, CPU)


def test_families_that_would_be_misread_are_refused():
    small = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    scaled = {k: v for k, v in SIZES.items() if k != "head_dim"}
    granite = AutoModelForCausalLM.from_config(GraniteConfig(**scaled, logits_scaling=8.0))
    with pytest.raises(ValueError, match="granite.*add it to Target.head"):
        Target(granite, None, "granite")
    bert = BertConfig(**small, num_attention_heads=4, intermediate_size=32, is_decoder=True)
    with pytest.raises(ValueError, match="target bert: BertModel has no list of 4 decoder layers"):
        Target(AutoModelForCausalLM.from_config(bert), None, "bert")


def test_dtypes_are_chosen_by_name():
    assert pick_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("auto", torch.device("cpu")) in (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match="dtype=float16: write one of auto, float32, bfloat16"):
        pick_dtype("float16", torch.device("cpu"))


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_a_device_that_is_not_here_is_refused_by_its_key(name):
    with pytest.raises(ValueError, match=f"hardware.device={name}: .* cpu"):
        pick_device(name)
