"""Score a drafter on held-out conversations, domain by domain, and leave a report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import inf, isclose
from operator import add
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.chat import Renderer
from data.examples import examples as to_examples
from data.examples import turn_rows
from data.regenerate import RegenerateConfig, append, done, regenerate
from data.sources import DataConfig, Row, check_skips, read
from drafters.method import Drafter
from drafters.target import Target
from drafters.types import Example
from eval.parts import by_part
from eval.replay import Counts, answers, paths, score, score_lookup
from eval.report import Scored, build, loops
from eval.rollout import rollout
from serve.costs import Costs, costs_for
from serve.lookup import Lookup
from serve.types import Proposer


@dataclass
class EvalConfig:
    """``eval.*``"""

    mode: str = "replay"  # replay: one pass; rollout: decode step by step
    n: list[int] | None = None  # drafts a round; None: every N from 1 to the trained block
    temperature: float = 0.0  # 0: the target's greedy answers; else answers sampled from it at this one
    drafts: str = "greedy"  # greedy: as the engine drafts; sampled: drawn from the drafter's law
    per_domain: int | None = None  # use the first so many rows of each domain
    max_new_tokens: int = 200  # of answers that have to be made first
    batch: int = 16  # requests decoded together for that, and by rollout
    break_even: bool = True  # time rounds here, and name the domains in which drafting does not pay
    server: str | None = None  # of a running server, http://127.0.0.1:8000: its counters are read instead
    model: str | None = None  # the name it serves, where it serves several or has one of its own
    api_key: str | None = None  # it asks for; None: FOREDRAFT_API_KEY of the environment, else none
    clients: int = 4  # that ask it at the same time
    # Shares of answer tokens by domain; {}: equal ones in task=compare, the evaluated ones in task=plan.
    traffic: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in ("replay", "rollout"):
            raise ValueError(f"eval.mode={self.mode}: write replay or rollout")
        if self.drafts not in ("greedy", "sampled"):
            raise ValueError(f"eval.drafts={self.drafts}: write greedy or sampled")
        if not 0 <= self.temperature < inf:
            raise ValueError(f"eval.temperature={self.temperature}: give 0 (greedy) or more")
        if self.drafts == "sampled" and self.mode == "rollout":
            raise ValueError(
                "eval.drafts=sampled eval.mode=rollout: the engine drafts greedily at every temperature; "
                "write eval.mode=replay"
            )
        if self.temperature == 0 and self.drafts == "sampled":
            raise ValueError(
                "eval.drafts=sampled eval.temperature=0: drafts are sampled at the target's temperature; "
                "give one above 0, or write eval.drafts=greedy"
            )
        for key in ("per_domain", "max_new_tokens", "batch", "clients"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"eval.{key}={value}: give at least 1")
        for name, share in self.traffic.items():
            if not 0 < share < inf:
                raise ValueError(f"eval.traffic.{name}={share:g}: give a number above 0, or leave it out")


def held_out(
    config: DataConfig, target: Target, render: Renderer, settings: EvalConfig, cache: Path
) -> list[Example]:
    """Conversations to score, each with the target's own answers: greedy, or at ``settings.temperature``.

    Rows that come without kept ids are answered now, turn by turn; answers are kept in ``cache``, so a second
    evaluation starts at once. Errors: ``ValueError`` naming a row sampled at another temperature, or the
    first of a domain in which nothing can be scored.
    """
    config, render = (
        replace(config, split=config.split or "eval"),
        replace(render, signature=target.signature),
    )
    rows = [
        turn
        for row in first_of_each(read(config), settings.per_domain)
        for turn in (turn_rows(row) if row.skip is None and not row.answers else [row])
    ]
    if settings.mode == "replay":  # decoding takes the prompts alone
        check_sampled((row for row in rows if row.skip is None and _answered(row, render)), config, settings)
    asked = [row for row in rows if row.skip is None and not _answered(row, render)]
    made = _answer(target, render, asked, settings, config, cache) if asked else {}
    for at, row in enumerate(rows):
        if row.skip is None and not _answered(row, render):
            unanswered = "no answer: its prompt leaves no room for one, or does not render"
            answer = made.get(row.key) or replace(row, skip=unanswered)
            rows[at] = replace(answer, where=row.where)
    found, seen = to_examples(rows, render, None, config.strict)
    check_skips(seen, config.max_skip)
    _check_domains(seen, found)
    return found


def _check_domains(rows: Sequence[Row], found: Sequence[Example]) -> None:
    """``ValueError`` naming the first row of a domain in which no answer has two tokens, as a round needs."""
    scored = {example.domain for example in found if sum(example.mask) > 1}
    for row in rows:
        if row.messages and row.domain not in scored:  # a row that cannot be read names no domain
            why = row.skip or "its answers have one token at most"
            raise ValueError(
                f"{row.where}: domain {row.domain} is empty, {why}; leave its rows out, or give others"
            )


def check_sampled(rows: Iterable[Row], config: DataConfig, settings: EvalConfig) -> None:
    """``ValueError`` naming the first answer that was not sampled at ``settings.temperature``, if above 0.

    Greedy evaluation takes any: what leaves the target's argmax is cut there, and counted.
    """
    for row in rows if settings.temperature else ():
        if row.temperature is None or not isclose(row.temperature, settings.temperature, rel_tol=1e-5):
            said = "does not say what it was" if row.temperature is None else f"was {row.temperature:g}"
            split = f" data.split={config.split}" if config.split else ""
            out = f"sampled-{settings.temperature:g}.jsonl"
            raise ValueError(
                f"{row.where}: eval.temperature={settings.temperature:g}, but the temperature of its answer "
                f"{said}; sample answers with `python -m data task=regenerate "
                f"regenerate.temperature={settings.temperature:g} data.path={config.path}{split} "
                f"out={out}` and name that file in its place"
            )


def _answered(row: Row, render: Renderer) -> bool:
    """Whether a row comes with ids of this target's."""
    return bool(row.answers) and row.tokenizer == render.tokenizer_hash and row.answered_by(render.signature)


def first_of_each(rows: Iterable[Row], number: int | None) -> list[Row]:
    """The first so many rows of each domain, in their order."""
    taken: dict[str, int] = {}
    out = []
    for row in rows:
        taken[row.domain] = taken.get(row.domain, 0) + 1
        if number is None or taken[row.domain] <= number:
            out.append(row)
    return out


def _answer(
    target: Target, render: Renderer, rows: list[Row], settings: EvalConfig, config: DataConfig, cache: Path
) -> dict[str, Row]:
    """The rows with the target's answers, by key; those not in ``cache`` are answered now."""
    how = RegenerateConfig(settings.max_new_tokens, settings.temperature, settings.batch)
    made_by = [target.fingerprint, str(target.dtype), how.max_new_tokens, render.template, render.settings]
    if how.temperature:
        made_by.append(how.temperature)
    name = hashlib.sha256(json.dumps(made_by, sort_keys=True).encode()).hexdigest()[:12]
    path = cache / f"answers-{name}.jsonl"
    have = done(path)
    missing = [row for row in rows if row.key not in have]
    if missing:
        append(path, regenerate(target, render, missing, how, max_length=config.max_length))
    return {row.key: row for row in read(DataConfig(path=str(path), split=config.split))}


def numbers_of_drafts(settings: EvalConfig, proposer: Proposer | None) -> list[int]:
    """Every N to score: of a trained drafter all that it knows, of other proposers the most they make.

    Errors: ``ValueError`` for one that they do not make, and for a proposer that has to be decoded.
    """
    if settings.mode == "replay" and not isinstance(proposer, Drafter | Lookup):
        what = "plain decoding" if proposer is None else "a lookup before a drafter"
        raise ValueError(f"eval.mode=replay: {what} is not replayed; write eval.mode=rollout")
    if settings.drafts == "sampled" and not isinstance(proposer, Drafter):
        raise ValueError("eval.drafts=sampled: what is looked up has no law to draw from; leave it out")
    if settings.n == []:
        raise ValueError("eval.n=[]: give numbers of drafts, or null for all")
    if proposer is None:
        return [0]
    most, trained = proposer.max_drafts, isinstance(proposer, Drafter)
    ns = settings.n or (list(range(1, most + 1)) if trained else [most])
    if min(ns) < 1 or max(ns) > most:
        whose = "this drafter was trained for" if trained else "this proposer makes"
        raise ValueError(f"eval.n={ns}: {whose} 1 to {most} drafts a round")
    return ns


def evaluate(
    target: Target,
    proposer: Proposer | None,
    held: Sequence[Example],
    settings: EvalConfig,
    seed: int,
    name: str | None = None,
) -> dict[str, Any]:
    """The report of a proposer over held-out conversations; ``name`` is for one that is no drafter."""
    ns = numbers_of_drafts(settings, proposer)
    if isinstance(proposer, Drafter):
        proposer.eval()
        name = proposer.config.name
    if settings.mode == "replay":
        one_each = _replayed(target, proposer, held, ns, settings)
    else:
        one_each = _rolled_out(target, proposer, held, ns, settings, seed)
    scored = _by_conversation(one_each)
    return build(
        scored,
        languages=by_part("lang", scored, held, max(ns), seed),
        sources=by_part("source", scored, held, max(ns), seed),
        max_n=max(ns),
        seed=seed,
        costs=_costs(target, proposer) if settings.break_even and proposer is not None else None,
        target=target.name,
        target_signature=target.signature,
        method=name or "none",
        temperature=settings.temperature,
        drafts=settings.drafts,
        mode=settings.mode,
        dtype=str(target.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu",
    )


def _costs(target: Target, proposer: Proposer) -> Costs | None:
    """What rounds of one request cost here; ``None``, and a line that says why, where none can be timed."""
    try:
        return costs_for(target, proposer, 1)
    except ValueError as reason:
        tqdm.write(f"where drafting pays is not known: {reason}")
        return None


def _replayed(
    target: Target, proposer: Proposer | None, held: Sequence[Example], ns: list[int], settings: EvalConfig
) -> list[Scored]:
    held, out = list(answers(held)), []
    lookups = {n: score_lookup(proposer, n) for n in ns} if isinstance(proposer, Lookup) else {}
    layer_ids = [] if proposer is None else proposer.layer_ids
    with tqdm(total=len(held), unit="answer", desc="replay", mininterval=1) as bar:
        for path in paths(target, held, layer_ids, temperature=settings.temperature):
            if isinstance(proposer, Drafter):
                (by_n,) = score(proposer, [path], ns, drafts=settings.drafts)
            else:
                by_n = {n: count(path) for n, count in lookups.items()}
            looping, odd = loops(path.tokens), int(path.off_path)
            out.append(_scored(path.example, by_n, off_path=odd, margin=path.margin, loops=looping))
            bar.update()
    return out


def _rolled_out(
    target: Target,
    proposer: Proposer | None,
    held: Sequence[Example],
    ns: list[int],
    settings: EvalConfig,
    seed: int,
) -> list[Scored]:
    held = list(answers(held))
    heat = settings.temperature
    decode = partial(
        rollout,
        target,
        proposer,
        held,
        temperature=heat,
        seed=seed,
        max_new_tokens=settings.max_new_tokens if heat else None,
        slots=settings.batch,
    )
    by_name: dict[str, Scored] = {}
    for n in ns:
        for example, answer, counts in tqdm(decode(n), total=len(held), desc=f"rollout N={n}"):
            stored = example.ids[example.mask.index(True) :]
            odd = int(not heat and answer.tokens != stored)
            new = _scored(example, {}, off_path=odd, loops=loops(answer.tokens))
            by_name.setdefault(example.name, new).by_n[n] = counts
    return [by_name[example.name] for example in held]  # not in the order in which they finished


def _scored(example: Example, by_n: dict[int, Counts], **odd: Any) -> Scored:
    prompt = json.dumps(example.ids[: example.mask.index(True)])
    asked = hashlib.sha256(prompt.encode()).hexdigest()[:16]
    return Scored(example.name, example.domain, by_n, prompt=asked, **odd)


def _by_conversation(scored: Sequence[Scored]) -> list[Scored]:
    """Turns of one conversation are not independent: they are resampled together."""
    groups: dict[str, list[Scored]] = {}
    for one in scored:
        groups.setdefault(one.name.split(" (turn ")[0], []).append(one)
    return [_joined(name, turns) for name, turns in groups.items()]


def _joined(name: str, turns: list[Scored]) -> Scored:
    by_n: dict[int, Counts] = {n: reduce(add, (turn.by_n[n] for turn in turns)) for n in turns[0].by_n}
    return Scored(
        name,
        turns[0].domain,
        by_n,
        sum(turn.off_path for turn in turns),
        min((turn.margin for turn in turns if turn.margin is not None), default=None),
        any(turn.loops for turn in turns),
        turns[0].prompt,
    )
