"""``python -m serve``: an answer by draft and verify, beside plain decoding."""

from __future__ import annotations

import io
import re
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from data.chat import Renderer
from drafters import checkpoint
from drafters.target import HardwareConfig, Target, load
from drafters.types import Example, States
from serve import answer as module
from serve import costs, tasks
from serve.answer import ServeConfig, Timed, capacity_for, decode, drafts_for
from serve.costs import Costs, Table
from serve.engine import Engine
from serve.law import Sampling, uniforms
from serve.text import Text
from serve.types import Answer, Request
from tests import tiny
from tests.commands import CPU, command, refusal

QUESTION = "question 0"


@pytest.fixture(scope="module")
def target(workshop):
    return load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))


def line(*seconds: float) -> Table:
    return Table((1,), tuple(range(1, 1 + len(seconds))), (seconds,))


def prompt_ids(target, text: str) -> list[int]:
    return Renderer(target.tokenizer, stop_ids=target.stop_ids).prompt_ids(
        [{"role": "user", "content": text}]
    )


@pytest.fixture(scope="module")
def directory(target, tmp_path_factory):
    """A drafter that knows the answer to ``QUESTION``."""
    prompt = prompt_ids(target, QUESTION)
    answer = tiny.greedy(target, prompt, 24)
    known = Example(prompt + answer, [False] * len(prompt) + [True] * len(answer), "chat", "known")
    directory = tmp_path_factory.mktemp("drafters") / "one"
    checkpoint.write(tiny.trained(target, [known], steps=40), directory)
    return directory


@pytest.fixture
def asked(workshop, directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return [*CPU, f"target={workshop / 'target'}", f"drafter={directory}", "serve.max_new_tokens=24"]


def spoken(target, text: str, num: int = 24) -> str:
    """What plain greedy decoding answers, by the plainest loop there is."""
    ids = tiny.greedy(target, prompt_ids(target, text), num)
    return target.tokenizer.decode(ids, skip_special_tokens=True)


# Prompts --------------------------------------------------------------------------------------------


def test_a_prompt_is_answered_as_plain_greedy_decoding_would(asked, target, capsys):
    assert command("serve", *asked, f"prompt={QUESTION}") == 0
    out = capsys.readouterr().out
    assert out.startswith(spoken(target, QUESTION) + "\n\n")
    found = re.search(r"^24 tokens, N=4, tau ([\d.]+), ([\d.]+) tokens/s$", out, re.MULTILINE)
    assert 1 < float(found[1]) <= 5, "the drafter knows this answer"
    found = re.search(
        r"^plain decoding ([\d.]+) tokens/s: drafting is ([\d.]+) times as fast; (.*)$", out, re.MULTILINE
    )
    assert float(found[1]) > 0
    assert found[3] == "token ids are equal"


def test_a_prompt_comes_from_a_file_with_commas_quotes_and_lines(asked, target, tmp_path, capsys):
    text = 'Say "a, b" and {c}:\n\n  it\'s = 1?'
    (tmp_path / "prompt.txt").write_text(text + "\n", encoding="utf-8")
    assert command("serve", *asked, "prompt_file=prompt.txt") == 0
    assert capsys.readouterr().out.startswith(spoken(target, text) + "\n\n")


def test_a_prompt_comes_from_standard_input(asked, target, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve 日本, really?\n"))
    assert command("serve", *asked) == 0
    assert capsys.readouterr().out.startswith(spoken(target, "naïve 日本, really?") + "\n\n")


def test_the_answer_is_printed_as_it_grows_and_whole_characters_only(target, capsys):
    hear = tasks._printer()
    answer = Answer(Request([1], 9, text=True), text=Text(target.tokenizer.decode))
    shown = []
    for token in target.tokenizer("a日b", add_special_tokens=False)["input_ids"]:
        answer.text.feed(token)
        hear(answer, [token])
        shown.append(capsys.readouterr().out)
    assert shown == ["a", "", "", "日", "b"]


def test_a_template_of_the_recipe_renders_the_prompt(asked, target, tmp_path, capsys):
    (tmp_path / "t.jinja").write_text(
        "{% if messages[0].content == 'no' %}{{ raise_exception('never') }}{% endif %}{{ mood }}"
        + tiny.CHATML
    )
    given = [*asked, "data.chat_template=t.jinja", "+data.template_settings.mood=glad", "prompt=hello"]
    assert command("serve", *given) == 0
    prompt = prompt_ids(target, "hello")
    ids = tiny.greedy(target, target.tokenizer("glad", add_special_tokens=False)["input_ids"] + prompt, 24)
    text = target.tokenizer.decode(ids, skip_special_tokens=True)
    assert capsys.readouterr().out.startswith(text + "\n\n")
    message = refusal(capsys, "serve", *given[:-1], "prompt=no")
    assert "the chat template refuses it: never" in message


# Settings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3])
def test_any_number_of_drafts_gives_the_same_answer(asked, target, n, capsys):
    assert command("serve", *asked, f"prompt={QUESTION}", f"serve.n={n}") == 0
    out = capsys.readouterr().out
    assert out.startswith(spoken(target, QUESTION) + "\n\n")
    assert f"N={n}," in out
    assert "token ids are equal" in out


def test_the_comparison_can_be_left_out(asked, capsys):
    assert command("serve", *asked, "prompt=hello", "serve.compare=false") == 0
    out = capsys.readouterr().out
    assert "tau" in out
    assert "plain" not in out


def test_an_answer_of_one_token_has_no_speed(asked, capsys):
    assert command("serve", *asked, "prompt=hello", "serve.max_new_tokens=1") == 0
    assert "1 tokens, N=4, tau 0.00, 0.0 tokens/s" in capsys.readouterr().out


def test_the_number_of_drafts_is_the_one_asked_for_then_the_fastest_then_the_trained_one(
    target, directory, tmp_path, monkeypatch
):
    drafter = checkpoint.read(directory, target)
    assert drafts_for(target, drafter, directory, None) == 4
    noted = tmp_path / "noted"
    checkpoint.write(drafter, noted, {"tau_by_n": {"1": 1.5, "2": 1.9, "3": 2.0, "4": 2.1}})
    cheap = Costs(line(1.0, 1.1, 1.2, 1.3, 1.4), line(0.001), line(1.0))
    monkeypatch.setattr(module, "costs_for", lambda target, drafter, slots: cheap)
    assert drafts_for(target, drafter, noted, None) == 2
    assert drafts_for(target, drafter, noted, 3) == 3
    dear = Costs(line(1.0, 1.9, 2.8, 3.7, 4.6), line(0.001), line(1.0))
    monkeypatch.setattr(module, "costs_for", lambda target, drafter, slots: dear)
    assert drafts_for(target, drafter, noted, None) == 0  # plain decoding is measured too


def test_what_decides_the_number_of_drafts_is_measured_once(target, directory, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREDRAFT_CACHE", str(tmp_path))
    drafter = checkpoint.read(directory, target)
    checkpoint.write(drafter, tmp_path / "noted", {"tau_by_n": {"2": 1.9, "4": 2.1}})
    first = drafts_for(target, drafter, tmp_path / "noted", None)
    assert first in (0, 2, 4)
    monkeypatch.setattr(costs, "pieces", None)
    assert drafts_for(target, drafter, tmp_path / "noted", None) == first


def timed(ids: list[int], temperature: float = 0.0) -> Timed:
    return Timed(Answer(Request([1], 9, Sampling(temperature)), ids), 2.0)


def test_parted_ids_are_rounding_in_bfloat16_and_said_with_their_place_and_the_remedy():
    coarse = Target(tiny.llama().bfloat16(), tiny.tokenizer(), "tiny")
    compare = partial(tasks.comparison, coarse)
    assert compare(timed([1, 2, 3]), timed([1, 2, 3])).endswith("token ids are equal")
    text = compare(timed([1, 2, 3, 4, 5]), timed([1, 2, 4]))
    assert "drafting is 2.00 times as fast" in text
    assert "token ids part at 2 " in text
    assert "hardware.dtype=float32" in text
    assert "part at 3 " in compare(timed([1, 2, 3]), timed([1, 2, 3, 4]))


def test_parted_ids_in_fp32_are_a_fault_unless_the_target_was_undecided(target, monkeypatch):
    margin = tasks.margin_after(target, [1, 1, 2], Sampling())
    best, second = target.model(torch.tensor([[1, 1, 2]])).logits[0, -1].topk(2).values.tolist()
    assert margin == pytest.approx(best - second, rel=1e-4)
    assert margin > 0.01
    one, other = timed([1, 2, 3, 4]), timed([1, 2, 4])
    with pytest.raises(ValueError, match="drafting changed the answer: token ids part at 2"):
        tasks.comparison(target, one, other)
    monkeypatch.setattr(tasks, "margin_after", lambda _, ids, __: 0.0005 if ids == [1, 1, 2] else 9.0)
    assert "part at 2, where the target's best two logits are 0.0005 apart" in tasks.comparison(
        target, one, other
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_ids_are_compared_and_part_only_where_a_draw_falls_between_two_tokens(
    target, temperature, monkeypatch
):
    prompt, config = [9, 9], ServeConfig(max_new_tokens=6, temperature=temperature)
    one = decode(Engine(target, capacity=64), prompt, config, 3)
    assert tasks.comparison(target, one, one).endswith("token ids are equal")
    margins = [
        tasks.margin_after(target, prompt + one.answer.tokens[:at], one.answer.request.sampling)
        for at in range(6)
    ]
    at = max(range(6), key=margins.__getitem__)
    assert margins[at] > tasks.ROUNDING
    tokens = [*one.answer.tokens[:at], one.answer.tokens[at] + 1]
    other = Timed(Answer(one.answer.request, tokens), 1.0)
    with pytest.raises(
        ValueError, match=f"drafting changed the answer: token ids part at {at}, where the draw"
    ):
        tasks.comparison(target, other, one)
    monkeypatch.setattr(tasks, "margin_after", lambda *_: 0.0005)
    assert f"part at {at}, where the draw and another token are 0.0005 apart" in tasks.comparison(
        target, other, one
    )


def test_the_margin_of_a_draw_is_to_the_nearest_boundary_of_its_token(target):
    """A law of hand-made shares: the uniform of this seed and position is known."""
    sampling, ids = Sampling(1.0, seed=5), [9, 9, 9]
    (drawn,) = uniforms(5, "next", 3, 1)
    shares = torch.tensor([drawn - 0.01, 0.03, 1 - drawn - 0.02])
    told = SimpleNamespace(
        device="cpu", states=lambda *_: States(None, torch.zeros(1, 1, 3)), head=lambda _: shares.log()
    )
    assert tasks.margin_after(told, ids, sampling) == pytest.approx(0.01, abs=1e-5)


def test_the_seed_decides_what_a_temperature_draws(asked, capsys):
    spoken = []
    for seed in (0, 1, 1):
        given = [*asked, "prompt=hello", "serve.temperature=1", f"seed={seed}"]
        assert command("serve", *given) == 0
        out = capsys.readouterr().out
        assert "token ids are equal" in out
        spoken.append(out.rsplit("tokens, N=", 1)[0])
    assert spoken[0] != spoken[1] == spoken[2]


def test_what_a_listener_does_is_not_counted_as_decoding(target, monkeypatch):
    """A clock that only moves when it is read, by a second, and while a listener is at work, by an hour."""
    clock = {"now": 0}

    def read() -> int:
        clock["now"] += 1
        return clock["now"]

    def listen(*_) -> None:
        clock["now"] += 3600

    monkeypatch.setattr(module, "perf_counter", read)
    timed = decode(Engine(target, capacity=64), [9, 9], ServeConfig(max_new_tokens=4), 0, listen)
    assert 0 < timed.seconds < 3600


# Bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prompt=a", "prompt_file=b"], ["prompt and prompt_file"]),
        (["prompt_file=nowhere.txt"], ["prompt_file=nowhere.txt", "no such file"]),
        (["prompt_file=bytes.txt"], ["prompt_file=bytes.txt", "not UTF-8"]),
        (["prompt=' '"], ["prompt is empty", "standard input"]),
        (["prompt=a", "drafter=nowhere"], ["drafter=nowhere", "no drafter directory"]),
        (["prompt=a", "serve.n=5"], ["n=5", "at most 4 drafts"]),
        (["prompt=a", "serve.max_new_tokens=600"], ["serve.max_new_tokens=600", "context of 512"]),
        (["prompt=a", "target=nowhere"], ["target=nowhere", "hub name"]),
    ],
    ids=lambda value: value[-1],
)
def test_what_cannot_be_served_is_refused(asked, arguments, words, tmp_path, capsys):
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    given = list({text.split("=")[0]: text for text in [*asked, *arguments]}.values())
    message = refusal(capsys, "serve", *given)
    for word in words:
        assert word in message


def test_silence_on_standard_input_is_refused(asked, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert "standard input" in refusal(capsys, "serve", *asked)


def test_a_drafter_of_another_target_is_refused_naming_what_differs(asked, tmp_path, capsys):
    tiny.save(tiny.target(layers=8, hidden=64), tmp_path / "other")
    given = [text for text in asked if not text.startswith("target")]
    message = refusal(capsys, "serve", *given, "target=other", "prompt=a")
    assert "made for another target: its hidden_size is 32, that of other is 64" in message
    assert "give target=" in message


def test_a_drafter_of_other_weights_serves_the_right_text_and_says_so(asked, tmp_path, capsys):
    """A fine-tune of the same sizes: nothing is wrong with the text, and tau is nobody's promise."""
    other = tiny.target(layers=8, seed=5)
    tiny.save(other, tmp_path / "tuned")
    assert command("serve", *asked, f"target={tmp_path / 'tuned'}", "prompt=hello") == 0
    out, err = capsys.readouterr()
    assert "was trained on other weights" in err
    assert out.startswith(spoken(other, "hello") + "\n\n")
    assert command("serve", *asked, "prompt=hello") == 0
    assert "other weights" not in capsys.readouterr().err


def test_a_prompt_may_fill_the_targets_context_to_the_last_token(target):
    assert capacity_for(target, [9] * 500, ServeConfig(max_new_tokens=12)) == 512
    with pytest.raises(ValueError, match=r"501 prompt tokens.*serve\.max_new_tokens=12.*512"):
        capacity_for(target, [9] * 501, ServeConfig(max_new_tokens=12))
