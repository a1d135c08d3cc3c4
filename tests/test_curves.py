"""What tokens bought, fitted over runs: known curves come back, and the best mix is the best there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from eval.curves import FLOOR, Curves, fit, harmonic, suggest

BUDGET = 1000.0
SHARES_RD = np.array([[1 / 3, 1 / 3, 1 / 3], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
A, B, C = np.array([1.1, 1.3, 1.0]), np.array([0.1, 0.02, 0.05]), np.array([0.03, 0.01, 0.0])


def curves(a=A, b=B, c=C, trained=(1, 1, 1), known=(1, 1, 1)) -> Curves:
    rows = (np.array([each], dtype=float) for each in (a, b, c))
    return Curves(*rows, np.array(trained, bool), np.array(known, bool), np.zeros(3), BUDGET)


def runs(shares_RD=SHARES_RD, total=BUDGET, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, totals and taus of runs that follow ``curves()``; three resamples, the last two noisy."""
    tokens_RD = shares_RD * total
    total_R = tokens_RD.sum(1)
    g = [np.log1p(100 * each / total_R.mean()) for each in (tokens_RD, total_R[:, None] - tokens_RD)]
    taus_RD = A + B * g[0] + C * g[1]
    errors_SRD = np.random.default_rng(0).normal(0, noise, (3, *taus_RD.shape))
    errors_SRD[0] = 0
    return tokens_RD, total_R, taus_RD + errors_SRD


def test_curves_that_runs_follow_come_back():
    found = fit(*runs())
    for name, want in (("a_SD", A), ("b_SD", B), ("c_SD", C)):
        assert getattr(found, name)[0] == pytest.approx(want, abs=1e-9)
    assert found.known_D.all()
    assert found.miss_D == pytest.approx(0, abs=1e-9)
    tokens_RD, _, taus_SRD = runs()
    for shares_D, taus_D in zip(SHARES_RD, taus_SRD[0], strict=True):
        assert found.taus(shares_D)[0] == pytest.approx(taus_D)


def test_what_a_curve_misses_is_told():
    tokens_RD, total_R, taus_SRD = runs()
    taus_SRD[0, 2:, 0] += 0.1, -0.1  # two runs without the first domain
    assert fit(tokens_RD, total_R, taus_SRD).miss_D == pytest.approx([0.1 * 0.5**0.5, 0, 0], abs=1e-9)


def test_every_resample_has_a_fit_of_its_own():
    tokens_RD, total_R, taus_SRD = runs(noise=0.01)
    together = fit(tokens_RD, total_R, taus_SRD)
    for s in range(3):
        alone = fit(tokens_RD, total_R, taus_SRD[s : s + 1])
        assert together.taus(np.array([0.2, 0.3, 0.5]))[s] == pytest.approx(
            alone.taus(np.array([0.2, 0.3, 0.5]))[0]
        )
    assert together.b_SD[1] != pytest.approx(together.b_SD[0])


def test_more_tokens_never_hurt():
    """Data that say so are noise: the slope is 0, and the rest of the curve the best that is left."""
    tokens_RD, total_R, taus_SRD = runs()
    worse_SRD = 3 - taus_SRD
    found = fit(tokens_RD, total_R, worse_SRD)
    assert (found.b_SD == 0).all()
    assert (found.c_SD >= 0).all()
    assert found.a_SD[0, 1] == pytest.approx(worse_SRD[0, :, 1].mean(), abs=0.1)
    left = worse_SRD[0] - found.taus(np.zeros(3))[0]  # not worse than a flat line, by less than rounding
    assert (left**2).sum() < ((worse_SRD[0] - 1) ** 2).sum()


def test_slopes_are_those_of_the_curve_where_all_shares_are_equal():
    found, more = fit(*runs()), 1e-3
    own_SD, others_SD = found.slopes()
    own, others = BUDGET / 3, 2 * BUDGET / 3
    g = lambda tokens: np.log1p(100 * tokens / BUDGET)  # noqa: E731
    assert own_SD[0] == pytest.approx(B * (g(own + more) - g(own)) / more * 1e6, rel=1e-4)
    assert others_SD[0] == pytest.approx(C * (g(others + more) - g(others)) / more * 1e6, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("shares", "known"),
    [
        ([[1 / 3, 1 / 3, 1 / 3], [1, 0, 0]], [False, False, False]),
        ([[1 / 3, 1 / 3, 1 / 3], [1, 0, 0], [0, 1, 0]], [True, True, False]),
        ([[0.5, 0.5, 0], [0.505, 0.495, 0], [1, 0, 0], [0, 1, 0]], [True, True, False]),
        ([[0.5, 0.5, 0], [0.505, 0.495, 0], [1, 0, 0]], [False, False, False]),
    ],
)
def test_three_different_amounts_tell_a_curve(shares, known):
    """Of one budget. Amounts that differ by a document are one amount."""
    tokens_RD, total_R, taus_SRD = runs(np.array(shares))
    assert fit(tokens_RD, total_R, taus_SRD).known_D.tolist() == known


def test_two_budgets_tell_a_curve_as_well():
    tokens_RD = np.array([[500.0, 500], [1000, 1000], [1000, 0]])
    assert fit(tokens_RD, tokens_RD.sum(1), np.ones((1, 3, 2))).known_D.all()


def test_tau_of_traffic_is_tokens_over_passes():
    """100 tokens at 2 a pass and 300 at 1.5: 50 and 200 passes."""
    assert harmonic(np.array([2.0, 1.5]), np.array([0.25, 0.75])) == pytest.approx(400 / 250)


@pytest.mark.parametrize("traffic", [(1, 1, 1), (8, 1, 1), (0, 1, 9), (1, 0, 0)])
def test_the_suggested_mix_is_the_best_on_its_grid(traffic):
    traffic_D = np.array(traffic) / sum(traffic)
    found = suggest(curves(), traffic_D)
    left = range(FLOOR, 101)
    grid = np.array([(i, j, 100 - i - j) for i, j in itertools.product(left, left) if 100 - i - j >= FLOOR])
    taus = harmonic(curves().taus(grid / 100), traffic_D)
    assert found[0].sum() == 100
    assert found[0].min() >= FLOOR
    assert harmonic(curves().taus(found / 100), traffic_D)[0] == pytest.approx(taus.max(), abs=1e-12)


def test_more_traffic_of_a_domain_brings_more_of_it():
    even, skewed = (suggest(curves(), np.array(p))[0] for p in ((1 / 3, 1 / 3, 1 / 3), (0.1, 0.8, 0.1)))
    assert skewed[1] > even[1]


def test_a_domain_that_no_run_learned_from_gets_nothing():
    found = suggest(curves(trained=(1, 1, 0), known=(1, 1, 0)), np.array([0.5, 0.5, 0]))
    assert found[0, 2] == 0
    assert found[0].sum() == 100


@pytest.mark.parametrize(
    ("trained", "known", "traffic"),
    [((1, 1, 1), (1, 1, 0), (0.5, 0.5, 0)), ((1, 1, 0), (1, 1, 0), (0.3, 0.3, 0.4))],
)
def test_nothing_is_suggested_from_a_curve_that_is_not_known(trained, known, traffic):
    assert suggest(curves(trained=trained, known=known), np.array(traffic)) is None
