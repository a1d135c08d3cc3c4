"""What clients may ask: OpenAI's bodies with vLLM's extras, and the reason for everything that is refused.

What would silently be ignored is refused; parameters that change nothing here are taken at those of their
values at which that is true. ``null`` is the same as leaving a parameter out. Ranges of the sampling
parameters are those of ``serve.law.Sampling``.
"""

from __future__ import annotations

import difflib
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import from_json

from serve.law import Sampling
from serve.types import Request

TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class Refusal(HTTPException):
    """An error as OpenAI's clients read it: ``{"error": {message, type, param, code}}``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


T = TypeVar("T")
List = Annotated[list[T], Field(fail_fast=True)]  # one bad item is enough to refuse a long list


# Parts of a chat ---------------------------------------------------------------------------------------


class Body(BaseModel):
    """Nothing unknown, nothing converted, no infinities."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """What the assistant called; ``arguments`` is JSON text, or already an object."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Body):
    """A call of an earlier assistant turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def plain(self) -> dict[str, Any]:
        """The call with its arguments as an object, as templates read it and drafters were trained on it."""
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = from_json(arguments, allow_inf_nan=False) if arguments.strip() else {}
            except ValueError as error:
                raise Refusal(
                    400,
                    f"messages: the arguments of a call of {self.function.name} are not JSON",
                    param="messages",
                ) from error
        call = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return call if self.id is None else {"id": self.id, **call}


class Message(Body):
    """One turn. ``developer`` is another word for ``system``; images and sound are not read."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | List[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: List[ToolCall] | None = None
    tool_call_id: str | None = None
    # What clients send back of an answer, and no template reads
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role} needs content")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as templates read it: content as one text, calls with their arguments as objects."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        out: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        out |= self.model_dump(include={"name", "reasoning_content", "tool_call_id"}, exclude_none=True)
        if self.tool_calls:
            out["tool_calls"] = [call.plain() for call in self.tool_calls]
        return out


class TextFormat(Body):
    """Plain text: what every answer is."""

    type: Literal["text"]


class StreamOptions(Body):
    """``include_usage`` sends the usage in a last chunk."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


# Requests ----------------------------------------------------------------------------------------------

SAMPLING = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
}
STOP_STRINGS = 16


class Asked(Body):
    """What both endpoints take.

    ``temperature`` is 1 where none is given, as with OpenAI. Without a ``seed`` each request draws its own;
    choice i of ``n`` has the seed of the first plus i.
    """

    prompt_param: ClassVar[str]  # where the prompt stands

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | List[str] | None = None
    stop_token_ids: List[int] | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Taken at values that change nothing
    user: str | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _streams(self) -> Asked:
        if self.stream_options and not self.stream:
            raise ValueError("stream_options is for stream=true")
        return self

    @field_validator("stop")
    @classmethod
    def _can_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        strings = [stop] if isinstance(stop, str) else stop or []
        if not all(strings) or len(strings) > STOP_STRINGS:
            raise ValueError(f"give at most {STOP_STRINGS} strings, none of them empty")
        return stop

    @property
    def limit(self) -> int | None:
        """The most new tokens, where a limit was given."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each token; ``None``: no log probabilities."""
        raise NotImplementedError

    def requests(self, prompt: list[int], max_new_tokens: int, vocab_size: int) -> list[Request]:
        """One request of the engine for each choice. Errors: ``Refusal`` for ids the target does not have."""
        bias = _bias(self.logit_bias or {}, vocab_size)
        check_ids("stop_token_ids", self.stop_token_ids or [], vocab_size)
        given = {"temperature": 1.0, **self.model_dump(include=SAMPLING, exclude_none=True)}
        if given.get("top_k") == -1:  # as vLLM writes "all"
            del given["top_k"]
        seed = secrets.randbits(62) if self.seed is None else self.seed
        try:
            samplings = [Sampling(**given, logit_bias=bias, seed=seed + i) for i in range(self.n or 1)]
        except ValueError as error:
            raise Refusal(400, str(error), param=str(error).partition("=")[0]) from error
        return [
            Request(
                prompt,
                max_new_tokens,
                sampling,
                stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                stop_ids=tuple(self.stop_token_ids or ()),
                ignore_eos=bool(self.ignore_eos),
                logprobs=self.num_logprobs,
                text=True,
            )
            for sampling in samplings
        ]


class ChatRequest(Asked):
    """``POST /v1/chat/completions``. Tools are shown to the model; calls in its answer stay text."""

    prompt_param = "messages"

    messages: List[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: List[dict[str, Any]] | None = None  # as they are: templates and drafters saw such
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None

    @field_validator("tools")
    @classmethod
    def _are_functions(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for tool in tools or []:
            function = tool.get("function")
            named = isinstance(function, dict) and isinstance(function.get("name"), str)
            if tool.get("type") != "function" or not named:
                raise ValueError('each is {"type": "function", "function": {"name": ..., "parameters": ...}}')
        return tools

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError(
                "max_tokens and max_completion_tokens are two names of one limit; give one of them"
            )
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Tool definitions for the template."""
        return None if self.tool_choice == "none" else self.tools or None


class CompletionRequest(Asked):
    """``POST /v1/completions``. A text gets the tokenizer's own start token, ids are taken as they are."""

    prompt_param = "prompt"

    prompt: str | List[int] | List[str] | List[List[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many, as texts or as ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or all(isinstance(i, int) for i in prompt) else prompt


def check_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """``Refusal`` for the first id that is outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise Refusal(
                400,
                f"{param}: {str(token)[:40]} is no token id; the target has ids from 0 to {vocab_size - 1}",
                param=param,
            )


def _bias(asked: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    for key in asked:
        if not (key.isascii() and key.isdecimal() and len(key) < 19):
            raise Refusal(400, f"logit_bias: {key[:40]!r} is no token id", param="logit_bias")
    check_ids("logit_bias", list(map(int, asked)), vocab_size)
    if len({*map(int, asked)}) < len(asked):
        raise Refusal(400, "logit_bias: two keys are the same token id; give one of them", param="logit_bias")
    return {int(key): value for key, value in asked.items()}


# Reasons -----------------------------------------------------------------------------------------------

REASONS = {
    "audio": "answers are text",
    "echo": "the prompt is not scored, so it cannot be given back with log probabilities",
    "suffix": "nothing can be inserted before a suffix",
    "best_of": "choices are not ranked; give n",
    "functions": "give tools",
    "function_call": "give tool_choice",
    "tool_choice": "calls are not enforced: write auto or none",
    "response_format": 'answers are not held to a format; write {"type": "text"}',
    "prediction": "drafts come from the server's own drafter",
    "reasoning_effort": "the target's chat template decides that",
    "verbosity": "ask for it in the messages",
    "web_search_options": "nothing is searched",
    "store": "answers are not kept",
    "modalities": 'answers are text; write ["text"]',
}


KNOWN = {*ChatRequest.model_fields, *CompletionRequest.model_fields}


def refusal_of(errors: Sequence[Any]) -> Refusal:
    """One message for what pydantic found: the parameter, the value, and what to write instead.

    ``errors`` are pydantic's, with ``"body"`` before each place.
    """
    depth = max(len(error["loc"]) for error in errors)
    worst = [error for error in errors if len(error["loc"]) == depth][:3]
    path = [str(part) for part in worst[0]["loc"][1:]]
    if not path:
        message = worst[0]["msg"].removeprefix("Value error, ")
        if worst[0]["type"] != "value_error":
            message = "the body must be a JSON object, sent with Content-Type: application/json"
        param = message.partition(" ")[0]
        return Refusal(400, message, param=param if param in KNOWN else None)
    param = path[0]
    if worst[0]["type"] == "extra_forbidden" and len(path) == 1:
        near = difflib.get_close_matches(param, KNOWN, 1)
        unknown = "this server knows no such parameter" + (f"; did you mean {near[0]}?" if near else "")
        reason = REASONS.get(param, unknown)
    else:
        reason = REASONS.get(param) or "; ".join(_said(error) for error in worst)
    return Refusal(400, f"{param[:80]}: {reason}", param=param[:80])


def _said(error: Any) -> str:
    """What pydantic says of a value, and where in the parameter it stands."""
    inner = ".".join(str(part) for part in error["loc"][2:])
    said = error["msg"].removeprefix("Value error, ")
    value = error["input"]
    got = f", not {json.dumps(value)[:40]}" if isinstance(value, str | int | float) else ""
    return f"{inner + ': ' if inner else ''}{said[:1].lower()}{said[1:]}{got}"
