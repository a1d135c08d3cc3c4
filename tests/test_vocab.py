"""The draft vocabulary: what is kept, how ids are mapped, which maps are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import tensor

from drafters.vocab import DraftVocab, choose, count_tokens, from_maps


def test_the_most_frequent_ids_are_kept_and_the_lower_of_two_equals():
    vocab = choose(tensor([5, 0, 9, 5, 5, 1]), 3)
    assert vocab.kept_N.tolist() == [0, 2, 3]
    assert (len(vocab), vocab.size) == (3, 6)


def test_an_end_of_turn_token_is_kept_however_rare():
    assert choose(tensor([5, 0, 9, 5, 5, 0]), 3, always=[5]).kept_N.tolist() == [0, 2, 5]


def test_kept_ids_and_offsets_are_those_of_the_case():
    case = json.loads((Path(__file__).parent / "cases" / "d12_vocab_counts.json").read_text())
    counts_V = torch.zeros(case["target_vocab"], dtype=torch.long)
    for token, count in case["counts"].items():
        counts_V[int(token)] = count
    padded = case["padded_target"]
    longer_V = torch.nn.functional.pad(counts_V, (0, padded["config_vocab"] - len(counts_V)))
    for forced, want in (([], "expect_without_forced"), (case["must_include_ids"], "expect_with_forced")):
        for counts, usable in ((counts_V, None), (longer_V, padded["tokenizer_len"])):
            vocab = choose(counts, case["draft_vocab"], forced, usable)
            assert vocab.kept_N.tolist() == case[want]["kept"]
            assert vocab.d2t_N.tolist() == case[want]["d2t_offsets"]
            assert vocab.t2d_V.nonzero().flatten().tolist() == case[want]["kept"]
            assert len(vocab.t2d_V) == len(counts)


def test_padding_rows_of_the_head_are_never_kept():
    counts = tensor([0, 0, 1, 7, 7, 7])
    assert choose(counts, 3, usable=3).kept_N.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"method\.draft_vocab=4.* 3 usable"):
        choose(counts, 4, usable=3)


def test_a_tokenizer_longer_than_the_head_adds_nothing():
    assert choose(tensor([1, 2]), 2, usable=9).kept_N.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"draft_vocab=3.* 2 usable"):
        choose(tensor([1, 2]), 3, usable=9)


def test_counting_adds_up_over_rows():
    counts = count_tokens([tensor([0, 2, 2]), tensor([2, 3])], 5)
    assert counts.tolist() == [1, 0, 3, 1, 0]
    assert choose(counts, 2).covers(counts) == pytest.approx(4 / 5)
    assert choose(counts, 3).covers(counts) == 1
    assert choose(counts, 2).covers(torch.zeros(5)) == 0


def test_maps_lead_from_draft_ids_to_target_ids_and_back():
    vocab = DraftVocab(tensor([1, 4, 5, 9]), 11)
    draft_ids = torch.arange(4)
    assert vocab.d2t_N.dtype == torch.int64
    assert (draft_ids + vocab.d2t_N).tolist() == [1, 4, 5, 9]  # offsets, as vLLM adds them
    assert vocab.t2d_V.dtype == torch.bool
    assert vocab.t2d_V.nonzero().squeeze(1).tolist() == [1, 4, 5, 9]
    assert vocab.draft_id_V[vocab.kept_N].tolist() == draft_ids.tolist()
    assert vocab.draft_id_V.tolist() == [-1, 0, -1, -1, 1, 2, -1, -1, -1, 3, -1]


def test_written_maps_read_back_as_the_same_vocabulary():
    vocab = DraftVocab(tensor([0, 1, 3, 7]), 8)
    for t2d in (vocab.t2d_V, vocab.t2d_V.int(), None):
        assert torch.equal(from_maps(vocab.d2t_N, t2d, 8).kept_N, vocab.kept_N)
    assert torch.equal(from_maps(vocab.d2t_N.int(), None, 8).kept_N, vocab.kept_N)


def test_a_vocabulary_of_all_ids_has_offsets_of_zero():
    vocab = choose(tensor([3, 1, 2]), 3)
    assert vocab.d2t_N.tolist() == [0, 0, 0]
    assert from_maps(vocab.d2t_N, None, 3).kept_N.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("kept", "match"),
    [
        ([3], "two or more"),
        ([], "two or more"),
        ([3, 1], "strictly ascending"),
        ([1, 1, 2], "strictly ascending"),
        ([1, 10], r"id 10 is outside the target's 10 ids"),
        ([-2, 5], r"id -2 is outside the target's 10 ids"),
    ],
)
def test_ids_that_are_no_subset_of_the_target_are_refused(kept, match):
    with pytest.raises(ValueError, match=match):
        DraftVocab(tensor(kept, dtype=torch.long), 10)


@pytest.mark.parametrize(
    ("d2t", "t2d", "match"),
    [
        ([1, 4, 3], None, "must hold offsets"),  # ids in order of frequency
        ([0, 0, 7], None, r"id 9 is outside"),  # another target's
        ([0, 3], [1, 0, 0, 1, 0, 0], "looks like absolute target ids"),
        ([0, 3], None, "looks like absolute target ids"),  # perhaps it is none: t2d would tell
        ([0, 0], [1, 0, 0, 1, 0, 0], "t2d and d2t name different tokens"),
        ([0, 3], [1, 0, 0, 0, 1], "t2d and d2t name different tokens"),  # of another length
    ],
)
def test_maps_that_contradict_each_other_or_the_target_are_refused(d2t, t2d, match):
    with pytest.raises(ValueError, match=match):
        from_maps(tensor(d2t), None if t2d is None else tensor(t2d).bool(), 6)


@pytest.mark.parametrize("d2t", [tensor(1), tensor([1.0, 2.0]), tensor([[1, 2]])])
def test_maps_that_are_no_row_of_integers_are_refused(d2t):
    with pytest.raises(ValueError, match="d2t: .* must be one row of integers"):
        from_maps(d2t, None, 8)
