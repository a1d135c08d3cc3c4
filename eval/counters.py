"""Acceptance of a running server, vLLM's or ours, by its counters: ``python -m eval eval.server=URL``.

Prompts of one domain after the other are sent through OpenAI's API, in blocks, and ``/metrics`` is read
between two blocks:

    read | block 1 of math | read | block 2 of math | read | block 1 of code | read ...

No counter says whose request it counted. So what was counted between two readings has to be exactly the
answers and tokens that came back here: a server that was started anew in between, that somebody else uses
too, or that is several behind one address, is refused. Intervals resample blocks.

Rounds are those of decoding, with drafts or without, and tokens those of answers after the prefill's, so that
tau is that of replay and rollout. Servers that do not count rounds (by ``inter_token_latency_seconds``) tell
of rounds with drafts alone; then tau is one and the sum of survival. vLLM counts accepted drafts before an
answer is cut at a stop or the limit, ours those that were emitted; ``counting`` of the report says which.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from data.chat import Message
from data.examples import questions, turn_rows
from data.sources import DataConfig, Row, check_skips, read
from drafters.checkpoint import read_config
from eval.evaluate import EvalConfig, first_of_each
from eval.replay import Counts
from eval.report import COUNTING, Scored, build
from eval.rollout import request_seed

T = TypeVar("T")

BLOCKS = 8  # of a domain, at most
SETTLE = 2.0  # seconds after an answer in which it has to be counted
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
TOKENS = "vllm:generation_tokens_total"
ANSWERS = "vllm:request_success_total"  # not there before the first
ROUNDS = "vllm:inter_token_latency_seconds_count"  # one for each output after an answer's first
NEEDED = (DRAFTS, DRAFT_TOKENS, ACCEPTED, TOKENS)


@dataclass(frozen=True)
class Reading:
    """Counters by name, and drafts accepted by position, over all engines of a server."""

    counters: dict[str, float]
    accepted_at: tuple[float, ...]

    def since(self, before: Reading) -> Reading:
        """What was counted in between."""
        gained = {name: value - before.counters[name] for name, value in self.counters.items()}
        pairs = zip(self.accepted_at, before.accepted_at, strict=True)
        return Reading(gained, tuple(after - then for after, then in pairs))

    def __add__(self, other: Reading) -> Reading:
        both = {name: value + other.counters[name] for name, value in self.counters.items()}
        pairs = zip(self.accepted_at, other.accepted_at, strict=True)
        return Reading(both, tuple(one + two for one, two in pairs))

    @property
    def counts(self) -> Counts:
        """Rounds and what they accepted; the head of this module says which."""
        found, num = self.counters, len(self.accepted_at)
        rounds, tokens = found[DRAFTS], found[DRAFTS] + found[ACCEPTED]
        if ROUNDS in found:
            rounds, tokens = found[ROUNDS], found[TOKENS] - found[ANSWERS]
        return Counts(num, int(rounds), int(tokens), [int(number) for number in self.accepted_at])

    @property
    def own_words(self) -> dict[str, Any]:
        """What dashboards show of the same counters."""
        found = self.counters
        length = 1 + found[ACCEPTED] / found[DRAFTS] if found[DRAFTS] else 1.0
        drafted, tokens = int(found[DRAFTS]), int(found[DRAFT_TOKENS])
        return {"drafted_rounds": drafted, "draft_tokens": tokens, "mean_acceptance_length": round(length, 4)}


def parse(text: str) -> Reading:
    """A page of ``/metrics``. Errors: ``ValueError`` for one of no server that drafts."""
    found: defaultdict[str, float] = defaultdict(float, {ANSWERS: 0.0})
    at: defaultdict[int, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == ACCEPTED_AT:
                at[int(sample.labels["position"])] += sample.value
            elif sample.name in (*NEEDED, ANSWERS, ROUNDS):
                found[sample.name] += sample.value
    missing = [name for name in NEEDED if name not in found] + ([] if at else [ACCEPTED_AT])
    if missing:
        raise ValueError(
            f"no {missing[0]}, so nothing drafts; start vLLM with --speculative-config, or python -m serve "
            "with drafter= or proposer="
        )
    return Reading(dict(found), tuple(at[k] for k in sorted(at)))


class Server:
    """A server by its address. Errors of every verb: ``ValueError`` when it cannot be reached, or refuses."""

    def __init__(self, settings: EvalConfig) -> None:
        assert settings.server is not None, settings
        self.settings, self.url = settings, settings.server.rstrip("/").removesuffix("/v1")
        key = settings.api_key or os.environ.get("FOREDRAFT_API_KEY")
        self.http = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=settings.clients),
            follow_redirects=True,  # vLLM sends /metrics on to /metrics/
        )
        self.card = self._card()
        self.ours = self.card.get("owned_by") == "foredraft"

    def _card(self) -> dict[str, Any]:
        """What /v1/models says of the model to ask: the one of ``eval.model``, or the only one."""
        cards = self._call("GET", "/v1/models", lambda found: {card["id"]: card for card in found["data"]})
        wanted = self.settings.model or (next(iter(cards)) if len(cards) == 1 else None)
        if wanted not in cards:
            raise ValueError(f"eval.model={wanted}: {self.url} serves {', '.join(cards)}; write one of them")
        return cards[wanted]

    def reading(self) -> Reading:
        """Its counters of now."""
        return self._call("GET", "/metrics", parse)

    def ask(self, row: Row, messages: list[Message], seed: int) -> tuple[str, int]:
        """The text of an answer, and its tokens."""
        # Tools are shown, and calls stay text: to vLLM that is "none", which hides them on a server of ours.
        choice = {} if self.ours else {"tool_choice": "none"}
        body = {
            "model": self.card["id"],
            "messages": [_as_sent(message) for message in messages],
            "max_tokens": self.settings.max_new_tokens,
            "temperature": self.settings.temperature,
            "seed": seed,
            **({"tools": row.tools, **choice} if row.tools else {}),
        }
        return self._call("POST", "/v1/chat/completions", _answer, row.where, json=body)

    def _call(
        self, verb: str, path: str, use: Callable[[Any], T], where: str | None = None, **more: Any
    ) -> T:
        """What ``use`` makes of the page, which is JSON but for the metrics."""
        about = f"{where}: eval.server={self.url}" if where else f"eval.server={self.url}"
        try:
            page = self.http.request(verb, self.url + path, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ValueError(
                f"{about} cannot be reached ({error or type(error).__name__}); start it, or give its address "
                "as http://HOST:PORT"
            ) from error
        if page.status_code != 200:
            key = "; give its key as FOREDRAFT_API_KEY" if page.status_code == 401 else ""
            raise ValueError(f"{about}: {path} answers {page.status_code}, {page.text[:300]}{key}")
        try:
            return use(page.text if path == "/metrics" else page.json())
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{about}: {path} cannot be used: {error or type(error).__name__}") from error


def _answer(found: dict[str, Any]) -> tuple[str, int]:
    return found["choices"][0]["message"]["content"] or "", int(found["usage"]["completion_tokens"])


def _as_sent(message: Message) -> Message:
    """A message as OpenAI has it: calls with ids, and their arguments as text."""
    if "tool_calls" not in message:
        return message
    calls = [
        {
            "id": f"call_{at}",
            **call,
            "type": "function",
            "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for at, call in enumerate(message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


# Measuring ----------------------------------------------------------------------------------------------


def measure(settings: EvalConfig, data: DataConfig, drafter: str | None, seed: int) -> dict[str, Any]:
    """The report of a server over the prompts of ``data``, domain by domain.

    Errors: ``ValueError`` naming the row for a server that refuses it, or whose counters tell of other
    requests than ours; and for one that serves another drafter than that of the directory ``drafter``.
    """
    rows = first_of_each(read(replace(data, split=data.split or "eval")), settings.per_domain)
    check_skips(rows, data.max_skip)
    domains: dict[str, list[Row]] = {}
    for row in rows:
        if row.skip is None:
            domains.setdefault(row.domain, []).append(row)
    server = Server(settings)
    before = server.reading()
    num = len(before.accepted_at)
    method = check_served(settings, drafter, server.card, num)
    scored: list[Scored] = []
    gained: dict[str, Reading] = {}
    for domain, some in domains.items():
        with tqdm(total=len(some), unit="prompt", desc=domain, mininterval=1) as bar:
            for block in _blocks(some, settings.clients):
                after = _asked(server, block, before, seed)
                new, before = after.since(before), after
                gained[domain] = gained[domain] + new if domain in gained else new
                name = block[0].where + (f" and {len(block) - 1} more" if len(block) > 1 else "")
                scored.append(Scored(name, domain, {num: new.counts}, loops=None, prompts=len(block)))
                bar.update(len(block))
    found = build(
        scored,
        max_n=num,
        seed=seed,
        counting=_counting(ROUNDS in before.counters, server.ours),
        target=server.card["id"],
        drafter=drafter or server.url,
        method=method,
        temperature=settings.temperature,
        drafts="as served",
        mode="server",
        server=server.url,
        dtype="as served",
        device="as served",
    )
    for domain, row in found["domains"].items():
        row |= gained[domain].own_words
    found["overall"] |= reduce(add, gained.values()).own_words
    return found


def check_served(settings: EvalConfig, drafter: str | None, card: dict[str, Any], num: int) -> str:
    """The method of a drafter directory. Errors: ``ValueError`` where the server has another drafter.

    What the server says of it are the model of ``card`` and the ``num`` positions that it counts.
    """
    wanted, whose, method = settings.n, f"eval.n={settings.n}", "as served"
    if drafter is not None:
        found = read_config(Path(drafter))
        try:
            about, method = found["speculators_config"], found["speculators_model_type"]
            most = about["proposal_methods"][0]["speculative_tokens"]
            target = about["verifier"]["name_or_path"]
        except KeyError as error:
            raise ValueError(
                f"drafter={drafter}: config.json has no {error} to compare with the server; convert it with "
                "python -m train task=export format=vllm, or leave drafter out"
            ) from error
        if settings.model is None and target not in (card["id"], card.get("root")):
            raise ValueError(
                f"drafter={drafter} was made for {target}, eval.server={settings.server} serves {card['id']} "
                f"and so another; where that is a name of {target}, write eval.model={card['id']}"
            )
        if wanted is None:
            wanted, whose = [most], f"drafter={drafter}"
        elif max(wanted) > most:
            raise ValueError(f"eval.n={wanted}: this drafter was trained for 1 to {most} drafts a round")
    if wanted not in (None, [num]):
        raise ValueError(
            f"eval.server={settings.server} counts {num} draft positions, {whose} has {wanted}: it serves "
            f"another drafter, or was told another number of drafts; then write eval.n=[{num}]"
        )
    return method


def _blocks(rows: Sequence[Row], clients: int) -> list[Sequence[Row]]:
    """Up to ``BLOCKS`` parts of about one size, few enough to keep all clients busy."""
    num = min(len(rows), BLOCKS, max(2, len(rows) // clients))
    return [rows[len(rows) * at // num : len(rows) * (at + 1) // num] for at in range(num)]


def _asked(server: Server, block: Sequence[Row], before: Reading, seed: int) -> Reading:
    """The counters after all assistant turns of these rows were asked for, and are counted."""

    def converse(row: Row) -> list[int]:
        said: list[Message] = []
        tokens = []
        for part in questions(row):
            said += part
            text, num = server.ask(row, said, request_seed(seed, row.where))
            said.append({"role": "assistant", "content": text})
            tokens.append(num)
        return tokens

    turns = [turn for row in block for turn in turn_rows(row)]
    with ThreadPoolExecutor(server.settings.clients) as pool:
        tokens = [num for answers in pool.map(converse, turns) for num in answers]
    where = f"{block[0].where}: eval.server={server.url}"
    patience = monotonic() + SETTLE
    while True:
        after = server.reading()
        if len(after.accepted_at) != len(before.accepted_at):
            raise ValueError(f"{where} counts other draft positions now, so it serves another drafter")
        gained = after.since(before)
        if min(*gained.counters.values(), *gained.accepted_at) < 0:
            raise ValueError(f"{where}: its counters went back, so it was started anew; ask again")
        more = gained.counters[ANSWERS] - len(tokens), gained.counters[TOKENS] - sum(tokens)
        if more == (0, 0):
            return after
        if max(more) > 0 or monotonic() > patience:
            break
        sleep(0.05)
    why = "somebody else asks it too" if max(more) > 0 else "it was started anew, or is one of several"
    counted = f"{gained.counters[ANSWERS]:.0f} answers of {gained.counters[TOKENS]:.0f} tokens"
    raise ValueError(
        f"{where} counts {counted} where {len(tokens)} of {sum(tokens)} came back: {why}; ask a server that "
        "is yours alone"
    )


def _counting(rounds: bool, ours: bool) -> dict[str, Any]:
    return {
        **COUNTING,
        "eos_rounds": COUNTING["eos_rounds"] if rounds else "whole",
        "rounds": "all" if rounds else "those with drafts",
        "survival": "drafts emitted" if ours else "drafts accepted, also beyond a stop or the limit",
    }
