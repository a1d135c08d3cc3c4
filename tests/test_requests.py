"""What a request may ask of the engine, with drafts and without: stops, laws, log probabilities, leaving."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from serve.engine import Engine
from serve.law import Sampling
from serve.types import Answer, Request
from tests import tiny
from tests.standins import Chance, Drafts, Script, oracle

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "cases" / "s01_stop_cases.json").read_text())["cases"]
}


@pytest.fixture(scope="module")
def target():
    return tiny.target(layers=3)


def prompt(num: int) -> list[int]:
    return tiny.example(num, num, seed=num).ids


def engine_with(target, right: int | None, slots: int = 1, **settings) -> Engine:
    """Plain for ``None``; else four drafts a round, of which ``right`` are the target's greedy ones."""
    drafts = None if right is None else oracle(target, lambda path: right)
    return Engine(target, drafts, slots=slots, capacity=96, chunk=7, **settings)


def answer_of(engine: Engine, request: Request) -> Answer:
    (answer,) = engine.run([request])
    return answer


class Spelled:
    """A tokenizer of one: token i is a piece of text."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.pieces[i] for i in ids)


def spelling(pieces: list[str]) -> Script:
    """A target that says ``pieces`` one by one, from token 1 on."""
    script = Script([0, *range(1, len(pieces) + 1)], ())
    script.tokenizer = Spelled(["", *pieces, *[""] * 128])
    return script


# Stops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3, 7])
def test_the_handed_stop_string_ends_text_ids_and_log_probabilities_together(n):
    case = CASES["stop string early in a long round"]
    script = spelling(case["pieces"])
    drafts = Drafts(lambda path, n: (list(range(path[-1] + 1, path[-1] + 1 + n)), None), max_drafts=7)
    request = Request([0], case["max_new"], stop=(case["stop"],), logprobs=1)
    answer = answer_of(Engine(script, drafts, n, capacity=200), request)
    assert answer.text.text == case["emit_text"]
    assert answer.finish == case["finish"]
    assert len(answer.tokens) == len(answer.logprobs) == case["token_ids_kept"]


@pytest.mark.parametrize("n", [0, 1, 2])
def test_the_handed_stop_string_across_two_rounds(n):
    case = CASES["stop string across two rounds"]
    script = spelling([piece for pieces in case["rounds"] for piece in pieces])
    drafts = Drafts(lambda path, n: ([99] * n, None))  # refused: every round gives one piece
    answer = answer_of(Engine(script, drafts, n, capacity=200), Request([0], 99, stop=(case["stop"],)))
    assert (answer.text.text, answer.finish) == (case["emit_text"], case["finish"])


@pytest.fixture(scope="module")
def letters(target):
    """A law under which every token is a letter, a digit or a sign: text has no broken characters."""
    texts = {i: target.tokenizer.decode([i]) for i in range(target.vocab_size)}
    return Sampling(
        logit_bias={i: -100.0 for i, text in texts.items() if len(text) > 1 or not "!" <= text <= "~"}
    )


@pytest.mark.parametrize("at", range(1, 12))
def test_a_stop_string_inside_an_accepted_block_ends_exactly_there(target, letters, at):
    """Every two pieces of the answer as stop string, at every place in blocks of five."""
    whole = answer_of(engine_with(target, None), Request(prompt(9), 24, letters, text=True))
    assert whole.text.text.isascii()
    stop = target.tokenizer.decode(whole.tokens[at : at + 2])
    first = whole.text.text.index(stop)
    known = [*whole.tokens, *[9] * 8]
    for right in (0, 1, 2, 4):
        drafts = Drafts(
            lambda path, n, right=right: (
                [t if k < right else 9 for k, t in enumerate(known[len(path) - 9 :][:n])],
                None,
            )
        )
        answer = answer_of(Engine(target, drafts, capacity=96), Request(prompt(9), 24, letters, stop=(stop,)))
        assert answer.finish == "stop"
        assert answer.text.text == whole.text.text[:first]
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert sum(r.emitted for r in answer.rounds) + 1 == len(answer.tokens)
        assert stop in target.tokenizer.decode(answer.tokens)
        assert stop not in target.tokenizer.decode(answer.tokens[:-1])


@pytest.mark.parametrize("right", [None, 0, 2, 4])
def test_stop_ids_of_a_request_and_those_of_the_target(target, right):
    free = answer_of(engine_with(target, None), Request(prompt(5), 30, ignore_eos=True)).tokens
    assert len(free) == 30
    token = free[11]
    ended = answer_of(engine_with(target, right), Request(prompt(5), 30, stop_ids=(token,), ignore_eos=True))
    assert ended.tokens == free[: free.index(token) + 1]
    assert ended.finish == "stop"
    of = tiny.target(layers=3)
    of.__dict__["stop_ids"] = (token,)
    assert answer_of(engine_with(of, right), Request(prompt(5), 30)).tokens == ended.tokens
    assert answer_of(engine_with(of, right), Request(prompt(5), 30, ignore_eos=True)).tokens == free


# Laws --------------------------------------------------------------------------------------------------

LAWS = {
    "greedy, penalties": Sampling(repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.5),
    "greedy, bias": Sampling(logit_bias={9: -100.0, 40: 9.0}),
    "temperature": Sampling(2.0, seed=3),
    "truncated": Sampling(3.0, top_k=20, top_p=0.8, min_p=0.01, seed=4),
    "all": Sampling(
        2.5, top_k=50, top_p=0.9, repetition_penalty=1.3, frequency_penalty=-0.4, logit_bias={7: 3.0}, seed=5
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_drafts_change_no_token_of_any_law(target, name):
    """Plain decoding's own text, for every seed: alone or beside others, whatever is drafted and verified."""
    requests = [Request(prompt(num), 20, LAWS[name], name=f"{num}") for num in (1, 9, 16)]
    plain = {r.name: answer_of(engine_with(target, None), r).tokens for r in requests}
    chance = random.Random(1)
    drafts = oracle(target, lambda path: chance.randint(0, 4))
    for slots, schedule in ((1, None), (3, None), (3, Chance(4, 2))):
        engine = Engine(target, drafts, slots=slots, capacity=96, chunk=7, schedule=schedule)
        assert {a.request.name: a.tokens for a in engine.run(requests)} == plain


def test_penalties_count_each_token_once_and_drafts_of_the_same_round(target):
    """Beside a loop that rebuilds the history for every token; the drafts are right, so rounds are long."""
    asked = Sampling(frequency_penalty=1.5, presence_penalty=0.25)
    ids, answer = prompt(6), []
    for _ in range(24):
        logits = target.model(input_ids=torch.tensor([ids + answer]), use_cache=False).logits[0, -1].float()
        for token in set(answer):
            logits[token] -= 0.25 + 1.5 * answer.count(token)
        answer.append(int(logits.argmax()))
        if answer[-1] in target.stop_ids:
            break
    assert answer != tiny.greedy(target, ids, 24), "the penalties have to matter here"
    known = answer + [0] * 8
    right = Drafts(lambda path, n: (known[len(path) - len(ids) :][:n], None))
    found = answer_of(Engine(target, right, capacity=96), Request(ids, 24, asked))
    assert found.tokens == answer
    assert max(r.accepted for r in found.rounds) == 4


@pytest.mark.parametrize("sampling", [Sampling(), LAWS["all"]], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_the_plain_target_one_a_token(target, sampling):
    for right in (None, 0, 3, 4):
        answer = answer_of(engine_with(target, right), Request(prompt(9), 20, sampling, logprobs=3))
        ids = torch.tensor([prompt(9) + answer.tokens])
        want = target.model(input_ids=ids, use_cache=False).logits[0, 8:-1].float().log_softmax(-1)
        assert len(answer.logprobs) == len(answer.tokens)
        for scored, token, law in zip(answer.logprobs, answer.tokens, want, strict=True):
            assert scored.logprob == pytest.approx(float(law[token]), abs=1e-3)
            values, best = law.topk(3)
            assert [i for i, _ in scored.top] == best.tolist()
            assert [value for _, value in scored.top] == pytest.approx(values.tolist(), abs=1e-3)


@pytest.mark.parametrize("sampling", [Sampling(), LAWS["all"]], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers_are_refused_and_not_decoded(sampling):
    of = tiny.target(layers=3)
    with torch.no_grad():
        of.head_weight_VD[17] = float("nan")
    with pytest.raises(ValueError, match="not numbers|NaN|nan"):
        answer_of(engine_with(of, None), Request(prompt(9), 5, sampling))


# Coming and going --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_an_aborted_request_frees_its_slot_and_changes_no_other_answer(target, which, after):
    """At every step, in every place: decoding, reading its prompt, waiting."""
    requests = [Request(prompt(num), 15, name=f"{num}") for num in (5, 23, 30, 9)]
    want = {r.name: tiny.greedy(target, r.prompt, 15) for r in requests}
    engine = engine_with(target, 2, slots=3)
    answers = [engine.submit(request) for request in requests]
    for _ in range(after):
        engine.step()
    gone = answers[which]
    before = (list(gone.tokens), gone.finish)
    engine.abort(gone)
    engine.abort(gone)
    later = engine.submit(Request(prompt(12), 9, name="later"))
    while engine.busy:
        engine.step()
    assert gone.finish == (before[1] or "abort")
    assert gone.tokens == before[0] == want[gone.request.name][: len(before[0])]
    assert all(a.tokens == want[a.request.name] for a in answers if a is not gone)
    assert later.tokens == tiny.greedy(target, prompt(12), 9)
    assert not engine.active
    assert engine.cache.lengths == [0, 0, 0]


def test_a_long_prompt_is_read_in_chunks_while_others_answer(target):
    engine = Engine(target, slots=2, capacity=96, chunk=8)
    short, long = engine.submit(Request(prompt(4), 30)), engine.submit(Request(prompt(60), 4))
    seen = []
    while not long.tokens:
        engine.step()
        seen.append((len(short.tokens), long.prefilled))
    assert [read for _, read in seen] == [4, 12, 20, 28, 36, 44, 52, 60]
    assert [told for told, _ in seen] == list(range(2, 10))


def test_a_listener_may_abort_others(target):
    engine = engine_with(target, 2, slots=3)
    others: list[Answer] = []
    first = engine.submit(Request(prompt(5), 20), lambda *_: [engine.abort(other) for other in others])
    engine.step()
    others += [engine.submit(Request(prompt(num), 20)) for num in (7, 8)]
    while engine.busy:
        engine.step()
    assert first.tokens == tiny.greedy(target, prompt(5), 20)
    assert {other.finish for other in others} <= {"abort"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt": [3, 999]}, "prompt holds token id 999; give ids from 0 to 264"),
        ({"prompt": [-1]}, "prompt holds token id -1"),
        ({"sampling": Sampling(logit_bias={265: 1.0})}, "logit_bias holds token id 265"),
        ({"stop": ("",)}, "empty stop string"),
    ],
)
def test_what_would_go_wrong_later_is_refused_at_once(target, settings, words):
    with pytest.raises(ValueError, match=words):
        Engine(target, capacity=64).submit(Request(**{"prompt": [9], "max_new_tokens": 4} | settings))


def test_text_of_a_target_without_a_tokenizer_is_refused(target):
    mute = tiny.target(layers=3)
    mute.tokenizer = None
    with pytest.raises(ValueError, match="need a target with a tokenizer; use stop_ids"):
        Engine(mute, capacity=64).submit(Request([9], 4, stop=("a",)))
