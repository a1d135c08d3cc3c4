"""A conversation to ids and a loss mask, by the tokenizer's own template.

One row is one render of the whole conversation. The mask covers what the assistant would generate in
each turn, the end-of-turn token included; what the generation prompt supplies (a header, an opening
think tag) is not supervised. Templates need no generation markers: where a turn begins and ends is
found by rendering the conversation up to it, and where a template rewrites earlier turns, by marking
the turn's own text and looking for the marks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from drafters.target import tokenizer_hash
from drafters.types import Example

Message = dict[str, Any]

OPEN, CLOSE = "\ue0f0", "\ue0f1"  # private-use marks; no template looks at them
PROBE = "zq_probe_zq"


class Skip(ValueError):
    """This row cannot be used; the message is the reason it is counted under."""


def template_of(file: str | None) -> str | None:
    """The text of ``data.chat_template``. Errors: ``ValueError`` when there is no such file."""
    if file is None:
        return None
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"data.chat_template={file}: no such file")
    return path.read_text(encoding="utf-8")


@dataclass
class Renderer:
    """Renders and tokenises chats as a server of this target would.

    ``template`` replaces the tokenizer's own; ``settings`` are passed to it (``enable_thinking``...).
    ``signature`` is that of the target whose kept answers count; ``None``: anyone's of this tokenizer.
    """

    tokenizer: Any
    template: str | None = None
    stop_ids: Sequence[int] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    signature: str | None = None

    def __post_init__(self) -> None:
        if self.template is None and self.tokenizer.chat_template is None:
            raise ValueError(
                "the target's tokenizer has no chat template; give one with data.chat_template=FILE.jinja"
            )

    @cached_property
    def tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer)

    @cached_property
    def template_hash(self) -> str:
        """A hash of what prompts are written with: the template and its settings."""
        content = json.dumps([self.template or self.tokenizer.chat_template, self.settings], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    # Text ------------------------------------------------------------------------------------

    def text(self, messages: Sequence[Message], tools: list | None = None, *, prompt: bool = False) -> str:
        """The rendered conversation; with ``prompt``, up to where the assistant would go on."""
        messages, tools = self._with_fallback(messages, tools)
        return self._render(messages, tools, prompt)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. The template writes any start token, so none is added here."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, messages: Sequence[Message], tools: list | None = None) -> list[int]:
        return self.encode(self.text(messages, tools, prompt=True))

    def _render(self, messages: Sequence[Message], tools: list | None, prompt: bool) -> str:
        try:
            rendered = self.tokenizer.apply_chat_template(
                [list(messages)],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                tokenize=False,
                **self.settings,
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise Skip(f"the chat template refuses it: {str(error).splitlines()[0][:80]}") from error
        return rendered[0]

    # Tools, where the template knows none ----------------------------------------------------

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template writes tool definitions and calls; SmolLM2's ignores both."""
        tool = {"type": "function", "function": {"name": PROBE, "parameters": {"type": "object"}}}
        call = {"type": "function", "function": {"name": PROBE + "_call", "arguments": {}}}
        messages: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "123456789", **call}]},
            {"role": "tool", "tool_call_id": "123456789", "name": PROBE + "_call", "content": "y"},
            {"role": "assistant", "content": "z"},
        ]
        try:
            found = self._render(messages, [tool], False)
        except Skip:
            return False
        return PROBE + "_call" in found and PROBE in found.replace(PROBE + "_call", "")

    def _with_fallback(self, messages: Sequence[Message], tools: list | None):
        if self.renders_tools or not (
            tools or any(m.get("tool_calls") or m["role"] == "tool" for m in messages)
        ):
            return messages, tools
        plain = [_plain_message(message) for message in messages]
        if tools:
            if plain and plain[0]["role"] == "system":
                plain[0] = {**plain[0], "content": f"{plain[0]['content']}\n\n{_tools_text(tools)}"}
            else:
                plain.insert(0, {"role": "system", "content": _tools_text(tools)})
        return plain, None

    # Mask ------------------------------------------------------------------------------------

    def example(
        self,
        messages: Sequence[Message],
        tools: list | None = None,
        *,
        domain: str = "",
        name: str = "",
        truncated: bool = False,
        max_length: int | None = None,
    ) -> Example:
        """The whole conversation as one example.

        ``truncated``: the last answer was cut by a length limit, so its end-of-turn is the template's
        and not the assistant's. A row over ``max_length`` is cut; ``Skip`` when nothing supervised is
        left, or when there never was any.
        """
        text, spans = self.supervised_spans(messages, tools, truncated=truncated)
        ids, mask = self._ids_and_mask(text, spans)
        if not any(mask):
            if any(m["role"] == "assistant" and (m.get("content") or m.get("tool_calls")) for m in messages):
                raise Skip("the chat template leaves no assistant text; give another with data.chat_template")
            raise Skip("no assistant text")
        if max_length is not None and len(ids) > max_length:
            ids, mask = ids[:max_length], mask[:max_length]
            if not any(mask):
                raise Skip("no assistant text within max_length")
        return Example(ids, mask, domain, name)

    def _ids_and_mask(self, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Ids of the whole render. Where a token straddles the border of a turn, the text is cut there:

        the assistant never sees such a token, since the prompt ends at the border. Templates whose
        markers are special tokens have no such place.
        """
        borders = sorted({at for span in spans for at in span})
        offsets = self._encode_pieces(text, [])[1]
        cuts = [at for at in borders if any(first < at < last for first, last in offsets)]
        ids, offsets = self._encode_pieces(text, cuts)
        return ids, _mask(offsets, spans)

    def _encode_pieces(self, text: str, cuts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            piece = self.tokenizer(text[start:end], add_special_tokens=False, return_offsets_mapping=True)
            ids += piece["input_ids"]
            offsets += [(start + first, start + last) for first, last in piece["offset_mapping"]]
        return ids, offsets

    def supervised_spans(
        self, messages: Sequence[Message], tools: list | None = None, *, truncated: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The single whole render, and the character spans that the assistant generated."""
        messages, tools = self._with_fallback(messages, tools)
        whole = self._render(messages, tools, False)
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            cut = truncated and index == len(messages) - 1
            floor = spans[-1][1] if spans else 0
            span = self._turn(whole, list(messages), tools, index, floor, cut)
            if span[0] < span[1]:
                spans.append(span)
        return whole, spans

    def _turn(self, whole: str, messages, tools, index: int, floor: int, cut: bool) -> tuple[int, int]:
        prompt = self._render(messages[:index], tools, True) if index else self._opening(tools)
        closed = self._render(messages[: index + 1], tools, False)
        if not cut and prompt is not None and whole.startswith(closed) and closed.startswith(prompt):
            start, end = len(prompt), len(closed)
        else:
            start, content_end, end = self._marked_turn(whole, messages, tools, index, floor, prompt)
            if cut:
                return start, content_end
        return start, self._end_of_turn(whole, start, end)

    def _opening(self, tools) -> str | None:
        """The generation prompt of an empty conversation, where the template can render one."""
        try:
            return self._render([], tools, True)
        except Skip:
            return None

    def _marked_turn(self, whole, messages, tools, index, floor, prompt) -> tuple[int, int, int]:
        """Start, end of content and end of a turn of ``whole`` that no shorter render is a prefix of."""
        marked = [*messages[:index], _marked(messages[index]), *messages[index + 1 :]]
        text = self._render(marked, tools, False)
        if text.replace(OPEN, "").replace(CLOSE, "") != whole:
            raise Skip("the chat template changes an assistant turn in a way that hides where it ends")
        if CLOSE not in text:
            return floor, floor, floor  # the template drops this turn: nothing of it is in the row
        content_end = _unmarked(text[: text.rindex(CLOSE)])
        content_start = _unmarked(text[: text.index(OPEN)]) if OPEN in text else content_end
        # The closing text is what this turn ends with as a last turn, as far as the whole agrees.
        alone = self._render(marked[: index + 1], tools, False)
        closing = alone[alone.rindex(CLOSE) + 1 :].replace(OPEN, "") if CLOSE in alone else ""
        end = content_end + _common_prefix(closing, whole[content_end:])
        end = max(content_end, self._added_token_at(whole, end)[0])
        # The header is the longest part of the generation prompt, in whole tokens, before the content.
        header = ""
        if prompt is not None:
            header = prompt[_common_prefix(self._render(messages[:index], tools, False), prompt) :]
        start = content_start
        ends = {last for _, last in self._encode_pieces(header, [])[1] if last}
        for size in sorted(ends, reverse=True):
            at = whole.rfind(header[:size], floor, max(content_start, floor))
            if at >= 0:
                start = min(max(content_start, floor), self._added_token_at(whole, at + size)[1])
                break
        return start, content_end, end

    def _added_token_at(self, text: str, at: int) -> tuple[int, int]:
        """Where the added token begins and ends that ``at`` would cut in two; else ``at`` twice."""
        for token in self._added_texts:
            begin = text.find(token, max(0, at - len(token) + 1), at + len(token) - 1)
            if begin >= 0:
                return begin, begin + len(token)
        return at, at

    def _end_of_turn(self, whole: str, start: int, end: int) -> int:
        """Cut the template's own text after the end-of-turn token (ChatML's newline)."""
        region = whole[start:end]
        for candidates in (self._stop_texts, self._special_texts):
            ends = [at + len(text) for text in candidates if (at := region.rfind(text)) >= 0]
            if ends:
                return start + max(ends)
        return start + len(region.rstrip())

    @cached_property
    def _stop_texts(self) -> list[str]:
        tokens = [self.tokenizer.convert_ids_to_tokens(i) for i in self.stop_ids]
        return [token for token in [*tokens, self.tokenizer.eos_token] if token]

    @cached_property
    def _added_texts(self) -> list[str]:
        return [token.content for token in self.tokenizer.added_tokens_decoder.values()]

    @cached_property
    def _special_texts(self) -> list[str]:
        return [t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special]


def _mask(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """A token is supervised when all its characters are; one that straddles a border is not."""
    mask, at = [], 0
    for first, last in offsets:
        while at < len(spans) and spans[at][1] <= first:
            at += 1
        inside = at < len(spans) and spans[at][0] <= first and last <= spans[at][1]
        mask.append(inside and first < last)
    return mask


def _unmarked(text: str) -> int:
    return len(text) - text.count(OPEN) - text.count(CLOSE)


def _common_prefix(a: str, b: str) -> int:
    size = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        size += 1
    return size


def _marked(message: Message) -> Message:
    """The message with marks just inside the outer blanks of each text the assistant wrote."""

    def wrap(text: str) -> str:
        core = text.strip()
        if not core:
            return text
        lead = len(text) - len(text.lstrip())
        return text[:lead] + OPEN + core + CLOSE + text[lead + len(core) :]

    out = dict(message)
    for key in ("reasoning_content", "content"):
        if isinstance(out.get(key), str):
            out[key] = wrap(out[key])
    if out.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "name": wrap(call["function"]["name"])}}
            for call in out["tool_calls"]
        ]
    return out


def _tools_text(tools: list) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call the functions listed here. To call one, write a JSON object with its name and "
        f"arguments between <tool_call> and </tool_call>.\n<tools>\n{lines}\n</tools>"
    )


def _plain_message(message: Message) -> Message:
    """Calls and results as text, for templates that know neither."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    if not message.get("tool_calls"):
        return {"role": message["role"], "content": message["content"]}
    calls = [
        "<tool_call>\n"
        + json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        + "\n</tool_call>"
        for call in message["tool_calls"]
    ]
    text = message["content"] or ""
    return {"role": "assistant", "content": "\n".join([text, *calls] if text else calls)}
