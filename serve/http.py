"""The server: OpenAI's API over the engine. ``python -m serve drafter=DIR port=8000``.

    GET  /v1/models              POST /v1/chat/completions     GET /health
    GET  /v1/models/{model}      POST /v1/completions          GET /metrics

Only ``/v1`` asks for the API key, as in vLLM. No answer begins before its first token, so that whatever
refuses or fails a request has a status of its own. A client that goes away takes its requests with it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time
from typing import Any, TypeVar

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from data.chat import Renderer
from serve.engine import Engine
from serve.guard import StrictRoute, protect
from serve.protocol import Asked, ChatRequest, CompletionRequest, Refusal, check_ids
from serve.reply import DONE, ChatForm, CompletionForm, Form, event, usage
from serve.settings import HttpConfig
from serve.worker import Call, Piece, Worker

T = TypeVar("T")


def create_app(build: Callable[[], Engine], renderer: Renderer, config: HttpConfig, model: str) -> FastAPI:
    """An application over the engine that ``build`` makes, which serves requests for ``model``.

    The engine has ``config.slots`` slots; the tokens that one of them holds are the context.
    """
    service = Service(Worker(build, model, config.slots + config.queue), renderer, config, model)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.worker.stop()

    app = FastAPI(title="Foredraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    protect(app, config)
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    v1 = APIRouter(prefix="/v1", route_class=StrictRoute)

    @v1.get("/models")
    async def models():
        return {"object": "list", "data": [service.card]}

    @v1.get("/models/{name:path}")
    async def one_model(name: str):
        service.check_model(name)
        return service.card

    @v1.post("/chat/completions")
    async def chat(asked: ChatRequest, http: Request):
        service.check_model(asked.model)
        prompt = await asyncio.to_thread(service.chat_prompt, asked)
        return await service.respond(http, asked, [prompt], ChatForm)

    @v1.post("/completions")
    async def completions(asked: CompletionRequest, http: Request):
        service.check_model(asked.model)
        prompts = await asyncio.to_thread(service.prompts, asked)
        return await service.respond(http, asked, prompts, CompletionForm)

    @app.get("/health")
    async def health():
        return Response(status_code=200 if service.worker.alive else 503)

    @app.get("/metrics")
    async def metrics():
        return Response(service.worker.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(v1)


def listen(host: str, port: int) -> socket.socket:
    """A socket on a host and port, taken before anything slow is loaded; port 0 is any free one.

    Errors: ``ValueError`` when it cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port}: give a port from 0 (any that is free) to {2**16 - 1}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
        # Also while an earlier server's port lingers
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen()  # from here on nobody else gets the port, however long the model loads
    except OSError as error:
        raise ValueError(f"http.host={host}, port={port}: {error}; give another port or host") from error
    return taken


def run_until_stopped(app: FastAPI, listener: socket.socket, config: HttpConfig) -> None:
    """Serve until SIGINT or SIGTERM; running requests have ``grace_seconds`` to end."""
    settings = uvicorn.Config(
        app, log_level="warning", lifespan="on", timeout_graceful_shutdown=config.grace_seconds
    )
    uvicorn.Server(settings).run(sockets=[listener])


# Answers -----------------------------------------------------------------------------------------------


@dataclass
class Service:
    """From a checked body to the engine's requests, and from what they bring to an answer."""

    worker: Worker
    renderer: Renderer
    config: HttpConfig
    model: str

    def __post_init__(self) -> None:
        self.tokenizer = self.renderer.tokenizer
        self.vocab_size = self.worker.engine.target.vocab_size
        self.context = self.worker.engine.capacity
        self.card = {
            "id": self.model,
            "object": "model",
            "created": int(time()),
            "owned_by": "foredraft",
            "max_model_len": self.context,
        }
        self.renderer.encode("one")  # settles the tokenizer, which threads share from here on

    def check_model(self, name: str | None) -> None:
        """``Refusal`` 404 for a model that is not served; none named is the one that is."""
        if name not in (None, self.model):
            raise Refusal(
                404,
                f"model={name!r:.200} is not served here; {self.model!r} is",
                param="model",
                code="model_not_found",
            )

    def check_choices(self, asked: Asked, num_prompts: int) -> None:
        """``Refusal`` for more answers than the server ever runs and queues."""
        most = self.worker.limit
        if num_prompts * (asked.n or 1) > most:
            raise Refusal(400, f"n: {most} answers are the most that fit here; ask for fewer", param="n")

    def chat_prompt(self, asked: ChatRequest) -> list[int]:
        """Ids of the rendered chat, up to where the assistant goes on."""
        messages = [message.plain() for message in asked.messages]
        try:
            return self.renderer.prompt_ids(messages, asked.shown_tools)
        except ValueError as error:
            raise Refusal(400, f"messages: {error}", param="messages") from error

    def prompts(self, asked: CompletionRequest) -> list[list[int]]:
        """Ids of each prompt of a completion."""
        self.check_choices(asked, len(asked.prompts))
        out = []
        for prompt in asked.prompts:
            ids = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            check_ids("prompt", ids, self.vocab_size)
            out.append(ids)
        return out

    def max_new_tokens(self, asked: Asked, prompt: list[int]) -> int:
        """The limit that was asked for, or what the context leaves. Errors: ``Refusal`` if too little."""
        limit, left, param = asked.limit, self.context - len(prompt), asked.prompt_param
        if not prompt:
            raise Refusal(400, f"{param}: the prompt is empty; give a token or more", param=param)
        if left < (limit or 1):
            most = f"max_tokens up to {left}, or " if left > 0 else ""
            raise Refusal(
                400,
                f"{param}: the prompt has {len(prompt)} tokens and the answer is to have {limit or 1}, but "
                f"this server holds {self.context} tokens a request; give {most}a shorter prompt",
                param=param,
                code="context_length_exceeded",
            )
        return limit or min(left, self.config.max_tokens)

    async def respond(
        self, http: Request, asked: Asked, prompts: list[list[int]], form_of: type[Form]
    ) -> Response:
        """The answer, whole or as a stream."""
        self.check_choices(asked, len(prompts))
        requests = [
            request
            for prompt in prompts
            for request in asked.requests(prompt, self.max_new_tokens(asked, prompt), self.vocab_size)
        ]
        form = form_of(self.model, self.tokenizer.decode, asked.num_logprobs is not None)
        call = self.worker.submit(requests)
        if asked.stream:
            return await self._streamed(http, asked, call, form, len(prompts))
        try:
            choices = await while_present(http, _collect(call, form))
            return JSONResponse(form.answer(choices, call.answers, len(prompts)))
        finally:
            self.worker.close(call)

    async def _streamed(
        self, http: Request, asked: Asked, call: Call, form: Form, num_prompts: int
    ) -> Response:
        try:
            await while_present(http, call.started())
        except BaseException:  # a refusal, a client that went away, or the server's end
            self.worker.close(call)
            raise
        options = asked.stream_options
        lines = _stream(call, form, num_prompts, bool(options and options.include_usage))
        return EventStream(lines, on_close=lambda: self.worker.close(call))


async def _collect(call: Call, form: Form) -> list[dict[str, Any]]:
    pieces: list[list[Piece]] = [[] for _ in call.requests]
    async for index, piece in call.pieces():
        pieces[index].append(piece)
    return [form.choice(index, of) for index, of in enumerate(pieces)]


async def _stream(call: Call, form: Form, num_prompts: int, with_usage: bool) -> AsyncIterator[str]:
    no_usage_yet = {"usage": None} if with_usage else {}
    for index in range(len(call.requests)):
        if opening := form.opening(index):
            yield event(form.chunk([opening], **no_usage_yet))
    try:
        async for index, piece in call.pieces():
            for choice in form.parts(index, piece):
                yield event(form.chunk([choice], **no_usage_yet))
    except Refusal as refusal:  # the status is sent already
        yield event(refusal.body)
        return
    if with_usage:
        yield event(form.chunk([], usage=usage(call.answers, num_prompts)))
    yield DONE


class EventStream(StreamingResponse):
    """Server-sent events; ``on_close`` is called when all are sent, or the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, lines: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(lines, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self.on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.on_close()


async def while_present(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``. Errors: ``Refusal`` 499 as soon as the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refusal(499, "the client went away")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _until_gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
