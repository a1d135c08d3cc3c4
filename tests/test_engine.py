"""Propose, verify, commit: the tokens are the target's own, whatever is drafted."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers

from drafters.target import Target
from serve.engine import Engine
from serve.law import Sampling, uniforms
from serve.types import Request, Round
from tests import tiny
from tests.standins import Chance, Drafts, Script, oracle

CASES = json.loads((Path(__file__).parent / "cases" / "s01_stop_cases.json").read_text())["cases"]
LAYOUTS = pytest.mark.parametrize("anchor_predicts", [False, True])


# Fixtures --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return tiny.target(layers=3)


@pytest.fixture(scope="module")
def asked(target):
    """Prompts of one token, of less and more than a prefill chunk; budgets that end at different times."""
    sizes = {1: 24, 5: 3, 23: 20, 9: 15, 16: 1}
    return [
        Request(tiny.example(size, size, seed=size).ids, num, name=str(at))
        for at, (size, num) in enumerate(sizes.items())
    ]


@pytest.fixture(scope="module")
def wanted(target, asked):
    return {request.name: tiny.greedy(target, request.prompt, request.max_new_tokens) for request in asked}


@pytest.fixture(scope="module")
def learned(target):
    """A drafter a layout that accepts some of its drafts on the first two of these prompts."""
    examples = [tiny.answered(target, prompt=size, seed=size) for size in (1, 23)]
    return {
        layout: tiny.trained(target, examples, steps=40, anchor_predicts=layout) for layout in (False, True)
    }


def answers_of(engine: Engine, requests: list[Request]):
    return {answer.request.name: answer for answer in engine.run(requests)}


def tokens_of(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers_of(engine, requests).items()}


# Greedy ------------------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("slots", [1, 3])
def test_an_untrained_drafter_changes_no_token(target, asked, wanted, anchor_predicts, slots):
    drafter = tiny.dflash(target, anchor_predicts=anchor_predicts)
    for n in range(drafter.max_drafts + 1):
        engine = Engine(target, drafter, n, slots=slots, capacity=64, chunk=7)
        assert tokens_of(engine, asked) == wanted, n


@LAYOUTS
@pytest.mark.parametrize("slots", [1, 3])
def test_a_drafter_that_is_sometimes_right_changes_no_token(
    target, asked, wanted, learned, anchor_predicts, slots
):
    drafter = learned[anchor_predicts]
    for n in range(1, drafter.max_drafts + 1):
        engine = Engine(target, drafter, n, slots=slots, capacity=64, chunk=7)
        answers = answers_of(engine, asked)
        assert {name: answer.tokens for name, answer in answers.items()} == wanted, n
        accepted = {r.accepted for answer in answers.values() for r in answer.rounds}
        assert accepted >= {0, 1}, f"N={n}: the test needs refusals and acceptances, found {accepted}"


@pytest.mark.parametrize("slots", [1, 3])
def test_every_number_of_accepted_drafts_gives_the_same_tokens(target, asked, wanted, slots):
    chance = random.Random(0)
    engine = Engine(target, oracle(target, lambda path: chance.randint(0, 4)), slots=slots, capacity=64)
    answers = answers_of(engine, asked)
    assert {name: answer.tokens for name, answer in answers.items()} == wanted
    assert {r.accepted for answer in answers.values() for r in answer.rounds} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_verify_different_numbers_of_drafts_keep_their_tokens(target, asked, wanted, slots, seed):
    """Rounds are ragged: some rows have no drafts, others all; a schedule hears of each."""
    schedule, chance = Chance(4, seed), random.Random(seed)
    drafts = oracle(target, lambda path: chance.randint(0, 4))
    engine = Engine(target, drafts, slots=slots, capacity=64, chunk=7, schedule=schedule)
    answers = answers_of(engine, asked)
    assert {name: answer.tokens for name, answer in answers.items()} == wanted
    assert (slots == 1) or any(len(set(drafted)) > 1 for drafted, _, _ in schedule.rounds)
    heard = sorted(
        pair for drafted, accepted, _ in schedule.rounds for pair in zip(drafted, accepted, strict=True)
    )
    kept = sorted((r.drafted, r.accepted) for answer in answers.values() for r in answer.rounds)
    assert [drafted for drafted, _ in heard] == [drafted for drafted, _ in kept]
    assert all(accepted <= drafted for drafted, accepted in heard)
    assert {accepted for _, accepted in heard} >= {0, 1, 2}


def test_plain_decoding_asks_the_drafter_for_nothing(target, asked, wanted):
    def never(path, n):
        raise AssertionError("asked for drafts")

    engine = Engine(target, Drafts(never), 0, slots=2, capacity=64)
    answers = answers_of(engine, asked)
    assert {name: answer.tokens for name, answer in answers.items()} == wanted
    assert {r for answer in answers.values() for r in answer.rounds} == {Round(0, 0, 1)}


def test_the_listener_hears_every_token_once_and_in_order(target, asked, wanted):
    heard: dict[str, list[int]] = {}

    def listen(answer, tokens):
        heard.setdefault(answer.request.name, []).extend(tokens)

    engine = Engine(target, oracle(target, lambda path: 2), slots=2, capacity=64)
    list(engine.run(asked, listen))
    assert heard == wanted


def test_more_drafts_make_fewer_rounds(target, asked):
    """tau of an oracle is N + 1 but for the end of the answer, so that drafts are really used."""
    request = asked[0]
    for n in (1, 2, 4):
        (answer,) = Engine(target, oracle(target, lambda path: 4), n, capacity=64).run([request])
        assert len(answer.rounds) == -(-(request.max_new_tokens - 1) // (n + 1))
        assert answer.tau == (request.max_new_tokens - 1) / len(answer.rounds)


# Stops and caps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, 10))
def test_a_stop_token_inside_an_accepted_block_ends_the_answer_there(at):
    of = tiny.target(layers=3)
    prompt = tiny.example(8, 8, seed=3).ids
    path = tiny.greedy(of, prompt, 20)
    of.stop_ids = (path[at],)
    (answer,) = Engine(of, oracle(of, lambda _: 4), capacity=64).run([Request(prompt, 20)])
    assert answer.tokens == tiny.greedy(of, prompt, 20)
    assert answer.finish == "stop"
    assert answer.tokens.index(path[at]) == len(answer.tokens) - 1
    for done in answer.rounds:
        assert done.accepted <= min(4, done.emitted)
    assert 1 + sum(done.emitted for done in answer.rounds) == len(answer.tokens)


def test_a_schedule_hears_of_the_drafts_that_were_emitted_alone():
    """Two more stand behind the stop token; nobody gains from them."""
    schedule = Chance(4)
    schedule.drafts, schedule.prefixes = lambda rows: 4, lambda proposal, rows: [4] * rows
    drafts = Drafts(lambda path, n: ([6, 9, 7, 8], None))
    engine = Engine(Script([0, 5, 6, 9, 7, 8, 4], (9,)), drafts, schedule=schedule)
    (answer,) = engine.run([Request([0], 20)])
    assert answer.tokens == [5, 6, 9]
    assert [(drafted, accepted) for drafted, accepted, _ in schedule.rounds] == [([4], [2])]


def test_a_stop_token_that_is_drafted_and_refused_ends_nothing(target):
    prompt = tiny.example(8, 8, seed=3).ids
    want = tiny.greedy(target, prompt, 12)
    (stop,) = target.stop_ids
    assert stop not in want
    (answer,) = Engine(target, Drafts(lambda path, n: ([stop] * n, None)), capacity=64).run(
        [Request(prompt, 12)]
    )
    assert (answer.tokens, answer.finish) == (want, "length")


def test_a_stop_token_from_the_prefill_makes_an_answer_without_rounds(target):
    of = tiny.target(layers=3)
    prompt = tiny.example(8, 8, seed=3).ids
    of.stop_ids = tuple(tiny.greedy(of, prompt, 1))
    others = [Request(tiny.example(5, 5, seed=s).ids, 6, name=f"{s}") for s in (4, 5)]
    answers = answers_of(
        Engine(of, oracle(of, lambda _: 1), slots=2, capacity=64), [Request(prompt, 9, name="stops"), *others]
    )
    assert answers["stops"].tokens == list(of.stop_ids)
    assert answers["stops"].finish == "stop"
    assert answers["stops"].rounds == []
    for request in others:
        assert answers[request.name].tokens == tiny.greedy(of, request.prompt, 6)


@pytest.mark.parametrize("limit", range(1, 13))
def test_an_answer_has_exactly_as_many_tokens_as_asked_for(target, limit):
    prompt = tiny.example(8, 8, seed=3).ids
    (answer,) = Engine(target, oracle(target, lambda _: 4), capacity=64).run([Request(prompt, limit)])
    assert answer.tokens == tiny.greedy(target, prompt, limit)
    assert answer.finish == "length"
    assert 1 + sum(done.emitted for done in answer.rounds) == limit


@pytest.mark.parametrize("case", [c for c in CASES if "round" in c], ids=lambda case: case["name"])
def test_handed_rounds_emit_what_they_should(case):
    """The whole round is accepted: all but its last token are drafts."""
    says = [0, *case["out_before"], *case["round"]]
    drafts = case["round"][:-1]
    engine = Engine(
        Script(says, (case["stop_token"],)), Drafts(lambda path, n: (drafts[:n], None)), len(drafts)
    )
    (answer,) = engine.run([Request([0], case["max_new"])])
    assert answer.tokens == case["emit"]
    assert answer.finish == case["finish"]
    assert len(answer.rounds) == 1
    assert 1 + answer.rounds[0].emitted == len(case["emit"])


def test_a_handed_stop_token_that_the_target_refuses_leaves_the_answer_open():
    (case,) = [c for c in CASES if "target" in c]
    says = [0, 7, *case["target"], 8, 9]
    engine = Engine(Script(says, (99,)), Drafts(lambda path, n: (case["draft"], None)), 2)
    engine.submit(Request([0], 10))
    assert engine.step() == []
    (answer,) = engine.active
    assert answer.tokens == [7, *case["emit"]]
    assert answer.finish is case["finish"]


def test_the_handed_answer_of_one_token_makes_no_round():
    (case,) = [c for c in CASES if "draft_rounds" in c]
    engine = Engine(Script([0, case["first_token_from_prefill"]], (99,)), Drafts(None), 2)
    (answer,) = engine.run([Request([0], case["max_new"])])
    assert answer.tokens == case["emit"]
    assert len(answer.rounds) == case["draft_rounds"]
    assert answer.finish == case["finish"]


# State ----------------------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("slots", [1, 3])
def test_rejected_rows_leave_no_trace_in_cache_and_drafter(target, asked, learned, anchor_predicts, slots):
    """After any number of rounds, what is kept equals what the true tokens alone leave behind."""
    drafter = learned[anchor_predicts]
    engine = Engine(target, drafter, slots=slots, capacity=64, chunk=7)
    for request in asked:
        engine.submit(request)
    compared = refused = 0
    while engine.busy:
        engine.step()
        for slot, answer in enumerate(engine.active[: engine.decoding]):
            ids = [*answer.request.prompt, *answer.tokens[:-1]]
            assert engine.cache.lengths[slot] == engine.state.lengths[slot] == len(ids)
            clean = Engine(target, drafter, capacity=64)
            tokens_1T = torch.tensor([ids])
            ran = clean.forward(range(1), tokens_1T)
            clean.keep(range(1), ran.states, tokens_1T, [len(ids)])
            for layer, other in zip(engine.cache.layers, clean.cache.layers, strict=True):
                near(layer.keys[slot, :, : len(ids)], other.keys[0, :, : len(ids)])
                near(layer.values[slot, :, : len(ids)], other.values[0, :, : len(ids)])
            for stores in ("keys", "values"):
                for have, want in zip(
                    getattr(engine.state, stores), getattr(clean.state, stores), strict=True
                ):
                    near(have[slot, : len(ids)], want[0, : len(ids)])
            compared += 1
            refused += sum(done.drafted - done.accepted for done in answer.rounds)
    assert compared > 10
    assert refused > 10


def near(have: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.allclose(have, want, atol=1e-4 * float(want.abs().max())), (have - want).abs().max()


def test_a_used_slot_is_like_a_new_one(target, learned):
    long, short = [Request(tiny.example(num, num, seed=num).ids, 25, name=f"{num}") for num in (30, 3)]
    used = answers_of(Engine(target, learned[False], capacity=64), [long, short])
    for request in (long, short):
        (fresh,) = Engine(target, learned[False], capacity=64).run([request])
        assert used[request.name].tokens == fresh.tokens
        assert used[request.name].rounds == fresh.rounds


# Other families -------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 265, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.3, "tie_word_embeddings": False, "sliding_window": 8,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
FAMILIES = {
    "mistral": dict,
    "gemma4_text": lambda: {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 265,
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 30.0,
    },
    "gpt_oss": lambda: {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_with_sliding_windows_answer_as_they_do_alone(family):
    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family]())
    of = Target(transformers.AutoModelForCausalLM.from_config(config), tiny.tokenizer(), family)
    assert 8 in of.attention_windows.values()
    requests = [
        Request(tiny.example(num, num, seed=num).ids, 18 - num // 2, name=f"{num}") for num in (1, 20, 11, 6)
    ]
    want = {r.name: tiny.greedy(of, r.prompt, r.max_new_tokens) for r in requests}
    assert max(len(set(tokens)) for tokens in want.values()) > 5
    for proposer in (tiny.dflash(of), oracle(of, lambda path: len(path) % 5)):
        for slots, schedule in ((1, None), (3, None), (3, Chance(4))):
            engine = Engine(of, proposer, slots=slots, capacity=64, chunk=7, schedule=schedule)
            assert tokens_of(engine, requests) == want


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                        "shared_expert_intermediate_size": 8}),
        ("recurrent_gemma", {}),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 3}),
    ],
)  # fmt: skip
def test_a_target_that_cannot_be_rolled_back_is_refused(family, settings):
    sizes = {k: v for k, v in SIZES.items() if k not in ("sliding_window", "initializer_range")}
    config = transformers.AutoConfig.for_model(family, **sizes, **settings)
    of = Target(transformers.AutoModelForCausalLM.from_config(config), tiny.tokenizer(), family)
    with pytest.raises(ValueError, match=f"{family}.*rolled back.*engine=vllm"):
        Engine(of)


# Sampling ---------------------------------------------------------------------------------------------------

V, LENGTH, HEAT, PROMPT = 5, 4, 1.5, [3, 4]


@pytest.fixture(scope="module")
def small():
    return Target(tiny.llama(layers=2, hidden=16, vocab=V, seed=1), None, "small")


def law_after(of: Target, ids: list[int]) -> torch.Tensor:
    logits = of.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return torch.softmax(logits.float() / HEAT, -1)


@pytest.fixture(scope="module")
def law(small):
    """The probability of every answer of the small target, by plain enumeration."""
    out = {}
    open_answers = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for answer, mass in open_answers.items():
            for token, p in enumerate(law_after(small, [*PROMPT, *answer]).tolist()):
                ended = token in small.stop_ids or len(answer) + 1 == LENGTH
                (out if ended else longer)[(*answer, token)] = mass * p
        open_answers = longer
    return out


def guessed(small: Target) -> Drafts:
    """Point-mass drafts: the likeliest token after the anchor, again and again."""
    best = {t: int(law_after(small, [*PROMPT, t]).argmax()) for t in range(V)}

    def make(path: list[int], n: int):
        out = [path[-1]]
        for _ in range(n):
            out.append(best[out[-1]])
        return out[1:], None

    return Drafts(make)


def drawn(small: Target) -> Drafts:
    """Drafts drawn from a law that is half the target's own and half flat."""
    generator = torch.Generator().manual_seed(5)
    known: dict[tuple, torch.Tensor] = {}

    def make(path: list[int], n: int):
        tokens, laws = [], []
        for _ in range(n):
            ids = (*path, *tokens)
            if ids not in known:
                known[ids] = 0.5 * law_after(small, list(ids)) + 0.5 / V
            laws.append(known[ids])
            tokens.append(int(torch.multinomial(known[ids], 1, generator=generator)))
        return tokens, torch.stack(laws)

    return Drafts(make)


def untrained(small: Target):
    """Point-mass drafts of a random block drafter; two layers leave one state to keep."""
    return tiny.dflash(small, num_states=1)


def chi_square(found: Counter, law: dict, runs: int) -> tuple[float, int]:
    """The statistic over answers, those expected less than five times taken together; degrees of freedom."""
    common = {answer: p for answer, p in law.items() if p * runs >= 5}
    cells = [(found[answer], p * runs) for answer, p in common.items()]
    rest = runs * (1 - sum(common.values()))
    if rest >= 5:
        cells.append((runs - sum(found[answer] for answer in common), rest))
    return sum((have - want) ** 2 / want for have, want in cells), len(cells) - 1


@pytest.mark.parametrize(
    ("proposer", "n"), [(None, 0), (guessed, 1), (guessed, 3), (drawn, 1), (drawn, 3), (untrained, 3)]
)
def test_sampled_answers_have_the_targets_law(small, law, proposer, n):
    """Whole runs, so that roll-back is part of it. The threshold is the 99.9 % point of chi-square."""
    runs = 1000
    engine = Engine(small, proposer and proposer(small), n, slots=50, capacity=16)
    requests = [Request(PROMPT, LENGTH, Sampling(HEAT, seed=seed), name=f"{seed}") for seed in range(runs)]
    answers = list(engine.run(requests))
    found = Counter(tuple(answer.tokens) for answer in answers)
    assert set(found) <= set(law)
    statistic, free = chi_square(found, law, runs)
    assert free > 20
    assert statistic < free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3
    if n and proposer is not untrained:
        assert {r.accepted for answer in answers for r in answer.rounds} >= {0, 1}


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(target, learned):
    """Neighbours differ in length, temperature and seed; one of them is greedy."""
    requests = [
        Request(tiny.example(num, num, seed=num).ids, 20, Sampling(heat, seed=seed), name=f"{num}")
        for num, heat, seed in ((1, 3.0, 7), (23, 0.0, 7), (9, 2.0, 8), (14, 3.0, 7))
    ]
    for n in (0, 2, 4):
        together = tokens_of(Engine(target, learned[False], n, slots=4, capacity=64), requests)
        turns = tokens_of(Engine(target, learned[False], n, slots=2, capacity=64), requests[::-1])
        alone = {}
        for request in requests:
            alone |= tokens_of(Engine(target, learned[False], n, capacity=64), [request])
        assert together == turns == alone
        assert alone["23"] == tiny.greedy(target, requests[1].prompt, 20)


def test_another_seed_gives_another_answer(target):
    engine = Engine(target, slots=4, capacity=64)
    requests = [Request([9, 10, 11], 16, Sampling(3.0, seed=seed), name=f"{seed}") for seed in range(4)]
    assert len({tuple(tokens) for tokens in tokens_of(engine, requests).values()}) == 4


def test_no_two_draws_share_a_random_number():
    """Neighbouring seeds, positions and purposes (accepting a draft, drawing a token) are independent."""
    places = itertools.product(range(20), ("accept", "next"), range(20))
    values = [u for place in places for u in uniforms(*place, 3)]
    assert len(set(values)) == len(values) == 20 * 2 * 20 * 3
    assert all(0 <= u < 1 for u in values)


# Refusals ---------------------------------------------------------------------------------------------------


@LAYOUTS
@pytest.mark.parametrize("n", [-1, 99])
def test_a_number_of_drafts_beyond_the_trained_block_is_refused(target, anchor_predicts, n):
    drafter = tiny.dflash(target, anchor_predicts=anchor_predicts)
    with pytest.raises(ValueError, match=f"n={n}.*at most {drafter.max_drafts} drafts"):
        Engine(target, drafter, n)


def test_the_trained_block_is_the_default(target):
    assert Engine(target, tiny.dflash(target), capacity=8).num_drafts == 4
    assert Engine(target, tiny.dflash(target, anchor_predicts=True), capacity=8).num_drafts == 5


@pytest.mark.parametrize(
    ("prompt", "new", "words"),
    [
        (0, 4, "empty prompt"),
        (20, 13, "20 prompt tokens.*13 new.*holds 32"),
        (4, 0, "0 new.*a token or more"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(target, prompt, new, words):
    engine = Engine(target, tiny.dflash(target), capacity=32)
    with pytest.raises(ValueError, match=words):
        engine.submit(Request([9] * prompt, new, name="q"))
    assert not engine.busy


def test_a_request_may_fill_its_slot_to_the_last_token(target):
    prompt = tiny.example(20, 20, seed=1).ids
    (answer,) = Engine(target, tiny.dflash(target), 4, capacity=32).run([Request(prompt, 12)])
    assert answer.tokens == tiny.greedy(target, prompt, 12)
