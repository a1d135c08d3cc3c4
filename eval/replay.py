"""Acceptance in one pass: the path is known beforehand, so no decoding is needed.

One target pass over prompt and answer gives states and path; one drafter pass gives the drafts of every
anchor at once, for each N, or for all of them where they are nested; then the rounds are walked. A round
at anchor a accepts as many drafts as agree with the path and emits one token more, or ends with the path.

At temperature 0 the path is the target's own argmax, and counts are exact in fp32: step-by-step decoding
(eval/rollout.py) makes the same rounds. At other temperatures it is the stored answer, which has to be
sampled from the target at that temperature; where drafts are sampled too, counts are expectations
(eval/sampled.py). A proposer that looks drafts up reads nothing but the path itself (``score_lookup``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from data.capture import capture, refuse_bad
from data.examples import turns
from data.pack import pack
from drafters.method import Drafter
from drafters.target import Target
from drafters.types import Batch, Example, States
from eval.sampled import acceptance, expected, log_law
from serve.lookup import Lookup


@dataclass
class Counts:
    """Rounds and what they accepted; added up, never averaged.

    ``survived[k]`` counts the rounds whose drafts 1..k+1 were all accepted; ``tokens`` those emitted.
    Rounds are whole numbers, but expectations where path and drafts are both sampled. ``proposed[k]`` counts
    the rounds in which k+1 drafts or more were verified; ``None`` where every round proposes ``max_n``.
    """

    max_n: int
    rounds: float = 0
    tokens: int = 0
    survived: list[float] = field(default_factory=list)
    proposed: list[int] | None = None

    def __post_init__(self) -> None:
        self.survived = self.survived or [0] * self.max_n

    def add_round(self, accepted: int, emitted: int, proposed: int = 0) -> None:
        """A round counts the drafts that it emitted, not those that stood beyond the end of the answer."""
        self.rounds += 1
        self.tokens += emitted
        for k in range(min(accepted, emitted)):
            self.survived[k] += 1
        if self.proposed is not None:
            self.proposed = [num + (k < proposed) for k, num in enumerate(self.proposed)]

    def __add__(self, other: Counts) -> Counts:
        rounds, tokens = self.rounds + other.rounds, self.tokens + other.tokens
        proposed = None
        if self.proposed is not None and other.proposed is not None:
            proposed = _sums(self.proposed, other.proposed)
        return Counts(self.max_n, rounds, tokens, _sums(self.survived, other.survived), proposed)

    @property
    def tau(self) -> float:
        """Tokens committed per target pass, the bonus token included, pooled over rounds."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def survival(self) -> list[float]:
        return [count / self.rounds if self.rounds else 0.0 for count in self.survived]

    @property
    def conditional(self) -> list[float]:
        return _shares(self.survived, [self.rounds, *self.survived])

    @property
    def survival_of_proposed(self) -> list[float] | None:
        """Of the rounds that proposed at least k drafts, those whose drafts 1..k were all accepted."""
        return None if self.proposed is None else _shares(self.survived, self.proposed)

    @property
    def drafted(self) -> float:
        """Drafts verified in a round, in the mean."""
        return self.max_n if self.proposed is None else sum(self.proposed) / max(1, self.rounds)


def _sums(one: Sequence, other: Sequence) -> list:
    return [a + b for a, b in zip(one, other, strict=True)]


def _shares(some: Sequence[float], of: Sequence[float]) -> list[float]:
    return [a / b if b else 0.0 for a, b in zip(some, of, strict=False)]


@dataclass(frozen=True)
class Path:
    """An answer as the target itself gives it, and the states along it.

    At temperature 0, ``length`` tokens from ``first`` on are the target's argmax; a stored answer that goes
    on otherwise is ``off_path`` and cut there. ``margin`` is the smallest difference between best and
    second logit. A sampled answer is taken whole, without a margin.
    """

    example: Example
    states: States
    first: int
    length: int
    off_path: bool
    margin: float | None
    temperature: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return self.example.ids[self.first : self.first + self.length]


def walk(drafts_AK: Tensor, path: Sequence[int]) -> Counts:
    """Walk the rounds of one path; ``drafts_AK[i]`` are the drafts made at ``path[i]``.

    The first token of the path (the prefill's) is the first anchor and no round of its own. A round
    that reaches the end of the path emits what is left of it and no bonus token.
    """
    counts = Counts(drafts_AK.shape[1])
    for _, accepted, emitted in rounds(drafts_AK, path):
        counts.add_round(accepted, emitted)
    return counts


def rounds(drafts_AK: Tensor, path: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where each round of one path starts, the drafts it accepts and the tokens it emits."""
    drafts = drafts_AK.tolist()
    at = 0
    while at < len(path) - 1:
        accepted, emitted = _round(drafts[at], path, at)
        yield at, accepted, emitted
        at += emitted


def _round(drafts: Sequence[int], path: Sequence[int], at: int) -> tuple[int, int]:
    """Of drafts made at ``path[at]`` those that the path accepts, and the tokens that their round emits."""
    pairs = zip(drafts, path[at + 1 : at + 1 + len(drafts)], strict=False)
    accepted = sum(takewhile(bool, (draft == token for draft, token in pairs)))
    return accepted, min(accepted + 1, len(path) - 1 - at)


@torch.inference_mode()
def paths(
    target: Target,
    examples: Iterable[Example],
    layer_ids: Sequence[int],
    *,
    temperature: float = 0.0,
    batch_tokens: int = 2048,
) -> Iterator[Path]:
    """The target's own path through each answer of the examples, turn by turn.

    Errors: ``ValueError`` naming a row whose states are NaN, infinite or zero, or one without a prompt.
    """
    for group in _groups(answers(examples), batch_tokens):
        for example, states in zip(group, capture(target, group, layer_ids, with_last=True), strict=True):
            refuse_bad(example, states)
            yield _path(target, example, states, temperature)


@torch.inference_mode()
def score(
    drafter: Drafter,
    found: Sequence[Path],
    ns: Sequence[int],
    *,
    drafts: str = "greedy",
    anchors_at_once: int = 256,
) -> list[dict[int, Counts]]:
    """Counts by N for each path, of ``greedy`` drafts or of drafts ``sampled`` at the path's temperature.

    Errors: ``ValueError`` for an N beyond the trained block.
    """
    most = drafter.max_drafts
    if not ns or min(ns) < 1 or max(ns) > most:
        raise ValueError(f"n={list(ns)}: this drafter was trained for 1 to {most} drafts a round")
    out = []
    for path in found:
        if path.length < 2:  # the prefill's token at most: no round
            out.append({n: Counts(n) for n in ns})
            continue
        batch = pack([path.example], [path.states]).to(drafter.target.device)
        every_A = torch.arange(path.first, path.first + path.length, device=batch.tokens_BT.device)
        parts = every_A.split(anchors_at_once)
        log_p_T = _log_p(drafter.target, batch, path, anchors_at_once) if drafts == "sampled" else None
        made: dict[int, Tensor] = {}
        for n in (max(ns),) if drafter.nested else ns:
            if log_p_T is None:
                some = [drafter.drafts(batch, part_A, n).tokens_BK for part_A in parts]
            else:
                some = [_acceptance(drafter, batch, part_A, n, path, log_p_T) for part_A in parts]
            made[n] = torch.cat(some)
        out.append({n: _counted(made.get(n, made[max(ns)])[:, :n], path, log_p_T is None) for n in ns})
    return out


def score_lookup(proposer: Lookup, n: int) -> Callable[[Path], Counts]:
    """Counts one path after another, of a proposer that looks drafts up, without a pass of anything.

    Paths are what one slot decodes in this order: what remembers past answers remembers those before.
    """
    state, row = proposer.begin(1, 0), range(1)

    def hear(tokens: list[int]) -> None:
        proposer.advance(state, row, None, torch.tensor([tokens]), [len(tokens)])

    def count(path: Path) -> Counts:
        counts, at, tokens = Counts(n, proposed=[0] * n), 0, path.tokens
        hear(path.example.ids[: path.first])
        proposer.answering(state, 0)
        while at < path.length - 1:
            proposal = proposer.propose(state, row, torch.tensor([tokens[at]]), n)
            drafts = proposal.tokens_BK[0].tolist()[: path.length - 1 - at]
            accepted, emitted = _round(drafts, tokens, at)
            counts.add_round(accepted, emitted, len(drafts))
            hear(tokens[at : at + emitted])
            at += emitted
        state.drop([0])
        return counts

    return count


def _counted(made_AK: Tensor, path: Path, greedy: bool) -> Counts:
    """The rounds of one path, from the drafts made at its tokens, or from how likely each is accepted."""
    if greedy:
        return walk(made_AK, path.tokens)
    rounds, survived = expected(made_AK)
    return Counts(made_AK.shape[1], rounds, path.length - 1, survived)


def _log_p(target: Target, batch: Batch, path: Path, at_once: int) -> Tensor:
    """The target's log-probability of every token after the first of a path, at that token's position."""
    assert path.temperature > 0, (path.example.name, path.temperature)
    log_p_T = torch.zeros(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
    for at_P in torch.arange(path.first + 1, path.first + path.length, device=log_p_T.device).split(at_once):
        logits_PV = target.head(batch.states.last()[0, at_P - 1])
        log_p_T[at_P] = log_law(logits_PV, batch.tokens_BT[0, at_P], path.temperature)
    return log_p_T


def _acceptance(
    drafter: Drafter, batch: Batch, anchors_A: Tensor, n: int, path: Path, log_p_T: Tensor
) -> Tensor:
    """How likely each of the path's tokens after an anchor was an accepted draft, ``[A, K]``.

    0 beyond the path, and for a token that a reduced draft vocabulary has not.
    """
    at_AK = anchors_A[:, None] + torch.arange(1, n + 1, device=anchors_A.device)
    possible_AK = at_AK < path.first + path.length
    at_AK = at_AK.clamp(max=path.first + path.length - 1)
    ids_AK = batch.tokens_BT[0, at_AK]
    if drafter.vocab is not None:
        ids_AK = drafter.vocab.draft_id_V.to(ids_AK.device)[ids_AK]
        possible_AK &= ids_AK >= 0
    logits_AKN = drafter.path_logits(batch, anchors_A, n)
    log_q_AK = log_law(logits_AKN, ids_AK.clamp(min=0), path.temperature)
    return acceptance(log_p_T[at_AK], log_q_AK) * possible_AK


def answers(examples: Iterable[Example]) -> Iterator[Example]:
    """Every answer of the examples as one of its own. Errors: ``ValueError`` naming a row without any."""
    for example in examples:
        found = turns(example)
        if not found:
            raise ValueError(f"{example.name}: the answer has no prompt before it; leave the row out")
        yield from found


def _path(target: Target, example: Example, states: States, temperature: float) -> Path:
    first = example.mask.index(True)
    if temperature > 0:
        return Path(example, states, first, len(example.ids) - first, False, None, temperature)
    answer_P = torch.tensor(example.ids[first:])
    last_PD = states.last()[0, first - 1 : len(example.ids) - 1]
    top_P2, best_P2 = target.head(last_PD.to(target.device)).float().topk(2, dim=-1)
    agree_P = (best_P2[:, 0].cpu() == answer_P).long().cumprod(0)
    length = int(agree_P.sum())
    margin = float((top_P2[:, 0] - top_P2[:, 1])[: length + 1].min())
    return Path(example, states, first, length, length < len(answer_P), margin)


def _groups(examples: Iterable[Example], budget: int) -> Iterator[list[Example]]:
    """Neighbours whose padded batch stays within ``budget`` tokens."""
    group: list[Example] = []
    for example in examples:
        longest = max(len(e.ids) for e in (*group, example))
        if group and longest * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(example)
    if group:
        yield group
