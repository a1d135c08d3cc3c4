"""Losses over the vocabulary: chunked against plain, against fp64, and in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafters.losses import (
    SOFT,
    Extra,
    Law,
    Lengths,
    LossWeights,
    Teacher,
    chunked,
    feature_distance,
    per_position,
    plain,
)

CASE = json.loads((Path(__file__).parent / "cases" / "t01_loss_and_metrics.json").read_text())
TERMS = ("ce", *SOFT)
P, D, V = 23, 12, 40
KEPT = torch.arange(1, V, 3)
WEIGHTS = {"ce": 0.7, "kl": 0.3, "l1": 1.3, "nla": 0.9, "hybrid": 0.8}


def only(term: str) -> LossWeights:
    return LossWeights(**{"ce": 0.0, term: WEIGHTS[term]})


def problem(reduced: bool = False, softcap: float | None = None, dtype=torch.float32, positions: int = P):
    """Arguments of ``plain`` and ``chunked`` but for the terms: every third weight is 0."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    kept = KEPT if reduced else None
    num = len(KEPT) if reduced else V
    last_PD, teacher_head = draw(positions, D), draw(V, D) / 2
    labels_P = torch.randint(0, num, (positions,), generator=generator)
    weights_P = torch.rand(positions, generator=generator) + 0.1
    weights_P[::3] = 0
    labels_P[::6] = -1  # cannot be drafted, and so without weight
    return {
        "hidden_PD": draw(positions, D).requires_grad_(),
        "head_ND": draw(num, D) / 2,
        "labels_P": labels_P,
        "weights_P": weights_P,
        "teacher": Teacher(last_PD, lambda x: capped(x @ teacher_head.T, softcap), kept),
        "softcap": softcap,
    }


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def definition(term: str, s_PV: torch.Tensor, p_PV: torch.Tensor, labels_P: torch.Tensor) -> torch.Tensor:
    """A term a position, in the dtype it is given, as the equations of the module's docstring say it."""
    q_PV = s_PV.softmax(-1)
    if term == "ce":
        return -q_PV.gather(1, labels_P.clamp(min=0)[:, None]).squeeze(1).log()
    soft_PV = p_PV / p_PV.sum(-1, keepdim=True)
    kl_P = (soft_PV * (soft_PV / q_PV).log()).sum(-1)
    alpha_P = torch.minimum(p_PV, q_PV).sum(-1)
    share_P = torch.exp(-3 * alpha_P.detach())
    return {
        "kl": kl_P,
        "l1": (p_PV - q_PV).abs().sum(-1),
        "nla": -alpha_P.log(),
        "hybrid": share_P * kl_P + (1 - share_P) * (1 - alpha_P),
    }[term]


def gradient(function, given: dict, terms: LossWeights, **more) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Total, gradient of the hidden states for a loss that is then scaled by 1/7, and the sums."""
    total, sums, _ = function(**given, terms=terms, **more)
    (grad,) = torch.autograd.grad(total / 7, given["hidden_PD"])
    return total.detach(), grad, sums


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("term", TERMS)
def test_every_term_is_its_definition_in_fp64_to_1e_5(term, reduced, softcap):
    given = problem(reduced, softcap)
    exact = problem(reduced, softcap, torch.float64)
    p_PV = exact["teacher"].head(exact["teacher"].last_PD).softmax(-1)
    p_PV = p_PV if exact["teacher"].kept_N is None else p_PV[:, KEPT]
    s_PV = capped(exact["hidden_PD"] @ exact["head_ND"].T, softcap)
    want = (definition(term, s_PV, p_PV, exact["labels_P"]) * exact["weights_P"]).sum()
    (want_grad,) = torch.autograd.grad(WEIGHTS[term] * want / 7, exact["hidden_PD"])
    for function, more in ((plain, {}), (chunked, {"chunk": 5})):
        total, grad, sums = gradient(function, given, only(term), **more)
        assert float(total) == pytest.approx(WEIGHTS[term] * want.item(), rel=1e-5)
        assert float(sums[term]) == pytest.approx(want.item(), rel=1e-5)
        assert relative(grad, want_grad.float()) < 1e-5


@pytest.mark.parametrize("chunk", [1, 7, P, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("reduced", [False, True])
def test_chunked_and_plain_agree_on_a_mixture_whatever_the_chunk(reduced, softcap, chunk):
    given, terms = problem(reduced, softcap), LossWeights(**WEIGHTS)
    want, want_grad, want_sums = gradient(plain, given, terms)
    total, grad, sums = gradient(chunked, given, terms, chunk=chunk)
    assert float(total) == pytest.approx(float(want), rel=1e-5)
    assert relative(grad, want_grad) < 1e-5
    assert sums.keys() == want_sums.keys() == set(TERMS)
    for name in TERMS:
        assert float(sums[name]) == pytest.approx(float(want_sums[name]), rel=1e-5)


@pytest.mark.filterwarnings("ignore:Input #0 requires gradient")
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("term", [term for term in TERMS if term != "hybrid"])  # its lambda is a constant
def test_gradients_are_those_of_finite_differences(term, softcap):
    given = problem(reduced=True, softcap=softcap, positions=4)
    hidden_PD = given.pop("hidden_PD")
    total = lambda x: chunked(x, **given, terms=only(term), chunk=3)[0]  # noqa: E731
    assert torch.autograd.gradcheck(total, (hidden_PD,), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_hard_labels_alone_need_no_teacher():
    given = {**problem(), "teacher": None}
    total, _, sums = gradient(chunked, given, LossWeights(), chunk=4)
    assert sums.keys() == {"ce"}
    assert float(total) == pytest.approx(float(gradient(plain, given, LossWeights())[0]), rel=1e-5)


def test_on_a_reduced_vocabulary_acceptance_counts_the_mass_it_leaves_out():
    """p is (0.5, 0.3, 0.2) and only the first two can be drafted: 0.8 is the most that alpha can be."""
    p_PV = torch.tensor([[0.5, 0.3]])
    law = Law(p_PV / 0.8, torch.tensor([[0.8]]))
    found = per_position(torch.tensor([[0.625, 0.375]]).log(), torch.tensor([0]), law)
    assert float(found["nla"].neg().exp()) == pytest.approx(0.8)
    assert float(found["kl"]) == pytest.approx(0, abs=1e-6)  # the renormalised law is met exactly
    assert float(found["l1"]) == pytest.approx(0.2)


def test_a_drafter_that_knows_the_target_has_nothing_left_to_learn():
    """With q = p all soft terms are 0, and kl, which has no kink there, is flat."""
    given = problem()
    last_PD = given["hidden_PD"].detach()
    given["teacher"] = Teacher(last_PD, lambda x: x @ given["head_ND"].T)
    _, grad, sums = gradient(chunked, given, only("kl"), chunk=6)
    every = gradient(chunked, given, LossWeights(**WEIGHTS), chunk=6)[2]
    assert [float(every[term]) for term in SOFT] == pytest.approx([0] * len(SOFT), abs=2e-5)
    assert float(sums["ce"]) > 1  # the labels are still a surprise
    assert float(grad.abs().max()) < 1e-6


@pytest.mark.parametrize("function", [plain, chunked])
def test_positions_of_weight_0_change_neither_loss_nor_gradient(function):
    given, terms = problem(), LossWeights(**WEIGHTS)
    total, grad, _ = gradient(function, given, terms)
    silent = given["weights_P"] == 0
    assert bool((grad[silent] == 0).all())
    assert bool((grad[~silent] != 0).any(1).all())
    changed = given["hidden_PD"].detach().clone()
    changed[silent] += 5
    again, _, _ = gradient(function, {**given, "hidden_PD": changed.requires_grad_()}, terms)
    assert float(again) == pytest.approx(float(total), rel=1e-6)


def test_masked_and_all_masked_sums_are_those_of_the_case():
    """Uniform laws over e**2 tokens would lose 2.0 each; a head of zeros over 7 loses log 7."""
    hidden_PD = torch.ones(4, 3, requires_grad=True)
    head_ND, labels_P = torch.zeros(7, 3), torch.zeros(4, dtype=torch.long)
    scale = CASE["masked_mean"]["token_losses"][0] / float(torch.tensor(7.0).log())
    weights_P = scale * torch.tensor(CASE["masked_mean"]["mask"]).float()
    total, *_ = chunked(hidden_PD, head_ND, labels_P, weights_P, LossWeights())
    assert total.item() / sum(CASE["masked_mean"]["mask"]) == pytest.approx(CASE["masked_mean"]["expect"])

    none_P = torch.tensor([0.0, 0.0, 0.0, 0.0])
    given = {**problem(positions=4), "hidden_PD": hidden_PD.detach().repeat(1, 4).requires_grad_()}
    for terms in (LossWeights(), LossWeights(**WEIGHTS)):
        total, grad, sums = gradient(chunked, {**given, "weights_P": none_P}, terms)
        assert float(total) == 0
        assert all(float(value) == 0 for value in sums.values())
        assert torch.equal(grad, torch.zeros_like(grad))  # finite, and there is one: every rank reduces it


def test_losses_of_micro_batches_add_up_to_that_of_the_whole():
    given, terms = problem(), LossWeights(**WEIGHTS)
    whole, grad, _ = gradient(chunked, given, terms)
    parts, grads = [], []
    for rows in (slice(0, 4), slice(4, P)):
        teacher = Teacher(given["teacher"].last_PD[rows], given["teacher"].head)
        cut = {key: given[key][rows] for key in ("labels_P", "weights_P")}
        hidden_PD = given["hidden_PD"].detach()[rows].clone().requires_grad_()
        part, of_part, _ = gradient(
            chunked, {**given, **cut, "hidden_PD": hidden_PD, "teacher": teacher}, terms
        )
        parts.append(part)
        grads.append(of_part)
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-5)
    assert relative(torch.cat(grads), grad) < 1e-5


def test_the_head_is_frozen():
    given = problem()
    head_ND = given["head_ND"].requires_grad_()
    total, *_ = chunked(**given, terms=LossWeights())
    total.backward()
    assert head_ND.grad is None
    assert given["hidden_PD"].grad is not None


@pytest.mark.parametrize("terms", [LossWeights(), LossWeights(**WEIGHTS)])
def test_bfloat16_states_lose_what_their_fp32_values_lose(terms):
    given = problem(dtype=torch.bfloat16)
    widened = {
        **given,
        "hidden_PD": given["hidden_PD"].detach().float().requires_grad_(),
        "head_ND": given["head_ND"].float(),
    }
    total, grad, _ = gradient(chunked, given, terms)
    want, want_grad, _ = gradient(chunked, widened, terms)
    assert grad.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(float(want), rel=1e-2)
    assert relative(grad.float(), want_grad) < 2e-2


# Memory --------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most numbers that any operation's result holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("terms", [LossWeights(), LossWeights(**WEIGHTS)])
def test_no_tensor_is_larger_than_one_chunk_of_logits_forward_or_backward(terms, reduced, softcap):
    chunk, positions = 16, 120
    given = problem(reduced, softcap, positions=positions)
    num = V if terms.soft else len(given["head_ND"])
    limit = max(chunk * num, positions * D, V * D)
    assert limit < positions * len(given["head_ND"])  # else there would be nothing to see
    with Largest() as seen:
        chunked(**given, terms=terms, chunk=chunk)[0].backward()
    assert 0 < seen.numel <= limit
    with Largest() as seen:
        plain(**given, terms=terms)[0].backward()
    assert seen.numel >= positions * len(given["head_ND"])


def test_the_label_of_a_weighted_position_can_be_drafted():
    given = problem()
    given["weights_P"][given["labels_P"] < 0] = 1.0
    with pytest.raises(AssertionError, match="outside the draft vocabulary"):
        chunked(**given, terms=LossWeights())


@pytest.mark.parametrize(
    ("wrong", "match"),
    [({"kl": -0.5}, r"loss\.kl=-0\.5"), ({"ce": 0.0}, "every weight is 0"), ({"nla": float("nan")}, "nla")],
)
def test_weights_that_train_nothing_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        LossWeights(**wrong)


def test_the_feature_term_is_the_squared_distance_as_a_share_of_the_targets_variance():
    last_PD = torch.tensor([[1.0, -1.0], [3.0, 1.0]])
    hidden_PD = (last_PD + torch.tensor([[2.0, 0.0], [0.0, 0.0]])).requires_grad_()
    weights_P = torch.tensor([0.5, 1.0])
    value = feature_distance(hidden_PD, last_PD, weights_P)
    value.backward()
    variance = 8 / 3  # of 1, -1, 3, 1
    assert value.item() == pytest.approx(0.5 * 2.0 / variance)
    assert hidden_PD.grad.tolist() == [[pytest.approx(0.5 * 2 * 2.0 / 2 / variance), 0.0], [0.0, 0.0]]


# The second factor of the logits, weights by accepted length, acceptance ------------------------------


def factor(positions: int, num: int) -> Extra:
    generator = torch.Generator().manual_seed(1)
    return Extra(
        torch.randn(positions, 3, generator=generator).requires_grad_(),
        torch.randn(num, 3, generator=generator).requires_grad_(),
    )


@pytest.mark.parametrize("terms", [LossWeights(), LossWeights(**WEIGHTS)], ids=["ce", "all"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("chunk", [4, 100])
def test_a_second_factor_of_the_logits_is_trained_alike_by_both(terms, softcap, chunk):
    given = {**problem(reduced=True, softcap=softcap), "extra": factor(P, len(KEPT)), "terms": terms}
    wanted = (given["hidden_PD"], *given["extra"])
    want = torch.autograd.grad(plain(**given).total, wanted)
    found = torch.autograd.grad(chunked(**given, chunk=chunk).total, wanted)
    for ours, theirs in zip(found, want, strict=True):
        assert relative(ours, theirs) < 1e-5


def test_weights_by_length_are_the_gradient_of_the_expected_length():
    """sum_m prod_{i <= m} hit_i, differentiated by log hit: what the weights of dpace and expected are."""
    hit_P = torch.tensor([0.9, 0.5, 0.2, 0.7, 0.3, 0.8])
    log_P = hit_P.log().requires_grad_()
    log_P.exp().unflatten(0, (2, 3)).cumprod(1).sum().backward()
    assert torch.allclose(Lengths("dpace", 3, 0.0)(hit_P, torch.ones(6)), log_P.grad, atol=1e-6)


def test_a_position_that_does_not_count_adds_nothing_to_those_before():
    weights_P = Lengths("dpace", 3, 0.5)(torch.full((3,), 0.6), torch.tensor([1.0, 1.0, 0.0]))
    assert weights_P.tolist() == pytest.approx([0.8 + 0.64, 0.64, 0.0])


@pytest.mark.parametrize("kind", ["dpace", "expected"])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_weights_by_length_agree_in_both_forms_whatever_the_chunk(kind, chunk):
    given = {**problem(reduced=True, positions=24), "terms": LossWeights(**WEIGHTS)}
    given["weights_P"][8:12] = 0  # a block of no weight at all
    given["lengths"] = Lengths(kind, 4, 0.3)
    want, found = plain(**given), chunked(**given, chunk=chunk)
    (want_grad,) = torch.autograd.grad(want.total, given["hidden_PD"])
    (grad,) = torch.autograd.grad(found.total, given["hidden_PD"])
    assert float(found.total.detach()) == pytest.approx(float(want.total.detach()), rel=1e-5)
    assert relative(grad, want_grad) < 1e-5


def test_a_token_that_cannot_be_drafted_ends_what_dpace_expects():
    given = {**problem(positions=3), "lengths": Lengths("dpace", 3, 0.0), "terms": LossWeights()}
    given["labels_P"] = torch.tensor([4, -1, 5])
    given["weights_P"] = torch.tensor([1.0, 0.0, 1.0])
    (grad,) = torch.autograd.grad(chunked(**given).total, given["hidden_PD"])
    assert bool((grad[0] != 0).any())
    assert bool((grad[2] == 0).all())


def test_acceptance_is_found_beside_hard_labels_and_has_no_gradient():
    given = {**problem(reduced=True), "terms": LossWeights()}
    used_P = given["weights_P"] != 0
    heard_P = used_P | (given["labels_P"] < 0)
    assert bool((heard_P & ~used_P).any())
    want, found = plain(**given, heard_P=heard_P), chunked(**given, heard_P=heard_P, chunk=5)
    assert torch.allclose(found.alpha_P[heard_P], want.alpha_P[heard_P], atol=1e-6)
    assert bool((found.alpha_P[~heard_P] == 0).all())
    assert not found.alpha_P.requires_grad
    (grad,) = torch.autograd.grad(found.total, given["hidden_PD"])
    (plain_grad,) = torch.autograd.grad(chunked(**given).total, given["hidden_PD"])
    assert torch.equal(grad, plain_grad)  # looking on changes nothing


@pytest.mark.parametrize("function", [plain, chunked])
def test_a_law_whose_kept_mass_underflows_has_finite_losses(function):
    """The target is sure of a token that cannot be drafted: the kept ones all have probability 0 in fp32."""
    given = problem(reduced=True, positions=4)
    sure = lambda x: torch.zeros(len(x), V).index_fill(1, torch.tensor([0]), 500.0)  # noqa: E731
    given["teacher"] = Teacher(torch.zeros(4, D), sure, KEPT)
    total, grad, sums = gradient(function, given, LossWeights(**WEIGHTS))
    assert bool(torch.isfinite(grad).all())
    assert torch.isfinite(torch.stack([total, *sums.values()])).all()


def test_kl_over_the_kept_rows_alone_is_kl_over_all_of_them():
    given = problem(reduced=True)
    teacher = given["teacher"]
    want = gradient(chunked, given, only("kl"))
    given["teacher"] = Teacher(
        teacher.last_PD, lambda x: pytest.fail("all rows"), KEPT, lambda x: teacher.head(x)[:, KEPT]
    )
    total, grad, _ = gradient(chunked, given, only("kl"))
    assert float(total) == pytest.approx(float(want[0]), rel=1e-6)
    assert relative(grad, want[1]) < 1e-6
