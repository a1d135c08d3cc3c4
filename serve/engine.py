"""Propose, verify, commit, for a batch of requests. Names no method: anything with the verbs will do.

A step prefills a chunk of the prompts that wait, then does four things for every request that has its
prompt behind it: propose drafts, run the target once over anchors and drafts, keep what the target
would have said itself, emit it. Without a proposer the same step decodes plainly, one token at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from drafters.target import Target
from drafters.types import Proposal, States
from serve.cache import SlotCache, attend_ragged, check_ragged
from serve.law import adjusted, choose, draw, law, scored, uniforms
from serve.text import Text
from serve.types import Answer, Proposer, Request, Round, Schedule
from serve.verify import verify, verify_matching


@dataclass(frozen=True)
class Pass:
    """One run of the target over ``counts[i]`` tokens of each row, and what it left behind.

    ``states`` are ``[B, J, ...]`` and true where a row has tokens; ``last_PD`` are the states after the
    final norm of real tokens alone, one after another.
    """

    rows: range
    tokens_BJ: Tensor
    counts: list[int]
    states: States
    last_PD: Tensor

    def split(self, values_P: Tensor) -> list[Tensor]:
        """Per row, what stands at its real tokens."""
        return list(values_P.split(self.counts))


class Engine:
    """Continuous batching over ``slots``; ``proposer=None`` or ``num_drafts=0`` is plain decoding.

    A step prefills at most ``chunk`` prompt tokens, so that long prompts do not hold up answers. With a
    ``schedule`` the drafts of a round are its to choose, ``num_drafts`` at most. Proposers are asked for
    greedy drafts at every temperature, not for draws from their law. One thread calls.

    Errors: ``ValueError`` for a target whose state cannot be rolled back (recurrent layers) or that cannot
    run rows of different lengths, a request that does not fit, or more drafts than the drafter was trained
    for.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        num_drafts: int | None = None,
        *,
        slots: int = 1,
        capacity: int = 2048,
        chunk: int = 512,
        schedule: Schedule | None = None,
    ) -> None:
        _check_target(target)
        self.target = target
        self.num_drafts = 0 if proposer is None else _check_drafts(proposer, num_drafts)
        self.proposer = proposer = proposer if self.num_drafts else None
        self.layer_ids = proposer.layer_ids if proposer else []
        self.slots, self.capacity, self.chunk = slots, capacity, chunk
        self.schedule = schedule if proposer else None
        self.cache = SlotCache(target.num_layers, slots, capacity, target.attention_windows)
        self.state: Any = proposer.begin(slots, capacity) if proposer else None
        self.waiting: deque[Answer] = deque()
        self.active: list[Answer] = []  # by slot; the last one may still be reading its prompt

    # What callers use ------------------------------------------------------------------------

    def run(
        self,
        requests: Iterable[Request],
        on_token: Callable[[Answer, list[int]], None] | None = None,
    ) -> Iterator[Answer]:
        """Answers as they finish; ``on_token`` hears of every batch of new ids of an answer."""
        for request in requests:
            self.submit(request, on_token)
        while self.busy:
            yield from self.step()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def submit(self, request: Request, on_token: Callable[[Answer, list[int]], None] | None = None) -> Answer:
        """Queue a request; the answer grows as ``step`` is called."""
        self.check(request)
        answer = Answer(request, on_token=on_token)
        if request.text or request.stop:
            answer.text = Text(self._decode, request.stop)
        self.waiting.append(answer)
        return answer

    def check(self, request: Request) -> None:
        """``ValueError`` with the reason why this request cannot be served."""
        name, vocab = f"request {request.name}".rstrip(), self.target.vocab_size
        if not request.prompt:
            raise ValueError(f"{name}: empty prompt")
        if request.max_new_tokens < 1 or len(request.prompt) + request.max_new_tokens > self.capacity:
            raise ValueError(
                f"{name}: {len(request.prompt)} prompt tokens, {request.max_new_tokens} new ones; a slot "
                f"holds {self.capacity}, an answer a token or more; shorten the request or raise the capacity"
            )
        for key, ids in (("prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
            strange = next((i for i in ids if not 0 <= i < vocab), None)
            if strange is not None:
                raise ValueError(f"{name}: {key} holds token id {strange}; give ids from 0 to {vocab - 1}")
        if (request.stop or request.text) and self.target.tokenizer is None:
            raise ValueError(f"{name}: text and stop strings need a target with a tokenizer; use stop_ids")
        if not all(request.stop):
            raise ValueError(f"{name}: an empty stop string would end every answer; leave it out")

    @torch.inference_mode()
    def abort(self, answer: Answer) -> None:
        """End an answer at any time; its slot is free at once. Nothing happens to one that is over."""
        if answer.finish is not None:
            return
        answer.finish = "abort"
        if answer in self.waiting:
            self.waiting.remove(answer)
        else:
            self._remove(self.active.index(answer))

    @torch.inference_mode()
    def step(self) -> list[Answer]:
        """Prefill a chunk, then one round for every request past its prompt; returns those that finished."""
        done = self._prefill()
        num = self.decoding
        if num == 0:
            return done
        start = perf_counter()
        anchors_B = self._tensor([answer.tokens[-1] for answer in self.active[:num]])
        proposal, lengths = self._proposal(range(num), anchors_B)
        tokens_BJ = torch.cat([anchors_B[:, None], proposal.tokens_BK], 1)
        ran = self.forward(range(num), tokens_BJ, [length + 1 for length in lengths])
        logits_PV = self.target.head(ran.last_PD)
        accepted, chosen = self._verify(proposal, lengths, ran.split(logits_PV))
        answers, kept = self.active[:num], []
        for answer, drafted, stood, tokens, logits_JV in zip(
            answers, lengths, accepted, chosen, ran.split(logits_PV), strict=True
        ):
            emitted = self._emit(answer, tokens, logits_JV)
            answer.rounds.append(Round(drafted, min(stood, emitted), emitted))
            kept.append(emitted)  # the anchor and all that is emitted but its last token, the next anchor
        self.keep(ran.rows, ran.states, ran.tokens_BJ, kept)
        for row in reversed(range(num)):
            if answers[row].finish:
                self._remove(row)
        if self.schedule:
            counted = [answer.rounds[-1].accepted for answer in answers]
            self.schedule.heard(lengths, counted, perf_counter() - start)
        for answer in answers:
            self._tell(answer)
        return done + [answer for answer in answers if answer.finish]

    @property
    def decoding(self) -> int:
        """How many requests are past their prompt; they fill the slots from the front."""
        reading = self.active and self.active[-1].prefilled < len(self.active[-1].request.prompt)
        return len(self.active) - bool(reading)

    # The parts of a step ---------------------------------------------------------------------

    def _prefill(self) -> list[Answer]:
        """Up to a chunk of prompt tokens, first come first served; the end of a prompt emits a token."""
        done, budget = [], self.chunk
        while budget > 0:
            if self.decoding == len(self.active):
                if not self.waiting or len(self.active) == self.slots:
                    break
                self.active.append(self.waiting.popleft())
            slot, answer = len(self.active) - 1, self.active[-1]
            prompt, row = answer.request.prompt, range(slot, slot + 1)
            tokens = prompt[answer.prefilled : answer.prefilled + budget]
            ran = self.forward(row, self._tensor([tokens]))
            self.keep(row, ran.states, ran.tokens_BJ, [len(tokens)])
            answer.prefilled += len(tokens)
            budget -= len(tokens)
            if answer.prefilled == len(prompt):
                if self.proposer:
                    self.proposer.answering(self.state, slot)
                logits_1V = self.target.head(ran.last_PD[-1:])
                (own,) = self._choose([answer], [logits_1V], [[]])
                self._emit(answer, own, logits_1V)
                if answer.finish:
                    done.append(answer)
                    self._remove(slot)
                self._tell(answer)
        return done

    def _proposal(self, rows: range, anchors_B: Tensor) -> tuple[Proposal, list[int]]:
        """Drafts for every row, cut to the longest that is verified, and how many of each row are."""
        n = self.schedule.drafts(len(rows)) if self.schedule else self.num_drafts
        proposal = self.propose(rows, anchors_B, n)
        if self.schedule:
            lengths = self.schedule.prefixes(proposal, len(rows))
        else:
            lengths = proposal.lengths or [proposal.tokens_BK.shape[1]] * len(rows)
        # Drafts past the end of an answer are for nothing, and past that of a slot. The one that would end it
        # is verified: a round then accepts what replay says it does, to the last.
        lengths = [min(num, self.active[row].room) for row, num in zip(rows, lengths, strict=True)]
        longest = max(lengths)
        laws = None if proposal.laws_BKV is None else proposal.laws_BKV[:, :longest]
        return Proposal(proposal.tokens_BK[:, :longest], laws), lengths

    def propose(self, rows: range, anchors_B: Tensor, n: int | None) -> Proposal:
        if self.proposer is None or n is None:
            return Proposal(anchors_B.new_empty(len(rows), 0))
        return self.proposer.propose(self.state, rows, anchors_B, n)

    def forward(self, rows: range, tokens_BJ: Tensor, counts: list[int] | None = None) -> Pass:
        """Run the target over the first ``counts[i]`` tokens of each row (``None``: all of them).

        Rows of different lengths run as one flat row, so that the target computes real tokens alone.
        """
        num, target = tokens_BJ.shape[1], self.target
        counts = counts or [num] * len(rows)
        if min(counts) == num:
            position_BJ, mask = self.cache.stage(rows, num, target.device, target.dtype)
            states = self._states(tokens_BJ, position_BJ, mask)
            return Pass(rows, tokens_BJ, counts, states, states.last().flatten(0, 1))
        position_1P, mask = self.cache.stage(rows, num, target.device, target.dtype, counts)
        ragged = self.cache.ragged
        assert ragged is not None, counts
        with attend_ragged(self.cache, target.config):
            flat = self._states(tokens_BJ.flatten()[ragged.real_P][None], position_1P, mask)
        return Pass(rows, tokens_BJ, counts, flat[0, ragged.place_BJ], flat.last()[0])

    def _states(self, tokens: Tensor, position: Tensor, mask: Tensor | dict[str, Tensor]) -> States:
        return self.target.states(
            tokens, self.layer_ids, attention_mask=mask, position_BT=position, cache=self.cache
        )

    def _verify(
        self, proposal: Proposal, lengths: list[int], logits: list[Tensor]
    ) -> tuple[list[int], list[list[int]]]:
        """How many drafts of each row stand, and the tokens that the row gains.

        Point-mass drafts stand while they are what the target chooses itself, drawn with the uniforms of
        each position: the tokens are those of plain decoding, whatever was drafted. Drafts that were drawn
        from a law stand by the rule of ``verify``.
        """
        drafts_BK = proposal.tokens_BK
        if proposal.laws_BKV is not None:
            return self._verify_drawn(proposal, lengths, logits)
        drafts = [row[:length] for row, length in zip(drafts_BK.tolist(), lengths, strict=True)]
        own = self._choose(self.active[: len(lengths)], logits, drafts)
        width = drafts_BK.shape[1] + 1
        own_BJ = self._tensor([tokens + [0] * (width - len(tokens)) for tokens in own])
        accepted_B, _ = verify_matching(own_BJ, drafts_BK, self._tensor(lengths))
        accepted = accepted_B.tolist()
        return accepted, [tokens[: num + 1] for tokens, num in zip(own, accepted, strict=True)]

    def _verify_drawn(
        self, proposal: Proposal, lengths: list[int], logits: list[Tensor]
    ) -> tuple[list[int], list[list[int]]]:
        """The same for drafts that were drawn from ``laws_BKV``."""
        drafts_BK = proposal.tokens_BK
        rows, num = drafts_BK.shape
        p_BJV = logits[0].new_zeros(rows, num + 1, self.target.vocab_size, dtype=torch.float32)
        drawn = []
        for row, (answer, logits_JV) in enumerate(zip(self.active, logits, strict=False)):
            asked = answer.request.sampling
            p_BJV[row, : lengths[row] + 1] = law(
                self._adjusted(answer, logits_JV, drafts_BK[row].tolist()), asked
            )
            drawn.append(uniforms(asked.seed, "accept", self._position(answer), num))
        u_BK = torch.tensor(drawn, device=drafts_BK.device).view(drafts_BK.shape)
        accepted_B, next_BV = verify(p_BJV, proposal.laws_BKV, drafts_BK, u_BK, self._tensor(lengths))
        accepted, chosen = accepted_B.tolist(), []
        for row, stood in enumerate(accepted):
            answer = self.active[row]
            own = uniforms(answer.request.sampling.seed, "next", self._position(answer) + stood + 1, 1)
            chosen.append(drafts_BK[row, :stood].tolist() + draw(next_BV[row : row + 1], own))
        return accepted, chosen

    # Small steps -----------------------------------------------------------------------------

    def release(self) -> None:
        """Give back the memory of the cache and the proposer; no step can follow."""
        self.cache.layers.clear()
        self.state = None

    def keep(self, rows: range, states: States, tokens_BJ: Tensor, kept: list[int]) -> None:
        """The first ``kept[i]`` tokens of each row are true; what followed them never happened."""
        self.cache.commit(rows, kept)
        if self.proposer:
            self.proposer.advance(self.state, rows, states, tokens_BJ, kept)

    def _choose(
        self, answers: list[Answer], logits: list[Tensor], drafts: list[list[int]]
    ) -> list[list[int]]:
        """The target's own token at each position after each answer and the drafts before it."""
        adjusted = [self._adjusted(*row) for row in zip(answers, logits, drafts, strict=True)]
        samplings = [answer.request.sampling for answer in answers]
        return choose(adjusted, samplings, [self._position(answer) + 1 for answer in answers])

    def _adjusted(self, answer: Answer, logits_JV: Tensor, drafts: list[int]) -> Tensor:
        request = answer.request
        if not request.sampling.adjusts:
            return logits_JV
        return adjusted(logits_JV, request.sampling, request.prompt, answer.tokens, drafts)

    def _emit(self, answer: Answer, tokens: list[int], logits_JV: Tensor) -> int:
        """Append up to whatever ends the answer first: a stop token, a stop string, the limit. How many."""
        request = answer.request
        stop_ids = {*request.stop_ids, *(() if request.ignore_eos else self.target.stop_ids)}
        room = answer.room
        for emitted, token in enumerate(tokens[:room], start=1):
            answer.tokens.append(token)
            if request.logprobs is not None:
                answer.logprobs.append(scored(logits_JV[emitted - 1], token, request.logprobs))
            if token in stop_ids:
                answer.finish = "stop"
            elif answer.text is not None:
                answer.text.feed(token)
                answer.finish = "stop" if answer.text.stopped else None
            if answer.finish is None and emitted == room:
                answer.finish = "length"
            if answer.finish:
                break
        if answer.finish and answer.text is not None:
            answer.text.close()
        return emitted

    def _tell(self, answer: Answer) -> None:
        """The listener hears last, when it may abort any request."""
        new, answer.told = answer.tokens[answer.told :], len(answer.tokens)
        if answer.on_token:
            answer.on_token(answer, new)

    def _remove(self, slot: int) -> None:
        """Take a request out and close the hole: the last past its prompt moves in, then one that reads."""
        last = len(self.active) - 1
        if self.proposer:
            self.state.drop([slot])
        for source in (self.decoding - 1, last):
            if source > slot:
                self.cache.move(source, slot)
                if self.proposer:
                    self.state.move(source, slot)
                self.active[slot] = self.active[source]
                slot = source
        self.cache.lengths[slot] = 0
        self.active.pop()

    def _position(self, answer: Answer) -> int:
        """Where the newest token of prompt and answer stands."""
        return len(answer.request.prompt) + len(answer.tokens) - 1

    def _decode(self, ids: list[int]) -> str:
        return self.target.tokenizer.decode(ids, skip_special_tokens=True)

    def _tensor(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.target.device)


def _check_target(target: Target) -> None:
    """``ValueError`` for a family that keeps a running state beside, or in place of, keys and values."""
    if target.model._is_stateful:
        raise ValueError(
            f"target {target.name}: {target.config.model_type} keeps a recurrent state that cannot be rolled "
            "back after a refused draft; serve it with engine=vllm"
        )
    check_ragged(target)


def _check_drafts(proposer: Proposer, num: int | None) -> int:
    most = proposer.max_drafts
    num = most if num is None else num
    if not 0 <= num <= most:
        raise ValueError(f"n={num}: this proposer makes at most {most} drafts a round; give 0 to {most}")
    return num
