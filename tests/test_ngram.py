"""Prompt lookup: the longest n-gram that ended earlier, and what last followed it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.ngram import Ngram, NgramConfig, NgramHistory

TEXTS = st.lists(st.integers(0, 2), max_size=30)


def brute(text: list[int], anchor: int, n: int, shortest: int, longest: int) -> list[int]:
    """Longest n-gram first, every place it may have ended, the last one first."""
    whole = [*text, anchor]
    for size in range(longest, shortest - 1, -1):
        if size > len(whole):
            continue
        for end in range(len(text), size - 1, -1):
            if whole[end - size : end] == whole[len(whole) - size :]:
                copied = whole
                for k in range(n):
                    copied = [*copied, copied[end + k]]
                return copied[len(whole) :]
    return []


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(0, 2), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.data())
def test_drafts_are_those_of_a_search_through_the_whole_text(text, anchor, n, shortest, more, data):
    history = NgramHistory(shortest, shortest + more)
    cut = data.draw(st.integers(0, len(text)))
    history.extend(text[:cut])
    history.drafts(anchor, n)  # leaves nothing behind
    history.extend(text[cut:])
    assert history.drafts(anchor, n)[0] == brute(text, anchor, n, shortest, shortest + more)


def test_the_longer_ngram_wins_over_the_later_one():
    history = NgramHistory(1, 3)
    history.extend([5, 6, 7, 8, 1, 7, 9, 2, 5, 6])
    assert history.drafts(7, 2)[0] == [8, 1]


def test_of_equally_long_ones_the_last_wins():
    history = NgramHistory(1, 3)
    history.extend([5, 6, 1, 5, 6, 2, 5])
    assert history.drafts(6, 2)[0] == [2, 5]


def test_a_copy_that_reaches_the_end_of_the_text_reads_on_in_itself():
    history = NgramHistory(1, 2)
    history.extend([1, 2, 3, 1, 2])
    assert history.drafts(3, 7)[0] == [1, 2, 3, 1, 2, 3, 1]


def test_rows_without_a_match_have_no_drafts():
    proposer = Ngram(NgramConfig(shortest=2, longest=3, max_drafts=4))
    state = proposer.begin(3, 64)
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 1, 2], [7, 7, 7, 7, 7]]
    proposer.advance(state, range(3), None, torch.tensor(texts), [5, 5, 2])
    proposal = proposer.propose(state, range(3), torch.tensor([6, 3, 7]), 3)
    assert proposal.lengths == [0, 3, 3]
    assert proposal.tokens_BK.tolist() == [[0, 0, 0], [1, 2, 3], [7, 7, 7]]
    assert proposal.laws_BKV is None
    assert proposal.confidence_BK is None
    none = proposer.propose(state, range(1), torch.tensor([6]), 3)
    assert (none.lengths, tuple(none.tokens_BK.shape), none.tokens_BK.dtype) == ([0], (1, 0), torch.int64)


def test_only_the_kept_tokens_of_a_row_are_text():
    proposer = Ngram(NgramConfig(shortest=1, longest=2))
    state = proposer.begin(2, 64)
    proposer.advance(state, range(2), None, torch.tensor([[1, 2, 3], [4, 5, 6]]), [1, 3])
    proposer.advance(state, range(1, 2), None, torch.tensor([[7, 8]]), [1])
    assert [history.text for history in state.histories] == [[1], [4, 5, 6, 7]]


def test_a_slot_that_was_dropped_remembers_nothing_and_a_moved_one_all():
    proposer = Ngram(NgramConfig(shortest=1, longest=2))
    state = proposer.begin(2, 64)
    proposer.advance(state, range(2), None, torch.tensor([[1, 2, 3], [4, 5, 6]]), [3, 3])
    state.drop([0])
    assert proposer.propose(state, range(1), torch.tensor([1]), 2).lengths == [0]
    state.move(1, 0)
    proposal = proposer.propose(state, range(2), torch.tensor([4, 4]), 2)
    assert proposal.lengths == [2, 0]
    assert proposal.tokens_BK[0].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"shortest": 0}, "serve.ngram.shortest=0"),
        ({"shortest": 5, "longest": 4}, "serve.ngram.longest=4"),
        ({"max_drafts": 0}, "serve.ngram.max_drafts=0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, named):
    with pytest.raises(ValueError, match=named):
        NgramConfig(**settings)
