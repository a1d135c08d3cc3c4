"""Replay of sampled answers expects the rounds that decoding makes: by enumeration, and beside the engine."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch

from data.pack import pack
from drafters.types import Example
from drafters.vocab import choose
from eval.replay import Counts, paths, score, walk
from eval.sampled import acceptance, expected, log_law
from serve.engine import Engine
from serve.law import Sampling
from serve.types import Request
from serve.verify import verify
from tests import tiny
from tests.test_verify import EDGE, V, make_law

LENGTH = 5  # tokens of an answer after the prefill's


class Laws:
    """A law for everything that may be asked, drawn when it is asked first."""

    def __init__(self, kind: str, drafts: str, seed: int) -> None:
        self.kind, self.drafts = kind, drafts
        self.generator = torch.Generator().manual_seed(seed)
        self.known: dict[tuple, torch.Tensor] = {}

    def _law(self, *of) -> torch.Tensor:
        if of not in self.known:
            self.known[of] = make_law(self.generator, self.kind)
        return self.known[of]

    def p(self, prefix: tuple) -> torch.Tensor:
        return self._law("p", prefix)

    def q(self, anchor: int, before: tuple) -> torch.Tensor:
        """The law of the draft after ``before``, whose first ``anchor`` tokens are committed."""
        if self.drafts == "sequential":  # each draft knows those before it
            return self._law("q", anchor, before)
        law_V = self._law("q", before[:anchor], len(before))  # each slot knows what was committed
        return law_V if self.drafts == "block" else torch.eye(V).double()[law_V.argmax()]

    def round(self, prefix: tuple, num: int):
        """(probability, accepted drafts, tokens) of all that ``verify`` can make of a round."""
        rows = []
        for x in itertools.product(range(V), repeat=num):
            p = [self.p(prefix + x[:j]) for j in range(num + 1)]
            q = [self.q(len(prefix), prefix + x[:k]) for k in range(num)]
            ratios, mass_of_x = [], 1.0
            for k, y in enumerate(x):
                p_y, q_y = float(p[k][y]), float(q[k][y])
                mass_of_x *= q_y
                ratios.append(min(1.0, p_y / q_y) if q_y else 0.0)
            for pattern in itertools.product((True, False), repeat=num if mass_of_x else 0):
                mass, u = mass_of_x, []
                for ratio, below in zip(ratios, pattern, strict=False):
                    mass *= ratio if below else 1 - ratio
                    u.append(ratio - EDGE if below else ratio + EDGE if ratio else 0.0)
                if mass > 0:
                    rows.append((mass, x, u, torch.stack(p), torch.stack(q)))
        masses, drafts, uniforms, p_, q_ = zip(*rows, strict=True)
        accepted_B, next_BV = verify(
            torch.stack(p_),
            None if self.drafts == "point" else torch.stack(q_),
            torch.tensor(drafts),
            torch.tensor(uniforms, dtype=torch.double),
        )
        for mass, x, accepted, law in zip(masses, drafts, accepted_B.tolist(), next_BV.tolist(), strict=True):
            for token in range(V):
                if mass * law[token] > 0:
                    yield mass * law[token], accepted, (*x[:accepted], token)


@dataclass
class Sums:
    """Over all ways to one prefix: their probability, and what it is times rounds and survivals."""

    mass: float = 0.0
    rounds: float = 0.0
    survived: list[float] = field(default_factory=lambda: [0.0] * 3)


def decoded(laws: Laws, num: int) -> dict[tuple, Sums]:
    """All that decoding answers of ``LENGTH`` tokens can do, by answer; a last round is cut."""
    reached: dict[tuple, Sums] = defaultdict(Sums)
    reached[()] = Sums(1.0)
    for prefix in [p for length in range(LENGTH) for p in itertools.product(range(V), repeat=length)]:
        here = reached.pop(prefix, None)
        if here is None:
            continue
        for chance, accepted, tokens in laws.round(prefix, num):
            tokens = tokens[: LENGTH - len(prefix)]
            there = reached[prefix + tokens]
            there.mass += here.mass * chance
            there.rounds += (here.rounds + here.mass) * chance
            for k in range(num):
                kept = k < min(accepted, len(tokens))
                there.survived[k] += (here.survived[k] + here.mass * kept) * chance
    return reached


def accept_of(laws: Laws, answer: tuple, num: int) -> torch.Tensor:
    accept_AK = torch.zeros(LENGTH + 1, num, dtype=torch.double)
    for a, k in itertools.product(range(LENGTH), range(num)):
        if a + k < LENGTH:
            before, x = answer[: a + k], answer[a + k]
            accept_AK[a, k] = acceptance(laws.p(before)[x].log(), laws.q(a, before)[x].log())
    return accept_AK


@pytest.mark.parametrize(("kind", "seed"), [("random", 0), ("sparse", 1)])
@pytest.mark.parametrize("drafts", ["block", "sequential", "point"])
def test_expected_rounds_are_those_of_decoding_for_every_answer(drafts, kind, seed):
    for num in (1, 2, 3):
        laws = Laws(kind, drafts, seed)
        reached = decoded(laws, num)
        for answer in itertools.product(range(V), repeat=LENGTH):
            p = float(torch.stack([laws.p(answer[:t])[x] for t, x in enumerate(answer)]).prod())
            found = reached.get(answer, Sums())
            assert found.mass == pytest.approx(p, abs=1e-9), "the text has the target's law"
            rounds, survived = expected(accept_of(laws, answer, num)) if p else (0.0, [0.0] * num)
            assert p * rounds == pytest.approx(found.rounds, abs=1e-9)
            assert [p * s for s in survived] == pytest.approx(found.survived[:num], abs=1e-9)


def test_neither_products_of_alpha_nor_a_mean_over_anchors_is_tau():
    """Of decoding, by a margin that no rounding explains."""
    laws, num = Laws("random", "sequential", 0), 3
    reached = decoded(laws, num)
    tau = LENGTH / sum(sums.rounds for sums in reached.values())
    by_alpha = by_anchor = exact = 0.0
    for answer, sums in reached.items():
        for a in range(LENGTH - num):  # anchors whose drafts all fit
            alphas = [
                float(torch.minimum(laws.p(before), laws.q(a, before)).sum())
                for before in (answer[: a + k] for k in range(num))
            ]
            chances = accept_of(laws, answer, num)[a]
            by_alpha += sums.mass * (1 + float(torch.tensor(alphas).cumprod(0).sum())) / (LENGTH - num)
            by_anchor += sums.mass * (1 + float(chances.cumprod(0).sum())) / (LENGTH - num)
        exact += sums.mass * expected(accept_of(laws, answer, num))[0]
    assert LENGTH / exact == pytest.approx(tau, abs=1e-9)
    assert abs(by_alpha - tau) > 0.01
    assert abs(by_anchor - tau) > 0.01
    assert abs(by_alpha - by_anchor) > 0.01


def test_drafts_that_are_certain_make_the_rounds_that_are_walked():
    generator = torch.Generator().manual_seed(0)
    for length, num in itertools.product((2, 3, 9), (1, 2, 4)):
        path = torch.randint(2, (length,), generator=generator).tolist()
        drafts_AK = torch.randint(2, (length, num), generator=generator)
        accept_AK = torch.tensor([
            [float(a + k + 1 < length and drafts_AK[a, k] == path[a + k + 1]) for k in range(num)]
            for a in range(length)
        ])  # fmt: skip
        rounds, survived = expected(accept_AK)
        assert Counts(num, rounds, length - 1, survived) == walk(drafts_AK, path)


def test_a_law_is_read_at_its_temperature():
    logits = torch.tensor([[1.0, 3.0, 0.0]])
    found = log_law(logits, torch.tensor([0]), 0.5)
    assert float(found.exp()) == pytest.approx(float(torch.softmax(logits / 0.5, -1)[0, 0]))
    assert float(acceptance(torch.tensor(0.3).log(), torch.tensor(0.1).log())) == pytest.approx(1 / 3)
    assert float(acceptance(torch.tensor(0.1).log(), torch.tensor(0.3).log())) == 1.0


# With a target and a drafter --------------------------------------------------------------------------

HEAT = 0.8


@pytest.fixture(scope="module")
def target():
    """Twelve tokens: chance alone accepts some drafts."""
    return tiny.target(layers=3, vocab=12)


@pytest.fixture(scope="module")
def drafter(target):
    return tiny.trained(target, sampled(target)[0], steps=30, mask_token=11)


def sampled(target, drafter=None, n=None, number=8, num=14):
    """Answers that the engine samples, with the rounds it made of them."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 11, (number, 6), generator=generator).tolist()
    engine = Engine(target, drafter, n, slots=2, capacity=40)
    asked = [Request(prompt, num, Sampling(HEAT, seed=i), name=str(i)) for i, prompt in enumerate(prompts)]
    answers = sorted(engine.run(asked), key=lambda answer: int(answer.request.name))
    examples = []
    for prompt, answer in zip(prompts, answers, strict=True):
        mask = [False] * len(prompt) + [True] * len(answer.tokens)
        examples.append(Example(prompt + answer.tokens, mask, "chat", f"row {answer.request.name}"))
    return examples, answers


@pytest.mark.parametrize("n", [1, 4])
def test_greedy_drafts_make_the_rounds_on_a_sampled_answer_that_the_engine_made(target, drafter, n):
    examples, answers = sampled(target, drafter, n)
    found = list(paths(target, examples, drafter.layer_ids, temperature=HEAT))
    assert [path.length for path in found] == [len(answer.tokens) for answer in answers]
    assert not any(path.off_path for path in found)
    for by_n, answer in zip(score(drafter, found, [n]), answers, strict=True):
        counts = Counts(n)
        for done in answer.rounds:
            counts.add_round(done.accepted, done.emitted)
        assert by_n[n] == counts
    assert len({done.accepted for answer in answers for done in answer.rounds}) > 1


@torch.inference_mode()
@pytest.mark.parametrize("kept", [None, 8])
def test_sampled_drafts_are_scored_by_both_laws_at_the_temperature(target, drafter, kept):
    examples = [example for example in sampled(target)[0] if sum(example.mask) > 6][:2]
    if kept:
        drafter = tiny.dflash(target, choose(torch.arange(12), kept), mask_token=11)
        assert any(i not in drafter.vocab.kept_N for e in examples for i in e.ids[7:])
    found = list(paths(target, examples, drafter.layer_ids, temperature=HEAT))
    scored = score(drafter, found, [3], drafts="sampled", anchors_at_once=5)
    for path, by_n in zip(found, scored, strict=True):
        ids = path.example.ids
        p_TV = torch.softmax(target.model(input_ids=torch.tensor([ids])).logits[0].float() / HEAT, -1)
        batch = pack([path.example], [path.states])
        accept_AK = torch.zeros(path.length, 3)
        for a, k in itertools.product(range(path.length), range(3)):
            at = path.first + a + k + 1
            if at < len(ids):
                anchor_A = torch.tensor([path.first + a])
                q_N = torch.softmax(drafter.draft_logits(batch, anchor_A, 3)[0, k] / HEAT, -1)
                kept_N = torch.arange(len(q_N)) if drafter.vocab is None else drafter.vocab.kept_N
                q = float(q_N[kept_N == ids[at]].sum())
                accept_AK[a, k] = min(1.0, q / float(p_TV[at - 1, ids[at]]))
        rounds, survived = expected(accept_AK)
        assert 1 < by_n[3].rounds < path.length - 1
        assert by_n[3].tokens == path.length - 1
        assert by_n[3].rounds == pytest.approx(rounds, rel=1e-4)
        assert by_n[3].survived == pytest.approx(survived, rel=1e-3)


def test_drafts_that_depend_on_one_another_are_conditioned_on_the_path(target, drafter, monkeypatch):
    """A drafter that is certain of the path's tokens, given those before, has all of them accepted."""
    examples, _ = sampled(target, number=1)
    (path,) = paths(target, examples, drafter.layer_ids, temperature=HEAT)

    def certain(batch, anchors_A, n):
        at_AK = anchors_A[:, None] + torch.arange(1, n + 1)
        ids_AK = batch.tokens_BT[0, at_AK.clamp(max=batch.tokens_BT.shape[1] - 1)]
        return torch.nn.functional.one_hot(ids_AK, target.vocab_size) * 1e4

    monkeypatch.setattr(drafter, "path_logits", certain)
    (by_n,) = score(drafter, [path], [3], drafts="sampled")
    assert by_n[3].rounds == pytest.approx(-(-(path.length - 1) // 4))
    assert by_n[3].tau == pytest.approx((path.length - 1) / by_n[3].rounds)


def test_answers_of_one_token_have_no_round(target, drafter):
    one = Example([5, 6, 7, 8], [False] * 3 + [True], "chat", "one")
    (path,) = paths(target, [one], drafter.layer_ids, temperature=HEAT)
    assert score(drafter, [path], [2], drafts="sampled") == [{2: Counts(2)}]
