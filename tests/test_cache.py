"""Slots of keys and values: what is written where, what is visible, and what a refusal leaves behind."""

import pytest
import torch
import transformers

from drafters.target import Target
from serve.cache import SlotCache, attend_ragged, check_ragged
from serve.engine import Engine
from tests import tiny

CAPACITY = 40


@pytest.fixture(scope="module")
def target():
    return tiny.target(layers=3)


def new_cache(target, slots: int) -> SlotCache:
    return SlotCache(target.num_layers, slots, CAPACITY, target.attention_windows)


def feed(target, cache: SlotCache, rows: range, tokens: list[list[int]]) -> torch.Tensor:
    """One pass over staged tokens, nothing committed; the states after the final norm."""
    position_BJ, mask = cache.stage(rows, len(tokens[0]), target.device, target.dtype)
    tokens_BJ = torch.tensor(tokens)
    return target.states(tokens_BJ, [], attention_mask=mask, position_BT=position_BJ, cache=cache).last_BTD


def plain(target, tokens: list[int]) -> torch.Tensor:
    """The same states without any cache."""
    return target.states(torch.tensor([tokens]), []).last_BTD[0]


def ids(num: int, seed: int) -> list[int]:
    return tiny.example(num, num, seed).ids


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_mask_is_causal_from_each_rows_own_length_and_ends_at_the_window(window):
    cache = SlotCache(1, 3, CAPACITY, {"full_attention": None, "sliding_attention": window})
    cache.lengths = [0, 5, 2]
    position_BJ, masks = cache.stage(range(3), 4, "cpu", torch.float32)
    assert position_BJ.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8], [2, 3, 4, 5]]
    for kind, limit in (("full_attention", None), ("sliding_attention", window)):
        assert masks[kind].shape == (3, 1, 4, 9)
        for row in range(3):
            for query in range(4):
                for key in range(9):
                    at = cache.lengths[row] + query
                    visible = key <= at and (limit is None or key > at - limit)
                    found = float(masks[kind][row, 0, query, key])
                    assert found == (0.0 if visible else torch.finfo(torch.float32).min)


def test_one_kind_of_layer_gets_one_mask():
    cache = SlotCache(1, 1, CAPACITY, {"full_attention": None})
    _, mask = cache.stage(range(1), 2, "cpu", torch.bfloat16)
    assert mask.shape == (1, 1, 2, 2)
    assert mask.dtype == torch.bfloat16


def test_a_slot_never_holds_more_than_its_capacity():
    cache = SlotCache(1, 1, CAPACITY, {"full_attention": None})
    cache.lengths = [CAPACITY - 2]
    cache.stage(range(1), 2, "cpu", torch.float32)
    with pytest.raises(AssertionError, match=f"slot of {CAPACITY} tokens asked to hold {CAPACITY + 1}"):
        cache.stage(range(1), 3, "cpu", torch.float32)


def test_what_a_slot_holds_survives_that_its_room_grows(target):
    """Longer than the room that a first short pass makes, and grown again."""
    cache = SlotCache(target.num_layers, 2, 300, target.attention_windows)
    tokens, found = ids(200, 1), []
    for start, end in ((0, 9), (9, 80), (80, 200)):
        found += list(feed(target, cache, range(1), [tokens[start:end]])[0])
        cache.commit(range(1), [end - start])
    assert torch.allclose(torch.stack(found), plain(target, tokens), atol=1e-4)


@pytest.mark.parametrize("kept", [0, 1, 3, 5])
def test_rejected_rows_leave_no_trace_in_the_cache(target, kept):
    prompt, drafts, rest = ids(9, 1), ids(5, 2), ids(4, 3)
    cache = new_cache(target, 1)
    feed(target, cache, range(1), [prompt])
    cache.commit(range(1), [9])
    feed(target, cache, range(1), [drafts])
    cache.commit(range(1), [kept])
    found = feed(target, cache, range(1), [rest])
    cache.commit(range(1), [4])

    true = [*prompt, *drafts[:kept], *rest]
    assert torch.allclose(found[0], plain(target, true)[-4:], atol=1e-4)
    clean = new_cache(target, 1)
    feed(target, clean, range(1), [true])
    for layer, other in zip(cache.layers, clean.layers, strict=True):
        for have, want in ((layer.keys, other.keys), (layer.values, other.values)):
            assert torch.allclose(have[0, :, : len(true)], want[0, :, : len(true)], atol=1e-4)


def test_nothing_past_a_slots_length_is_visible(target):
    prompt, rest = ids(9, 1), ids(4, 3)
    found = []
    for poison in (0.0, 1e4):
        cache = new_cache(target, 2)
        feed(target, cache, range(2), [prompt, prompt])
        cache.commit(range(2), [9, 4])
        for layer in cache.layers:
            for row, length in enumerate(cache.lengths):
                layer.keys[row, :, length:] = poison
                layer.values[row, :, length:] = poison
        found.append(feed(target, cache, range(2), [rest, rest]))
    assert torch.equal(found[0], found[1])


def test_rows_of_one_pass_do_not_see_each_other(target):
    prompts = [ids(3, 1), ids(9, 2), ids(5, 3)]
    cache = new_cache(target, 3)
    for row, prompt in enumerate(prompts):
        feed(target, cache, range(row, row + 1), [prompt])
        cache.commit(range(row, row + 1), [len(prompt)])
    more = [ids(4, 10 + row) for row in range(3)]
    found = feed(target, cache, range(3), more)
    for row in range(3):
        want = plain(target, prompts[row] + more[row])[-4:]
        assert torch.allclose(found[row], want, atol=1e-4)


def test_a_moved_request_goes_on_as_before(target):
    prompt, more = ids(7, 1), ids(3, 2)
    cache = new_cache(target, 3)
    feed(target, cache, range(2, 3), [prompt])
    cache.commit(range(2, 3), [7])
    cache.move(2, 0)
    assert cache.lengths == [7, 0, 0]
    found = feed(target, cache, range(1), [more])
    assert torch.allclose(found[0], plain(target, prompt + more)[-3:], atol=1e-4)


# Rows of different lengths in one pass --------------------------------------------------------------------

SIZES = {
    "vocab_size": 265, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}


def family(name: str, sizes: dict) -> Target:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **sizes)
    return Target(transformers.AutoModelForCausalLM.from_config(config), tiny.tokenizer(), name)


def feed_ragged(target, cache: SlotCache, rows: range, tokens: list[list[int]]) -> list[torch.Tensor]:
    """One flat pass over rows of these tokens, nothing committed; the states of each."""
    counts = [len(row) for row in tokens]
    flat = torch.tensor([[token for row in tokens for token in row]])
    position, mask = cache.stage(rows, max(counts), target.device, target.dtype, counts)
    with attend_ragged(cache, target.config):
        states = target.states(flat, [], attention_mask=mask, position_BT=position, cache=cache)
    return list(states.last_BTD[0].split(counts))


@pytest.mark.parametrize("windows", ["full", "sliding", "mixed"])
def test_a_flat_pass_has_the_states_of_plain_ones_and_refused_rows_leave_no_trace(target, windows):
    if windows != "full":
        target = family({"sliding": "mistral", "mixed": "gemma2"}[windows], GROUPED)
        assert 4 in target.attention_windows.values()
    texts, kept = [ids(3, 1), ids(9, 2), ids(5, 3)], [2, 0, 1]
    cache = new_cache(target, 3)
    for row, text in enumerate(texts):
        feed(target, cache, range(row, row + 1), [text])
        cache.commit(range(row, row + 1), [len(text)])
    for counts in ([4, 1, 2], [1, 5, 3], [2, 1, 6]):
        new = [ids(num, 10 * num + row) for row, num in enumerate(counts)]
        found = feed_ragged(target, cache, range(3), new)
        for states, text, more in zip(found, texts, new, strict=True):
            assert torch.allclose(states, plain(target, text + more)[-len(more) :], atol=1e-4)
        stood = [min(num, count) for num, count in zip(kept, counts, strict=True)]
        cache.commit(range(3), stood)
        texts = [text + more[:num] for text, more, num in zip(texts, new, stood, strict=True)]
    for row, text in enumerate(texts):
        clean = new_cache(target, 1)
        feed(target, clean, range(1), [text])
        assert cache.lengths[row] == len(text)
        for layer, other in zip(cache.layers, clean.layers, strict=True):
            for have, want in ((layer.keys, other.keys), (layer.values, other.values)):
                assert torch.allclose(have[row, :, : len(text)], want[0, :, : len(text)], atol=1e-4)


def test_a_target_whose_attention_is_not_reached_is_refused_before_anybody_asks(target):
    check_ragged(target)
    with pytest.raises(ValueError, match=r"target falcon: falcon cannot run rows of .* engine=vllm"):
        Engine(family("falcon", SIZES))


def test_a_target_that_reads_rows_wrongly_is_refused_even_if_nothing_fails(target, monkeypatch):
    """Its positions count the flat row: the shapes fit, the states are others."""
    usual = target.states

    def astray(tokens, *arguments, position_BT, **settings):
        position_BT = position_BT[:, :1] + torch.arange(tokens.shape[1])
        return usual(tokens, *arguments, position_BT=position_BT, **settings)

    monkeypatch.setattr(target, "states", astray)
    with pytest.raises(ValueError, match=r"rows of different lengths .*relative error 0\.\d+"):
        check_ragged(target)
