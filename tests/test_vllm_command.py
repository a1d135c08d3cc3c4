"""The command of ``engine=vllm``: its words, and what is refused before vLLM would misread it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters import checkpoint
from drafters.target import HardwareConfig, load
from recipes.schema import Run
from serve.answer import ServeConfig
from serve.ngram import NgramConfig
from serve.settings import HttpConfig
from serve.suffix import SuffixConfig
from serve.vllm import VllmConfig, command
from tests import tiny
from tests.commands import CPU, refusal
from tests.commands import command as python_m


@pytest.fixture(scope="module")
def target(workshop):
    return load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def directory(target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("drafters") / "one"
    checkpoint.write(tiny.dflash(target), directory)
    return directory


@pytest.fixture
def run(workshop, directory):
    return Run(target=str(workshop / "target"), drafter=str(directory))


def option(words: list[str], name: str) -> str | None:
    """The value of an option, as the last one of that name has it."""
    return words[len(words) - words[::-1].index(name)] if name in words else None


def speculative(run: Run, rocm: bool = False):
    words = command(run, rocm=rocm)
    value = option(words, "--speculative-config")
    return None if value is None else json.loads(value)


def noted(run: Run, tmp_path, **facts) -> Run:
    """The run with a copy of its drafter's config.json in which these keys are others."""
    copy = tmp_path / "copy"
    copy.mkdir()
    found = checkpoint.read_config(Path(run.drafter))
    found = {key: value for key, value in {**found, **facts}.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(found))
    return replace(run, drafter=str(copy))


def test_the_words_for_a_drafter(run, workshop, directory):
    words = command(replace(run, port=8123), rocm=False)
    assert words[:3] == ["vllm", "serve", str(workshop / "target")]
    assert option(words, "--host") == "127.0.0.1"
    assert option(words, "--port") == "8123"
    assert option(words, "--served-model-name") == run.target
    assert option(words, "--dtype") == "float32"  # what the drafter was trained under
    assert option(words, "--max-num-seqs") == "8"
    assert option(words, "--max-model-len") is None
    found = checkpoint.read_config(directory)
    assert json.loads(option(words, "--speculative-config")) == {
        "method": found["speculators_model_type"],
        "model": str(directory),
        "num_speculative_tokens": found["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
    }


def test_settings_become_arguments_and_given_ones_win(run):
    more = VllmConfig(python="env/bin/python", args=["--port", "9", "--enforce-eager"])
    web = HttpConfig(host="0.0.0.0", model="mine", slots=3, context=99)
    hardware = HardwareConfig(dtype="bfloat16", trust_remote_code=True)
    words = command(replace(run, vllm=more, http=web, hardware=hardware, serve=ServeConfig(n=2)), rocm=False)
    assert words[:4] == ["env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert option(words, "--host") == "0.0.0.0"
    assert option(words, "--served-model-name") == "mine"
    assert option(words, "--max-num-seqs") == "3"
    assert option(words, "--max-model-len") == "99"
    assert option(words, "--dtype") == "bfloat16"
    assert "--trust-remote-code" in words
    assert words[-3:] == ["--port", "9", "--enforce-eager"]
    assert json.loads(option(words, "--speculative-config"))["num_speculative_tokens"] == 2


def test_a_drafter_on_rocm_gets_an_attention_backend_of_its_own(run):
    assert speculative(run, rocm=True) == {**speculative(run), "attention_backend": "TRITON_ATTN"}
    ngram = replace(run, proposer="ngram")
    assert speculative(ngram, rocm=True) == speculative(ngram)  # no layers, no attention


@pytest.mark.parametrize(
    ("proposer", "n", "want"),
    [
        ("ngram", None, {"num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        ("ngram", 6, {"num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        (
            "suffix",
            None,
            {
                "num_speculative_tokens": 16,
                "suffix_decoding_max_tree_depth": 48,
                "suffix_decoding_max_spec_factor": 2.0,
                "suffix_decoding_min_token_prob": 0.1,
            },
        ),
    ],
)
def test_proposers_without_training_are_vllms_own_with_our_defaults(run, proposer, n, want):
    run = replace(run, proposer=proposer, serve=ServeConfig(n=n))
    for drafter in (run.drafter, None):  # a drafter that is not asked, as in our own engine
        assert speculative(replace(run, drafter=drafter)) == {"method": proposer, **want}


def test_every_setting_of_a_lookup_is_told(run):
    ngram = NgramConfig(shortest=3, longest=5, max_drafts=7)
    assert speculative(replace(run, proposer="ngram", serve=ServeConfig(ngram=ngram))) == {
        "method": "ngram",
        "num_speculative_tokens": 7,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 3,
    }
    suffix = SuffixConfig(max_drafts=5, factor=1.5, min_probability=0.3, max_match=9, past=False)
    assert speculative(replace(run, proposer="suffix", serve=ServeConfig(suffix=suffix))) == {
        "method": "suffix",
        "num_speculative_tokens": 5,
        "suffix_decoding_max_tree_depth": 14,
        "suffix_decoding_max_spec_factor": 1.5,
        "suffix_decoding_min_token_prob": 0.3,
        "suffix_decoding_max_cached_requests": 0,
    }


def test_a_context_beyond_the_targets_is_the_targets(run):
    words = command(replace(run, http=HttpConfig(context=10_000)), rocm=False)
    assert option(words, "--max-model-len") == "512"


def test_the_drafter_may_be_asked_for_by_its_method(run):
    assert speculative(replace(run, proposer="dflash")) == speculative(run)


def test_nothing_drafts_where_nothing_is_asked_to(run):
    assert speculative(replace(run, drafter=None)) is None
    assert speculative(replace(run, serve=ServeConfig(n=0))) is None
    assert speculative(replace(run, proposer="none")) is None
    assert option(command(replace(run, drafter=None), rocm=True), "--dtype") == "auto"


def test_the_embedded_target_is_named_by_its_directory(run, monkeypatch, workshop):
    monkeypatch.setattr("drafters.target.embedded_directory", lambda: workshop / "target")
    words = command(replace(run, target="smollm2-embedded"), rocm=False)
    assert words[2] == str(workshop / "target")
    assert option(words, "--served-model-name") == "smollm2-embedded"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"serve": ServeConfig(n=99)}, r"serve\.n=99: .* at most \d+ drafts"),
        ({"proposer": "suffix+dflash"}, r"proposer=suffix\+dflash: .* one way at a time; .*ngram\|suffix"),
        ({"proposer": "eagle3"}, r"proposer=eagle3: the drafter in drafter= is dflash"),
        ({"proposer": "dflash", "drafter": None}, r"proposer=dflash: .*name a drafter, drafter=DIR"),
        ({"prompt": "hello"}, "leave prompt and prompt_file out"),
        ({"drafter": "/nowhere"}, "drafter=/nowhere: no drafter directory"),
        ({"target": "/nowhere"}, "target=/nowhere: no model directory"),
        ({"http": HttpConfig(queue=3)}, r"http\.queue=3: vLLM has no such setting; .*vllm\.args"),
        ({"http": HttpConfig(max_tokens=9)}, r"http\.max_tokens=9"),
        ({"http": HttpConfig(max_body_bytes=9)}, r"http\.max_body_bytes=9"),
        ({"http": HttpConfig(grace_seconds=9)}, r"http\.grace_seconds=9"),
        (
            {"proposer": "suffix", "serve": ServeConfig(suffix=SuffixConfig(memory=9))},
            r"serve\.suffix\.memory=9",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused(run, changed, message):
    with pytest.raises(ValueError, match=message):
        command(replace(run, **changed), rocm=False)


def test_a_directory_that_says_it_is_not_for_vllm_is_refused_with_its_reason(run, tmp_path):
    ours = {"vllm": {"servable": False, "why": "gated heads are not served"}}
    with pytest.raises(ValueError, match=r"gated heads are not served; serve it without engine=vllm"):
        command(noted(run, tmp_path, foredraft=ours), rocm=False)


def test_a_layout_that_is_not_tried_is_refused_with_the_way_to_convert_it(run, tmp_path):
    others = noted(run, tmp_path, speculators_model_type=None, architectures=["DFlashDraftModel"])
    with pytest.raises(ValueError, match=r"task=export drafter=.*copy .*format=vllm"):
        command(others, rocm=False)


@pytest.mark.parametrize("key", ["model_type", "vocab_size", "hidden_size", "num_layers"])
def test_a_drafter_of_another_target_is_refused(run, tmp_path, target, key):
    ours = {"target": {**target.fingerprint, key: 7}, "vllm": {"servable": True}}
    with pytest.raises(ValueError, match=rf"another target: its {key} is 7"):
        command(noted(run, tmp_path, foredraft=ours), rocm=False)


@pytest.mark.parametrize("verdict", ["x", {}, {"servable": "yes"}])
def test_a_verdict_that_is_none_is_refused(run, tmp_path, verdict):
    with pytest.raises(ValueError, match=r"config\.json: foredraft\.vllm=.* is no verdict; export it again"):
        command(noted(run, tmp_path, foredraft={"vllm": verdict}), rocm=False)


def test_a_config_without_the_number_of_drafts_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match=r"has no 'speculators_config'; export the run again"):
        command(noted(run, tmp_path, speculators_config=None), rocm=False)


# On the command line ----------------------------------------------------------------------------------


@pytest.fixture
def asked(run):
    return [*CPU, "engine=vllm", f"target={run.target}", f"drafter={run.drafter}"]


def test_task_command_prints_what_a_shell_can_run(asked, capsys, run, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert python_m("serve", *asked, "task=command", "vllm.args=[--max-num-seqs,'4']") == 0
    want = command(replace(run, vllm=VllmConfig(args=["--max-num-seqs", "4"])), rocm=False)
    assert shlex.split(capsys.readouterr().out) == want


def test_rocm_is_what_torch_was_built_for(asked, capsys, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    assert python_m("serve", *asked, "task=command") == 0
    assert '"attention_backend": "TRITON_ATTN"' in capsys.readouterr().out


def test_the_process_becomes_vllm(asked, run, monkeypatch, tmp_path):
    became = []
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "execvpe", lambda *become: became.append(become))
    assert python_m("serve", *asked) == 0
    assert became == [("vllm", command(run, rocm=torch.version.hip is not None), dict(os.environ))]


@pytest.mark.parametrize("by_environment", [False, True])
def test_the_key_goes_by_the_environment_and_is_printed_nowhere(
    asked, monkeypatch, tmp_path, capfd, by_environment
):
    """A real program takes the place of a child process, and sees the key and its own words."""
    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\necho "key: $VLLM_API_KEY"\necho "words: $*"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if by_environment:
        monkeypatch.setenv("FOREDRAFT_API_KEY", "secret")
    given = [] if by_environment else ["http.api_key=secret"]
    monkeypatch.setattr(
        os,
        "execvpe",
        lambda file, words, environment: subprocess.run(words, env=environment, check=True),
    )
    assert python_m("serve", *asked, *given) == 0
    out, err = capfd.readouterr()
    assert out.startswith("key: secret\nwords: serve ")
    assert (out + err).count("secret") == 1
    assert python_m("serve", *asked, *given, "task=command") == 0
    printed = capfd.readouterr().out
    assert "secret" not in printed
    monkeypatch.setenv("FOREDRAFT_API_KEY", "mine")
    ran = subprocess.run(printed, shell=True, capture_output=True, text=True)
    assert ran.stdout.startswith("key: mine\nwords: serve ")
    monkeypatch.delenv("FOREDRAFT_API_KEY")  # a shell without the key starts no open server
    ran = subprocess.run(printed, shell=True, capture_output=True, text=True)
    assert ran.returncode != 0
    assert ran.stdout == ""


def test_without_vllm_the_way_to_install_it_is_said(asked, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    message = refusal(capsys, "serve", *asked)
    assert "vllm: no such command" in message
    assert "pip install vllm" in message
    assert "wheels.vllm.ai/rocm" in message


def test_an_engine_or_task_that_is_not_there_is_refused(asked, capsys):
    assert "engine=tgi: write own or vllm" in refusal(capsys, "serve", *asked, "engine=tgi")
    assert "task=answer: write one of command, serve" in refusal(capsys, "serve", *asked, "task=answer")
