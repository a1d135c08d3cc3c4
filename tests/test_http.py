"""The HTTP server: OpenAI's client as it is, every refusal, clients that vanish, an engine that fails."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread
from time import sleep

import httpx
import openai
import pytest
import torch
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from data.chat import Renderer
from drafters import checkpoint
from drafters.types import Example
from serve import tasks
from serve.costs import Costs, Table
from serve.engine import Engine
from serve.http import create_app, listen
from serve.law import Sampling, Scored
from serve.protocol import ChatRequest, CompletionRequest, Refusal
from serve.reply import ChatForm, CompletionForm, usage
from serve.schedule import Schedule
from serve.settings import HttpConfig
from serve.types import Answer, Request, Round
from serve.worker import Piece
from tests import tiny
from tests.commands import CPU, command, refusal

HELLO = [{"role": "user", "content": "hello"}]
QUESTION = "question 0"
GO_ON = {"ignore_eos": True}
LONG = {"context": 60_000}  # an answer that no test waits for
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"z": {}, "a": {}}}},
}


class Paced(Engine):
    """An engine whose steps wait for a gate, and fail when they are told to."""

    def __init__(self, *arguments, served: Served, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.served = served

    def step(self) -> list[Answer]:
        assert self.served.gate.wait(30), "the gate was never opened"
        if self.served.one_step:
            self.served.gate.clear()
        if self.served.faults and self.active:
            raise self.served.faults.pop()
        return super().step()


@dataclass
class Served:
    """A server in a thread, as its clients see it, and the gate and the engines behind it."""

    url: str = ""
    gate: Event = field(default_factory=Event)
    one_step: bool = False  # a step closes the gate behind it
    faults: list[Exception] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    server: uvicorn.Server | None = None

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=30)

    def post(self, path: str = "/v1/chat/completions", **body) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30)

    def chat(self, **body) -> httpx.Response:
        return self.post(**{"messages": HELLO, "max_tokens": 8, "temperature": 0, **body})

    def metrics(self) -> dict[str, float]:
        """Values by name, with the position where there is one."""
        found = {}
        for family in text_string_to_metric_families(httpx.get(self.url + "/metrics").text):
            for sample in family.samples:
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")
                found[sample.name + sample.labels.get("position", "")] = sample.value
        return found

    def until(self, what) -> None:
        """Wait for something that another thread will make true."""
        for _ in range(3000):
            if what():
                return
            sleep(0.01)
        raise AssertionError("it never became true")

    def release(self) -> None:
        """Let the engine run freely again."""
        self.one_step = False
        self.gate.set()

    @property
    def engine(self) -> Engine:
        return self.engines[-1]


@contextmanager
def serving(
    target, drafter=None, template: str | None = None, schedule: Schedule | None = None, **chosen
) -> Iterator[Served]:
    config = HttpConfig(**{"slots": 4, "queue": 12, "context": 200, "max_tokens": 16, **chosen})
    served = Served()
    served.gate.set()

    def build() -> Engine:
        engine = Paced(
            target,
            drafter,
            slots=config.slots,
            capacity=config.context,
            schedule=schedule,
            served=served,
        )
        served.engines.append(engine)
        return engine

    render = Renderer(target.tokenizer, template, target.stop_ids)
    app = create_app(build, render, config, "tiny")
    with listen("127.0.0.1", 0) as listener:
        served.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        settings = uvicorn.Config(
            app, log_level="critical", lifespan="on", timeout_graceful_shutdown=config.grace_seconds
        )
        served.server = uvicorn.Server(settings)
        thread = Thread(target=served.server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            served.until(lambda: served.server.started)
            yield served
        finally:
            served.release()
            served.server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def prompt_ids(target, messages=HELLO, tools=None) -> list[int]:
    return Renderer(target.tokenizer, stop_ids=target.stop_ids).prompt_ids(messages, tools)


def greedy_text(target, ids: list[int], num: int) -> str:
    return target.tokenizer.decode(tiny.greedy(target, ids, num), skip_special_tokens=True)


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module")
def drafter(target):
    """One that knows the answers to hello: some drafts are accepted."""
    prompt = prompt_ids(target)
    answer = tiny.greedy(target, prompt, 24)
    known = Example(prompt + answer, [False] * len(prompt) + [True] * len(answer), "chat", "hello")
    return tiny.trained(target, [known], steps=40)


@pytest.fixture(scope="module")
def served(target, drafter):
    with serving(target, drafter) as served:
        yield served


@pytest.fixture
def client(served):
    return served.client


# Answers -----------------------------------------------------------------------------------------------


def test_a_chat_is_answered_as_plain_greedy_decoding_would(client, target):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=12)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == greedy_text(target, prompt_ids(target), 12)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("length", 0, None)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens) == (len(prompt_ids(target)), 12)
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    drafting = used.speculation
    assert drafting["accepted"] > 0, "the drafter knows this answer"
    assert drafting["tau"] == pytest.approx(11 / drafting["rounds"])
    details = used.completion_tokens_details
    assert details.accepted_prediction_tokens == drafting["accepted"]
    assert details.rejected_prediction_tokens == drafting["drafted"] - drafting["accepted"]


@pytest.mark.parametrize("given", [{"temperature": 0}, {"seed": 3}, {"seed": 5, "stop": ["e", "\ufffd"]}])
def test_a_stream_has_the_text_and_the_end_of_the_whole_answer(client, given):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 12, **given}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert {c.id for c in chunks} == {chunks[0].id}
    assert {c.object for c in chunks} == {"chat.completion.chunk"}


def events(response: httpx.Response) -> list:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-1] == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line != "data: [DONE]"]


def test_a_stream_opens_with_the_role_and_closes_with_usage_and_done(served):
    response = served.chat(stream=True, stream_options={"include_usage": True})
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    first, *middle, end, last = events(response)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, "length")
    assert last["choices"] == []
    assert last["usage"] == served.chat().json()["usage"]
    assert [chunk["usage"] for chunk in (first, *middle, end)] == [None] * (len(middle) + 2)
    assert "usage" not in events(served.chat(stream=True))[-1]


def test_text_comes_as_it_grows_and_not_at_the_end(target):
    with serving(target) as served:
        served.one_step = True
        with served.client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=20, stream=True, logprobs=True, extra_body=GO_ON
        ) as stream:
            chunks = iter(stream)
            assert next(chunks).choices[0].delta.role == "assistant"
            assert len(next(chunks).choices[0].logprobs.content) == 1
            assert not served.gate.is_set(), "the engine stands still, and tokens were sent"
            served.release()
            tokens = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
            assert sum(map(len, tokens)) == 19


def test_tools_and_calls_are_rendered_as_in_training(served, target):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "we"}, {"type": "text", "text": "ather?"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"a": 1}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    seen = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"a": 1}}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    with serving(target, context=512) as roomy:
        asked = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 4}
        answer = roomy.client.chat.completions.create(**asked, tools=[WEATHER], tool_choice="auto")
        ids = prompt_ids(target, seen, [WEATHER])
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.choices[0].message.content == greedy_text(target, ids, 4)
        assert answer.choices[0].message.tool_calls is None, "calls stay text"
        hidden = roomy.client.chat.completions.create(**asked, tools=[WEATHER], tool_choice="none")
        assert hidden.usage.prompt_tokens == len(prompt_ids(target, seen))


def test_a_client_may_send_back_the_message_that_it_got(client):
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=3, seed=1)
    again = [*HELLO, answer.choices[0].message, {"role": "user", "content": "go on"}]
    client.chat.completions.create(model="tiny", messages=again, max_tokens=3)


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(client, target):
    prompt = target.tokenizer("abc")["input_ids"]
    text = greedy_text(target, prompt, 16)
    end = next(at for at in range(3, 12) if "\ufffd" not in text[at : at + 2] and text[at : at + 2] in text)
    asked = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 16}
    for stop in (text[end : end + 2], ["never seen", text[end : end + 2]]):
        answer = client.completions.create(**asked, stop=stop)
        assert answer.choices[0].text == text[: text.index(text[end : end + 2])]
        assert answer.choices[0].finish_reason == "stop"
        streamed = list(client.completions.create(**asked, stop=stop, stream=True))
        assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_stop_tokens_end_the_answer_unless_they_are_to_be_ignored(served):
    (end,) = tiny.target().stop_ids
    forced = {"logit_bias": {str(end): 100}, "max_tokens": 3}
    answer = served.chat(**forced).json()
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 1
    answer = served.chat(**forced, ignore_eos=True).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 3)
    answer = served.chat(max_tokens=3, logit_bias={"40": 100}, stop_token_ids=[40]).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 1)


def test_choices_have_seeds_that_follow_one_another(served):
    def texts(**given) -> list[str]:
        answer = served.chat(temperature=1, **given).json()
        return [choice["message"]["content"] for choice in answer["choices"]]

    three = texts(seed=5, n=3)
    assert len(set(three)) == 3
    assert [texts(seed=5 + i) for i in range(3)] == [[text] for text in three]
    assert texts(n=2) != texts(n=2), "without a seed each request draws its own"
    pooled = served.chat(n=3).json()["usage"]
    assert pooled["completion_tokens"] == 24
    assert pooled["prompt_tokens"] == served.chat().json()["usage"]["prompt_tokens"], "counted once"


def test_the_choices_of_a_stream_are_told_apart(served):
    found: dict[int, str] = {}
    for chunk in events(served.chat(n=3, seed=5, temperature=1, stream=True)):
        (choice,) = chunk["choices"]
        found[choice["index"]] = found.get(choice["index"], "") + choice["delta"].get("content", "")
    whole = served.chat(n=3, seed=5, temperature=1).json()["choices"]
    assert found == {choice["index"]: choice["message"]["content"] for choice in whole}


def test_prompts_are_texts_or_ids_one_or_many(served, target):
    def texts(prompt, **given) -> list[str]:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 5, **given}
        answer = served.post("/v1/completions", **body).json()
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
        return [choice["text"] for choice in answer["choices"]]

    one, other = (target.tokenizer(text)["input_ids"] for text in ("abc", "de"))
    want = [greedy_text(target, ids, 5) for ids in (one, other)]
    assert want[0] != want[1]
    assert texts("abc") == texts(one) == texts([one]) == want[:1]
    assert texts(["abc", "de"]) == texts([one, other]) == want
    assert texts(["abc", "de"], n=2) == [want[0], want[0], want[1], want[1]]
    used = served.post("/v1/completions", prompt=["abc", "de"], n=2, max_tokens=5, **GO_ON).json()["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (5, 20)


def test_an_answer_without_a_limit_has_what_the_context_leaves_but_no_more_than_is_set(served):
    body = {"temperature": 0, "ignore_eos": True}
    assert served.post("/v1/completions", prompt=[9] * 10, **body).json()["usage"]["completion_tokens"] == 16
    assert served.post("/v1/completions", prompt=[9] * 195, **body).json()["usage"]["completion_tokens"] == 5
    asked = served.post("/v1/completions", prompt=[9] * 100, max_tokens=100, **body)
    assert asked.json()["usage"]["completion_tokens"] == 100


# Log probabilities --------------------------------------------------------------------------------------


@torch.inference_mode()
def reference(target, prompt: list[int], ids: list[int]) -> list[float]:
    laws_TV = target.model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    return [float(laws_TV[len(prompt) + at - 1, token]) for at, token in enumerate(ids)]


def test_a_chat_has_the_log_probability_of_every_token(served, target):
    greedy = served.chat(logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    want = reference(target, prompt_ids(target), tiny.greedy(target, prompt_ids(target), 8))
    assert [each["logprob"] for each in greedy] == pytest.approx(want, abs=1e-3)
    for each in greedy:
        assert len(each["top_logprobs"]) == 3
        assert each["logprob"] == each["top_logprobs"][0]["logprob"], "greedy takes the likeliest"
        assert each["bytes"] == (None if "\ufffd" in each["token"] else list(each["token"].encode()))
    held_back = {"logprobs": True, "top_logprobs": 2, "seed": 8, "temperature": 0.7, "stop": ["\ufffdx"]}
    content = served.chat(**held_back).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    streamed = events(served.chat(**held_back, stream=True))
    pieces = [chunk["choices"][0]["logprobs"]["content"] for chunk in streamed[1:-1]]
    assert sum(pieces, []) == content, "also of tokens whose text was held back"
    assert served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_a_completion_has_log_probabilities_in_lists(served, target):
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 6, "logprobs": 2}
    found = served.post("/v1/completions", **body).json()["choices"][0]["logprobs"]
    prompt = target.tokenizer("abc")["input_ids"]
    ids = tiny.greedy(target, prompt, 6)
    assert found["tokens"] == [target.tokenizer.decode([i]) for i in ids]
    assert found["token_logprobs"] == pytest.approx(reference(target, prompt, ids), abs=1e-3)
    assert found["text_offset"] == [sum(map(len, found["tokens"][:at])) for at in range(6)]
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) <= 3
    streamed = events(served.post("/v1/completions", **body, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert {key: sum((part[key] for part in parts), []) for key in found} == found


def test_what_is_no_number_in_json_is_written_as_one():
    piece = Piece([9], "x", [Scored(float("-inf"), [(10, float("-inf")), (11, float("nan"))])], "length")
    for form_of in (ChatForm, CompletionForm):
        form = form_of("tiny", tiny.tokenizer().decode, True)
        json.dumps(form.choice(0, [piece]), allow_nan=False)


def test_the_usage_pools_rounds_over_choices():
    answers = [
        Answer(Request([1, 2], 9), [3] * 4, [Round(3, 2, 3)]),
        Answer(Request([1, 2], 9), [3] * 2, [Round(2, 0, 1)]),
    ]
    found = usage(answers, 1)
    assert found["prompt_tokens"] == 2
    assert usage(answers, 2)["prompt_tokens"] == 4
    assert found["speculation"] == {"rounds": 2, "drafted": 5, "accepted": 2, "tau": 2.0}
    assert usage([Answer(Request([1], 1), [2])], 1)["speculation"]["tau"] == 0


# Parameters ---------------------------------------------------------------------------------------------


def test_every_sampling_parameter_reaches_the_engine():
    values = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
    }
    body = {"messages": HELLO, **values, "seed": 4, "logit_bias": {"12": -3}, "stop": "x", "n": 2}
    asked = ChatRequest.model_validate({**body, "stop_token_ids": [7], "logprobs": True, "top_logprobs": 2})
    one, two = asked.requests([1], 9, 100)
    assert one.sampling == Sampling(**values, logit_bias={12: -3.0}, seed=4)
    assert two.sampling == Sampling(**values, logit_bias={12: -3.0}, seed=5)
    assert (one.prompt, one.max_new_tokens, one.stop, one.stop_ids) == ([1], 9, ("x",), (7,))
    assert (one.logprobs, one.ignore_eos, one.text) == (2, False, True)


def test_what_is_not_given_is_as_with_openai():
    (request,) = ChatRequest.model_validate({"messages": HELLO}).requests([1], 9, 100)
    assert request.sampling == Sampling(temperature=1.0, seed=request.sampling.seed)
    assert (request.stop, request.stop_ids, request.logprobs) == ((), (), None)
    (other,) = ChatRequest.model_validate({"messages": HELLO, "top_k": -1}).requests([1], 9, 100)
    assert other.sampling.top_k == 0
    assert other.sampling.seed != request.sampling.seed
    plain = CompletionRequest.model_validate({"prompt": "a", "logprobs": 0})
    assert plain.num_logprobs == 0
    assert plain.prompts == ["a"]


def test_parameters_that_change_nothing_are_taken_at_such_values(served):
    nothing = {
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "parallel_tool_calls": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tool_choice": "none",
        "n": 1,
        "top_k": -1,
        "model": "tiny",
    }
    plain = served.chat().json()["choices"]
    assert served.chat(**nothing).json()["choices"] == plain
    assert served.chat(**dict.fromkeys([*nothing, "stop", "logprobs", "tools", "stream"])).status_code == 200
    legacy = {"best_of": 1, "echo": False, "suffix": ""}
    assert served.post("/v1/completions", prompt="a", max_tokens=2, **legacy).status_code == 200


MANY = ["a"] * 17

REFUSED = [
    ({"temprature": 1}, "temprature", ["no such parameter", "temperature"]),
    ({"min_tokens": 3}, "min_tokens", ["no such parameter"]),
    ({"temperature": "1"}, "temperature", ["number", '"1"']),
    ({"temperature": True}, "temperature", ["number"]),
    ({"temperature": -1}, "temperature", ["-1", "0 (greedy)"]),
    ({"top_p": 0}, "top_p", ["above 0"]),
    ({"top_k": -2}, "top_k", ["-2"]),
    ({"min_p": 2}, "min_p", ["from 0 to 1"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["1 is none"]),
    ({"presence_penalty": 3}, "presence_penalty", ["-2 to 2"]),
    ({"frequency_penalty": -3}, "frequency_penalty", ["-2 to 2"]),
    ({"max_tokens": 0}, "max_tokens", ["greater than or equal to 1"]),
    ({"max_tokens": -5}, "max_tokens", ["-5"]),
    ({"max_tokens": 2.0}, "max_tokens", ["integer"]),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", ["two names"]),
    ({"max_tokens": 1000}, "messages", ["8 tokens", "1000", "200 tokens a request", "up to 192"]),
    (
        {"messages": [{"role": "user", "content": "a" * 300}]},
        "messages",
        ["303 tokens", "200", "a shorter prompt"],
    ),
    ({"n": 0}, "n", ["0"]),
    ({"n": 17}, "n", ["16", "fewer"]),
    ({"seed": 2**63}, "seed", ["less than"]),
    ({"seed": "1"}, "seed", ["integer"]),
    ({"stop": ""}, "stop", ["empty"]),
    ({"stop": ["a", ""]}, "stop", ["empty"]),
    ({"stop": MANY}, "stop", ["16"]),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ["-1", "0 to 264"]),
    ({"logit_bias": {"265": 1}}, "logit_bias", ["265", "0 to 264"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ["'-1'"]),
    ({"logit_bias": {"x": 1}}, "logit_bias", ["'x'"]),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", ["no token id"]),
    ({"logit_bias": {"3": 101}}, "logit_bias", ["-100 to 100"]),
    ({"top_logprobs": 2}, "top_logprobs", ["logprobs=true"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["20"]),
    ({"logprobs": 2}, "logprobs", ["boolean"]),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options", ["stream=true"]),
    ({"tool_choice": "required", "tools": [WEATHER]}, "tool_choice", ["not enforced"]),
    ({"tools": [{"type": "web"}]}, "tools", ["function"]),
    ({"tools": [{"type": "function", "function": {}}]}, "tools", ["name"]),
    ({"response_format": {"type": "json_object"}}, "response_format", ["not held to a format"]),
    ({"store": True}, "store", ["not kept"]),
    ({"prediction": {}}, "prediction", ["own drafter"]),
    ({"functions": []}, "functions", ["tools"]),
    ({"messages": []}, "messages", ["at least 1"]),
    ({"messages": "hello"}, "messages", ["list"]),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages", ["role", "king"]),
    ({"messages": [{"role": "user"}]}, "messages", ["needs content"]),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages", ["weight", "extra"]),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        ["'text'", "image_url"],
    ),
    (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ]
        },
        "messages",
        ["arguments of a call of f are not JSON"],
    ),
    (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '"\\ud800"'}}]},
            ]
        },
        "messages",
        ["arguments of a call of f are not JSON"],
    ),
]


def error_of(response: httpx.Response, status: int) -> dict:
    """The error of a refusal, in OpenAI's shape."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_served_is_refused_by_its_name(served, body, param, words):
    for stream in (False, True):
        error = error_of(served.chat(**{"stream": stream, **body}), 400)
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        for word in [*words, *([param] if param else [])]:
            assert word in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", ["required"]),
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": ["a", ""]}, "prompt", ["empty"]),
        ({"prompt": [[1], []]}, "prompt", ["empty"]),
        ({"prompt": [265]}, "prompt", ["265", "0 to 264"]),
        ({"prompt": [1, -1]}, "prompt", ["-1"]),
        ({"prompt": [True]}, "prompt", ["integer"]),
        ({"prompt": [1, "a"]}, "prompt", ["string"]),
        ({"prompt": ["a"] * 17}, "n", ["16"]),
        ({"prompt": "a", "echo": True}, "echo", ["not scored"]),
        ({"prompt": "a", "suffix": "b"}, "suffix", ["inserted"]),
        ({"prompt": "a", "best_of": 2}, "best_of", ["give n"]),
        ({"prompt": "a", "logprobs": 21}, "logprobs", ["20"]),
        ({"prompt": "a", "messages": HELLO}, "messages", ["no such parameter"]),
    ],
    ids=str,
)
def test_completions_refuse_by_name_too(served, body, param, words):
    error = error_of(served.post("/v1/completions", **body), 400)
    assert error["param"] == param
    assert all(word in error["message"] for word in words)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
    ids=lambda value: repr(value)[:32],
)
def test_bodies_that_are_no_json_object_are_refused(served, body):
    response = httpx.post(
        served.url + "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert error_of(response, 400)["message"]


def test_no_nan_hides_in_the_parts_that_only_templates_read(served):
    body = json.dumps({"messages": HELLO, "tools": [{**WEATHER, "x": float("nan")}]}).encode()
    response = httpx.post(
        served.url + "/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert error_of(response, 400)["code"] == "invalid_json"


def test_a_body_that_is_not_called_json_is_refused_with_the_remedy(served):
    response = httpx.post(served.url + "/v1/completions", content=b'{"prompt": "a"}')
    assert "Content-Type: application/json" in error_of(response, 400)["message"]


def test_a_refusal_of_the_template_is_told(target):
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}" + tiny.CHATML
    with serving(target, template=template) as served:
        error = error_of(served.chat(messages=[{"role": "user", "content": "no"}]), 400)
        assert "the chat template refuses it: never" in error["message"]
        assert served.chat().status_code == 200


def test_what_the_engine_itself_refuses_is_no_fault_of_the_server(target, monkeypatch):
    def submit(engine, request, on_token=None):
        if len(request.prompt) == 2:
            raise ValueError("request: two are too few")
        return Engine.submit(engine, request, on_token)

    with serving(target, slots=2, queue=0) as served:
        monkeypatch.setattr(Paced, "submit", submit)
        body = {"prompt": [[9, 9, 9], [9, 9]], "max_tokens": 4}
        for stream in (True, False, True):  # more often than there are slots
            error = error_of(served.post("/v1/completions", **body, stream=stream), 400)
            assert "two are too few" in error["message"]
        assert not served.engine.busy


# Paths, keys, sizes ---------------------------------------------------------------------------------------


def test_models_are_listed_and_others_are_not_found(served, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 200
    with pytest.raises(openai.NotFoundError, match="big/one.*tiny"):
        client.models.retrieve("big/one")
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="big", messages=HELLO)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert error_of(httpx.get(served.url + "/v1/nothing"), 404)
    assert error_of(httpx.get(served.url + "/"), 404)
    response = httpx.get(served.url + "/v1/chat/completions")
    assert "GET /v1/chat/completions" in error_of(response, 405)["message"]
    assert response.headers["allow"] == "POST"
    assert httpx.get(served.url + "/health").status_code == 200
    assert "/v1/completions" in httpx.get(served.url + "/openapi.json").json()["paths"]


@pytest.mark.parametrize("by_environment", [False, True])
def test_only_v1_asks_for_the_key(target, monkeypatch, by_environment):
    if by_environment:
        monkeypatch.setenv("FOREDRAFT_API_KEY", "schlüssel")
    with serving(target, api_key=None if by_environment else "schlüssel") as served:
        for path in ("/v1/models", "/v1/nothing"):
            for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "schlüssel".encode()}):
                error = error_of(httpx.get(served.url + path, headers=given), 401)
                assert error["code"] == "invalid_api_key"
        assert error_of(httpx.post(served.url + "/v1/completions", content=b"{"), 401)
        for scheme in ("Bearer", "bearer"):  # RFC 9110: in any case
            right = {"Authorization": f"{scheme} schlüssel".encode()}
            assert httpx.get(served.url + "/v1/models", headers=right).status_code == 200
        assert httpx.get(served.url + "/metrics").status_code == 200
        assert httpx.get(served.url + "/health").status_code == 200


def test_nothing_is_loaded_from_elsewhere_to_read_about_the_api(served):
    """Pages of documentation would fetch scripts from a content network; the schema is plain JSON."""
    for path in ("/docs", "/redoc"):
        assert httpx.get(served.url + path).status_code == 404
    assert "/v1/chat/completions" in httpx.get(served.url + "/openapi.json").json()["paths"]


def test_a_long_body_is_refused_by_its_length_or_while_it_comes(target):
    with serving(target, max_body_bytes=1000) as served:
        url, sent = served.url + "/v1/completions", []

        def pieces() -> Iterator[bytes]:
            for _ in range(100):
                sent.append(1)
                yield b" " * 100

        json_type = {"Content-Type": "application/json"}
        whole = httpx.post(url, content=b" " * 1001, headers=json_type)
        assert "1000 bytes" in error_of(whole, 413)["message"]
        chunked = httpx.post(url, content=pieces(), headers=json_type)
        assert "1000 bytes" in error_of(chunked, 413)["message"]
        exact = json.dumps({"prompt": "a", "max_tokens": 2}).ljust(1000).encode()
        assert httpx.post(url, content=exact, headers=json_type).status_code == 200
        assert httpx.post(url, content=iter([exact[:500], exact[500:]]), headers=json_type).status_code == 200


# Load ---------------------------------------------------------------------------------------------------


@contextmanager
def streaming(served: Served, **body) -> Iterator[Iterator[str]]:
    """The lines of an answer that has begun."""
    body = {"messages": HELLO, "max_tokens": 100, "stream": True, **GO_ON, **body}
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def in_background(call) -> tuple[Thread, list]:
    out: list = []
    thread = Thread(target=lambda: out.append(call()))
    thread.start()
    return thread, out


def test_a_full_queue_says_when_to_come_back_and_takes_new_requests_once_it_is_not(target):
    with serving(target, slots=1, queue=1) as served:
        served.gate.clear()
        threads = [in_background(served.chat) for _ in range(2)]
        served.until(lambda: served.metrics()["vllm:num_requests_waiting"] == 2)
        response = served.chat()
        assert error_of(response, 429)["code"] == "queue_full"
        assert response.headers["retry-after"] == "1"
        assert error_of(served.chat(n=2), 429), "all choices or none"
        served.gate.set()
        for thread, out in threads:
            thread.join(30)
            assert out[0].status_code == 200
        served.until(lambda: served.metrics()["vllm:num_requests_waiting"] == 0)
        assert served.chat(n=2).status_code == 200


def test_requests_that_run_and_wait_are_counted(target):
    with serving(target, slots=1) as served:
        served.one_step = True
        with streaming(served):
            thread, _ = in_background(served.chat)
            served.until(lambda: served.metrics()["vllm:num_requests_waiting"] == 1)
            assert served.metrics()["vllm:num_requests_running"] == 1
            served.release()
            thread.join(30)


def test_a_client_that_vanishes_in_the_middle_of_a_stream_frees_its_slots(target):
    with serving(target, slots=2, queue=0, **LONG) as served:
        served.one_step = True
        with streaming(served, n=2, max_tokens=50_000):
            served.until(lambda: len(served.engine.active) == 2)
        served.release()
        served.until(lambda: not served.engine.busy)
        counted = served.metrics()
        assert counted["vllm:generation_tokens_total"] < 50_000, "it was not decoded to the end"
        assert counted["vllm:num_requests_waiting"] == 0
        assert served.chat(n=2).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_before_its_answer_begins_is_forgotten(target, stream):
    body = json.dumps({"messages": HELLO, "max_tokens": 50_000, "stream": stream, **GO_ON}).encode()
    with serving(target, slots=1, queue=1, **LONG) as served:
        served.gate.clear()
        host, port = served.url.removeprefix("http://").split(":")
        clients = []
        for number in (1, 2):  # one for the slot, one that waits
            clients.append(socket.create_connection((host, int(port))))
            clients[-1].sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            served.until(lambda n=number: served.metrics()["vllm:num_requests_waiting"] == n)
        for client in clients:
            client.close()
        served.gate.set()
        served.until(lambda: served.metrics()["vllm:num_requests_waiting"] == 0)
        served.until(lambda: not served.engine.busy)
        assert served.metrics()["vllm:generation_tokens_total"] < 50_000
        assert served.chat().status_code == 200


# Faults ---------------------------------------------------------------------------------------------------


def test_a_fault_of_the_engine_is_told_and_logged_and_the_rest_goes_on(target, drafter, caplog):
    with serving(target, drafter, slots=1) as served:
        want = served.chat().json()["choices"]
        served.gate.clear()
        first = in_background(served.chat)
        served.until(lambda: served.metrics()["vllm:num_requests_waiting"] == 1)
        second = in_background(served.chat)
        served.until(lambda: served.metrics()["vllm:num_requests_waiting"] == 2)
        served.faults.append(RuntimeError("out of memory in layer 3"))
        served.gate.set()
        first[0].join(30)
        second[0].join(30)
        by_status = {out[0].status_code: out[0] for _, out in (first, second)}
        assert set(by_status) == {200, 500}, "the one that waited is answered"
        assert by_status[200].json()["choices"] == want
        error = error_of(by_status[500], 500)
        assert error["type"] == "server_error"
        assert "layer 3" not in error["message"], "that is for the log"
        assert "out of memory in layer 3" in caplog.text
        assert len(served.engines) == 2, "what the failed step left behind is not used"
        assert served.chat().json()["choices"] == want
        assert httpx.get(served.url + "/health").status_code == 200


def test_a_fault_in_the_middle_of_a_stream_is_an_event(target):
    with serving(target) as served:
        served.one_step = True
        with streaming(served) as lines:
            served.faults.append(RuntimeError("broken"))
            served.gate.set()
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        served.gate.set()
        stream = served.client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, extra_body=GO_ON
        )
        served.faults.append(RuntimeError("broken"))
        served.release()
        with pytest.raises(openai.APIError, match="engine failed"):
            list(stream)
        assert served.chat().status_code == 200


def test_a_failed_engine_gives_its_memory_back_before_there_is_another(target, monkeypatch):
    """Tensors of its cache, and those that the failed step itself held."""
    held: list[weakref.ref] = []
    alive_at_build: list[list] = []
    usual = Engine.__init__

    def building(self, *arguments, **settings) -> None:
        alive_at_build.append([each() for each in held if each() is not None])
        usual(self, *arguments, **settings)

    def failing(self) -> list[Answer]:
        states = self.cache.layers[0].keys + 1
        held.extend(map(weakref.ref, [states, self.cache.layers[0].keys, self.cache.layers[-1].values]))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Engine, "__init__", building)
    monkeypatch.setattr(logging.getLogger("serve.worker"), "propagate", False)  # pytest keeps tracebacks
    with serving(target) as served:
        served.one_step = True
        with streaming(served) as lines:
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "step", failing)
                served.gate.set()
                *_, last = lines
            assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        served.release()
        assert served.chat().status_code == 200
    assert alive_at_build == [[], []]
    assert len(held) == 3


def test_an_engine_that_cannot_be_made_again_ends_the_service_and_not_in_silence(target, caplog):
    with serving(target) as served:
        served.faults.append(RuntimeError("broken"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Paced, "__init__", lambda *_, **__: 1 / 0)
            assert error_of(served.chat(), 500)
            served.until(lambda: httpx.get(served.url + "/health").status_code == 503)
        assert error_of(served.chat(), 503)
        assert "division by zero" in caplog.text


def test_a_server_that_is_told_to_stop_lets_running_requests_end(target):
    with serving(target) as served:
        served.one_step = True
        with streaming(served) as lines:
            served.server.should_exit = True
            served.release()
            *_, last = lines
        assert last == "data: [DONE]"


def test_requests_that_outlast_the_grace_are_given_up(target):
    with serving(target, grace_seconds=0, **LONG) as served, streaming(served, max_tokens=50_000) as lines:
        served.server.should_exit = True
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)


# Metrics --------------------------------------------------------------------------------------------------


def test_metrics_have_vllms_names_and_agree_with_the_usage(target, drafter):
    with serving(target, drafter) as served:
        assert served.metrics()["vllm:spec_decode_num_accepted_tokens_per_pos_total0"] == 0, "from the start"
        answers = [served.chat(max_tokens=20).json()["usage"]]
        answers += [
            served.chat(max_tokens=1, messages=[{"role": "user", "content": QUESTION}]).json()["usage"]
        ]
        answers += [events(served.chat(stream=True, stream_options={"include_usage": True}))[-1]["usage"]]
        found = served.metrics()

    def total(key: str) -> int:
        return sum(used["speculation"][key] for used in answers)

    assert total("accepted") > 0
    assert found["vllm:prompt_tokens_total"] == sum(used["prompt_tokens"] for used in answers)
    tokens = sum(used["completion_tokens"] for used in answers)
    assert found["vllm:generation_tokens_total"] == tokens
    assert found["vllm:spec_decode_num_draft_tokens_total"] == total("drafted")
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == total("accepted")
    assert 0 < found["vllm:spec_decode_num_drafts_total"] <= total("rounds")
    by_position = [found[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{k}"] for k in range(4)]
    assert sum(by_position) == total("accepted")
    assert by_position == sorted(by_position, reverse=True)
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:inter_token_latency_seconds_count"] == total("rounds"), "one an output, as in vLLM"
    assert found["vllm:request_time_per_output_token_seconds_count"] == 3
    longest = found["vllm:e2e_request_latency_seconds_sum"]
    assert 0 < found["vllm:request_time_per_output_token_seconds_sum"] < longest
    assert 0 < found["vllm:inter_token_latency_seconds_sum"] < longest
    assert found["vllm:e2e_request_latency_seconds_count"] == 3
    assert found["vllm:request_success_total"] == 3
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0


def test_a_schedule_shows_what_it_does(target, drafter):
    with serving(target, drafter) as served:
        assert not any(name.startswith("foredraft:") for name in served.metrics())
    step, draft = Table((1,), (1, 5), ((1.0, 1.3),)), Table((1,), (1,), ((1e-3,),))
    cheap = Costs(step, draft, Table((1,), (1,), ((1.0,),)))
    schedule = Schedule(cheap, 4)
    with serving(target, drafter, schedule=schedule) as served:
        served.chat(max_tokens=20)
        found = served.metrics()
    summary = schedule.summary
    assert found["foredraft:schedule_drafts"] == summary.drafts
    assert found["foredraft:schedule_plain_share"] == summary.plain_share
    assert found["foredraft:schedule_verified_drafts"] == summary.verified > 0


def test_rounds_without_drafts_are_no_drafts(target):
    with serving(target) as served:
        assert served.chat().json()["usage"]["speculation"]["drafted"] == 0
        found = served.metrics()
    assert found["vllm:spec_decode_num_drafts_total"] == 0
    assert found["vllm:generation_tokens_total"] == 8


# Anything at all -------------------------------------------------------------------------------------------

TEXT = st.text(max_size=8)
SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(),
    TEXT,
    st.sampled_from([1e-300, 1e300, 2**31, 2**63, -(2**63)]),
)
ANYTHING = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
PARTS = TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": TEXT, "arguments": st.sampled_from(["", '{"a": 1}', "[]"])})}
)
ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": PARTS | st.none()},
    optional={"tool_calls": st.lists(CALL, max_size=2), "reasoning_content": TEXT, "refusal": st.none()},
)
OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "tool"]), "content": PARTS},
    optional={"name": TEXT, "tool_call_id": TEXT},
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": TEXT, "parameters": st.dictionaries(TEXT, ANYTHING)}),
    }
)
COMMON = {
    "n": st.integers(1, 3),
    "seed": st.integers(-5, 5),
    "stream": st.booleans(),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 264), max_size=3),
    "ignore_eos": st.booleans(),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 400),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 264).map(str), st.floats(-100, 100), max_size=3),
}
GOOD_CHAT = {
    **COMMON,
    "messages": st.lists(ASSISTANT | OTHERS, min_size=1, max_size=3),
    "max_tokens": st.integers(1, 4),
    "tools": st.lists(TOOL, max_size=2),
    "logprobs": st.booleans(),
}
GOOD_COMPLETION = {
    **COMMON,
    "prompt": st.one_of(
        st.text(min_size=1, max_size=5),
        st.lists(st.integers(0, 264), min_size=1, max_size=5),
        st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3),
    ),
    "max_tokens": st.integers(1, 4),
    "logprobs": st.integers(0, 3),
}
NEEDED = ("messages", "prompt", "max_tokens")  # a body without max_tokens is fine, and slow


def good(fields: dict) -> st.SearchStrategy[dict]:
    """Bodies that are answered."""
    needed = {key: fields[key] for key in NEEDED if key in fields}
    return st.fixed_dictionaries(
        needed, optional={key: fields[key] for key in fields if key not in (*NEEDED, "tools")}
    )


def odd(fields: dict, model: type) -> st.SearchStrategy[dict]:
    """Good bodies in which up to three parameters have any value, known or not."""
    wrong = st.dictionaries(st.sampled_from(sorted(model.model_fields)) | TEXT, ANYTHING, max_size=3)
    likely = st.fixed_dictionaries({}, optional={key: fields[key] for key in fields if key not in NEEDED})
    return st.tuples(good(fields), likely, wrong).map(
        lambda parts: {**parts[0], **parts[1], **parts[2], "max_tokens": parts[0]["max_tokens"]}
    )


@pytest.fixture(scope="module")
def session():
    with httpx.Client(timeout=30) as session:
        yield session


def survives(served, session, path: str, content: bytes) -> int:
    response = session.post(served.url + path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code < 500, (content, response.text)
    if response.status_code == 200:
        assert '"choices"' in response.text, content
    else:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, response.text
    return response.status_code


FUZZ = settings(
    deadline=None,
    max_examples=100,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(body=good(GOOD_CHAT))
def test_every_good_chat_is_answered(served, session, body):
    assert survives(served, session, "/v1/chat/completions", json.dumps(body).encode()) == 200


@FUZZ
@given(body=good(GOOD_COMPLETION))
def test_every_good_completion_is_answered(served, session, body):
    assert survives(served, session, "/v1/completions", json.dumps(body).encode()) == 200


@FUZZ
@given(body=odd(GOOD_CHAT, ChatRequest))
def test_no_chat_makes_the_server_fail(served, session, body):
    survives(served, session, "/v1/chat/completions", json.dumps(body).encode())


@FUZZ
@given(body=odd(GOOD_COMPLETION, CompletionRequest))
def test_no_completion_makes_the_server_fail(served, session, body):
    survives(served, session, "/v1/completions", json.dumps(body).encode())


@FUZZ
@given(body=st.binary(max_size=40) | ANYTHING.map(lambda value: json.dumps(value, ensure_ascii=False)))
def test_no_bytes_make_the_server_fail(served, session, body):
    content = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    assert survives(served, session, "/v1/completions", content) == 400


# The command ------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(workshop, tmp_path_factory, monkeypatch):
    from drafters.target import HardwareConfig, load

    target = load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))
    directory = tmp_path_factory.mktemp("drafters") / "one"
    checkpoint.write(tiny.dflash(target), directory)
    monkeypatch.chdir(directory.parent)
    return [*CPU, f"target={workshop / 'target'}", f"drafter={directory}"]


@pytest.fixture
def no_input(monkeypatch):
    with open("/dev/null") as null:
        monkeypatch.setattr(sys, "stdin", null)
        yield


@pytest.fixture
def models(monkeypatch) -> list[tuple[str, int]]:
    """In place of the server's loop: one question about the models; names and contexts of the answer."""
    found: list[tuple[str, int]] = []

    async def ask(app) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            data = (await client.get("/v1/models")).json()["data"]
        found.extend((model["id"], model["max_model_len"]) for model in data)

    monkeypatch.setattr(tasks, "run_until_stopped", lambda app, _listener, _config: asyncio.run(ask(app)))
    return found


@pytest.mark.usefixtures("no_input")
@pytest.mark.parametrize(
    ("arguments", "context", "drafts"),
    [
        (["port=0"], 512, "drafts by schedule"),
        (["task=http", "port=0", "http.context=99", "serve.n=3"], 99, "N=3"),
        (["port=0", "serve.schedule=false"], 512, "N=4"),
        (["port=0", "proposer=none"], 512, "N=0"),
    ],
)
def test_the_command_serves_the_api(asked, arguments, context, drafts, models, capsys):
    assert command("serve", *asked, *arguments, "http.model=mine") == 0
    out = capsys.readouterr().out
    assert "mine on http://127.0.0.1:" in out
    assert f"8 slots of {context} tokens, {drafts}\n" in out
    assert models == [("mine", context)]


@pytest.mark.usefixtures("no_input")
def test_with_no_task_port_prompt_or_piped_text_the_api_is_served_on_port_8000(asked, models, monkeypatch):
    taken = []
    monkeypatch.setattr(tasks, "listen", lambda *place: taken.append(place) or listen("127.0.0.1", 0))
    assert command("serve", *asked) == 0
    assert taken == [("127.0.0.1", 8000)]
    assert len(models) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["port=8000", "prompt=a"], ["prompt", "port", "ask once"]),
        (["port=70000"], ["port=70000", "65535"]),
        (["port=0", "http.host=no.such.host.invalid"], ["http.host=no.such.host.invalid"]),
        (["port=0", "http.slots=0"], ["http.slots=0", "1 or more"]),
        (["port=0", "http.queue=-1"], ["http.queue=-1"]),
        (["port=0", "http.api_key=' '"], ["http.api_key", "empty"]),
        (["port=0", "drafter=nowhere"], ["drafter=nowhere"]),
        (["task=htp"], ["task=htp", "Did you mean http"]),
    ],
    ids=lambda value: value[-1],
)
def test_what_the_command_cannot_serve_is_refused(asked, arguments, words, models, capsys):
    given = list({text.split("=")[0]: text for text in [*asked, *arguments]}.values())
    message = refusal(capsys, "serve", *given)
    assert all(word in message for word in words), message
    assert models == []


def test_a_port_that_is_taken_is_named(asked, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port={port}" in refusal(capsys, "serve", *asked, f"port={port}")


def test_refusals_are_written_in_openais_shape():
    assert Refusal(429, "later", code="queue_full").body == {
        "error": {"message": "later", "type": "rate_limit_error", "param": None, "code": "queue_full"}
    }


def test_two_keys_of_one_biased_token_are_refused(served):
    body = {"prompt": "a", "max_tokens": 2, "logit_bias": {"3": 1, "03": -1}}
    error = error_of(httpx.post(served.url + "/v1/completions", json=body), 400)
    assert error["param"] == "logit_bias"
    assert "same token id" in error["message"]


def test_a_refusal_of_a_huge_id_is_short(served):
    body = {"prompt": [10**400], "max_tokens": 2}
    assert len(error_of(httpx.post(served.url + "/v1/completions", json=body), 400)["message"]) < 300


def test_a_port_is_taken_from_the_moment_it_was_asked_for():
    with listen("127.0.0.1", 0) as first, pytest.raises(ValueError, match="give another port"):
        listen("127.0.0.1", first.getsockname()[1])
