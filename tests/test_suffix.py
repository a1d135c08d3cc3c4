"""Suffix decoding: the tree against brute force, and what is remembered of past answers."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.suffix import (
    NO_CHILDREN,
    Acceptance,
    Node,
    PastAnswers,
    Suffix,
    SuffixConfig,
    SuffixHistory,
    SuffixTree,
    kind_of,
)


def nodes(tree: SuffixTree) -> list[Node]:
    """All nodes but the root."""
    found, waiting = [], [tree.root]
    while waiting:
        children = waiting.pop().children.values()
        found += children
        waiting += children
    return found


def followers(texts: list[list[int]], stretch: list[int]) -> list[Counter]:
    """What follows a stretch in the texts: a counter, or none where it stands nowhere."""
    size = len(stretch)
    places = [
        (text, i + size)
        for text in texts
        for i in range(len(text) - size + 1)
        if text[i : i + size] == stretch
    ]
    return [Counter(text[at] for text, at in places if at < len(text))] if places else []


def check(tree: SuffixTree, texts: list[list[int]], context: list[int], max_drafts: int) -> None:
    """Match and drafts are those that counting all stretches gives."""
    ending = next((context[i:] for i in range(len(context)) if followers(texts, context[i:])), [])
    length, node, offset = tree.match(context)
    assert length == len(ending)
    if not ending:
        return
    tokens, shares = tree.follow(node, offset, max_drafts, 0.0)
    assert len(tokens) == len(shares)
    for token, share in zip(tokens, shares, strict=True):
        (counts,) = followers(texts, ending)
        assert counts[token] == max(counts.values())
        assert share == pytest.approx(counts[token] / counts.total())
        ending = [*ending, token]
    if len(tokens) < max_drafts:  # the texts end here, or most of them do
        (counts,) = followers(texts, ending)
        assert not counts or any(token < 0 and num == max(counts.values()) for token, num in counts.items())


# The tree -----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=16), max_size=4),
    st.lists(st.integers(0, 2), max_size=16),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_a_tree_grown_token_by_token_counts_what_its_texts_hold(past, text, context, max_drafts, forgotten):
    tree = SuffixTree(len(context) + max_drafts)
    texts: deque[list[int]] = deque()
    for each in past:
        for token in each:
            tree.append(token)
        texts.append(tree.close())
    for _ in range(min(forgotten, len(texts))):
        tree.forget(texts.popleft())
    check(tree, [*texts], context, max_drafts)
    for at, token in enumerate(text):
        newest = [*text[:at], token][-len(context) :]
        check(tree, [*texts, text[:at]], newest, max_drafts)
        tree.append(token)
        check(tree, [*texts, text[: at + 1]], context, max_drafts)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=16), max_size=5), st.integers(0, 5), st.integers(2, 8))
def test_a_tree_that_forgot_is_the_tree_of_what_is_left(texts, forgotten, depth):
    tree, fresh, closed = SuffixTree(depth), SuffixTree(depth), []
    for text in texts:
        for token in text:
            tree.append(token)
        closed.append(tree.close())
    for text in closed[:forgotten]:
        tree.forget(text)
    fresh.ends = -min(forgotten, len(texts))
    for text in texts[forgotten:]:
        for token in text:
            fresh.append(token)
        fresh.close()
    assert shape(tree.root) == shape(fresh.root)
    kept = {id(text) for text in closed[forgotten:]}
    assert all(id(node.text) in kept for node in nodes(tree)), "an edge of a text that was forgotten"


def shape(node: Node):
    """A tree without whose text its edges point into. A closed text ends wherever its end token stands."""
    edge = node.text[node.start : node.start + node.length]
    return edge, node.count, {token: shape(child) for token, child in node.children.items()}


def test_a_text_of_one_token_again_and_again_costs_no_more_than_the_depth():
    tree = SuffixTree(12)
    for _ in range(500):
        tree.append(7)
        assert len(tree.open) < 12
    assert len(nodes(tree)) == 1
    length, node, offset = tree.match([7] * 8)
    assert (length, tree.follow(node, offset, 4, 0.1)) == (8, ([7] * 4, [1.0] * 4))


# Drafts -------------------------------------------------------------------------------------------------


def history(text: list[int], past: PastAnswers | None = None, **chosen) -> SuffixHistory:
    made = SuffixHistory(SuffixConfig(**chosen), past, Acceptance())
    made.extend(text)
    return made


def remembered(*answers: list[int], memory: int = 1000, **chosen) -> PastAnswers:
    past = PastAnswers(SuffixConfig(**chosen).depth, memory)
    for answer in answers:
        past.add(answer)
    return past


ABC = [1, 2, 3, 4, 81, 1, 2, 3, 5, 82, 1, 2, 3, 5, 83, 1]  # and 2 for an anchor


def test_drafts_follow_the_most_frequent_branch_with_its_share():
    tokens, shares = history(ABC).drafts(2, 4)
    assert tokens == [3, 5, 82, 1]
    assert shares == pytest.approx([1, 2 / 3, 1 / 2, 1])


def test_drafts_end_where_they_are_too_unlikely_together():
    assert history(ABC, min_probability=1 / 3 - 0.01).drafts(2, 4)[0] == [3, 5, 82, 1]
    assert history(ABC, min_probability=1 / 3 + 0.01).drafts(2, 4)[0] == [3, 5]
    assert history(ABC, min_probability=2 / 3 + 0.01).drafts(2, 4)[0] == [3]


@pytest.mark.parametrize(("factor", "wanted"), [(0.5, 1), (1.0, 3), (1.5, 4), (2.0, 6), (9.0, 8)])
def test_a_longer_match_has_more_drafts(factor, wanted):
    text = [*range(1, 20), 50, 1, 2]
    tokens, _ = history(text, factor=factor, max_drafts=8).drafts(3, 100)
    assert tokens == list(range(4, 4 + wanted))
    assert history(text, factor=factor, max_drafts=8).drafts(3, 2)[0] == [4, 5][:wanted]


def test_no_match_has_no_drafts():
    assert history([1, 2, 3]).drafts(4, 5) == ([], [])
    assert history([]).drafts(4, 5) == ([], [])


def test_at_first_the_longer_match_decides_and_the_own_text_where_they_are_equal():
    past = remembered([7, 1, 2, 3, 60, 61])
    assert history([3, 50, 51, 9, 7, 1, 2], past).drafts(3, 2)[0] == [60, 61]
    assert history([2, 3, 50, 51, 9, 2], past).drafts(3, 2)[0] == [50, 51]
    assert history([2, 3, 50, 51, 9, 2], None).drafts(3, 2)[0] == [50, 51]


def test_where_answers_mostly_ended_no_draft_is_made():
    assert history([5, 1], remembered([8, 1, 2], [8, 1, 2], [8, 1, 2, 3])).drafts(2, 4) == ([], [])


# Confidence -----------------------------------------------------------------------------------------------


def seen_once(proposer: Suffix, state, right: list[bool]) -> list[float]:
    """A text in which everything was said once before; whether it goes on as it did. The confidences."""
    row, sure = range(1), []
    for at, as_before in enumerate(right):
        marker, followed, other = 100 + 3 * at, 101 + 3 * at, 102 + 3 * at
        proposer.advance(state, row, None, torch.tensor([[marker, followed]]), [2])
        proposal = proposer.propose(state, row, torch.tensor([marker]), 1)
        assert proposal.tokens_BK.tolist() == [[followed]]
        sure.append(proposal.confidence_BK.item())
        said = torch.tensor([[marker, followed if as_before else other]])
        proposer.advance(state, row, None, said, [2])
    return sure


def test_confidence_becomes_the_share_of_such_drafts_that_were_right():
    proposer = Suffix(SuffixConfig())
    coin = random.Random(0)
    right = [coin.random() < 0.5 for _ in range(1000)]
    sure = seen_once(proposer, proposer.begin(1, 5000), right)
    assert sure[0] == 1.0, "its share"
    assert [c for c in sure[200:] if not 0.4 < c < 0.6] == []
    proposer = Suffix(SuffixConfig())
    state = proposer.begin(1, 9000)
    wrong = seen_once(proposer, state, [False] * 1000)
    assert wrong[-1] < 0.01
    state.drop([0])
    again = seen_once(proposer, state, [True] * 1000)
    assert again[0] < 0.01, "learnt from all requests"
    assert again[-1] > 0.8, "and unlearnt"


def test_a_draft_is_judged_once_and_none_after_a_wrong_one():
    acceptance = Acceptance(prior=3)
    made = SuffixHistory(SuffixConfig(factor=9.0), None, acceptance)
    made.extend([1, 2, 3, 4, 5, 6, 1, 2])
    first, second = kind_of(True, 3, 1.0), kind_of(True, 4, 1.0)
    assert made.drafts(3, 6) == ([4, 5, 6, 1, 2], [1.0] * 5)
    assert not acceptance.heard
    made.extend([3, 4, 5])  # the anchor and two drafts
    assert acceptance.heard == {first: (1.0, 4), second: (1.0, 4)}
    made.drafts(9, 6)  # in place of 6
    assert acceptance.heard == {first: (1.0, 4), second: (0.8, 5)}
    made.extend([9, 1, 2, 3])
    assert made.drafts(4, 1) == ([5], [0.8])


def test_drafts_are_those_of_which_more_are_expected_to_be_accepted():
    past = remembered([7, 1, 2, 3, 60, 61])
    made = history([3, 50, 51, 9, 7, 1, 2], past)
    assert made.drafts(3, 2)[0] == [60, 61], "the longer match"
    for _ in range(9):
        made.acceptance.hear(kind_of(False, 4, 1.0), 1.0, False)
    assert made.drafts(3, 2)[0] == [50, 51]
    for _ in range(90):
        made.acceptance.hear(kind_of(True, 1, 1.0), 1.0, False)
    assert made.drafts(3, 2)[0] == [60, 61]


# The proposer ---------------------------------------------------------------------------------------------


def test_lengths_and_confidences_are_those_of_each_row():
    proposer = Suffix(SuffixConfig(factor=1.0))
    state = proposer.begin(3, 64)
    texts = torch.tensor([ABC, [*range(20, 36)], [*range(20, 30), 5, 6, 7, 20, 21, 22]])
    proposer.advance(state, range(3), None, texts, [16] * 3)
    proposal = proposer.propose(state, range(3), torch.tensor([2, 2, 23]), 6)
    assert proposal.lengths == [2, 0, 4]
    assert proposal.tokens_BK.tolist() == [[3, 5, 0, 0], [0] * 4, [24, 25, 26, 27]]
    assert torch.allclose(proposal.confidence_BK, torch.tensor([[1, 2 / 3, 0, 0], [0] * 4, [1.0] * 4]))
    assert proposal.laws_BKV is None
    assert proposer.has_confidence


def say(proposer: Suffix, state, slot: int, prompt: list[int], answer: list[int]) -> None:
    """A request in a slot: its prompt in chunks of two, then its answer, a token a plain round."""
    row = range(slot, slot + 1)
    for at in range(0, len(prompt), 2):
        chunk = prompt[at : at + 2]
        proposer.advance(state, row, None, torch.tensor([chunk]), [len(chunk)])
    proposer.answering(state, slot)
    for token in answer:
        proposer.advance(state, row, None, torch.tensor([[token]]), [1])


def test_answers_join_the_past_when_their_request_leaves_and_prompts_do_not():
    proposer = Suffix(SuffixConfig())
    state = proposer.begin(2, 64)
    say(proposer, state, 0, [1, 2, 3, 4, 5], [11, 12, 13])
    past = state.histories[0].past
    assert not past.texts, "an answer that is not finished"
    state.drop([0])
    assert [list(text) for text in past.texts] == [[11, 12, 13, -1]]
    say(proposer, state, 1, [21, 22, 23], [])  # aborted before its first round
    state.move(1, 0)
    state.drop([0])
    proposer.advance(state, range(1), None, torch.tensor([[21, 22]]), [2])  # and within its prompt
    state.drop([0])
    assert len(past.texts) == 1
    assert proposer.propose(state, range(1), torch.tensor([11]), 2).tokens_BK.tolist() == [[12, 13]]
    assert proposer.propose(state, range(1), torch.tensor([1]), 2).lengths == [0]


def test_without_past_answers_requests_know_nothing_of_each_other():
    proposer = Suffix(SuffixConfig(past=False))
    state = proposer.begin(1, 64)
    say(proposer, state, 0, [1], [11, 12, 13])
    state.drop([0])
    assert proposer.propose(state, range(1), torch.tensor([11]), 2).lengths == [0]


def test_thousands_of_answers_stay_within_the_memory():
    chance = random.Random(0)
    past = PastAnswers(12, 200)
    for _ in range(3000):
        past.add([chance.randrange(3) if chance.random() < 0.3 else 7 for _ in range(chance.randint(0, 60))])
        assert past.num_tokens == sum(len(text) - 1 for text in past.texts) <= 200
    assert past.num_tokens > 100
    found = nodes(past.tree)
    assert len(found) <= 2 * 200
    assert not NO_CHILDREN
    leaves = [node for node in found if not node.children]
    assert {id(node.children) for node in leaves} == {id(NO_CHILDREN)}
    assert len(leaves) > len(found) / 2
    assert {id(node.text) for node in found} <= {id(text) for text in past.texts}
    check(past.tree, [*past.texts], [7, 7, 7], 9)


def test_the_oldest_answer_is_forgotten_first_and_of_a_long_one_the_end_is_kept():
    past = remembered([1, 2, 3], [4, 5, 6], [7, 8], memory=6)
    assert [text[:-1] for text in past.texts] == [[4, 5, 6], [7, 8]]
    assert past.tree.match([1, 2])[0] == 0
    past.add([*range(30, 40)])
    assert [text[:-1] for text in past.texts] == [[*range(34, 40)]]


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_drafts", 0), ("factor", 0.0), ("factor", float("nan")), ("min_probability", 1.5), ("max_match", 0),
     ("memory", 0)],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"serve.suffix.{key}={value}: give"):
        SuffixConfig(**{key: value})
