"""Propose, verify, commit, for a batch of requests. Names no method: anything with the verbs will do.

A step is four lines: admit waiting requests (prefill), propose drafts for every active request, run the
target once over anchors and drafts, commit what was accepted. Without a proposer the same step decodes
plainly, one token at a time.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters.method import Drafter
from drafters.target import Target
from drafters.types import Proposal
from serve.cache import SlotCache
from serve.verify import verify, verify_matching


@dataclass
class Request:
    """One prompt to answer. ``seed`` and position alone decide its random draws."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    name: str = ""


@dataclass(frozen=True)
class Round:
    """Drafts proposed and accepted, and tokens emitted; ``accepted`` counts emitted drafts only."""

    drafted: int
    accepted: int
    emitted: int


@dataclass
class Answer:
    """Emitted ids, the stop token included; ``finish`` is stop or length."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: str | None = None

    @property
    def tau(self) -> float:
        """Tokens committed per target pass; the token of the prefill is neither."""
        return sum(r.emitted for r in self.rounds) / max(1, len(self.rounds))


class Engine:
    """Continuous batching over ``slots``; ``proposer=None`` or ``num_drafts=0`` is plain decoding.

    Errors: ``ValueError`` for a target whose state cannot be rolled back (recurrent layers), a prompt
    that does not fit, or more drafts than the drafter was trained for.
    """

    def __init__(
        self,
        target: Target,
        proposer: Drafter | None = None,
        num_drafts: int | None = None,
        *,
        slots: int = 1,
        capacity: int = 2048,
        chunk: int = 512,
    ) -> None:
        _check_target(target)
        self.target = target
        self.num_drafts = 0 if proposer is None else _check_drafts(proposer, num_drafts)
        self.proposer = proposer = proposer if self.num_drafts else None
        self.layer_ids = proposer.layer_ids if proposer else []
        self.slots, self.capacity, self.chunk = slots, capacity, chunk
        self.cache = SlotCache(target.num_layers, slots, capacity, target.attention_windows)
        self.state: Any = proposer.begin(slots, capacity) if proposer else None
        self.waiting: deque[Answer] = deque()
        self.active: list[Answer] = []
        self.on_token: Callable[[Answer, list[int]], None] | None = None

    # What callers use ------------------------------------------------------------------------

    def run(
        self,
        requests: Iterable[Request],
        on_token: Callable[[Answer, list[int]], None] | None = None,
    ) -> Iterator[Answer]:
        """Answers as they finish; ``on_token`` hears of every batch of new ids of an answer."""
        self.on_token = on_token
        for request in requests:
            self.submit(request)
        while self.busy:
            yield from self.step()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def submit(self, request: Request) -> None:
        if not request.prompt:
            raise ValueError(f"request {request.name}: empty prompt")
        longest = len(request.prompt) + request.max_new_tokens + self.num_drafts
        if request.max_new_tokens < 1 or longest > self.capacity:
            raise ValueError(
                f"request {request.name}: {len(request.prompt)} prompt tokens, {request.max_new_tokens} new "
                f"ones, {self.num_drafts} drafts; a slot holds {self.capacity}, an answer one token or more; "
                "shorten the request or raise the capacity"
            )
        self.waiting.append(Answer(request))

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """One round for every active request; returns those that finished."""
        done = self._admit()
        if self.active:
            rows = range(len(self.active))
            anchors_B = self._tensor([answer.tokens[-1] for answer in self.active])
            proposal = self.propose(rows, anchors_B)
            logits_BJV, states, tokens_BJ = self.forward(
                rows, torch.cat([anchors_B[:, None], proposal.tokens_BK], 1)
            )
            done += self._commit(rows, proposal, logits_BJV, states, tokens_BJ)
        return done

    # The four lines --------------------------------------------------------------------------

    def _admit(self) -> list[Answer]:
        """Prefill waiting requests into free slots, chunk by chunk; each emits its first token."""
        done = []
        while self.waiting and len(self.active) < self.slots:
            answer = self.waiting.popleft()
            slot = len(self.active)
            row = range(slot, slot + 1)
            self.cache.lengths[slot] = 0
            if self.proposer:
                self.state.drop([slot])
            self.active.append(answer)
            prompt = answer.request.prompt
            for start in range(0, len(prompt), self.chunk):
                tokens_1T = self._tensor([prompt[start : start + self.chunk]])
                last_only = start + self.chunk < len(prompt)
                logits_1TV, states, _ = self.forward(row, tokens_1T, head_rows=0 if last_only else 1)
                self.keep(row, states, tokens_1T, [tokens_1T.shape[1]])
            law_BV = self._laws(logits_1TV[:, -1:], row)[:, -1]
            first = self._draw(answer, law_BV[0], len(prompt))
            if self._emit(answer, [first]):
                done.append(answer)
                self._remove(slot)
        return done

    def propose(self, rows: range, anchors_B: Tensor) -> Proposal:
        if self.proposer is None:
            return Proposal(anchors_B.new_empty(len(rows), 0))
        return self.proposer.propose(self.state, rows, anchors_B, self.num_drafts)

    def forward(self, rows: range, tokens_BJ: Tensor, head_rows: int | None = None):
        """Logits of the last ``head_rows`` positions (``None``: all), and states of all."""
        position_BJ, mask = self.cache.stage(rows, tokens_BJ.shape[1], self.target.device, self.target.dtype)
        states = self.target.states(
            tokens_BJ,
            self.layer_ids,
            attention_mask=mask,
            position_BT=position_BJ,
            cache=self.cache,
        )
        last_BJD = states.last()
        if head_rows is not None:
            last_BJD = last_BJD[:, last_BJD.shape[1] - head_rows :]
        return self.target.head(last_BJD), states, tokens_BJ

    def _commit(
        self, rows: range, proposal: Proposal, logits_BJV: Tensor, states, tokens_BJ: Tensor
    ) -> list[Answer]:
        drafts_BK = proposal.tokens_BK
        if all(answer.request.temperature == 0 for answer in self.active):
            accepted_B, next_B = verify_matching(logits_BJV.argmax(-1), drafts_BK)
            next_tokens = next_B.tolist()
        else:
            uniforms = [
                _uniforms(a.request.seed, "accept", self._position(a), drafts_BK.shape[1])
                for a in self.active
            ]
            accepted_B, law_BV = verify(
                self._laws(logits_BJV, rows),
                proposal.laws_BKV,
                drafts_BK,
                torch.tensor(uniforms, device=drafts_BK.device).view(drafts_BK.shape),
            )
            next_tokens = [
                self._draw(answer, law_BV[row], self._position(answer) + int(accepted_B[row]) + 1)
                for row, answer in enumerate(self.active)
            ]
        accepted = accepted_B.tolist()
        self.keep(rows, states, tokens_BJ, [num + 1 for num in accepted])
        finished = []
        for row, (answer, num, token) in enumerate(zip(self.active, accepted, next_tokens, strict=True)):
            before = len(answer.tokens)
            over = self._emit(answer, [*drafts_BK[row, :num].tolist(), token])
            emitted = len(answer.tokens) - before
            answer.rounds.append(Round(drafts_BK.shape[1], min(num, emitted), emitted))
            if over:
                finished.append(row)
        out = [self.active[row] for row in finished]
        for row in reversed(finished):
            self._remove(row)
        return out

    # Small steps -----------------------------------------------------------------------------

    def keep(self, rows: range, states, tokens_BJ: Tensor, kept: list[int]) -> None:
        self.cache.commit(rows, kept)
        if self.proposer:
            self.proposer.advance(self.state, rows, states, tokens_BJ, kept)

    def _emit(self, answer: Answer, tokens: list[int]) -> bool:
        """Append up to the first stop token or the limit; says whether the answer is over."""
        room = answer.request.max_new_tokens - len(answer.tokens)
        tokens = tokens[:room]
        for at, token in enumerate(tokens):
            if token in self.target.stop_ids:
                tokens, answer.finish = tokens[: at + 1], "stop"
                break
        else:
            if len(tokens) == room:
                answer.finish = "length"
        answer.tokens.extend(tokens)
        if self.on_token:
            self.on_token(answer, tokens)
        return answer.finish is not None

    def _remove(self, slot: int) -> None:
        """Close a hole by moving the last active request into it."""
        last = len(self.active) - 1
        if slot != last:
            self.cache.move(last, slot)
            if self.proposer:
                self.state.move(last, slot)
            self.active[slot] = self.active[last]
        self.active.pop()

    def _position(self, answer: Answer) -> int:
        return len(answer.request.prompt) + len(answer.tokens) - 1

    def _laws(self, logits_BJV: Tensor, rows: range) -> Tensor:
        """The target's law of every row; a point mass at temperature 0."""
        laws_BJV = torch.empty_like(logits_BJV, dtype=torch.float32)
        for at, answer in enumerate(self.active[rows.start : rows.stop]):
            heat, logits_JV = answer.request.temperature, logits_BJV[at].float()
            if heat == 0:
                laws_BJV[at] = torch.zeros_like(logits_JV).scatter_(
                    1, logits_JV.argmax(-1, keepdim=True), 1.0
                )
            else:
                laws_BJV[at] = torch.softmax(logits_JV / heat, dim=-1)
        return laws_BJV

    def _draw(self, answer: Answer, law_V: Tensor, position: int) -> int:
        if answer.request.temperature == 0:
            return int(law_V.argmax())
        (u,) = _uniforms(answer.request.seed, "next", position, 1)
        cumulative_V = law_V.double().cumsum(0)
        at = torch.searchsorted(cumulative_V, cumulative_V[-1:] * u, right=True)
        return min(int(at), len(law_V) - 1)

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.target.device)


def _uniforms(seed: int, purpose: str, position: int, num: int) -> list[float]:
    """Draws that depend on a request's seed and a position alone; each purpose has its own."""
    stream = random.Random(f"{seed}/{purpose}/{position}")
    return [stream.random() for _ in range(num)]


def _check_target(target: Target) -> None:
    """``ValueError`` for a family that keeps a running state beside, or in place of, keys and values."""
    if target.model._is_stateful:
        raise ValueError(
            f"target {target.name}: {target.config.model_type} keeps a recurrent state that cannot be rolled "
            "back after a refused draft; serve it with engine=vllm"
        )


def _check_drafts(proposer: Drafter, num: int | None) -> int:
    most = proposer.max_drafts
    num = most if num is None else num
    if not 0 <= num <= most:
        raise ValueError(
            f"n={num}: this drafter was trained for at most {most} drafts a round; give 0 to {most}"
        )
    return num
