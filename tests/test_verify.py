"""The law of the lossless rule, by exact enumeration: all drafts, accept patterns, sides of each ratio."""

import inspect
import itertools
import re

import pytest
import torch

from serve import verify as module
from serve.verify import verify, verify_matching

V = 3
EDGE = 1e-12  # how far a uniform stands from the ratio that decides


class Laws:
    """A law for every prefix of up to ``num`` tokens: of the target, and of the drafter."""

    def __init__(self, num: int, seed: int, kind: str) -> None:
        self.num = num
        generator = torch.Generator().manual_seed(seed)
        prefixes = [x for length in range(num + 1) for x in itertools.product(range(V), repeat=length)]
        self.p = {prefix: make_law(generator, kind) for prefix in prefixes}
        self.q = {prefix: make_law(generator, kind) for prefix in prefixes}
        if kind == "same":
            self.q = self.p
        self.floats = {prefix: law.tolist() for prefix, law in self.p.items()}  # of p, quick to read

    def of_target(self) -> dict[tuple, float]:
        """The law of the next ``num + 1`` tokens when the target decodes alone."""
        return {seq: self.chain(seq, 0) for seq in itertools.product(range(V), repeat=self.num + 1)}

    def chain(self, seq: tuple, start: int) -> float:
        """The target's probability of ``seq[start:]`` after ``seq[:start]``."""
        out = 1.0
        for at in range(start, len(seq)):
            out *= self.floats[seq[:at]][seq[at]]
        return out


def make_law(generator: torch.Generator, kind: str) -> torch.Tensor:
    weights = torch.rand(V, generator=generator, dtype=torch.float64) + 1e-3
    if kind == "sparse":  # zeros of one law meet zeros and ones of the other
        keep = torch.rand(V, generator=generator) < 0.6
        keep[int(torch.randint(V, (1,), generator=generator))] = True
        weights = weights * keep
    if kind == "tiny":  # probabilities that an epsilon would swallow
        weights[int(torch.randint(V, (1,), generator=generator))] *= 1e-7
    return weights / weights.sum()


def law_of_output(rule, laws: Laws, length: int, drafts: tuple | None) -> dict[tuple, float]:
    """The exact law of ``num + 1`` tokens: one round of ``rule``, then the target alone.

    ``length`` drafts are real, those after it filled with what must not matter. ``drafts=None``: drawn from
    the drafter's law, all possibilities enumerated; otherwise these fixed ones, as point masses.
    """
    num, rows = laws.num, []
    for x in itertools.product(range(V), repeat=length) if drafts is None else [drafts[:length]]:
        mass_of_x, ratios = 1.0, []
        for k in range(length):
            p = float(laws.p[x[:k]][x[k]])
            q = float(laws.q[x[:k]][x[k]]) if drafts is None else 1.0
            mass_of_x *= q
            ratios.append(min(1.0, p / q) if q else 0.0)
        for pattern in itertools.product((True, False), repeat=length):
            mass, uniforms = mass_of_x, []
            for ratio, below in zip(ratios, pattern, strict=True):
                mass *= ratio if below else 1 - ratio
                uniforms.append(ratio - EDGE if below else ratio + EDGE if ratio else 0.0)
            if mass > 0:
                rows.append((x + (0,) * (num - length), uniforms + [0.0] * (num - length), mass))
    x_BK = torch.tensor([row[0] for row in rows]).view(len(rows), num)
    u_BK = torch.tensor([row[1] for row in rows], dtype=torch.float64).view(len(rows), num)
    p_BJV = torch.stack([torch.stack([laws.p[row[0][:j]] for j in range(num + 1)]) for row in rows])
    q_BKV = torch.stack([torch.stack([laws.q[row[0][:j]] for j in range(num + 1)]) for row in rows])[:, :num]
    lengths_B = torch.full((len(rows),), length)
    accepted_B, next_BV = rule(p_BJV, q_BKV if drafts is None else None, x_BK, u_BK, lengths_B)

    out = dict.fromkeys(laws.of_target(), 0.0)
    for (x, _, mass), accepted, law in zip(rows, accepted_B.tolist(), next_BV.tolist(), strict=True):
        for seq in out:
            if seq[:accepted] == x[:accepted]:
                out[seq] += mass * law[seq[accepted]] * laws.chain(seq, accepted + 1)
    return out


def largest_error(rule, num: int, kind: str, seed: int, fixed: bool = False) -> float:
    """How far the law of the output is from the target's, over all draft lengths up to ``num``."""
    laws = Laws(num, seed, kind)
    want, worst = laws.of_target(), 0.0
    for length in range(num + 1):
        for drafts in itertools.product(range(V), repeat=length) if fixed else [None]:
            found = law_of_output(rule, laws, length, drafts)
            worst = max(worst, *(abs(found[seq] - want[seq]) for seq in want))
    return worst


CASES = [("random", 0), ("sparse", 1), ("sparse", 2), ("tiny", 3), ("same", 4)]


@pytest.mark.parametrize(("kind", "seed"), CASES)
@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_the_output_has_the_targets_law_when_drafts_are_sampled(num, kind, seed):
    assert largest_error(verify, num, kind, seed) < 1e-9


@pytest.mark.parametrize(("kind", "seed"), CASES[:4])
@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_the_output_has_the_targets_law_when_drafts_are_point_masses(num, kind, seed):
    assert largest_error(verify, num, kind, seed, fixed=True) < 1e-9


SAMPLED_FAULTS = {
    "no residual": (r"\(p_BV - q_BKV\[every, at_B\]\)", "p_BV"),
    "an epsilon clamp on q": (
        r"q_BKV\.gather\((.*)\)\.squeeze\(2\)",
        r"q_BKV.gather(\1).squeeze(2).clamp(min=1e-6)",
    ),
    "the residual of position 0": (r"p_BV - q_BKV\[every, at_B\]", "p_BJV[:, 0] - q_BKV[:, 0]"),
    "the residual off by one": (r"q_BKV\[every, at_B\]", "q_BKV[every, (at_B + 1).clamp(max=num - 1)]"),
    "a flipped comparison": (r"u_BK \* q_x_BK < p_x_BK", "u_BK * q_x_BK > p_x_BK"),
    "a count that is no prefix": (r"\.cumprod\(1\)", ""),
    "the bonus from the wrong row": (
        r"p_BJV\[every, accepted_B\]",
        "p_BJV[every, accepted_B.clamp(max=num - 1)]",
    ),
    "drafts beyond a row's length": (r"accept_BK &= .*", "pass"),
    "a residual after the last draft of a short row": (r"accepted_B < lengths_B", "accepted_B < num"),
}
FIXED_FAULTS = {
    "no residual": (r"p_BV\.scatter\(.*\)", "p_BV"),
    "the residual off by one": (r"x_BK\[every, at_B\]", "x_BK[every, (at_B + 1).clamp(max=num - 1)]"),
}


def with_fault(pattern: str, put: str, rule=verify):
    """The rule with one line of its source changed."""
    source, changes = re.subn(pattern, put, inspect.getsource(rule))
    assert changes == 1, f"{pattern} occurs {changes} times in {rule.__name__}: write the fault anew"
    names = dict(vars(module))
    exec(source, names)  # noqa: S102
    return names[rule.__name__]


@pytest.mark.parametrize("fault", SAMPLED_FAULTS)
def test_a_fault_in_the_rule_for_sampled_drafts_is_seen(fault):
    rule = with_fault(*SAMPLED_FAULTS[fault])
    assert any(largest_error(rule, num, kind, seed) > 1e-9 for kind, seed in CASES for num in (1, 2, 3))


@pytest.mark.parametrize("fault", FIXED_FAULTS)
def test_a_fault_in_the_rule_for_point_masses_is_seen(fault):
    rule = with_fault(*FIXED_FAULTS[fault])
    assert any(largest_error(rule, num, kind, seed, True) > 1e-9 for kind, seed in CASES for num in (1, 2, 3))


def test_rows_of_a_batch_may_have_different_numbers_of_drafts():
    laws = Laws(2, 0, "random")
    x_BK = torch.tensor([[0, 1], [0, 1], [0, 1]])
    p_BJV = torch.stack([laws.p[()], laws.p[(0,)], laws.p[(0, 1)]]).expand(3, 3, V)
    q_BKV = torch.stack([laws.q[()], laws.q[(0,)]]).expand(3, 2, V)
    accepted_B, next_BV = verify(
        p_BJV, q_BKV, x_BK, torch.zeros(3, 2, dtype=torch.float64), torch.tensor([0, 1, 2])
    )
    assert accepted_B.tolist() == [0, 1, 2]
    for row, prefix in enumerate([(), (0,), (0, 1)]):
        assert torch.equal(next_BV[row], laws.p[prefix])


def test_matching_agrees_with_the_rule_at_temperature_0():
    generator = torch.Generator().manual_seed(0)
    best_BJ = torch.randint(V, (200, 4), generator=generator)
    x_BK = torch.randint(V, (200, 3), generator=generator)
    u_BK = torch.rand(200, 3, generator=generator)
    lengths_B = torch.randint(4, (200,), generator=generator)
    one_hot_BJV = torch.nn.functional.one_hot(best_BJ, V).float()
    for lengths in (None, lengths_B):
        accepted_B, next_BV = verify(one_hot_BJV, None, x_BK, u_BK, lengths)
        matched_B, token_B = verify_matching(best_BJ, x_BK, lengths)
        assert set(matched_B.tolist()) == {0, 1, 2, 3}
        assert torch.equal(matched_B, accepted_B)
        assert torch.equal(torch.nn.functional.one_hot(token_B, V).float(), next_BV)


def law_of_matching(rule, laws: Laws, drafts: tuple) -> tuple[dict[tuple, float], list[float]]:
    """The exact laws of ``num + 1`` tokens and of the accepted count, over all that the target may choose.

    ``drafts`` may be shorter than ``num``: filled with tokens that must not matter, also where the target
    happens to choose them.
    """
    num, seqs = laws.num, list(laws.of_target())  # every choice at every position
    x = drafts + (0,) * (num - len(drafts))
    rows = len(seqs)
    chosen_BJ, x_BK = torch.tensor(seqs).view(rows, num + 1), torch.tensor([x] * rows).view(rows, num)
    accepted_B, next_B = rule(chosen_BJ, x_BK, torch.full((rows,), len(drafts)))

    out, counts = dict.fromkeys(seqs, 0.0), [0.0] * (num + 1)
    for chosen, accepted, token in zip(seqs, accepted_B.tolist(), next_B.tolist(), strict=True):
        mass = 1.0
        for j, own in enumerate(chosen):  # drawn after the drafts, each with its position's own uniform
            mass *= laws.floats[x[:j]][own]
        counts[accepted] += mass
        for rest in itertools.product(range(V), repeat=num - accepted):
            seq = (*x[:accepted], token, *rest)
            out[seq] += mass * laws.chain(seq, accepted + 1)
    return out, counts


def matching_error(rule, num: int, kind: str, seed: int) -> float:
    """How far output and accepted count are from the target's law and from what ``verify`` accepts."""
    laws = Laws(num, seed, kind)
    want, worst = laws.of_target(), 0.0
    for length in range(num + 1):
        for drafts in itertools.product(range(V), repeat=length):
            found, counts = law_of_matching(rule, laws, drafts)
            survival = [laws.chain(drafts[:k], 0) for k in range(length + 1)] + [0.0] * (num + 1 - length)
            worst = max(worst, *(abs(found[seq] - want[seq]) for seq in want))
            worst = max(worst, *(abs(counts[k] - survival[k] + survival[k + 1]) for k in range(num + 1)))
    return worst


@pytest.mark.parametrize(("kind", "seed"), CASES[:4])
@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_matching_has_the_targets_law_and_accepts_as_the_rule_does(num, kind, seed):
    """A point mass is accepted with p of its draft, so k drafts survive with the product of theirs."""
    assert matching_error(verify_matching, num, kind, seed) < 1e-9


MATCHING_FAULTS = {
    "a flipped comparison": (r"\] == x_BK", "] != x_BK"),
    "a count that is no prefix": (r"\.cumprod\(1\)", ""),
    "drafts beyond a row's length": (r"match_BK &= .*", "pass"),
    "drafts of a short row one too many": (r"< lengths_B", "<= lengths_B"),
    "the token of the wrong row": (r"gather\(1, accepted_B", "gather(1, (accepted_B - 1).clamp(min=0)"),
    "a bonus that is always the last": (
        r"gather\(1, accepted_B\[",
        "gather(1, (0 * accepted_B + x_BK.shape[1])[",
    ),
}


@pytest.mark.parametrize("fault", MATCHING_FAULTS)
def test_a_fault_in_matching_is_seen(fault):
    rule = with_fault(*MATCHING_FAULTS[fault], rule=verify_matching)
    assert any(matching_error(rule, num, kind, seed) > 1e-9 for kind, seed in CASES for num in (1, 2))


def test_the_text_of_matching_does_not_depend_on_the_drafts():
    """The same uniforms, one a position: whatever is drafted, the tokens are those of plain decoding."""
    laws, generator = Laws(3, 0, "random"), torch.Generator().manual_seed(1)
    accepted = set()
    for uniforms in torch.rand(20, 4, generator=generator, dtype=torch.float64).tolist():

        def choose(prefix, uniforms=uniforms):
            return int((laws.p[prefix].cumsum(0) <= uniforms[len(prefix)]).sum())

        plain: tuple = ()
        while len(plain) < 4:
            plain += (choose(plain),)
        for x in itertools.product(range(V), repeat=3):
            chosen_1J = torch.tensor([[choose(x[:j]) for j in range(4)]])
            (num,), (token,) = (each.tolist() for each in verify_matching(chosen_1J, torch.tensor([x])))
            accepted.add(num)
            assert (*x[:num], token) == plain[: num + 1]
    assert accepted == {0, 1, 2, 3}


@pytest.mark.parametrize("num", [0, 1])
def test_a_refused_draft_of_equal_laws_falls_back_to_the_targets_law(num):
    """No residual is left when q equals p; rounding may still refuse, and the law must stay finite."""
    p_BJV = torch.full((1, num + 1, V), 1 / V)
    q_BKV = p_BJV[:, :num] * (1 + 1e-6)
    _, next_BV = verify(p_BJV, q_BKV, torch.zeros(1, num, dtype=torch.long), torch.full((1, num), 0.9999999))
    assert torch.allclose(next_BV, p_BJV[:, 0])
