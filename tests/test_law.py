"""The law of a request: every parameter beside plain loops in Python, and beside transformers' processors."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from serve.law import Sampling, _chosen, adjusted, choose, law, laws, uniforms

V = 12
LOGITS_JV = torch.randn(4, V, generator=torch.Generator().manual_seed(0)) * 3
PROMPT, ANSWER, DRAFTS = [3, 3, 7], [1, 5, 1], [1, 5, 0]


def by_loops(logits_V, sampling: Sampling, prompt, answer) -> list[float]:
    """The law of one position, as vLLM's documentation has it, in float64 and without a tensor."""
    z = [float(logit) for logit in logits_V]
    counts = Counter(answer)
    for token in range(len(z)):
        z[token] += sampling.logit_bias.get(token, 0.0)
        if token in {*prompt, *answer}:
            z[token] *= 1 / sampling.repetition_penalty if z[token] > 0 else sampling.repetition_penalty
        z[token] -= sampling.frequency_penalty * counts[token]
        z[token] -= sampling.presence_penalty * (counts[token] > 0)
    if sampling.temperature == 0:
        return [float(token == z.index(max(z))) for token in range(len(z))]
    weights = [math.exp((each - max(z)) / sampling.temperature) for each in z]
    weights = [w if w >= sampling.min_p else 0.0 for w in weights]  # the best weighs 1
    if sampling.top_k:
        least = sorted(weights, reverse=True)[min(sampling.top_k, len(z)) - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    mass, before = sum(weights), 0.0
    for token in sorted(range(len(z)), key=lambda token: -weights[token]):
        weight = weights[token]
        if before >= sampling.top_p * mass:
            weights[token] = 0.0
        before += weight
    return [w / sum(weights) for w in weights]


def law_of(sampling: Sampling, logits_JV=LOGITS_JV, prompt=PROMPT, answer=ANSWER, drafts=DRAFTS):
    return law(adjusted(logits_JV, sampling, prompt, answer, drafts), sampling)


def assert_as_by_loops(sampling: Sampling) -> None:
    found_JV = law_of(sampling)
    assert found_JV.dtype == torch.float32
    for j, found_V in enumerate(found_JV):
        want = by_loops(LOGITS_JV[j], sampling, PROMPT, ANSWER + DRAFTS[:j])
        assert found_V.tolist() == pytest.approx(want, abs=1e-5), (sampling, j)


SINGLE = {
    "temperature": [1e-5, 0.3, 1.0, 2.5, 1e6],
    "top_k": [0, 1, 4, V, V + 9],
    "top_p": [1e-30, 0.3, 0.9, 1 - 1e-12, 1.0],
    "min_p": [0.0, 1e-30, 0.2, 1.0],
    "repetition_penalty": [0.5, 1.0, 1.7, 1e6],
    "presence_penalty": [-2.0, 0.7, 2.0],
    "frequency_penalty": [-2.0, 0.7, 2.0],
    "logit_bias": [{2: 100.0}, {2: -100.0, 5: 3.5}, dict.fromkeys(range(V), -100.0)],
}


@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize(("key", "value"), [(key, value) for key in SINGLE for value in SINGLE[key]])
def test_one_parameter_beside_plain_loops(key, value, heat):
    assert_as_by_loops(Sampling(**{"temperature": heat, key: value}))


@settings(max_examples=150, deadline=None, database=None)
@given(st.fixed_dictionaries({}, optional={key: st.sampled_from(SINGLE[key]) for key in SINGLE}))
def test_any_combination_beside_plain_loops(chosen):
    if chosen.get("temperature") == 1e6 and {"top_p", "repetition_penalty"} & chosen.keys():
        return  # everything ties but for rounding: which tokens stay is nobody's to say
    assert_as_by_loops(Sampling(**chosen))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, top_k=5),
        Sampling(temperature=1.3, top_p=0.8),
        Sampling(temperature=1.3, min_p=0.1),
        Sampling(temperature=0.9, repetition_penalty=1.4),
        Sampling(temperature=1.8, min_p=0.05, top_k=6, top_p=0.7, repetition_penalty=0.8),
    ],
)
def test_the_law_is_that_of_transformers_processors_in_our_order(sampling):
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    processors.append(MinPLogitsWarper(sampling.min_p))
    processors.append(TopKLogitsWarper(sampling.top_k or V))
    processors.append(TopPLogitsWarper(sampling.top_p))
    for j, found_V in enumerate(law_of(sampling)):
        ids = torch.tensor([PROMPT + ANSWER + DRAFTS[:j]])
        want_1V = processors(ids, LOGITS_JV[j : j + 1].clone()).softmax(-1)
        assert torch.allclose(found_V, want_1V[0], atol=1e-6)
        assert torch.equal(found_V > 0, want_1V[0] > 0)


def test_a_row_sees_the_drafts_before_it_and_no_other():
    """All rows have the same logits, so they differ by history alone; each occurrence counts once."""
    same_JV = LOGITS_JV[:1].expand(4, V)
    sampling = Sampling(frequency_penalty=1.0, presence_penalty=0.25)
    lost_JV = same_JV - adjusted(same_JV, sampling, PROMPT, [1], [1, 5, 1])
    want = [{1: 1.25}, {1: 2.25}, {1: 2.25, 5: 1.25}, {1: 3.25, 5: 1.25}]
    for row, lost_V in zip(want, lost_JV, strict=True):
        assert lost_V.tolist() == pytest.approx([row.get(token, 0.0) for token in range(V)], abs=1e-5)


def test_rows_are_as_if_the_drafts_were_answered_one_by_one():
    sampling = Sampling(1.0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.5)
    at_once_JV = adjusted(LOGITS_JV, sampling, PROMPT, ANSWER, DRAFTS)
    for j in range(4):
        alone_1V = adjusted(LOGITS_JV[j : j + 1], sampling, PROMPT, ANSWER + DRAFTS[:j], [])
        assert torch.equal(at_once_JV[j], alone_1V[0])


def test_penalties_of_a_first_token_and_of_drafts_alone():
    """No answer yet: presence and frequency take nothing, repetition the prompt's tokens alone."""
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=2.0, frequency_penalty=2.0)
    ones_JV = torch.ones(2, V)
    found_JV = adjusted(ones_JV, sampling, [3], [], [4])
    assert found_JV[0].tolist() == [0.5 if token == 3 else 1.0 for token in range(V)]
    assert found_JV[1].tolist() == [{3: 0.5, 4: -3.5}.get(token, 1.0) for token in range(V)]
    assert torch.equal(adjusted(ones_JV, Sampling(repetition_penalty=2.0), [], [], []), ones_JV)


@pytest.mark.parametrize(
    "sampling", [Sampling(logit_bias={2: 5.0}), Sampling(repetition_penalty=3.0), Sampling(0.5, top_p=0.5)]
)
def test_the_targets_logits_stay_as_they_are(sampling):
    before_JV = LOGITS_JV.clone()
    law_of(sampling)
    assert torch.equal(LOGITS_JV, before_JV)


def test_greedy_follows_penalties_and_bias_and_ignores_truncation():
    logits_1V = torch.tensor([[4.0, 3.5, 1.0]])
    truncated = {"top_k": 1, "top_p": 0.1, "min_p": 1.0}
    for sampling, answer, want in [
        (Sampling(), [0], 0),
        (Sampling(**truncated, frequency_penalty=0.3), [0], 0),
        (Sampling(**truncated, frequency_penalty=0.3), [0, 0], 1),
        (Sampling(**truncated, repetition_penalty=1.2), [0], 1),
        (Sampling(**truncated, logit_bias={2: 3.5}), [], 2),
    ]:
        assert law_of(sampling, logits_1V, [], answer, []).tolist() == [[float(t == want) for t in range(3)]]


def test_ties_with_the_kth_token_stay():
    logits_1V = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    for k, kept in [(1, {1}), (2, {0, 1, 2, 4}), (4, {0, 1, 2, 4}), (5, {0, 1, 2, 3, 4})]:
        assert set(law_of(Sampling(1.0, top_k=k), logits_1V)[0].nonzero().flatten().tolist()) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.49, {1}), (0.5, {1}), (0.51, {1, 0}), (0.75, {1, 0}), (0.76, {1, 0, 2}), (0.875, {1, 0, 2})],
)
def test_the_token_that_crosses_the_mass_stays_and_of_ties_the_lower_id(top_p, kept):
    logits_1V = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log()  # powers of two: sums are exact
    found_V = law_of(Sampling(1.0, top_p=top_p), logits_1V)[0]
    assert set(found_V.nonzero().flatten().tolist()) == kept
    assert float(found_V.sum()) == pytest.approx(1)


def test_min_p_is_a_share_of_the_best_after_temperature():
    logits_1V = torch.tensor([[0.0, -1.0, -2.0]])
    for heat, kept in [(0.5, 1), (1.0, 2), (2.0, 3)]:  # shares of the second: 0.14, 0.37, 0.61
        assert int((law_of(Sampling(heat, min_p=0.3), logits_1V) > 0).sum()) == kept
    assert law_of(Sampling(1.0, min_p=1.0), torch.tensor([[2.0, 2.0, 1.0]])).tolist() == [[0.5, 0.5, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_p=0.9), Sampling(repetition_penalty=1.3)])
def test_half_precision_logits_are_taken_as_the_numbers_they_are(dtype, sampling):
    half_JV = LOGITS_JV.to(dtype)
    found_JV = law_of(sampling, half_JV)
    assert found_JV.dtype == torch.float32
    assert torch.equal(found_JV, law_of(sampling, half_JV.float()))
    assert torch.equal(law(half_JV, sampling), law(half_JV.float(), sampling))
    both = [adjusted(logits_JV, sampling, PROMPT, ANSWER, DRAFTS) for logits_JV in (half_JV, half_JV.float())]
    assert both[0].dtype == torch.float32
    assert torch.equal(*both)


@pytest.mark.parametrize("mass", [1e-46, 1e-300, 5e-324])
def test_a_mass_too_small_for_float32_keeps_the_best_token(mass):
    law_1V = law(torch.tensor([[0.0, 3.0, 1.0]]), Sampling(1.0, top_p=mass))
    assert law_1V.tolist() == [[0.0, 1.0, 0.0]]


HARD = [-math.inf, -3e38, -1e4, 0.0, 1e4, 3e38, math.inf]


@pytest.mark.parametrize("heat", [0.0, 1e-6, 1e-5, 1.0, 1e6])
@pytest.mark.parametrize(
    "more", [{}, {"top_p": 1e-9}, {"top_k": 2}, {"min_p": 0.5}, {"logit_bias": {0: 100.0}}]
)
def test_extreme_logits_and_temperatures_give_a_law(heat, more):
    rows = [row for row in itertools.product(HARD, repeat=3) if max(row) > -math.inf]
    found_JV = law_of(Sampling(heat, **more), torch.tensor(rows), [], [], [])
    assert found_JV.isfinite().all()
    assert torch.allclose(found_JV.sum(1), torch.ones(len(rows)))
    best_J = torch.tensor(rows).argmax(1, keepdim=True)
    assert (found_JV.gather(1, best_J) >= 1 / 3 - 1e-6).all()
    assert found_JV[torch.tensor(rows) == -math.inf].eq(0).all()


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [-math.inf] * 3])
def test_logits_that_are_no_law_are_refused(row, heat):
    with pytest.raises(ValueError, match=r"logits are NaN.*hardware\.dtype=float32"):
        law(torch.tensor([[0.0, 1.0, 2.0], row]), Sampling(heat))


@pytest.mark.parametrize(
    ("sampling", "sorts"),
    [
        (Sampling(), set()),
        (Sampling(1.0), set()),
        (Sampling(1.0, min_p=0.1, repetition_penalty=1.2, logit_bias={1: 1.0}), set()),
        (Sampling(1.0, top_k=V), set()),
        (Sampling(1.0, top_k=3), {"topk"}),
        (Sampling(1.0, top_p=0.9), {"sort"}),
    ],
)
def test_only_truncated_rows_are_sorted(sampling, sorts, monkeypatch):
    heard = set()
    for name in ("sort", "topk", "argsort"):
        kept = getattr(torch.Tensor, name)

        def counted(*args, name=name, kept=kept, **kwargs):
            heard.add(name)
            return kept(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    law_of(sampling)
    assert heard == sorts


# Many requests ----------------------------------------------------------------------------------------

ALL = [
    Sampling(seed=3),
    Sampling(1.0, seed=4),
    Sampling(0.7, seed=3),
    Sampling(1.7, top_k=7, seed=5),
    Sampling(0.9, top_p=0.6, seed=6),
    Sampling(1.2, min_p=0.1, seed=7),
    Sampling(2.5, top_k=40, top_p=0.9, min_p=0.01, seed=8),
    Sampling(0.0, top_p=0.5),
]
MANY = [
    torch.randn(1 + at % 3, 300, generator=torch.Generator().manual_seed(at)) * 4 for at in range(len(ALL))
]


def test_the_law_of_a_row_is_the_same_bits_beside_any_others():
    each = [sampling for sampling, logits_JV in zip(ALL, MANY, strict=True) for _ in logits_JV]
    alone = [law(logits_JV, sampling) for sampling, logits_JV in zip(ALL, MANY, strict=True)]
    assert torch.equal(laws(torch.cat(MANY), each), torch.cat(alone))


@pytest.mark.parametrize("at_once", [choose, _chosen])
def test_requests_draw_what_each_would_alone_by_the_uniforms_of_its_positions(at_once):
    positions = list(range(20, 20 + len(ALL)))
    want = []
    for sampling, logits_JV, position in zip(ALL, MANY, positions, strict=True):
        cumulative_JV = law(logits_JV, sampling).double().cumsum(-1)
        below = [uniforms(sampling.seed, "next", position + j, 1)[0] for j in range(len(logits_JV))]
        pairs = zip(cumulative_JV.tolist(), below, strict=True)
        want.append([sum(each <= u * row[-1] for each in row) for row, u in pairs])
    assert at_once(MANY, ALL, positions) == want
    assert want[0] == MANY[0].argmax(-1).tolist()


def test_a_nucleus_is_the_same_whether_rare_tokens_are_sorted_or_not():
    """300 tokens, peaked: most of them are rarer than what the cut needs to look at."""
    for top_p in (0.05, 0.5, 0.9, 0.999, 1 - 1e-12):
        laws_JV = law(torch.cat(MANY), Sampling(1.0))
        sorted_JV, order_JV = laws_JV.sort(dim=-1, descending=True, stable=True)
        kept_JV = sorted_JV * (sorted_JV.cumsum(-1) - sorted_JV < top_p)
        want_JV = torch.zeros_like(laws_JV).scatter_(1, order_JV, kept_JV)
        assert torch.equal(law(torch.cat(MANY), Sampling(1.0, top_p=top_p)), want_JV / want_JV.sum(-1, True))


BAD = {
    "temperature": [-0.1, math.nan, math.inf, 1e7, "1"],
    "top_k": [-1, 2.5, math.nan, math.inf, None],
    "top_p": [0.0, -0.5, 1.0001, math.nan],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0.0, -1.0, math.inf, math.nan, 1e-300],
    "presence_penalty": [2.1, -2.1, math.nan],
    "frequency_penalty": [2.1, -2.1, math.nan],
    "logit_bias": [{1: 101.0}, {1: -101.0}, {1: math.nan}, {-1: 1.0}, {"1": 1.0}, {0.5: 1.0}],
    "seed": [math.nan, 1.5, None],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in BAD for value in BAD[key]])
def test_bad_values_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"^{key}=.*: give "):
        Sampling(**{key: value})


@pytest.mark.parametrize(
    ("sampling", "greedy", "history", "adjusts"),
    [
        (Sampling(), True, False, False),
        (Sampling(0.5, top_k=3, top_p=0.5, min_p=0.1), False, False, False),
        (Sampling(1e-300, logit_bias={1: 1.0}), True, False, True),
        (Sampling(repetition_penalty=0.9), True, True, True),
        (Sampling(1.0, presence_penalty=-0.1), False, True, True),
        (Sampling(1.0, frequency_penalty=0.1), False, True, True),
    ],
)
def test_what_a_request_needs_is_known_beforehand(sampling, greedy, history, adjusts):
    assert (sampling.greedy, sampling.needs_history, sampling.adjusts) == (greedy, history, adjusts)
