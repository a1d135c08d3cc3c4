"""Confidences that mean what they say: sequential temperature scaling, and how good they are.

A drafter's c_k estimates the probability that draft k is accepted given that those before it were, so the
product c_1 ... c_k estimates survival at k. Left to right, with t_1 .. t_{k-1} fixed, t_k is the temperature
at which product of sigmoid(logit_i / t_i) over i <= k has the smallest expected calibration error against
"the first k drafts were accepted" (DSpark paper, sequential temperature scaling; a grid search). Every round
of replay counts, with all its drafts: confidences that had decided what is verified would choose their own
evidence. Half of the conversations fit, the other half are reported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import torch
from torch import Tensor

from data.pack import pack
from drafters import checkpoint
from drafters.files import replace_file
from drafters.method import Drafter
from eval.replay import Path, rounds

FILE = "calibration.json"
BINS = 20
GRID = torch.logspace(-1, 1, 81, base=5.0).tolist()  # from 1/5 to 5, 1 among them


@dataclass(frozen=True)
class Evidence:
    """Rounds: confidence logits ``[R, K]``, whether drafts 1..k+1 were all accepted, whether that is known.

    Behind the end of an answer nothing is known of a draft, nor that one before it was refused: to count
    those that fail there and not those that would go on would make survival look rarer than it is.
    """

    logits_RK: Tensor
    survived_RK: Tensor
    known_RK: Tensor

    def __add__(self, other: Evidence) -> Evidence:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Evidence(*(torch.cat(pair) for pair in pairs))


@torch.inference_mode()
def evidence(drafter: Drafter, path: Path, anchors_at_once: int = 256) -> Evidence:
    """The rounds of one greedy answer, drafted at the largest N.

    Errors: ``ValueError`` for a drafter without confidences.
    """
    if not drafter.has_confidence:
        raise ValueError(
            f"method {drafter.config.name}: this drafter has no confidences to calibrate; train one with a "
            "confidence head, for example `python -m train +recipe=dspark`"
        )
    n = drafter.max_drafts
    batch = pack([path.example], [path.states]).to(drafter.target.device)
    every_A = torch.arange(path.first, path.first + path.length, device=batch.tokens_BT.device)
    some = [drafter.drafts(batch, part_A, n) for part_A in every_A.split(anchors_at_once)]
    found = list(rounds(torch.cat([p.tokens_BK for p in some]), path.tokens))
    starts = torch.tensor([at for at, _, _ in found], dtype=torch.long)
    accepted_R1 = torch.tensor([[accepted] for _, accepted, _ in found], dtype=torch.long).view(-1, 1)
    left_R1 = (path.length - 1 - starts)[:, None]
    k_K = torch.arange(n)
    survived_RK = k_K < accepted_R1
    known_RK = (k_K < left_R1).expand(len(starts), n)
    confidence_AK = torch.cat([p.confidence_BK for p in some if p.confidence_BK is not None]).cpu()
    return Evidence(torch.logit(confidence_AK[starts].double(), eps=1e-9), survived_RK, known_RK)


def survival(logits_RK: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Estimated probability that the first k drafts are all accepted, ``[R, K]``."""
    return torch.sigmoid(logits_RK / torch.tensor(temperatures, dtype=logits_RK.dtype)).cumprod(1)


def fit(found: Evidence) -> list[float]:
    """One temperature a position, left to right; 1 where nothing is known."""
    before_R = torch.ones(len(found.logits_RK), dtype=torch.double)
    out = []
    for k in range(found.logits_RK.shape[1]):
        known_R = found.known_RK[:, k]
        options = {t: before_R * torch.sigmoid(found.logits_RK[:, k] / t) for t in (1.0, *GRID)}
        errors = {
            t: calibration_error(some_R[known_R], found.survived_RK[known_R, k])
            for t, some_R in options.items()
        }
        best = min(errors, key=lambda t: errors[t]) if bool(known_R.any()) else 1.0
        out.append(best)
        before_R = options[best]
    return out


def calibration_error(estimate_R: Tensor, happened_R: Tensor) -> float:
    """Expected calibration error over equal-width bins (Guo et al. 2017)."""
    if len(estimate_R) == 0:
        return 0.0
    bin_R = (estimate_R * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.double)
    gap.index_add_(0, bin_R, estimate_R.double() - happened_R.double())
    return float(gap.abs().sum() / len(estimate_R))


def auc(score_R: Tensor, happened_R: Tensor) -> float | None:
    """How often a round that survived scores above one that did not, ties half; ``None`` without both."""
    yes, no = int(happened_R.sum()), int((~happened_R).sum())
    if yes == 0 or no == 0:
        return None
    values, where_R = torch.unique(score_R, return_inverse=True)
    counts = torch.bincount(where_R, minlength=len(values)).double()
    rank = counts.cumsum(0) - (counts - 1) / 2  # the mean rank of equal scores, from 1
    return float((rank[where_R][happened_R].sum() - yes * (yes + 1) / 2) / (yes * no))


def calibrate(drafter: Drafter, found: Sequence[Path]) -> dict[str, Any]:
    """Temperatures from every second conversation of a domain; quality on the others, per domain.

    Errors: ``ValueError`` for fewer than two conversations that have a round.
    """
    turns: dict[str, dict[str, list[Evidence]]] = {}  # by domain and conversation
    known, drafter.temperatures = drafter.temperatures, None
    try:
        for path in found:
            if path.length > 1:
                conversation = path.example.name.split(" (turn ")[0]  # its turns are not independent
                some = turns.setdefault(path.example.domain, {}).setdefault(conversation, [])
                some.append(evidence(drafter, path))
    finally:
        drafter.temperatures = known
    parts = {domain: [_sum(one) for one in some.values()] for domain, some in turns.items()}
    if sum(len(some) for some in parts.values()) < 2:
        raise ValueError("calibration needs two held-out answers or more; give more rows with data.path=")
    fitting = [e for some in parts.values() for e in some[::2]]
    judging = {domain: some[1::2] for domain, some in parts.items() if some[1:]}
    temperatures = fit(_sum(fitting))
    report = {domain: _quality(_sum(some), temperatures) for domain, some in judging.items()}
    if judging:
        report["overall"] = _quality(_sum([e for some in judging.values() for e in some]), temperatures)
    return {
        "temperatures": temperatures,
        "fitted_on": len(fitting),
        "judged_on": sum(len(some) for some in judging.values()),
        "bins": BINS,
        "domains": report,
    }


def keep(drafter: Drafter, directory: FilePath, found: Sequence[Path], report: FilePath) -> dict[str, Any]:
    """Calibrate a drafter directory: temperatures into its config.json, quality into ``report``."""
    result = calibrate(drafter, found)
    drafter.temperatures = result["temperatures"]
    checkpoint.note(directory, confidence_temperatures=result["temperatures"])
    report.parent.mkdir(parents=True, exist_ok=True)
    replace_file(report, (json.dumps(result, indent=2) + "\n").encode())
    return result


def table(found: dict[str, Any]) -> str:
    """Lines for the terminal: ECE before and after, AUC, by domain and position."""
    temperatures = " ".join(f"{t:.2f}" for t in found["temperatures"])
    lines = [
        f"confidence temperatures {temperatures}, from {found['fitted_on']} conversations; "
        f"on {found['judged_on']} others:",
        f"{'domain':14s}{'position':>9s}{'rounds':>8s}{'survived':>10s}"
        + "".join(f"{name:>8s}" for name in ("ECE", "after", "AUC", "after")),
    ]
    number = lambda value: "-" if value is None else f"{value:.3f}"  # noqa: E731
    for domain, some in found["domains"].items():
        for k, at in enumerate(some):
            cells = [at["survived"], at["ece"], at["ece_after"], at["auc"], at["auc_after"]]
            lines.append(
                f"{domain if k == 0 else '':14s}{k + 1:9d}{at['rounds']:8d}{number(cells[0]):>10s}"
                + "".join(f"{number(cell):>8s}" for cell in cells[1:])
            )
    return "\n".join(lines)


def _quality(found: Evidence, temperatures: Sequence[float]) -> list[dict[str, Any]]:
    out = []
    plain = [1.0] * len(temperatures)
    before_RK, after_RK = (survival(found.logits_RK, some) for some in (plain, temperatures))
    for k in range(len(temperatures)):
        known_R = found.known_RK[:, k]
        happened_R = found.survived_RK[known_R, k]
        before_R, after_R = before_RK[known_R, k], after_RK[known_R, k]
        out.append(
            {
                "rounds": len(happened_R),
                "survived": float(happened_R.double().mean()) if len(happened_R) else None,
                "ece": calibration_error(before_R, happened_R),
                "ece_after": calibration_error(after_R, happened_R),
                "auc": auc(before_R, happened_R),
                "auc_after": auc(after_R, happened_R),
            }
        )
    return out


def _sum(parts: Sequence[Evidence]) -> Evidence:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
