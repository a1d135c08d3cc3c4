"""The loss mask covers what the assistant would generate, and nothing else, whatever the template does."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.chat import Renderer, Skip
from data.examples import examples, of_row, renderer
from data.sources import DataConfig, Row, check_skips, read
from drafters.target import tokenizer_hash
from tests import tiny

CASES = Path(__file__).parent / "cases"

GENERATION = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NEWLINES = (  # ChatML as most families write it: a newline after each end of turn
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LAST_ONLY = (  # closes only the last turn with the end marker (as some Mistral and DeepSeek templates)
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = (  # as Qwen3: reasoning is kept after the last user turn; with thinking off the prompt closes it
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content or '' }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def talk(*texts: str | tuple[str, str]) -> list[dict]:
    """User and assistant by turns; (reasoning, content) for one that thinks."""
    messages = []
    for at, text in enumerate(texts):
        role = ("user", "assistant")[at % 2]
        if isinstance(text, tuple):
            messages.append({"role": role, "reasoning_content": text[0], "content": text[1]})
        else:
            messages.append({"role": role, "content": text})
    return messages


def supervised(render: Renderer, messages: list[dict], tools: list | None = None, **more) -> list[str]:
    """The decoded runs where the mask is 1."""
    found = render.example(messages, tools, **more)
    pairs = zip(found.ids, found.mask, strict=True)
    return [
        render.tokenizer.decode([i for i, _ in group])
        for good, group in groupby(pairs, lambda p: p[1])
        if good
    ]


def case(name: str) -> dict:
    return json.loads(next(CASES.glob(f"{name}_*.json")).read_text())


# Where a turn begins and ends ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template", [tiny.CHATML, GENERATION, NEWLINES], ids=["plain", "generation", "newlines"]
)
def test_every_turn_is_supervised_with_its_end_token_and_nothing_else_is(template):
    render = Renderer(tiny.tokenizer(template), stop_ids=(1,))
    messages = [{"role": "system", "content": "be kind"}, *talk("hi", "yo", "what?", "né 👍")]
    assert supervised(render, messages) == ["yo<|end|>", "né 👍<|end|>"]
    found = render.example(messages)
    assert render.tokenizer.decode(found.ids) == render.text(messages)


def test_markers_in_the_template_change_neither_ids_nor_mask():
    messages = talk("hi", "yo", "what?", "no")
    plain, marked = (
        Renderer(tiny.tokenizer(t), stop_ids=(1,)).example(messages) for t in (tiny.CHATML, GENERATION)
    )
    assert plain == marked


def test_an_end_token_that_is_no_stop_id_of_the_model_is_supervised_all_the_same():
    assert supervised(Renderer(tiny.tokenizer(NEWLINES)), talk("hi", "yo")) == ["yo<|end|>"]


def test_a_turn_that_the_template_leaves_open_in_the_middle_ends_where_its_text_does():
    render, messages = Renderer(tiny.tokenizer(LAST_ONLY), stop_ids=(1,)), talk("hi", "yo", "what?", "no")
    assert supervised(render, messages) == ["yo", "no<|end|>"]
    assert render.example(messages).ids == render.encode(render.text(messages))  # no marker is cut in two


def test_two_user_turns_in_a_row_are_both_kept_and_neither_supervised():
    messages = [{"role": "user", "content": "a"}, *talk("b", "c")]
    render = Renderer(tiny.tokenizer(), stop_ids=(1,))
    assert supervised(render, messages) == ["c<|end|>"]
    assert render.text(messages) == "<|user|>a<|end|><|user|>b<|end|><|assistant|>c<|end|>"


def test_the_same_words_in_user_turns_are_not_supervised():
    render = Renderer(tiny.tokenizer(THINKING), stop_ids=(1,))
    assert supervised(render, talk("yo", "yo", "yo yo", "yo")) == ["yo<|end|>", "<think></think>yo<|end|>"]


def test_d03_an_assistant_turn_that_is_the_first_token():
    given = case("d03")
    render = Renderer(tiny.tokenizer(given["template"]), stop_ids=(1,))
    assert render.text(given["messages"]) == given["rendered"]
    assert [int(m) for m in render.example(given["messages"]).mask] == given["expect"]["mask"]


def test_d04_a_template_that_rewrites_earlier_turns():
    given, expect = case("d04"), case("d04")["expect"]
    render = Renderer(tiny.tokenizer(given["template"]), stop_ids=(1,))
    assert render.text(given["messages"]) == expect["rendered"]
    assert render.tokenizer.decode(render.example(given["messages"]).ids) == expect["rendered"]
    assert supervised(render, given["messages"]) == expect["supervised_text_one_render"]


def test_d04_one_row_a_turn_has_the_prompt_that_a_server_builds():
    given, expect = case("d04"), case("d04")["expect"]
    render = Renderer(tiny.tokenizer(given["template"]), stop_ids=(1,))
    for at, turn in zip((1, 3), expect["one_row_per_turn"], strict=True):
        assert render.text(given["messages"][:at], prompt=True) == turn["prompt"]
        assert supervised(render, given["messages"][: at + 1])[-1] == turn["supervised"]


# Thinking --------------------------------------------------------------------------------------------


def test_reasoning_that_the_assistant_writes_is_supervised():
    render = Renderer(tiny.tokenizer(THINKING), stop_ids=(1,))
    assert supervised(render, talk("2+2", ("sum", "4"))) == ["<think>sum</think>4<|end|>"]
    assert supervised(render, talk("2+2", "4")) == ["<think></think>4<|end|>"]
    thought_twice = talk("2+2", ("sum", "4"), "more", ("sum again", "5"))
    assert supervised(render, thought_twice) == ["4<|end|>", "<think>sum again</think>5<|end|>"]


def test_what_the_generation_prompt_supplies_is_not_supervised():
    render = Renderer(tiny.tokenizer(THINKING), stop_ids=(1,), settings={"enable_thinking": False})
    assert supervised(render, talk("2+2", "4")) == ["4<|end|>"]
    assert supervised(render, talk("2+2", "4", "3+3", "6")) == ["4<|end|>", "6<|end|>"]


# Templates that cannot be used -----------------------------------------------------------------------


def test_a_template_that_yields_an_all_zero_mask_is_an_error_naming_row_and_remedy(tmp_path):
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    path = tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": talk("hi", "yo")}])
    rows, render = list(read(DataConfig(path=str(path)))), Renderer(tiny.tokenizer(silent))
    found, seen = examples(rows, render, 99)
    assert found == []
    with pytest.raises(ValueError, match=r"leaves no assistant text.*data\.chat_template.*rows\.jsonl:1"):
        check_skips(seen, 0.05)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the chat template leaves no assistant text"):
        examples(rows, render, 99, strict=True)


@pytest.mark.parametrize("messages", [talk("hi"), talk("hi", "")])
def test_a_row_without_assistant_text_is_skipped_with_that_reason(messages):
    with pytest.raises(Skip, match="no assistant text$"):
        Renderer(tiny.tokenizer(NEWLINES.replace("<|end|>", "")), stop_ids=(1,)).example(messages)


def test_a_template_that_hides_where_a_turn_ends_is_refused_not_guessed():
    shouting = tiny.CHATML.replace("m['content']", "(m['content'] | length | string)").replace(
        "<|end|>'", "'"
    )
    rewrites = shouting.replace("{% for m", "{{ messages | length }}{% for m")
    with pytest.raises(Skip, match="hides where it ends"):
        Renderer(tiny.tokenizer(rewrites), stop_ids=(1,)).example(talk("hi", "yo", "hm", "no"))


def test_a_template_that_raises_gives_its_own_words_as_the_reason():
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('a system turn first') }}{% endif %}x"
    with pytest.raises(Skip, match="refuses it: a system turn first"):
        Renderer(tiny.tokenizer(strict)).example(talk("hi", "yo"))


def test_no_template_at_all_is_an_error_that_says_what_to_write():
    with pytest.raises(ValueError, match=r"data\.chat_template=FILE\.jinja"):
        Renderer(tiny.tokenizer(None))


def test_a_template_file_replaces_the_tokenizers_own(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
    )
    render = renderer(DataConfig(chat_template=str(file)), tiny.tokenizer())
    assert render.text(talk("hi", "yo")) == "[hi][yo]"
    assert supervised(render, talk("hi", "yo")) == ["yo]"]
    with pytest.raises(ValueError, match=r"data\.chat_template=.*gone\.jinja: no such file"):
        renderer(DataConfig(chat_template=str(tmp_path / "gone.jinja")), tiny.tokenizer())


# Ids -------------------------------------------------------------------------------------------------


def adding_bos(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that starts every text with <s> unless told not to."""
    found = tiny.tokenizer(template)
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", found.bos_token_id)]
    )
    assert found("hi")["input_ids"][0] == found.bos_token_id
    return found


def test_d11_one_start_token_and_the_prompt_is_the_servers():
    given = case("d11")
    tokenizer = adding_bos(given["template"])
    render, messages = Renderer(tokenizer, stop_ids=(1,)), given["messages"]
    ids = render.example(messages).ids
    assert ids.count(tokenizer.bos_token_id) == given["expect"]["bos_count_at_start"] == 1
    assert ids[0] == tokenizer.bos_token_id
    assert ids == render.encode(render.text(messages))
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert tokenizer.bos_token_id not in render.encode("yo")
    prompt = render.prompt_ids(messages[:1])
    assert prompt == tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert ids[: len(prompt)] == prompt
    assert supervised(render, messages) == ["yo<|end|>"]


def test_where_a_token_would_straddle_the_border_of_a_turn_the_prompt_is_still_the_servers():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*letters, ":y"])}, merges=[(":", "y")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}a:{% endif %}"
    render = Renderer(PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template))
    found, prompt = render.example(talk(":y", "yo")), render.prompt_ids(talk(":y"))
    assert found.ids[: len(prompt)] == prompt
    assert found.ids.count(inner.token_to_id(":y")) == 1  # the user's own stays whole
    assert supervised(render, talk(":y", "yo")) == ["yo"]


def test_a_row_over_max_length_keeps_what_is_supervised_before_the_cut():
    render = Renderer(tiny.tokenizer(), stop_ids=(1,))
    messages = talk("12345678", "0123456789")  # 1 + 8 + 1 + 1 tokens before the answer
    assert supervised(render, messages, max_length=15) == ["0123"]
    assert len(render.example(messages, max_length=15).ids) == 15
    with pytest.raises(Skip, match="no assistant text within max_length"):
        render.example(messages, max_length=11)


def test_an_answer_that_was_cut_has_no_end_token_to_learn():
    render = Renderer(tiny.tokenizer(), stop_ids=(1,))
    assert supervised(render, talk("q", "a", "q", "cut off in the mid"), truncated=True) == [
        "a<|end|>",
        "cut off in the mid",
    ]
    row = Row(0, "file:1", messages=talk("q", "cut off in the mid"), finish="length")
    assert not of_row(row, render, None)[0].mask[-1]


def test_kept_ids_follow_the_servers_prompt_and_are_not_tokenised_again():
    tokenizer = tiny.tokenizer()
    render, kept = Renderer(tokenizer, stop_ids=(1,)), [[200, 201, 1], [150, 151]]
    row = Row(
        0, "file:1", messages=talk("q", "a", "r", "b"), answers=[(1, kept[0]), (3, kept[1])],
        tokenizer=tokenizer_hash(tokenizer),
    )  # fmt: skip
    for at, ids, found in zip((1, 3), kept, of_row(row, render, None), strict=True):
        prompt = render.prompt_ids(row.messages[:at])
        assert found.ids == prompt + ids
        assert found.mask == [False] * len(prompt) + [True] * len(ids)
    row.tokenizer = "of another"
    with pytest.raises(Skip, match="of another tokenizer; answer it again with task=regenerate"):
        of_row(row, render, None)


# Tools -----------------------------------------------------------------------------------------------


def cased(number: int) -> Row:
    return list(read(DataConfig(path=str(CASES / "d07_tool_calls_mixed_types.jsonl"))))[number]


@pytest.mark.parametrize("template", [TOOLS, tiny.CHATML], ids=["template", "fallback"])
def test_d07_the_call_and_the_final_text_are_supervised_and_the_tool_turn_is_not(template):
    render = Renderer(tiny.tokenizer(template), stop_ids=(1,))
    assert render.renders_tools == (template == TOOLS)
    found = [render.example(row.messages, row.tools) for row in map(cased, range(4))]
    assert found[0].ids == found[1].ids
    call, final = supervised(render, cased(0).messages, cased(0).tools)
    assert '"name": "add"' in call
    assert call.count('{"x": 3}') == 1
    assert call.endswith("<|end|>")
    assert "\\" not in call
    assert final == "Done<|end|>"
    assert '{"x": "noon"}' in supervised(render, cased(2).messages)[0]
    text = render.tokenizer.decode(found[0].ids)
    assert text.count('"properties"') == 1  # the definitions stand once, in the prompt
    assert '"properties"' in render.text(cased(0).messages[:1], cased(0).tools, prompt=True)


def test_a_template_that_ignores_tools_gets_them_inside_the_system_turn_that_is_there():
    render = Renderer(tiny.tokenizer(), stop_ids=(1,))
    messages = [{"role": "system", "content": "be kind"}, *talk("add 3", "no")]
    text = render.text(messages, cased(1).tools)
    assert text.startswith("<|system|>be kind\n\n")
    assert text.count("<|system|>") == 1
    assert '"name": "add"' in text
    assert supervised(render, messages, cased(1).tools) == ["no<|end|>"]


@pytest.mark.parametrize("supplied", ["", "<think>"], ids=["plain prompt", "prompt opens thinking"])
def test_a_call_in_a_turn_that_the_template_rewrites_later_is_supervised_whole(supplied):
    template = THINKING.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}",
    ).replace("{% set ns =", "{% if tools %}{{ tools | tojson }}{% endif %}{% set ns =", 1)
    template = template.replace("<|assistant|>{% if enable", f"<|assistant|>{supplied}{{% if enable")
    render = Renderer(tiny.tokenizer(template), stop_ids=(1,))
    assert render.renders_tools
    more = [*cased(0).messages, *talk("thanks", "sure")]
    call, done, last = supervised(render, more, cased(0).tools)
    assert call == '<call>{"name": "add", "arguments": {"x": 3}}</call><|end|>'
    assert (done, last) == ("Done<|end|>", "<think></think>sure<|end|>".removeprefix(supplied))
