"""Before and around every route: the API key, the size and the JSON of bodies, errors in OpenAI's shape."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.protocol import Refusal, refusal_of
from serve.settings import HttpConfig


def protect(app: FastAPI, config: HttpConfig) -> None:
    """Put a guard before an application, and have it tell its errors as OpenAI does."""
    app.add_middleware(Guard, config=config)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _broken)


class StrictRequest(Request):
    """A body is JSON as it is defined: UTF-8, no NaN, no half surrogates, no endless nesting."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise Refusal(400, f"the body is not JSON: {error}", code="invalid_json") from error


class StrictRoute(APIRoute):
    """A route that reads bodies with ``StrictRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handler(StrictRequest(request.scope, request.receive))

        return strictly


class Guard:
    """Before a route is looked for: the API key of ``/v1``, and the size of the body, counted as it comes."""

    def __init__(self, app: ASGIApp, config: HttpConfig) -> None:
        self.app, self.most = app, config.max_body_bytes
        self.key = f"bearer {config.key}".encode() if config.key else None  # the scheme is lowered below

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            return await _as_response(refusal)(scope, receive, send)
        return await self.app(scope, self._counted(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> Refusal | None:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = scheme.lower() + b" " + token
        if path.startswith("/v1") and self.key and not hmac.compare_digest(given, self.key):
            return Refusal(
                401,
                "give the API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get(b"content-length", b"0")
        return self._too_long() if length.isdigit() and int(length) > self.most else None

    def _counted(self, receive: Receive) -> Receive:
        """``receive`` of a body that may come in chunks without saying how long it is."""
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            got += len(message.get("body", b""))
            if got > self.most:
                raise self._too_long()
            return message

        return counted

    def _too_long(self) -> Refusal:
        return Refusal(
            413,
            f"the body is longer than {self.most} bytes (http.max_body_bytes)",
            headers={"Connection": "close"},
        )


def _as_response(refusal: Refusal) -> Response:
    return JSONResponse(refusal.body, refusal.status_code, refusal.headers)


async def _refused(http: Request, error: Exception) -> Response:
    if not isinstance(error, Refusal):  # of the router: no such path, or no such method
        assert isinstance(error, HTTPException), error
        message = f"{http.method} {http.url.path}: {error.detail}"
        error = Refusal(error.status_code, message, headers=error.headers)
    return _as_response(error)


async def _invalid(_http: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), error
    return _as_response(refusal_of(error.errors()))


async def _broken(_http: Request, _error: Exception) -> Response:
    """Of our own faults; the traceback is in the server's log."""
    return _as_response(Refusal(500, "the server failed on this request; its log has more"))
