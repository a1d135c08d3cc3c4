"""One thread owns the engine; the event loop hands it requests and hears of every round.

The engine knows nothing of threads: only this thread calls it. The loop puts small jobs into its inbox
(take a call, abort a call, stop), which are done between two rounds; what a round brought goes back to the
loop by ``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from time import perf_counter

from serve.engine import Engine
from serve.law import Scored
from serve.metrics import Metrics
from serve.protocol import Refusal
from serve.schedule import Schedule
from serve.types import Answer, Request

logger = logging.getLogger(__name__)

STOPPED = "the server is stopping, or its engine cannot go on"


@dataclass(frozen=True)
class Piece:
    """What one round added to an answer; the last piece has its ``finish``. Text may lag behind tokens."""

    tokens: list[int]
    text: str
    logprobs: list[Scored]
    finish: str | None


class Call:
    """The engine requests of one HTTP request, and a stream of what comes of them.

    ``answers`` may be read once the stream is over: they change until then.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.answers: list[Answer] = []
        self.events: asyncio.Queue[tuple[int, Piece] | Refusal] = asyncio.Queue()
        self.arrived = perf_counter()
        self._first: tuple[int, Piece] | None = None

    async def started(self) -> None:
        """Wait for the first token of any answer. Errors: what refused or failed the call."""
        self._first = await self._next()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Index of the request, and what was added to its answer, until all are finished."""
        unfinished = len(self.requests)
        while unfinished:
            index, piece = self._first or await self._next()
            self._first = None
            yield index, piece
            unfinished -= piece.finish is not None

    async def _next(self) -> tuple[int, Piece]:
        event = await self.events.get()
        if isinstance(event, Refusal):
            raise event
        return event


@dataclass(eq=False)
class _Running:
    """One answer of a call, and how much of it was told and counted."""

    call: Call
    index: int
    answer: Answer
    heard: float
    began: float = 0.0  # when its first token came
    tokens: int = 0
    characters: int = 0
    rounds: int = 0


class Worker:
    """Runs an engine in a thread of its own. ``limit`` requests may run and wait; more are refused (429).

    ``build`` makes the engine, and makes it anew after a step that failed: what such a step left in its
    caches is not trusted.
    """

    def __init__(self, build: Callable[[], Engine], model: str, limit: int) -> None:
        self.build, self.limit = build, limit
        self.inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.thread = Thread(target=self._run, name="engine", daemon=True)
        # The loop's
        self.calls: set[Call] = set()  # not closed yet
        self.admitted = 0  # requests that run or wait
        self.ended = False
        # The thread's
        self.engine = build()
        self.running: list[_Running] = []
        self.stopping = False
        self.metrics = Metrics(
            model,
            self.engine.num_drafts,
            running=lambda: len(self.engine.active),
            waiting=lambda: max(0, self.admitted - len(self.engine.active)),
        )
        if isinstance(schedule := self.engine.schedule, Schedule):
            self.metrics.show_schedule(lambda: schedule.summary)

    # In the event loop -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, and answer to the running event loop."""
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    async def stop(self) -> None:
        """End the thread; whoever still waits is told so."""
        self.inbox.put(self._stop)
        await asyncio.to_thread(self.thread.join)

    @property
    def alive(self) -> bool:
        return self.thread.is_alive() and not self.ended

    def submit(self, requests: Sequence[Request]) -> Call:
        """All of them, or none; ``close`` the call at the end.

        Errors: ``Refusal`` 429 when the queue is full, 503 when nothing is decoded any more.
        """
        if not self.alive:
            raise Refusal(503, STOPPED)
        if self.admitted + len(requests) > self.limit:
            raise Refusal(
                429,
                f"{self.admitted} requests run or wait, and {self.limit} may: try again in a moment",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.admitted += len(requests)
        call = Call(requests)
        self.calls.add(call)
        self.inbox.put(partial(self._take, call))
        return call

    def close(self, call: Call) -> None:
        """Nobody listens to this call any more: what of it is not finished is aborted."""
        self.calls.discard(call)
        self.inbox.put(partial(self._abort, call))

    def _release(self) -> None:
        self.admitted -= 1

    def _end(self) -> None:
        self.ended = True
        for call in self.calls:
            call.events.put_nowait(Refusal(503, STOPPED))

    # In the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.stopping:
                failure = None
                try:
                    self._turn()
                except Exception as error:  # whatever it is, its requests must hear of it and the server live
                    logger.exception("the engine failed; the requests in its slots are given up")
                    failure = f"the engine failed ({type(error).__name__}); the server's log has more"
                if failure:  # by now nothing holds on to the tensors of the failed step
                    self._recover(failure)
        except Exception:
            logger.exception("no engine could be made in place of the failed one; nothing more is answered")
        finally:
            self._loop(self._end)

    def _turn(self) -> None:
        """Jobs first, so that what was cancelled is not decoded; then one round."""
        if not self.engine.busy:
            self.inbox.get()()
        while not self.inbox.empty():
            self.inbox.get()()
        if self.engine.busy:
            self.engine.step()

    def _take(self, call: Call) -> None:
        for index, request in enumerate(call.requests):
            try:
                answer = self.engine.submit(request, self._heard)
            except ValueError as error:
                self._abort(call)
                for _ in call.requests[index:]:
                    self._loop(self._release)
                self._loop(call.events.put_nowait, Refusal(400, str(error)))
                return
            call.answers.append(answer)
            self.running.append(_Running(call, index, answer, call.arrived))

    def _heard(self, answer: Answer, _tokens: list[int]) -> None:
        self._tell(next(running for running in self.running if running.answer is answer))

    def _tell(self, running: _Running) -> None:
        """Count and send on what was added to an answer."""
        answer = running.answer
        tokens, text = answer.tokens[running.tokens :], answer.text.text if answer.text else ""
        self._count(running, len(tokens))
        piece = Piece(tokens, text[running.characters :], answer.logprobs[running.tokens :], answer.finish)
        running.tokens, running.characters = len(answer.tokens), len(text)
        self._loop(running.call.events.put_nowait, (running.index, piece))
        if answer.finish:
            self._leave(running)

    def _count(self, running: _Running, new: int) -> None:
        metrics, answer, now = self.metrics, running.answer, perf_counter()
        metrics.generation_tokens.inc(new)
        for each in answer.rounds[running.rounds :]:
            metrics.count_round(each)
        running.rounds = len(answer.rounds)
        if not running.tokens:
            metrics.prompt_tokens.inc(len(answer.request.prompt))
            metrics.first_token.observe(now - running.heard)
            running.began = now
        else:
            metrics.between.observe(now - running.heard)
        running.heard = now
        if answer.finish:
            metrics.per_token.observe((now - running.began) / max(1, len(answer.tokens) - 1))
            metrics.whole.observe(now - running.call.arrived)
            metrics.count_finish(answer.finish)

    def _abort(self, call: Call) -> None:
        for running in [r for r in self.running if r.call is call]:
            self._leave(running)
            self.metrics.count_finish("abort")
            self.engine.abort(running.answer)

    def _recover(self, message: str) -> None:
        """Fail the calls that were being decoded, and hand those that wait to a new engine.

        Where none was being decoded all fail: one of those that wait must have been the cause.
        """
        waiting = {id(answer) for answer in self.engine.waiting}
        failed = [r for r in self.running if id(r.answer) not in waiting] or self.running
        calls = {running.call for running in failed}
        for call in calls:
            self._loop(call.events.put_nowait, Refusal(500, message))
        for running in [r for r in self.running if r.call in calls]:
            self._leave(running)
            self.metrics.count_finish("error")
        self.engine.release()  # there may be no room for the caches of two engines
        gc.collect()
        self.engine = self.build()
        for running in self.running:
            running.answer = self.engine.submit(running.answer.request, self._heard)
            running.call.answers[running.index] = running.answer

    def _stop(self) -> None:
        self.stopping = True

    def _leave(self, running: _Running) -> None:
        self.running.remove(running)
        self._loop(self._release)

    def _loop(self, act: Callable, *arguments: object) -> None:
        self.loop.call_soon_threadsafe(act, *arguments)
