"""What clients get: OpenAI's answer objects and chunks, and what drafting did in the usage.

A form is made for each HTTP request and writes the objects of its endpoint. What the two endpoints share,
the envelope and the usage, stands in ``Form``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from time import time
from typing import Any, ClassVar
from uuid import uuid4

from serve.law import Scored
from serve.text import REPLACEMENT
from serve.types import Answer
from serve.worker import Piece

LEAST = -9999.0  # JSON has no minus infinity; OpenAI and vLLM write this number


class Form:
    """The objects of one endpoint; ``decode`` turns ids into text, special tokens included."""

    whole: ClassVar[str]
    part: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, model: str, decode: Callable[[list[int]], str], logprobs: bool) -> None:
        self.decode, self.logprobs = decode, logprobs
        self.head = {"id": f"{self.prefix}-{uuid4().hex}", "created": int(time()), "model": model}

    def answer(
        self, choices: list[dict[str, Any]], answers: list[Answer], num_prompts: int
    ) -> dict[str, Any]:
        """The whole answer."""
        return {**self.head, "object": self.whole, "choices": choices, "usage": usage(answers, num_prompts)}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One chunk of a stream."""
        return {**self.head, "object": self.part, "choices": choices, **more}

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """A whole choice of its pieces."""
        text = "".join(piece.text for piece in pieces)
        scored = self.scored(index, [p for piece in pieces for p in self.pairs(piece)])
        return self.filled(index, text, scored, pieces[-1].finish, whole=True)

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says of a choice before its text."""
        return None

    def parts(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """What a stream says of a choice: text that is certain now, each token's log probability, the end."""
        if piece.text or self.logprobs:
            yield self.filled(index, piece.text, self.scored(index, self.pairs(piece)), None)
        if piece.finish:
            yield self.ended(index, piece.finish)

    def pairs(self, piece: Piece) -> list[tuple[int, Scored]]:
        """Ids with their log probabilities, where these were asked for."""
        return list(zip(piece.tokens, piece.logprobs, strict=True)) if self.logprobs else []

    # What each endpoint writes its own way ----------------------------------------------------------

    def scored(self, index: int, pairs: list[tuple[int, Scored]]) -> dict[str, Any] | None:
        """Log probabilities of these tokens of a choice; ``None`` where none were asked for."""
        raise NotImplementedError

    def filled(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish: str | None, whole: bool = False
    ) -> dict[str, Any]:
        """A choice with text."""
        raise NotImplementedError

    def ended(self, index: int, finish: str) -> dict[str, Any]:
        """The end of a choice in a stream."""
        return self.filled(index, "", None, finish)


class ChatForm(Form):
    """``/v1/chat/completions``. What the model wrote is content, calls of tools included."""

    whole, part, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def scored(self, index: int, pairs: list[tuple[int, Scored]]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {**self._token(token, s.logprob), "top_logprobs": [self._token(i, value) for i, value in s.top]}
            for token, s in pairs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        known = REPLACEMENT not in text  # a token may be part of a character
        return {
            "token": text,
            "logprob": max(LEAST, logprob),
            "bytes": list(text.encode()) if known else None,
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def filled(self, index, text, logprobs, finish, whole=False) -> dict[str, Any]:
        if not whole:
            return self._delta(index, {"content": text}, logprobs, finish)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def ended(self, index: int, finish: str) -> dict[str, Any]:
        return self._delta(index, {}, None, finish)

    def _delta(self, index, delta, logprobs, finish) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


class CompletionForm(Form):
    """``/v1/completions``. Offsets count the characters of the tokens, each decoded alone, as in vLLM."""

    whole = part = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: str, decode: Callable[[list[int]], str], logprobs: bool) -> None:
        super().__init__(model, decode, logprobs)
        self.offsets: Counter[int] = Counter()

    def scored(self, index: int, pairs: list[tuple[int, Scored]]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        out: dict[str, Any] = {"text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}
        for token, score in pairs:
            text = self.decode([token])
            out["text_offset"].append(self.offsets[index])
            out["tokens"].append(text)
            out["token_logprobs"].append(max(LEAST, score.logprob))
            likeliest = {self.decode([i]): max(LEAST, value) for i, value in reversed(score.top)}
            out["top_logprobs"].append({text: max(LEAST, score.logprob), **likeliest})
            self.offsets[index] += len(text)
        return out

    def filled(self, index, text, logprobs, finish, whole=False) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def usage(answers: list[Answer], num_prompts: int) -> dict[str, Any]:
    """Tokens, and what drafting did, pooled over all choices; a prompt counts once for its choices.

    ``speculation`` is our own: target passes (``rounds``), drafts verified and accepted, and ``tau``, tokens
    a pass. Rejected drafts are no part of ``completion_tokens``.
    """
    prompt = sum(len(answer.request.prompt) for answer in answers[:: len(answers) // num_prompts])
    completion = sum(len(answer.tokens) for answer in answers)
    rounds = [each for answer in answers for each in answer.rounds]
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculation": {
            "rounds": len(rounds),
            "drafted": drafted,
            "accepted": accepted,
            "tau": sum(r.emitted for r in rounds) / max(1, len(rounds)),
        },
    }


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"


DONE = "data: [DONE]\n\n"
