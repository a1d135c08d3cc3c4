"""Anchors, labels, spans and masks, against hand-made answers and a slow second writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import tensor

from drafters.ops import (
    Span,
    block_labels,
    context_mask,
    decay_weights,
    document_spans,
    sample_anchors,
    valid_anchors,
)

CASE = json.loads((Path(__file__).parent / "cases" / "t02_attention_masks.json").read_text())

# Two rows of nine: documents of 5 and 4 tokens, then of 6 and 2 and one of padding.
DOC = tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, -1]])
MASK = tensor([[0, 1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 1, 1, 0, 1, 1, 1, 1]]).bool()
TOKENS = torch.arange(100, 118).view(2, 9)


def anchors() -> torch.Tensor:
    return valid_anchors(MASK, DOC).flatten().nonzero().squeeze(1)


def visible(mask_RC: torch.Tensor, query: int) -> list[int]:
    return mask_RC[query].nonzero().squeeze(1).tolist()


# Anchors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_mates", [0, 1, 3])
def test_anchor_and_first_label_are_both_supervised_with_any_batch_mates(batch_mates):
    case = CASE["anchor_choice"]
    mask_T = tensor(case["loss_mask"]).bool()
    mask_BT = torch.stack([mask_T, *[torch.ones_like(mask_T)] * batch_mates])
    found = valid_anchors(mask_BT, torch.zeros_like(mask_BT, dtype=torch.long))
    assert found[0].nonzero().squeeze(1).tolist() == case["valid_anchors"]


def test_an_anchor_has_its_first_label_in_its_own_document_and_row():
    # 4 is the last token of its document and 17 is padding, though the mask is on over both borders.
    assert anchors().tolist() == [1, 2, 3, 5, 11, 15]


def test_the_first_anchor_is_the_first_token_of_an_answer():
    mask_BT = tensor([[0, 0, 0, 1, 1, 1]]).bool()
    assert valid_anchors(mask_BT, torch.zeros(1, 6, dtype=torch.long))[0].tolist() == [0, 0, 0, 1, 1, 0]


def long_documents() -> tuple[torch.Tensor, torch.Tensor]:
    """Documents of 40, 4 and 20 tokens in one row, of 64 in the other; all supervised."""
    doc_BT = tensor([[0] * 40 + [1] * 4 + [2] * 20, [0] * 64])
    return valid_anchors(torch.ones_like(doc_BT).bool(), doc_BT), doc_BT


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 1.0])
def test_a_share_of_every_document_is_drawn_once_each_and_in_order(share):
    valid_BT, doc_BT = long_documents()
    found = sample_anchors(valid_BT, doc_BT, share, torch.Generator().manual_seed(0))
    assert found.tolist() == sorted(set(found.tolist()))
    assert bool(valid_BT.flatten()[found].all())
    document = (doc_BT + tensor([[0], [10]])).flatten()[found]
    drawn = [int((document == d).sum()) for d in (0, 1, 2, 10)]
    assert drawn == [max(1, round(size * share)) for size in (39, 3, 19, 63)]


def test_anchors_are_a_matter_of_the_generator_and_each_is_drawn_alike():
    valid_BT, doc_BT = long_documents()
    draw = lambda seed: sample_anchors(valid_BT, doc_BT, 0.3, torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    times = torch.bincount(torch.cat([draw(seed) for seed in range(300)]), minlength=128)
    assert bool((times[~valid_BT.flatten()] == 0).all())
    of_first = times[:39].float()  # 12 of 39, so 92 times in 300 draws, give or take 8
    assert float(of_first.min()) > 60
    assert float(of_first.max()) < 125


def test_nothing_supervised_gives_no_anchor():
    nothing = torch.zeros(1, 4).bool()
    assert sample_anchors(nothing, torch.zeros(1, 4).long(), 0.5, torch.Generator()).tolist() == []


# Labels and weights --------------------------------------------------------------------------------


def test_labels_follow_the_anchor_and_end_with_its_document_row_or_supervision():
    labels_AK, valid_AK = block_labels(TOKENS, MASK, DOC, tensor([1, 3, 5, 10, 11, 15]), 4)
    assert labels_AK.tolist() == [
        [102, 103, 104, 0],  # the document ends
        [104, 0, 0, 0],
        [106, 0, 0, 0],  # 108 is supervised, 107 before it is not
        [111, 112, 0, 0],
        [112, 0, 0, 0],
        [116, 0, 0, 0],  # then padding, whose mask is on
    ]
    assert torch.equal(labels_AK > 0, valid_AK)


def test_a_block_that_leaves_the_last_row_has_no_labels_there():
    doc = torch.zeros(1, 5).long()
    labels_AK, valid_AK = block_labels(TOKENS[:1, :5], torch.ones(1, 5).bool(), doc, tensor([3]), 3)
    assert labels_AK.tolist() == [[104, 0, 0]]
    assert valid_AK.tolist() == [[True, False, False]]


def test_a_block_does_not_go_on_into_the_next_row_of_the_same_document_number():
    doc, mask = torch.zeros(2, 4).long(), torch.ones(2, 4).bool()
    _, valid_AK = block_labels(torch.arange(8).view(2, 4), mask, doc, tensor([2]), 3)
    assert valid_AK.tolist() == [[True, False, False]]


@pytest.mark.parametrize(("layout", "first"), [("dflash_block", 1), ("dspark_slot0_predicts", 0)])
def test_weights_decay_from_the_first_predicting_slot(layout, first):
    case = CASE[layout]
    drafts = case["max_drafts_per_round"]
    assert drafts == case["block_size"] - first
    assert decay_weights(drafts, 2.0, first).tolist() == pytest.approx(case["decay_gamma_2"], abs=5e-5)


@pytest.mark.parametrize(("layout", "first"), [("dflash_block", 1), ("dspark_slot0_predicts", 0)])
def test_slots_predict_the_tokens_of_their_layout(layout, first):
    case, anchor, length = CASE[layout], CASE["dflash_block"]["anchor"], CASE["dflash_block"]["context_len"]
    tokens = torch.arange(length)[None]
    ones = torch.ones_like(tokens)
    labels_AK, _ = block_labels(tokens, ones.bool(), 0 * ones, tensor([anchor]), case["block_size"] - first)
    said = {str(first + k): f"token {label}" for k, label in enumerate(labels_AK[0].tolist())}
    assert said == {slot: text for slot, text in case["predicts"].items() if text.startswith("token")}


def test_without_decay_all_drafts_weigh_alike():
    assert decay_weights(3, None).tolist() == [1, 1, 1]


# Spans and masks -----------------------------------------------------------------------------------


def test_a_span_is_a_document_up_to_its_last_anchor():
    assert document_spans(DOC, tensor([1, 3, 5, 11, 13, 15])) == [
        Span(0, 3, 0, 2), Span(5, 5, 2, 3), Span(9, 13, 3, 5), Span(15, 15, 5, 6),
    ]  # fmt: skip


def test_a_document_of_many_anchors_is_cut_so_that_masks_stay_small():
    doc = torch.zeros(1, 4096).long()
    doc[:, 100:] = 1
    anchors = torch.cat([torch.arange(90, 100), torch.arange(200, 4000)])
    spans = document_spans(doc, anchors)
    assert spans[0] == Span(0, 99, 0, 10)
    assert spans[1] == Span(100, 215, 10, 26)
    assert spans[-1] == Span(100, 3999, 10 + 16 * 237, len(anchors))
    assert [one.last for one in spans] == [*(other.first for other in spans[1:]), len(anchors)]
    assert document_spans(doc, anchors, most=2)[5] == Span(100, 201, 10, 12)


def test_rows_that_end_and_start_with_the_same_document_number_are_two_spans():
    assert document_spans(torch.zeros(2, 4).long(), tensor([2, 5])) == [Span(0, 2, 0, 1), Span(4, 5, 1, 2)]


def test_no_anchor_is_one_empty_span():
    assert document_spans(DOC, tensor([], dtype=torch.long)) == [Span(0, 0, 0, 0)]
    assert context_mask(Span(0, 0, 0, 0), tensor([], dtype=torch.long), 4).shape == (0, 0)


def test_context_is_strictly_before_the_anchor_and_the_block_sees_itself_both_ways():
    case = CASE["dflash_block"]
    mask = context_mask(Span(0, 8, 0, 1), tensor([case["anchor"]]), case["block_size"])
    for query in range(case["block_size"]):
        assert visible(mask, query) == [*case["context_keys"], *range(8, 8 + case["block_size"])]


def test_a_sliding_window_counts_from_each_query_and_is_causal_in_the_block():
    case = CASE["dflash_sliding"]
    mask = context_mask(Span(0, 5, 0, 1), tensor([case["anchor"]]), 4, case["window"])
    found = visible(mask, case["query_offset"])
    assert found == [*case["context_keys"], *[5 + offset for offset in case["block_offsets"]]]
    assert len(found) == case["total"]


def test_the_first_token_of_a_conversation_has_no_context():
    case = CASE["short_prompt"]
    mask = context_mask(Span(0, 0, 0, 1), tensor([0]), 3, case["window"])
    assert visible(mask, 0) == case["context_keys_for_anchor_0"] + [0]
    assert visible(context_mask(Span(0, 0, 0, 1), tensor([0]), 3), 0) == [0, 1, 2]


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 100])
@pytest.mark.parametrize("slots", [1, 3])
def test_masks_of_many_anchors_are_what_one_reads_off_the_definition(window, slots):
    before = [2, 3, 7]  # the second document's anchors, of three
    span, all_before = Span(10, 17, 1, 4), tensor([4, *before, 9])
    mask = context_mask(span, all_before, slots, window)
    assert mask.shape == (len(before) * slots, 7 + len(before) * slots)
    for at, anchor in enumerate(before):
        for s in range(slots):
            query = anchor + s
            wanted = [t for t in range(7) if t < anchor and (window is None or query - t < window)]
            for other in range(slots):
                if window is None or (other <= s and s - other < window):
                    wanted.append(7 + at * slots + other)
            assert visible(mask, at * slots + s) == wanted
