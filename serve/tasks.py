"""What ``python -m serve`` does."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from drafters.method import Drafter
from drafters.target import Target
from serve.answer import Timed, capacity_for, decode, drafts_for, known_taus, loaded
from serve.costs import costs_for
from serve.engine import Engine
from serve.http import create_app, listen, run_until_stopped
from serve.law import Sampling, law, uniforms
from serve.proposers import UNTRAINED, build, drafts_asked
from serve.schedule import Schedule, schedule_of
from serve.settings import PORT
from serve.types import Answer, Proposer

if TYPE_CHECKING:
    from recipes.schema import Run


def answer(run: Run) -> None:
    """Answer ``prompt=``, ``prompt_file=`` or standard input, greedily unless a temperature is given."""
    check_asked(run)
    text = read_prompt(run.prompt, run.prompt_file)
    target, drafter, render = loaded(run)
    prompt = render.prompt_ids([{"role": "user", "content": text}])
    proposer, n = proposer_of(run, target, drafter)
    capacity = capacity_for(target, prompt, run.serve)

    engine, plainly = Engine(target, proposer, n, capacity=capacity), Engine(target, capacity=capacity)
    if run.serve.compare:  # neither is timed cold
        for each in (engine, plainly):
            short = replace(run.serve, max_new_tokens=min(4, run.serve.max_new_tokens))
            decode(each, prompt, short, run.seed)
    drafted = decode(engine, prompt, run.serve, run.seed, _printer())
    print(
        f"\n\n{len(drafted.answer.tokens)} tokens, N={engine.num_drafts}, tau {drafted.answer.tau:.2f}, "
        f"{drafted.tokens_per_second:.1f} tokens/s"
    )
    if run.serve.compare:
        print(comparison(target, drafted, decode(plainly, prompt, run.serve, run.seed)))


def http(run: Run) -> None:
    """Serve OpenAI's API on ``http.host`` and ``port``, until told to stop."""
    check_asked(run)
    config = run.http
    if run.prompt is not None or run.prompt_file is not None:
        raise ValueError(
            "the server takes its prompts by HTTP; leave out prompt, prompt_file and port to ask once"
        )
    with listen(config.host, PORT if run.port is None else run.port) as listener:
        target, drafter, render = loaded(run)
        context = min(config.context, target.config.max_position_embeddings)
        proposer, n, schedule = scheduled(run, target, drafter)

        def build() -> Engine:
            return Engine(target, proposer, n, slots=config.slots, capacity=context, schedule=schedule)

        name = config.model or run.target
        host, port = listener.getsockname()[:2]
        most = 0 if proposer is None else proposer.max_drafts if n is None else n
        how = "drafts by schedule" if schedule else f"N={most}"
        print(
            f"{name} on http://{f'[{host}]' if ':' in host else host}:{port}/v1: "
            f"{config.slots} slots of {context} tokens, {how}",
            flush=True,
        )
        gc.freeze()  # what is loaded stays: the garbage collector need not look at it between two rounds
        run_until_stopped(create_app(build, render, config, name), listener, config)


def check_asked(run: Run) -> None:
    """``ValueError`` when nothing was named that could draft, and nobody said that nothing should."""
    if run.drafter is None and run.proposer is None:
        raise ValueError(
            "drafter: name a drafter directory, for example drafter=runs/demo/drafter; without one, "
            "proposer=suffix or proposer=ngram drafts, and proposer=none decodes plainly"
        )


def proposer_of(run: Run, target: Target, drafter: Drafter | None) -> tuple[Proposer | None, int | None]:
    """What ``proposer=`` names, and how many drafts: of a trained drafter, the fastest for one request."""
    build(run.proposer, drafter, run.serve)  # a name that is none is refused before anything is measured
    n = run.serve.n
    if drafter is not None and run.drafter is not None and run.proposer not in UNTRAINED:
        n = drafts_for(target, drafter, Path(run.drafter), n)
    proposer = build(run.proposer, drafter, replace(run.serve, n=n))
    return proposer, drafts_asked(proposer, n)


def scheduled(
    run: Run, target: Target, drafter: Drafter | None
) -> tuple[Proposer | None, int | None, Schedule | None]:
    """For a server: a fixed N where ``serve.n`` says it, else a schedule over measured costs."""
    if run.serve.n is not None or not run.serve.schedule:
        return *proposer_of(run, target, drafter), None
    proposer = build(run.proposer, drafter, run.serve, apart=True)
    if proposer is None:
        return None, None, None
    print("costs of a round at every load: looked up, or measured now", flush=True)
    costs = costs_for(target, proposer, run.http.slots)
    known = {} if run.drafter is None else known_taus(Path(run.drafter))
    return proposer, None, schedule_of(proposer, costs, known)


ROUNDING = 1e-3  # in logits or shares: what the order of additions may change in fp32, with room


def comparison(target: Target, drafted: Timed, plain: Timed) -> str:
    """Speed beside plain decoding, and whether the ids are the same: drafts change none, at any temperature.

    Errors: ``ValueError`` for ids that part in fp32 where the target's choice was not close.
    """
    ratio = drafted.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    text = f"plain decoding {plain.tokens_per_second:.1f} tokens/s: drafting is {ratio:.2f} times as fast; "
    if drafted.answer.tokens == plain.answer.tokens:
        return text + "token ids are equal"
    pairs = zip(drafted.answer.tokens, plain.answer.tokens, strict=False)
    at = next(
        (i for i, (a, b) in enumerate(pairs) if a != b),
        min(len(drafted.answer.tokens), len(plain.answer.tokens)),
    )
    if target.dtype != torch.float32:
        return text + f"token ids part at {at} (rounding; use hardware.dtype=float32 for equality)"
    request = plain.answer.request
    margin = margin_after(target, request.prompt + plain.answer.tokens[:at], request.sampling)
    what = "the target's best two logits are" if request.sampling.greedy else "the draw and another token are"
    if margin >= ROUNDING:
        raise ValueError(
            f"drafting changed the answer: token ids part at {at}, where {what} {margin:.2g} apart in "
            "float32; this is a fault of the engine, report it with drafter and prompt"
        )
    return text + f"token ids part at {at}, where {what} {margin:.1g} apart"


@torch.inference_mode()
def margin_after(target: Target, ids: list[int], sampling: Sampling) -> float:
    """How far the target's choice after these ids is from another one.

    Of a greedy choice how far its best two logits are apart; else the share of the law between what was drawn
    and the nearest token beside it.
    """
    last_1TD = target.states(torch.tensor([ids], device=target.device), []).last()
    logits_V = target.head(last_1TD[0, -1])
    if sampling.greedy:
        best, second = logits_V.topk(2).values.tolist()
        return best - second
    upto_V = law(logits_V[None], sampling)[0].double().cumsum(0)
    (drawn,) = uniforms(sampling.seed, "next", len(ids), 1)
    return float((upto_V / upto_V[-1] - drawn).abs().min())


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt of the command line, of a file, or of standard input.

    Errors: ``ValueError`` when there is none, or two.
    """
    if prompt is not None and prompt_file is not None:
        raise ValueError("prompt and prompt_file are both given; give one of them")
    if prompt_file is not None:
        path = Path(prompt_file).expanduser()
        if not path.is_file():
            raise ValueError(f"prompt_file={prompt_file}: no such file")
        try:
            prompt = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompt_file={prompt_file}: not UTF-8 text ({error})") from error
    elif prompt is None:
        if sys.stdin.isatty():
            print("prompt (end with Ctrl-D):", file=sys.stderr)
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ValueError(
            'the prompt is empty; give prompt="...", prompt_file=FILE, or text on standard input'
        )
    return prompt.strip("\n")


def _printer() -> Callable[[Answer, list[int]], None]:
    """Prints the text of an answer as it grows."""
    shown = 0

    def heard(answer: Answer, _new: list[int]) -> None:
        nonlocal shown
        assert answer.text is not None, "a request without text"
        print(answer.text.text[shown:], end="", flush=True)
        shown = len(answer.text.text)

    return heard
