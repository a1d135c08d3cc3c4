"""Tau of each domain as a function of what a run learned from, and the mix that is best for some traffic.

Over runs, tau of domain d is fitted by least squares as

    tau_d = a_d + b_d g(T_d) + c_d g(T - T_d)        g(t) = log(1 + t / s), b_d >= 0, c_d >= 0

where T_d are the supervised tokens of d that a run learned from, T those of all domains, and s is a hundredth
of the mean T: returns diminish, and tokens of other domains count, if less. Traffic in which domain d has a
share p_d of the answer tokens takes sum_d p_d / tau_d target passes a token, so the tau of the traffic is the
harmonic mean. Its inverse is convex in the shares of the mix, one term a domain: giving out hundredths one by
one to where they save most finds the best mix on that grid.

Axes: S resamples, of which the first one is the data as they are; R runs; D domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FLOOR = 5  # hundredths that every domain of a suggested mix has at least


def harmonic(taus: np.ndarray, shares_D: np.ndarray) -> np.ndarray:
    """Tau of traffic with these shares of its tokens, over the last axis."""
    return 1 / (shares_D / taus).sum(-1)


@dataclass(frozen=True)
class Curves:
    """a, b and c of every resample and domain.

    ``trained_D`` says whether any run learned from the domain, ``known_D`` whether the runs tell a, b and c
    apart. ``budget`` is the mean T, ``miss_D`` by how much (root mean square) the runs' taus are missed.
    """

    a_SD: np.ndarray
    b_SD: np.ndarray
    c_SD: np.ndarray
    trained_D: np.ndarray
    known_D: np.ndarray
    miss_D: np.ndarray
    budget: float

    def taus(self, shares: np.ndarray) -> np.ndarray:
        """Taus ``[S, D]`` of a run of the mean budget with these shares of it, ``[D]`` or ``[S, D]``."""
        own = shares * self.budget
        return self.a_SD + self.b_SD * _g(own, self.budget) + self.c_SD * _g(self.budget - own, self.budget)

    def slopes(self) -> tuple[np.ndarray, np.ndarray]:
        """Tau by a million more tokens of the domain itself, and of the others, ``[S, D]`` each: the
        derivatives where all domains have the same share."""
        own, scale = self.budget / max(1, self.trained_D.sum()), self.budget / 100
        return 1e6 * self.b_SD / (scale + own), 1e6 * self.c_SD / (scale + self.budget - own)


def fit(tokens_RD: np.ndarray, total_R: np.ndarray, taus_SRD: np.ndarray) -> Curves:
    """Curves of every domain. Amounts within 2 % of the mean T of one another are told apart by nobody."""
    budget, grain = float(total_R.mean()), float(total_R.mean()) / 50
    others_RD = total_R[:, None] - tokens_RD
    coefs: list[np.ndarray] = []
    known: list[bool] = []
    miss: list[float] = []
    for own_R, others_R, taus_SR in zip(tokens_RD.T, others_RD.T, np.moveaxis(taus_SRD, 2, 0), strict=True):
        design_R3 = _design(own_R, others_R, budget)
        coefs.append(_least_squares(design_R3, taus_SR))
        miss.append(float(((taus_SR[0] - design_R3 @ coefs[-1][:, 0]) ** 2).mean() ** 0.5))
        rough_R3 = _design(np.round(own_R / grain) * grain, np.round(others_R / grain) * grain, budget)
        known.append(int(np.linalg.matrix_rank(rough_R3)) == 3)
    a_SD, b_SD, c_SD = np.stack(coefs, axis=-1)
    return Curves(a_SD, b_SD, c_SD, np.any(tokens_RD > 0, axis=0), np.array(known), np.array(miss), budget)


def _g(tokens: np.ndarray, budget: float) -> np.ndarray:
    return np.log1p(100 * tokens / budget)


def _design(own_R: np.ndarray, others_R: np.ndarray, budget: float) -> np.ndarray:
    return np.stack([np.ones_like(own_R), _g(own_R, budget), _g(others_R, budget)], axis=1)


def _least_squares(design_R3: np.ndarray, taus_SR: np.ndarray) -> np.ndarray:
    """Coefficients ``[3, S]``, the last two at least 0: the best of the fits with and without each."""
    best_3S = np.zeros((3, len(taus_SR)))
    least_S = np.full(len(taus_SR), np.inf)
    subsets: Sequence[list[int]] = ([0], [0, 1], [0, 2], [0, 1, 2])
    for kept in subsets:
        part = design_R3[:, kept]
        coefs_S = taus_SR @ np.linalg.pinv(part).T
        error_S = ((taus_SR - coefs_S @ part.T) ** 2).sum(1)
        better_S = (coefs_S[:, 1:] >= 0).all(1) & (error_S < least_S - 1e-12)
        best_3S[:, better_S] = 0
        best_3S[np.ix_(kept, better_S)] = coefs_S[better_S].T
        least_S = np.where(better_S, error_S, least_S)
    return best_3S


def suggest(curves: Curves, traffic_D: np.ndarray) -> np.ndarray | None:
    """Hundredths ``[S, D]`` of the mix that is best for this traffic; ``None`` when a curve is not known.

    Domains that no run learned from have none of it; all others at least ``FLOOR``.
    """
    trained_D = curves.trained_D
    if not curves.known_D[trained_D].all() or not trained_D[traffic_D > 0].all():
        return None
    floor = min(FLOOR, 100 // int(trained_D.sum()))
    hundredths_SD = np.tile(np.where(trained_D, floor, 0), (len(curves.a_SD), 1))
    for _ in range(100 - int(hundredths_SD[0].sum())):
        now_SD, then_SD = (traffic_D / curves.taus((hundredths_SD + more) / 100) for more in (0, 1))
        saved_SD = np.where(trained_D, now_SD - then_SD, -np.inf)
        hundredths_SD[np.arange(len(hundredths_SD)), saved_SD.argmax(1)] += 1
    return hundredths_SD
