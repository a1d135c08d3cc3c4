"""What ``python -m serve`` does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from data.chat import Renderer
from drafters import checkpoint
from drafters.target import Target, load
from serve.answer import Timed, capacity_for, decode, drafts_for
from serve.engine import Answer, Engine

if TYPE_CHECKING:
    from recipes.schema import Run


def answer(run: Run) -> None:
    """Answer ``prompt=``, ``prompt_file=`` or standard input, greedily unless a temperature is given."""
    if run.drafter is None:
        raise ValueError("drafter: name a drafter directory, for example drafter=runs/demo/drafter")
    text = read_prompt(run.prompt, run.prompt_file)
    checkpoint.read_config(Path(run.drafter))  # refused before the target is loaded
    target = load(run.target, run.hardware)
    drafter = checkpoint.read(Path(run.drafter), target)
    render = Renderer(target.tokenizer, stop_ids=target.stop_ids)
    prompt = render.prompt_ids([{"role": "user", "content": text}])
    n = drafts_for(target, drafter, Path(run.drafter), run.serve)
    capacity = capacity_for(target, prompt, run.serve, max(n, 1))

    drafted = decode(Engine(target, drafter, n, capacity=capacity), prompt, run.serve, _printer(target))
    print(
        f"\n\n{len(drafted.answer.tokens)} tokens, N={n}, tau {drafted.answer.tau:.2f}, "
        f"{drafted.tokens_per_second:.1f} tokens/s"
    )
    if run.serve.compare:
        plain = decode(Engine(target, capacity=capacity), prompt, run.serve)
        print(comparison(drafted, plain))


def comparison(drafted: Timed, plain: Timed) -> str:
    """Speed beside plain decoding, and whether the ids are the same."""
    ratio = drafted.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    text = f"plain decoding {plain.tokens_per_second:.1f} tokens/s: drafting is {ratio:.2f} times as fast; "
    if drafted.answer.tokens == plain.answer.tokens:
        return text + "token ids are equal"
    pairs = zip(drafted.answer.tokens, plain.answer.tokens, strict=False)
    at = next(
        (i for i, (a, b) in enumerate(pairs) if a != b),
        min(len(drafted.answer.tokens), len(plain.answer.tokens)),
    )
    return text + f"token ids part at {at} (rounding; use hardware.dtype=float32 for equality)"


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


def _printer(target: Target):
    """Prints an answer as it grows, whole characters only."""
    shown = 0

    def heard(answer: Answer, _new: list[int]) -> None:
        nonlocal shown
        text = target.tokenizer.decode([i for i in answer.tokens if i not in target.stop_ids])
        if not text.endswith("\ufffd") or answer.finish:
            print(text[shown:], end="", flush=True)
            shown = len(text)

    return heard
