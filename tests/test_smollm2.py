"""The one check on real weights: the embedded SmolLM2, loaded once, in fp32."""

from __future__ import annotations

import lzma

import pytest
import torch

from data.chat import Renderer
from data.examples import of_row
from data.sources import BUNDLED_DIRECTORY, parse, row_of
from drafters.target import EMBEDDED, HardwareConfig, load
from serve.engine import Engine
from serve.types import Request

pytestmark = pytest.mark.real
ANSWERS = BUNDLED_DIRECTORY / "answers.jsonl.xz"


@pytest.fixture(scope="module")
def target():
    return load(EMBEDDED, HardwareConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def render(target):
    return Renderer(target.tokenizer, stop_ids=target.stop_ids)


@pytest.fixture(scope="module")
def prompt(render):
    return render.prompt_ids([{"role": "user", "content": "What is the capital of France?"}])


def test_it_is_the_model_that_the_design_names(target, render):
    assert (target.config.model_type, target.num_layers, target.hidden_size) == ("llama", 30, 576)
    assert target.vocab_size == 49152
    assert target.stop_ids == (2,)
    assert torch.equal(target.head_weight_VD, target.embedding.weight)  # tied
    assert not render.renders_tools


@torch.inference_mode()
def test_states_and_head_are_those_of_hugging_face(target, prompt):
    tokens = torch.tensor([prompt])
    want = target.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    have = target.states(tokens, [0, 14, 28])
    for at, k in enumerate([0, 14, 28]):
        assert torch.equal(have.layers_BTLD[:, :, at], want.hidden_states[k + 1])
    logits = target.head(have.last_BTD)
    assert (logits - want.logits).abs().max() <= 1e-5 * want.logits.abs().max()


@torch.inference_mode()
def test_plain_greedy_decoding_equals_hugging_faces_generate(target, prompt):
    tokens = torch.tensor([prompt])
    want = target.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=24, do_sample=False
    )
    (answer,) = Engine(target, capacity=len(prompt) + 24).run([Request(prompt, 24)])
    assert answer.tokens == want[0, len(prompt) :].tolist()
    assert "Paris" in target.tokenizer.decode(answer.tokens)


@torch.inference_mode()
def test_the_first_bundled_answer_is_the_targets_own(target, render):
    if not ANSWERS.exists():
        pytest.skip("no answers are bundled: python -m data task=regenerate makes them")
    with lzma.open(ANSWERS) as file:
        row = row_of(0, ANSWERS.name, parse(file.readline()))
    example = of_row(row, render, None)[0]
    first = example.mask.index(True)
    last_TD = target.states(torch.tensor([example.ids]), []).last_BTD[0, first - 1 : -1]
    logits_TV = target.head(last_TD)
    stored_T = torch.tensor(example.ids[first:])
    short_T = logits_TV.max(-1).values - logits_TV.gather(1, stored_T[:, None]).squeeze(1)
    # One pass and step-by-step decoding round differently: what is not the argmax must be a tie with it.
    assert float(short_T.max()) < 1e-3, f"parts at {int((short_T > 0).long().argmax())} of {len(stored_T)}"
    assert (short_T == 0).float().mean() > 0.98
