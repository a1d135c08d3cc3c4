"""Slots of keys and values: what is written where, what is visible, and what a refusal leaves behind."""

import pytest
import torch

from serve.cache import SlotCache
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
