"""proposer= by name; a lookup before a trained drafter; the tokens are the target's own with all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from drafters.method import all_methods
from drafters.target import Target
from drafters.types import Proposal
from serve.engine import Engine
from serve.law import Sampling
from serve.ngram import Ngram, NgramConfig
from serve.proposers import Combined, ProposerConfig, build, chosen, drafts_asked, known_names
from serve.suffix import Suffix, SuffixConfig
from serve.types import Request
from tests import tiny
from tests.standins import Chance

CONFIG = ProposerConfig(
    NgramConfig(shortest=1, max_drafts=5), SuffixConfig(max_drafts=6, max_match=8, memory=60), trust=3
)


def drafter_of(method: str, of: Target):
    """A random drafter of any method, in which every input matters."""
    if method != "eagle3":
        return tiny.loud(of, method)
    drafter = tiny.build(all_methods()[method].config_class(unroll=4, init="random"), of).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    return drafter


@pytest.fixture(scope="module")
def target():
    """Attention that only whispers: answers run in circles, and leave them now and then."""
    model = tiny.llama(layers=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.02)
        model.lm_head.weight.mul_(4)  # and at temperature 1 too
    return Target(model, tiny.tokenizer(), "circles")


@pytest.fixture(scope="module")
def asked():
    """Prompts that say everything twice, one of them asked again; answers of several lengths."""
    lengths = {3: 40, 4: 25, 5: 33, 6: 1, 7: 12}
    requests = [
        Request(tiny.example(9, 9, seed=seed).ids * 2, num, name=f"{seed}") for seed, num in lengths.items()
    ]
    return [*requests, Request(requests[0].prompt, 40, name="again")]


@pytest.fixture(scope="module")
def wanted(target, asked):
    return {request.name: tiny.greedy(target, request.prompt, request.max_new_tokens) for request in asked}


# Names --------------------------------------------------------------------------------------------------


def test_every_name_builds_what_it_says(target):
    assert build("none", None, CONFIG) is None
    assert build(None, None, CONFIG) is None
    assert isinstance(build("ngram", None, CONFIG), Ngram)
    assert isinstance(build("suffix", None, CONFIG), Suffix)
    for method in all_methods():
        drafter = drafter_of(method, target)
        assert build(None, drafter, CONFIG) is drafter
        assert build(method, drafter, CONFIG) is drafter
        assert build("none", drafter, CONFIG) is None
        for cheap, kind in (("ngram", Ngram), ("suffix", Suffix)):
            made = build(f"{cheap}+{method}", drafter, CONFIG)
            assert isinstance(made, Combined)
            assert (type(made.first), made.second, made.trust) == (kind, drafter, 3)
            assert made.layer_ids == drafter.layer_ids
            assert made.has_confidence == (cheap == "suffix" and drafter.has_confidence)
            assert made.max_drafts == max(made.first.max_drafts, drafter.max_drafts)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "sufix",
            ["proposer=sufix", "Did you mean suffix?", *[n for n in known_names() if "+" not in n]],
        ),
        ("suffix+dspak", ["Did you mean suffix+dspark?"]),
        ("dspark+suffix", ["ngram+ or suffix+ before a method"]),
        ("suffix+", ["write one of"]),
        ("+dflash", ["write one of"]),
        ("none+dflash", ["write one of"]),
        ("", ["write one of"]),
        ("dspark", ["proposer=dspark", "is dflash", "write dflash"]),
        ("suffix+dspark", ["is dflash", "write suffix+dflash"]),
    ],
)
def test_a_name_that_cannot_be_is_refused_with_one_that_can(target, name, words):
    with pytest.raises(ValueError, match="proposer=") as error:
        build(name, tiny.dflash(target), CONFIG)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize("name", ["dflash", "ngram+dflash"])
def test_a_method_without_a_drafter_is_refused(name):
    with pytest.raises(ValueError, match=rf"proposer={name.replace('+', '.')}.*drafter=DIR"):
        build(name, None, CONFIG)


def test_no_trust_is_refused():
    with pytest.raises(ValueError, match="serve.trust=0: give"):
        ProposerConfig(trust=0)


# The cheap one first ------------------------------------------------------------------------------------


@dataclass
class Fixed:
    """Proposes what it was given, and counts how often it is asked."""

    proposal: Proposal
    max_drafts: int
    has_confidence: bool = True
    layer_ids: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def begin(self, slots: int, capacity: int) -> None:
        return None

    def propose(self, state, rows: range, anchors_B, n: int) -> Proposal:
        self.asked.append(n)
        tokens_BK, sure_BK = (each[:, :n] for each in (self.proposal.tokens_BK, self.proposal.confidence_BK))
        lengths = self.proposal.lengths and [min(num, n) for num in self.proposal.lengths]
        return Proposal(tokens_BK, None, sure_BK, lengths)


def fixed(lengths: list[int] | None, first: int, most: int, rows: int = 3, **settings) -> Fixed:
    tokens_BK = first + torch.arange(rows * most).view(rows, most)
    return Fixed(Proposal(tokens_BK, None, tokens_BK / 100, lengths), most, **settings)


def test_a_row_with_too_few_cheap_drafts_takes_the_trained_ones():
    cheap, costly = fixed([4, 2, 0], 0, 4), fixed(None, 50, 3)
    combined = Combined(cheap, costly, trust=3)
    proposal = combined.propose(combined.begin(3, 64), range(3), torch.zeros(3).long(), 4)
    assert proposal.tokens_BK.tolist() == [[0, 1, 2, 3], [53, 54, 55, 0], [56, 57, 58, 0]]
    assert proposal.lengths == [4, 3, 3]
    assert torch.equal(proposal.confidence_BK, proposal.tokens_BK / 100)
    assert proposal.laws_BKV is None
    assert (cheap.asked, costly.asked) == ([4], [3]), "no more than it was trained for"


@pytest.mark.parametrize(
    ("lengths", "n", "is_asked"),
    [([4, 4, 3], 4, False), ([4, 4, 2], 4, True), ([3, 3, 3], 3, False), ([3, 3, 2], 3, True)],
)
def test_the_trained_drafter_rests_while_every_row_has_enough(lengths, n, is_asked):
    cheap, costly = fixed(lengths, 0, 4), fixed(None, 50, 3)
    combined = Combined(cheap, costly, trust=3)
    proposal = combined.propose(combined.begin(3, 64), range(3), torch.zeros(3).long(), n)
    assert bool(costly.asked) == is_asked
    if not is_asked:
        drafts = cheap.proposal.tokens_BK[:, :n].tolist()
        assert (proposal.lengths, proposal.tokens_BK.tolist()) == (lengths, drafts)


def test_a_trained_drafter_of_no_drafts_is_not_asked_and_short_matches_stand():
    cheap, costly = fixed([4, 2, 0], 0, 4), fixed(None, 50, 3)
    combined = Combined(cheap, costly, trust=3, n=0)
    proposal = combined.propose(combined.begin(3, 64), range(3), torch.zeros(3).long(), 4)
    assert proposal.lengths == [4, 2, 0]
    assert not costly.asked


@pytest.mark.parametrize("n", [1, 2])
def test_a_short_match_is_not_enough_because_few_drafts_are_asked_for(n):
    cheap, costly = fixed([2, 3, 4], 0, 4), fixed(None, 50, 3)
    combined = Combined(cheap, costly, trust=3)
    proposal = combined.propose(combined.begin(3, 64), range(3), torch.zeros(3).long(), n)
    assert proposal.tokens_BK.tolist() == [row[:n] for row in ([50, 51], [4, 5], [8, 9])]
    assert torch.equal(proposal.confidence_BK, proposal.tokens_BK / 100)
    assert proposal.lengths == [n, n, n]
    assert (cheap.asked, costly.asked) == ([3], [n]), "only what is needed to know whether there is enough"
    cheap.proposal = fixed([3, 3, 4], 0, 4).proposal
    rested = combined.propose(combined.begin(3, 64), range(3), torch.zeros(3).long(), n)
    assert rested.tokens_BK.tolist() == [row[:n] for row in ([0, 1], [4, 5], [8, 9])]
    assert rested.lengths == [n, n, n]
    assert len(costly.asked) == 1


@pytest.mark.parametrize("n", [0, 2])
def test_apart_the_number_asked_for_is_the_trained_drafters_alone(n):
    cheap, costly = fixed([4, 2, 0], 0, 4), fixed(None, 50, 3)
    combined = Combined(cheap, costly, trust=3, apart=True)
    proposal = combined.propose(combined.begin(3, 64), range(3), torch.zeros(3).long(), n)
    assert costly.asked == ([2] if n else [])
    assert proposal.lengths == ([4, 2, 2] if n else [4, 2, 0])
    assert proposal.copied == ([True, False, False] if n else [True] * 3)
    assert proposal.tokens_BK[0].tolist() == [0, 1, 2, 3]


def test_a_lookup_of_few_drafts_is_trusted_with_all_it_can_make():
    cheap, costly = fixed([2, 2, 2], 0, 2), fixed(None, 50, 3)
    combined = Combined(cheap, costly, trust=4)
    combined.propose(combined.begin(3, 64), range(3), torch.zeros(3).long(), 7)
    assert not costly.asked


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 0, 4]])
def test_confidences_of_one_proposer_alone_are_left_out(lengths):
    for one, other in ((True, False), (False, True)):
        cheap = fixed(lengths, 0, 4, has_confidence=one)
        combined = Combined(cheap, fixed(None, 50, 3, has_confidence=other), trust=3)
        proposal = combined.propose(combined.begin(3, 64), range(3), torch.zeros(3).long(), 4)
        assert not combined.has_confidence
        assert proposal.confidence_BK is None


def test_a_slot_is_dropped_and_moved_in_both():
    combined = Combined(Ngram(NgramConfig(shortest=1)), Ngram(NgramConfig(shortest=1)), trust=1)
    state = combined.begin(2, 64)
    combined.advance(state, range(2), None, torch.tensor([[1, 2], [3, 4]]), [2, 2])
    state.drop([0])
    state.move(1, 0)
    for own in (state.first, state.second):
        assert [history.text for history in own.histories] == [[3, 4], []]


def test_rows_without_any_draft_make_a_proposal_of_none():
    none = Proposal(torch.zeros(2, 0).long(), lengths=[0, 0])
    made = chosen([True, False], none, none, False)
    assert (tuple(made.tokens_BK.shape), made.lengths) == ((2, 0), [0, 0])


@pytest.mark.parametrize("method", sorted(all_methods()))
def test_a_drafter_that_was_not_asked_for_rounds_drafts_as_if_it_had_been(target, method):
    drafter = drafter_of(method, target)
    ids = tiny.example(30, 30, seed=2).ids
    states = target.states(torch.tensor([ids]), drafter.layer_ids)
    rows, proposals = range(1), []
    with torch.inference_mode():
        for always in (True, False):
            state, at = drafter.begin(1, 64), 0
            for kept in (8, 1, 3, 1, 4):
                drafter.advance(
                    state,
                    rows,
                    states[:, at : at + 5 + kept],
                    torch.tensor([ids[at : at + 5 + kept]]),
                    [kept],
                )
                at += kept
                if always:
                    drafter.propose(state, rows, torch.tensor([ids[at]]), 3)
            proposals.append(drafter.propose(state, rows, torch.tensor([ids[at]]), 4))
    one, other = proposals
    assert torch.equal(one.tokens_BK, other.tokens_BK)
    assert len(set(one.tokens_BK.flatten().tolist())) > 1


# How many -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ngram", "suffix", "dflash"])
def test_n_fixes_the_drafts_of_every_proposer(target, asked, name):
    for n in (0, 2):
        proposer = proposer_of(name, target)
        answers = [*Engine(target, proposer, drafts_asked(proposer, n), capacity=72).run(asked)]
        assert max(done.drafted for answer in answers for done in answer.rounds) == n
    with pytest.raises(ValueError, match=r"n=7: .* at most"):
        Engine(target, proposer, drafts_asked(proposer, 7), capacity=72)
    assert Engine(target, proposer, drafts_asked(proposer, None), capacity=72).num_drafts == {
        "ngram": 5, "suffix": 6, "dflash": 4
    }[name]  # fmt: skip


@pytest.mark.parametrize("n", [0, 2])
def test_n_of_a_combination_is_that_of_its_trained_drafter(target, asked, n):
    drafter = drafter_of("dflash", target)
    proposer = build("ngram+dflash", drafter, replace(CONFIG, n=n))
    engine = Engine(target, proposer, drafts_asked(proposer, n), capacity=72)
    rounds = [done.drafted for answer in engine.run(asked) for done in answer.rounds]
    assert max(rounds) == 5, "those of the lookup"
    assert {num for num in rounds if num < 5} >= {n}


# Through the engine ---------------------------------------------------------------------------------------

NAMES = [
    "ngram",
    "suffix",
    *(f"{cheap}+{method}" for cheap in ("ngram", "suffix") for method in all_methods()),
]


def proposer_of(name: str, of: Target):
    method = name.rpartition("+")[2]
    return build(name, drafter_of(method, of) if method in all_methods() else None, CONFIG)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_no_proposer_changes_a_greedy_token(target, asked, wanted, name, slots):
    for n in (1, 3, 6) if "+" not in name else (4,):
        proposer = proposer_of(name, target)
        n = min(n, proposer.max_drafts)
        engine = Engine(target, proposer, n, slots=slots, capacity=72, chunk=7)
        answers = {answer.request.name: answer for answer in engine.run(asked)}
        assert {key: answer.tokens for key, answer in answers.items()} == wanted
        rounds = [done for answer in answers.values() for done in answer.rounds]
        found = {done.accepted for done in rounds}
        assert min(found) == 0, f"N={n}: the test needs refusals"
        assert max(found) >= min(n, 3), f"N={n}: the test needs acceptances"


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["ngram", "suffix", "suffix+eagle3", "suffix+dspark"])
def test_a_seed_says_the_same_with_every_proposer(target, asked, name, slots):
    requests = [
        Request(each.prompt, each.max_new_tokens, Sampling(temperature=1.0, seed=at), name=each.name)
        for at, each in enumerate(asked)
    ]
    plain = {a.request.name: a.tokens for a in Engine(target, slots=2, capacity=72).run(requests)}
    engine = Engine(target, proposer_of(name, target), 4, slots=slots, capacity=72, chunk=7)
    answers = {answer.request.name: answer for answer in engine.run(requests)}
    assert {key: answer.tokens for key, answer in answers.items()} == plain
    assert sum(done.accepted for answer in answers.values() for done in answer.rounds) > 5
    assert plain["3"] != plain["again"], "another seed"


def test_an_answer_that_was_given_before_is_copied(target, asked, wanted):
    """With past answers the second time takes fewer rounds, without them as many."""
    request = asked[0]
    rounds = {}
    for past in (True, False):
        config = ProposerConfig(suffix=SuffixConfig(max_drafts=6, past=past))
        engine = Engine(target, build("suffix", None, config), capacity=72)
        first, second = engine.run([request, request])
        assert first.tokens == second.tokens == wanted[request.name]
        rounds[past] = len(first.rounds), len(second.rounds)
    assert rounds[True][0] == rounds[False][0] == rounds[False][1]
    assert rounds[True][1] < rounds[True][0]


class Plainly(Chance):
    """Asks for drafts in no round."""

    def drafts(self, rows: int) -> int:
        return 0


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["suffix", "suffix+dflash"])
def test_answers_and_no_prompts_are_remembered_drafted_or_not(target, asked, wanted, name, slots, drafting):
    """All that the target has processed: an answer without its last token."""
    config = replace(CONFIG, suffix=replace(CONFIG.suffix, memory=1000))
    proposer = build(name, drafter_of("dflash", target), config)
    schedule = None if drafting else Plainly(0)
    engine = Engine(target, proposer, slots=slots, capacity=72, chunk=7, schedule=schedule)
    done = [answer.request.name for answer in engine.run(asked)]
    state = engine.state if name == "suffix" else engine.state.first
    found = [text[:-1] for text in state.histories[0].past.texts]
    assert sorted(found) == sorted(wanted[each][:-1] for each in done if len(wanted[each]) > 1)


def test_an_aborted_request_leaves_its_slot_to_the_next(target, asked, wanted):
    engine = Engine(target, proposer_of("suffix+dflash", target), 4, slots=2, capacity=72, chunk=7)
    aborted, *others = [engine.submit(request) for request in asked]
    while len(aborted.tokens) < 5:
        engine.step()
    engine.abort(aborted)
    while engine.busy:
        engine.step()
    for answer in others:
        assert answer.tokens == wanted[answer.request.name]


@pytest.mark.parametrize(
    ("name", "n", "words"),
    [
        ("none", 5, "serve.n=5: none makes at most 0 drafts"),
        ("suffix+dflash", 99, "serve.n=99: this dflash makes at most 4 drafts"),
        ("dflash", 9, "serve.n=9: this dflash makes at most 4 drafts"),
        (None, 9, "serve.n=9: this dflash makes at most 4 drafts"),
        ("suffix", 99, "serve.n=99: suffix makes at most 16 drafts"),
    ],
)
def test_more_drafts_than_there_can_be_are_refused_before_anything_runs(name, n, words):
    drafter = tiny.dflash(tiny.target(layers=3))
    with pytest.raises(ValueError, match=words):
        build(name, drafter, ProposerConfig(n=n))


def test_a_negative_number_of_drafts_is_refused():
    with pytest.raises(ValueError, match="serve.n=-1: give 0"):
        ProposerConfig(n=-1)
