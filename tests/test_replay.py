"""Replay counts what step-by-step decoding would have counted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from data.capture import capture
from data.chat import Renderer
from data.pack import pack
from data.sources import DOMAINS, DataConfig, read
from drafters.eagle3 import Eagle3Config
from drafters.method import build
from drafters.types import Example
from drafters.vocab import choose
from eval import replay
from eval.replay import Counts, paths, score, score_lookup, walk
from eval.rollout import request_seed, rollout
from serve.engine import Engine
from serve.law import Sampling
from serve.ngram import Ngram, NgramConfig
from serve.proposers import Combined
from serve.suffix import Suffix, SuffixConfig
from serve.types import Request
from tests import tiny

CASES = Path(__file__).parent / "cases"
KINDS = {
    "slot s predicts x[a+s]": {},
    "the anchor predicts": {"anchor_predicts": True},
    "sliding window": {"sliding_window": 6},
    "draft vocabulary": {"draft_vocab": 200},
}


@pytest.fixture(scope="module")
def target():
    """Its stop token is one that some of the answers below run into and others do not."""
    of = tiny.target(layers=3)
    of.stop_ids = (tiny.greedy(of, tiny.example(8, 8, seed=0).ids, 24)[15],)
    return of


@pytest.fixture(scope="module")
def answers(target):
    """Answers of many lengths: stopped ones and cut ones, one of one token and one of two."""
    found = [tiny.answered(target, num=24, seed=seed) for seed in range(4)]
    found += [tiny.answered(target, num=num, prompt=5, seed=10 + num) for num in (1, 2, 7, 13)]
    stopped = [example.ids[-1] in target.stop_ids for example in found]
    assert any(stopped)
    assert not all(stopped)
    return found


@pytest.fixture(scope="module")
def learned(target, answers):
    """Drafters of each kind that know two of the answers and not the others; four or five drafts a round."""

    @cache
    def make(kind):
        vocab = None
        if "draft_vocab" in KINDS[kind]:
            counts_V = torch.zeros(target.vocab_size, dtype=torch.long)
            counts_V[9:] = 1
            vocab = choose(counts_V, KINDS[kind]["draft_vocab"], target.stop_ids)
        return tiny.trained(target, answers[:2], steps=40, vocab=vocab, **KINDS[kind])

    return make


@pytest.fixture(scope="module")
def drafter(learned):
    return learned("slot s predicts x[a+s]")


# Replay equals rollout ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_replay_and_decoding_step_by_step_make_the_same_rounds(target, answers, learned, kind):
    drafter = learned(kind)
    ns = range(1, drafter.max_drafts + 1)
    found = list(paths(target, answers, drafter.layer_ids))
    assert not any(path.off_path for path in found)
    replayed = score(drafter, found, ns)
    for n in ns:
        decoded = list(rollout(target, drafter, answers, n))
        assert [example for example, _, _ in decoded] == answers
        assert [counts for _, _, counts in decoded] == [by_n[n] for by_n in replayed], n
        accepted = {r.accepted for _, answer, _ in decoded for r in answer.rounds}
        assert min(accepted) == 0, n
        assert max(accepted) >= min(n, 2), f"N={n}: the test needs accepted drafts, found {accepted}"


def test_replay_and_decoding_agree_on_the_bundled_evaluation_prompts():
    """A third of them, from all five domains; the drafter knows some of the answers."""
    of = tiny.target(layers=3)
    render = Renderer(of.tokenizer, stop_ids=of.stop_ids)
    examples = []
    for row in list(read(DataConfig(split="eval")))[::3]:
        prompt = render.prompt_ids(row.messages[:1], row.tools)[-200:]
        ids = prompt + tiny.greedy(of, prompt, 12)
        mask = [at >= len(prompt) for at in range(len(ids))]
        examples.append(Example(ids, mask, row.domain, row.where))
    assert len(examples) == 40
    assert {example.domain for example in examples} == set(DOMAINS)
    drafter = tiny.trained(of, examples[::4], steps=30)
    replayed = score(drafter, list(paths(of, examples, drafter.layer_ids)), [1, 4])
    for n in (1, 4):
        assert [counts for _, _, counts in rollout(of, drafter, examples, n)] == [
            by_n[n] for by_n in replayed
        ]
        assert sum(by_n[n].survived[0] for by_n in replayed) > 0


@pytest.mark.parametrize("seed", range(3))
def test_replay_and_decoding_agree_for_other_targets_and_untrained_drafters(seed):
    of = tiny.target(layers=3, seed=seed, vocab=12)  # twelve tokens: chance alone accepts some drafts
    examples = []
    for at in range(4):
        prompt = [int(x) for x in torch.randint(3, 12, (4,))]
        ids = prompt + tiny.greedy(of, prompt, 20)
        examples.append(Example(ids, [False] * 4 + [True] * (len(ids) - 4), "chat", f"row {at}"))
    drafter = tiny.dflash(of, mask_token=11)
    found = list(paths(of, examples, drafter.layer_ids))
    replayed = score(drafter, found, [1, 2, 4])
    for n in (1, 2, 4):
        assert [counts for _, _, counts in rollout(of, drafter, examples, n)] == [
            by_n[n] for by_n in replayed
        ]


def test_several_slots_count_as_one_slot_does(target, answers, drafter):
    alone = {example.name: counts for example, _, counts in rollout(target, drafter, answers, 3)}
    together = {example.name: counts for example, _, counts in rollout(target, drafter, answers, 3, slots=4)}
    assert together == alone


def conversation(of, turns: int, seed: int) -> Example:
    """Questions and the target's greedy answers, one after another, in one row."""
    ids, mask = [], []
    for turn in range(turns):
        ids += tiny.example(5, 5, seed=100 * seed + turn).ids
        answer = tiny.greedy(of, ids, 9 + turn)
        mask += [False] * (len(ids) - len(mask)) + [True] * len(answer)
        ids += answer
    return Example(ids, mask, "chat", f"talk {seed}")


def test_every_turn_of_a_conversation_is_a_path_of_its_own(target, answers, drafter):
    rows = [answers[0], conversation(target, 3, 1), conversation(target, 2, 2)]
    found = list(paths(target, rows, drafter.layer_ids))
    names = [f"talk {talk} (turn {turn})" for talk, turns in ((1, 3), (2, 2)) for turn in range(1, turns + 1)]
    assert [path.example.name for path in found] == [answers[0].name, *names]
    assert not any(path.off_path for path in found)
    assert sum(path.length for path in found) == sum(sum(row.mask) for row in rows)
    replayed = score(drafter, found, [1, 4])
    for n in (1, 4):
        decoded = {example.name: counts for example, _, counts in rollout(target, drafter, rows, n, slots=2)}
        assert decoded == {path.example.name: by_n[n] for path, by_n in zip(found, replayed, strict=True)}
    assert sum(by_n[4].survived[0] for by_n in replayed) > 0


# Proposers that look drafts up ----------------------------------------------------------------------


def greedily(of, prompt: list[int], num: int, name: str) -> Example:
    answer = tiny.greedy(of, prompt, num)
    return Example(prompt + answer, [False] * len(prompt) + [True] * len(answer), "chat", name)


LOOKUPS = {
    "ngram": Ngram(NgramConfig(shortest=1)),
    "suffix": Suffix(SuffixConfig()),
    "suffix of one request": Suffix(SuffixConfig(past=False)),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_what_is_looked_up_is_replayed_as_it_is_decoded(name, n):
    of = tiny.target(layers=3, vocab=12)  # answers repeat themselves
    prompts = torch.randint(3, 12, (6, 20), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [greedily(of, prompt, 40, f"row {at}") for at, prompt in enumerate(prompts)]
    proposer = LOOKUPS[name]
    count = score_lookup(proposer, n)
    replayed = [count(path) for path in paths(of, rows, [])]
    decoded = [counts for _, _, counts in rollout(of, proposer, rows, n)]
    assert decoded == replayed
    total = sum(replayed[1:], replayed[0])
    assert 0 < total.survived[0] < total.proposed[0]
    assert total.proposed[0] < total.rounds, "the test needs rounds without drafts"
    assert total.drafted == sum(total.proposed) / total.rounds


def test_rounds_that_propose_nothing_count_in_tau_and_not_among_those_that_propose():
    counts = Counts(2, proposed=[0, 0])
    for accepted, proposed in ((2, 2), (0, 0), (1, 1), (0, 1)):
        counts.add_round(accepted, accepted + 1, proposed)
    assert (counts.tau, counts.survival) == (7 / 4, [0.5, 0.25])
    assert counts.proposed == [3, 1]
    assert counts.survival_of_proposed == [2 / 3, 1.0]
    assert (counts + counts).proposed == [6, 2]
    assert Counts(2, 4, 7, [2, 1]).survival_of_proposed is None


def test_a_lookup_before_a_drafter_and_plain_decoding_are_decoded(target, answers, drafter):
    both = Combined(Ngram(NgramConfig()), drafter, trust=4, n=2)
    for example, answer, counts in rollout(target, both, answers, 8, slots=3):
        assert answer.tokens == example.ids[example.mask.index(True) :]
        assert counts.tokens == len(answer.tokens) - 1
        assert len(counts.proposed) == 8
    for example, answer, counts in rollout(target, None, answers, 0):
        assert answer.tokens == example.ids[example.mask.index(True) :]
        assert (counts.rounds, counts.survived) == (len(answer.tokens) - 1, [])


# At a temperature -----------------------------------------------------------------------------------

HOT, LONG = 1.0, 16


@pytest.fixture(scope="module")
def toy():
    """A target of twelve tokens, a drafter that knows its greedy answers to six prompts, 40 rows of each.

    The surer an answer, the more of it is drafted: tau is 5 at temperature 0, 1.9 at 0.5, 1.5 at 1.
    """
    of = tiny.target(layers=2, vocab=12, seed=3)
    with torch.no_grad():
        of.model.lm_head.weight *= 1.5
    prompts = torch.randint(3, 11, (6, 4), generator=torch.Generator().manual_seed(0)).tolist()
    known = [greedily(of, prompt, LONG, "known") for prompt in prompts]
    ids = [[*prompts[at % 6], 3] for at in range(240)]
    asked = [Example(row, [False] * 4 + [True], "chat", f"row {at}") for at, row in enumerate(ids)]
    return of, tiny.trained(of, known, steps=60, mask_token=11, num_states=1), asked


def sampled(of, asked, seed):
    """The answers that plain decoding samples, as rows."""
    engine = Engine(of, slots=16, capacity=40)
    requests = [
        Request(row.ids[:4], LONG, Sampling(HOT, seed=request_seed(seed, row.name)), name=str(at))
        for at, row in enumerate(asked)
    ]
    answers = sorted(engine.run(requests), key=lambda answer: int(answer.request.name))
    return [
        replace(row, ids=row.ids[:4] + a.tokens, mask=[False] * 4 + [True] * len(a.tokens))
        for row, a in zip(asked, answers, strict=True)
    ]


def by_row(found, rows):
    by_name = {example.name: counts for example, _, counts in found}
    return [by_name[row.name] for row in rows]


def test_sampled_answers_are_those_of_their_seed_whatever_else_is_decoded(toy):
    of, drafter, asked = toy
    rows = sampled(of, asked[:24], seed=1)
    replayed = score(drafter, list(paths(of, rows, drafter.layer_ids, temperature=HOT)), [3])
    hot = {"temperature": HOT, "seed": 1, "max_new_tokens": LONG}
    for slots in (1, 16):
        decoded = by_row(rollout(of, drafter, asked[:24], 3, slots=slots, **hot), rows)
        assert decoded == [by_n[3] for by_n in replayed]
    assert len({request_seed(1, row.name) for row in rows}) == 24


def test_tau_of_decoding_is_that_of_sampled_replay_within_monte_carlo_error(toy):
    """Other draws on either side for the same prompts: only the law is the same."""
    of, drafter, asked = toy
    found = list(paths(of, sampled(of, asked, seed=1), drafter.layer_ids, temperature=HOT))
    replayed = [by_n[4] for by_n in score(drafter, found, [4])]
    hot = {"temperature": HOT, "seed": 2, "max_new_tokens": LONG, "slots": 16}
    decoded = by_row(rollout(of, drafter, asked, 4, **hot), asked)
    (tau, off), (other, other_off) = deviations(replayed), deviations(decoded)
    error = sum((a - b) ** 2 for a, b in zip(off, other_off, strict=True)) ** 0.5
    assert 3 * error < 0.1 * tau, "too few draws to tell"
    assert abs(tau - other) < 3 * error


def deviations(counts):
    """Pooled tau, and what each answer moves it by: a ratio of sums over independent answers."""
    tokens, rounds = sum(c.tokens for c in counts), sum(c.rounds for c in counts)
    return tokens / rounds, [(c.tokens - tokens / rounds * c.rounds) / rounds for c in counts]


def test_decoding_goes_on_to_the_limit_that_is_asked_for(target, answers):
    cut = replace(answers[1], ids=answers[1].ids[:12], mask=answers[1].mask[:12])
    ((_, answer, _),) = rollout(target, tiny.dflash(target), [cut], 2, max_new_tokens=9)
    assert answer.tokens == tiny.greedy(target, cut.ids[:8], 9)


@pytest.mark.parametrize("batch_tokens", [1, 40, 10_000])
def test_how_answers_are_batched_changes_no_path(target, answers, batch_tokens):
    layers = [0, 1]
    alone = [next(paths(target, [example], layers)) for example in answers]
    batched = list(paths(target, answers, layers, batch_tokens=batch_tokens))
    assert [path.example for path in batched] == answers
    for have, want in zip(batched, alone, strict=True):
        assert (have.first, have.length, have.off_path) == (want.first, want.length, want.off_path)
        assert have.margin == pytest.approx(want.margin, rel=1e-3, abs=1e-4)


def test_few_anchors_at_once_count_as_all_do(target, answers, drafter):
    found = list(paths(target, answers, drafter.layer_ids))
    assert score(drafter, found, [4], anchors_at_once=3) == score(drafter, found, [4])


# The path -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 5, 22])
def test_an_answer_that_leaves_the_targets_path_is_cut_where_it_does(target, answers, drafter, at):
    example = next(e for e in answers if len(e.ids) == 32)
    first = example.mask.index(True)
    ids = list(example.ids)
    ids[first + at] = (ids[first + at] + 1 - 9) % 200 + 9
    (path,) = paths(target, [replace(example, ids=ids)], [0, 1])
    assert path.off_path
    assert path.length == at
    assert path.tokens == example.ids[first : first + at]
    cut = replace(example, ids=example.ids[: first + at], mask=example.mask[: first + at])
    if at == 0:
        assert score(drafter, [path], [2]) == [{2: Counts(2)}]
    else:
        assert score(drafter, [path], [2, 4]) == score(drafter, list(paths(target, [cut], [0, 1])), [2, 4])


def test_the_margin_is_the_smallest_gap_between_best_and_second_logit(target, answers):
    example = answers[1]
    first = example.mask.index(True)
    logits = target.model(input_ids=torch.tensor([example.ids]), use_cache=False).logits[0]
    best = logits[first - 1 : -1].topk(2, dim=-1).values
    (path,) = paths(target, [example], [0])
    assert path.margin == pytest.approx(float((best[:, 0] - best[:, 1]).min()), rel=1e-4)


def test_an_answer_without_a_prompt_is_refused_by_name(target):
    with pytest.raises(ValueError, match="row 0: the answer has no prompt"):
        list(paths(target, [tiny.example(20, 0)], [0]))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("value", "reason"), [(float("nan"), "NaN or infinite"), (0.0, "all-zero state at")])
def test_states_that_are_none_are_refused_by_row(target, answers, temperature, value, reason, monkeypatch):
    def spoilt(*given, **settings):
        found = capture(*given, **settings)
        found[0].last()[0, 3] = value
        return found

    monkeypatch.setattr(replay, "capture", spoilt)
    with pytest.raises(ValueError, match=f"{answers[0].name}: .* cannot be used: last: {reason}.*dtype"):
        list(paths(target, answers[:1], [0, 1], temperature=temperature))


@pytest.mark.parametrize("ns", [[], [0], [1, 5]])
def test_a_number_of_drafts_that_was_not_trained_is_refused(target, answers, ns):
    drafter = tiny.dflash(target)
    with pytest.raises(ValueError, match=r"n=\[.*trained for 1 to 4 drafts"):
        score(drafter, list(paths(target, answers[:1], drafter.layer_ids)), ns)


# Counting -------------------------------------------------------------------------------------------


def test_rounds_are_walked_as_by_hand():
    path = [7, 1, 2, 3, 4, 5, 6]
    drafts = [
        [1, 9],  # at 7: accepts 1, the target adds 2
        [0, 0],
        [3, 4],  # at 2: accepts both, the target adds 5
        [0, 0],
        [0, 0],
        [6, 8],  # at 5: accepts 6, where the path ends: no bonus token
        [0, 0],
    ]
    counts = walk(torch.tensor(drafts), path)
    assert counts == Counts(2, rounds=3, tokens=6, survived=[3, 1])
    assert counts.tau == 2.0
    assert counts.survival == [1.0, 1 / 3]
    assert counts.conditional == [1.0, 1 / 3]


def test_drafts_that_are_right_again_after_a_wrong_one_do_not_count():
    case = json.loads((CASES / "e01_expect.json").read_text())["mask_style_1_0_1_0"]
    path = [0, 1, 2, 3, 4]
    right = torch.tensor([[1, 9, 3, 9], *[[9] * 4] * 4])
    counts = walk(right, path)
    assert counts.survived[0] == case["accepted_prefix"]
    assert counts.survived[1:] == [0, 0, 0]
    assert counts.rounds == 3  # after 1 and 2 two refused rounds are left
    assert Counts(4, 1, 2, [1, 0, 0, 0]).survival[0] / 4 == case["rate"]


@pytest.mark.parametrize("length", range(1, 8))
def test_a_perfect_drafter_accepts_all_that_is_left(length):
    path = list(range(length))
    drafts = torch.tensor([[at + 1, at + 2, at + 3] for at in path])
    counts = walk(drafts, path)
    assert counts.tokens == length - 1  # the token of the prefill is neither a round nor part of tau
    assert counts.rounds == -(-(length - 1) // 4)
    assert sum(counts.survived) == length - 1 - (length - 1) // 4  # all but the bonus tokens were drafted


def test_every_token_after_the_first_is_emitted_by_exactly_one_round():
    chance = random.Random(0)
    for _ in range(200):
        path = [chance.randrange(2) for _ in range(chance.randint(1, 20))]
        num = chance.randint(1, 5)
        drafts = [[chance.randrange(2) for _ in range(num)] for _ in path]
        counts = walk(torch.tensor(drafts), path)
        assert counts.tokens == len(path) - 1
        assert counts.survived == sorted(counts.survived, reverse=True)
        assert counts.rounds >= counts.survived[0]


def test_tau_is_one_and_the_sum_of_survival_where_each_last_round_is_left_out(target, answers, drafter):
    """As vLLM's counters have it: there, drafts are counted before a stop or a limit trims them."""
    for n in (1, 4):
        whole = Counts(n)
        for _, answer, _ in rollout(target, drafter, answers, n):
            for done in answer.rounds[:-1]:
                whole.add_round(done.accepted, done.emitted)
        assert whole.rounds > 10
        assert whole.tau == pytest.approx(1 + sum(whole.survival))


def test_the_handed_log_of_rounds_is_pooled_and_not_averaged():
    want = json.loads((CASES / "e01_expect.json").read_text())
    pooled, last = Counts(3), Counts(5)
    for line in (CASES / "e01_accept_log.jsonl").read_text().splitlines():
        request = json.loads(line)
        for done in request["rounds"]:
            counts = last if request["request"] == "C" else pooled
            counts.add_round(done["accepted"], done["emitted"])
    assert pooled.rounds == want["A_and_B"]["rounds"]
    assert pooled.tau == want["A_and_B"]["mean_length_with_bonus"]
    assert sum(pooled.survival) == want["A_and_B"]["mean_length_drafts_only"]
    assert pooled.survival == want["A_and_B"]["position_rates"]
    assert last.tau == want["C"]["emitted_per_round"] < want["C"]["accepted_plus_one_is_wrong"]
    assert last.survived == [1, 1, 1, 0, 0]  # drafts past the end were never emitted
    drafted = 3 * pooled.rounds
    assert sum(pooled.survived) / drafted == want["A_and_B"]["draft_acceptance_rate"]


def test_the_handed_batches_are_added_before_they_are_divided():
    want = json.loads((CASES / "e01_expect.json").read_text())["aggregate"]
    one, other = [Counts(2, batch["blocks"], 0, batch["prefix_ok"]) for batch in want["batches"]]
    assert 1 + sum((one + other).survival) == want["expect_length"]


def test_no_rounds_make_no_rates_and_no_division_by_zero():
    assert Counts(2).tau == 0.0
    assert Counts(2).survival == Counts(2).conditional == [0.0, 0.0]
    never = Counts(3, 4, 4, [0, 0, 0])
    assert never.conditional == [0.0, 0.0, 0.0]


def test_conditional_acceptance_is_survival_over_the_survival_before():
    counts = Counts(3, 10, 19, [6, 3, 0])
    assert counts.survival == [0.6, 0.3, 0.0]
    assert counts.conditional == [0.6, 0.5, 0.0]


def test_counts_of_different_lengths_are_not_added():
    with pytest.raises(ValueError, match="zip"):
        Counts(2) + Counts(3)


# One pass for every N ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["greedy", "sampled"])
@pytest.mark.parametrize(
    ("kind", "settings", "nested"),
    [
        ("dflash", {"sliding_window": 64}, True),
        ("dflash", {"sliding_window": 4}, True),
        ("dflash", {}, False),
        ("dspark", {"sliding_window": 64, "markov_rank": 4}, True),
        ("dspark", {"sliding_window": 64, "markov_rank": 4, "anchor_predicts": False}, True),
        ("dspark", {"markov_rank": 4}, False),
        ("eagle3", {}, True),
    ],
)
def test_nested_drafts_are_counted_from_one_pass_as_from_one_for_every_n(
    monkeypatch, kind, settings, nested, drafts
):
    of = tiny.target(seed=4)
    if kind == "eagle3":
        drafter = build(Eagle3Config(unroll=4, draft_vocab=None, init="random"), of).eval()
    else:
        drafter = tiny.untrained(of, kind, **settings)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.3)
    rows = [tiny.answered(of, seed=seed) for seed in range(3)]
    if drafts == "greedy":  # what is drafted, and not only what of it is accepted
        batch = pack([rows[0]], list(capture(of, [rows[0]], drafter.layer_ids, with_last=True)))
        anchors_A = torch.arange(5, 12)
        most_AK = drafter.drafts(batch, anchors_A, 4).tokens_BK
        same = [
            bool((drafter.drafts(batch, anchors_A, n).tokens_BK == most_AK[:, :n]).all()) for n in (1, 2, 3)
        ]
        assert all(same) == nested
    assert drafter.nested == nested
    found = list(paths(of, rows, drafter.layer_ids, temperature=0.8 if drafts == "sampled" else 0.0))
    once = score(drafter, found, [1, 2, 4], drafts=drafts)
    monkeypatch.setattr(type(drafter), "nested", False)
    each = score(drafter, found, [1, 2, 4], drafts=drafts)
    for one, other in zip(once, each, strict=True):
        for n in (1, 2, 4):
            assert one[n].rounds == pytest.approx(other[n].rounds, abs=1e-5)
            assert one[n].survived == pytest.approx(other[n].survived, abs=1e-5)


def test_in_bf16_a_block_is_drafted_at_each_length():
    """Rounded sums of a longer block differ by more than the last bits; a chain is the same steps."""
    block = tiny.untrained(tiny.target(), "dflash", sliding_window=64)
    assert block.nested
    assert not block.bfloat16().nested
    assert build(Eagle3Config(init="random"), tiny.target()).bfloat16().nested
