"""``eval.server=``: our own server's counters say what replay says, and others' are not mixed with ours."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from data.sources import DataConfig
from drafters import checkpoint
from drafters.target import HardwareConfig, load
from drafters.types import Example
from eval import counters
from eval.counters import ACCEPTED_AT, NEEDED, ROUNDS, Server, measure, parse
from eval.evaluate import EvalConfig
from serve.ngram import Ngram, NgramConfig
from tests import tiny
from tests.commands import CPU, command, refusal
from tests.test_http import HELLO, prompt_ids, serving


@pytest.fixture(scope="module")
def target(workshop):
    return load(str(workshop / "target"), HardwareConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def drafter(target):
    """One that knows two of the answers: some drafts are accepted."""
    known = []
    for row in tiny.answered_rows(target, 2):
        (_, answer), prompt = row["answers"][0], prompt_ids(target, row["messages"][:1])
        mask = [False] * len(prompt) + [True] * len(answer)
        known.append(Example(prompt + answer, mask, row["domain"], row["id"]))
    return tiny.trained(target, known, steps=30)


@pytest.fixture(scope="module")
def directory(drafter, tmp_path_factory):
    directory = tmp_path_factory.mktemp("drafters") / "one"
    checkpoint.write(drafter, directory)
    return directory


@pytest.fixture(scope="module")
def served(target, drafter):
    with serving(target, drafter) as served:
        yield served


@pytest.fixture
def here(workshop, tmp_path, monkeypatch):
    """The working directory, with rows in two domains: what a conversation asks in between is asked too."""
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in (workshop / "rows.jsonl").read_text().splitlines()[:6]]
    tiny.write_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path


def report(where="report-server/report.json") -> dict:
    with open(where) as file:
        return json.load(file)


def asked(server, *more: str) -> list[str]:
    return [f"eval.server={server.url}", "data.path=rows.jsonl", *more]


# Our own server -----------------------------------------------------------------------------------------


def test_a_server_tells_what_replay_tells(served, here, workshop, directory, capsys):
    both = ["data.path=rows.jsonl", "eval.max_new_tokens=24", f"drafter={directory}", "seed=3"]
    assert command("eval", *asked(served, "eval.model=tiny", *both, "eval.n=[4]")) == 0
    told = report()
    assert command("eval", *CPU, f"target={workshop / 'target'}", *both, "eval.n=[4]", "out=replay") == 0
    replayed = report("replay/report.json")
    for row, want in [
        (told["overall"], replayed["overall"]),
        *((told["domains"][name], want) for name, want in replayed["domains"].items()),
    ]:
        same = ("prompts", "rounds", "tokens", "tau", "survival", "conditional", "tau_by_n")
        assert {key: row[key] for key in same} == {key: want[key] for key in same}
        low, high = row["tau_ci95"]
        assert low <= row["tau"] <= high
        assert row["drafted_rounds"] == row["rounds"]
        assert row["loops"] is None
    assert told["overall"]["survival"][0] > 0
    assert told["worst_domain"] == replayed["worst_domain"]
    assert (told["mode"], told["method"], told["target"], told["server"]) == (
        "server",
        "dflash",
        "tiny",
        served.url,
    )
    assert told["counting"]["rounds"] == "all"
    assert told["counting"]["survival"] == "drafts emitted"
    assert "worst domain" in capsys.readouterr().out
    assert (here / "report-server" / "report.html").exists()


def test_rounds_without_drafts_count_in_tau(target, here):
    """What n-gram lookup cannot find is not drafted: the counters of drafts know nothing of those rounds."""
    proposer = Ngram(NgramConfig(shortest=1))
    with serving(target, proposer) as served:
        settings = EvalConfig(server=served.url, max_new_tokens=12, clients=2)
        row = measure(settings, DataConfig(path="rows.jsonl"), None, 0)["overall"]
    assert row["tokens"] == 6 * 11
    assert row["drafted_rounds"] < row["rounds"] <= row["tokens"]
    assert row["tau"] == round(row["tokens"] / row["rounds"], 4)
    assert len(row["survival"]) == proposer.max_drafts


def test_every_assistant_turn_is_asked_for(target, drafter, here):
    talk = [
        {"role": role, "content": f"{role} {at}"}
        for at, role in enumerate(["user", "assistant", "user", "user", "assistant"])
    ]
    call = {"type": "function", "function": {"name": "clock", "arguments": {"city": "Oslo"}}}
    rows = [
        {"messages": talk},  # an answer is missing, the last is asked for again
        {"messages": [*talk[:3]]},
        {
            "messages": [
                talk[0],
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "noon", "tool_call_id": "call_0"},
            ],
            "tools": [{"type": "function", "function": {"name": "clock", "parameters": {}}}],
        },
        # Kept ids say which turns are the target's.
        {"messages": [talk[0], talk[1], talk[2], talk[4]], "answers": [[3, [9, 9]]], "tokenizer": "any"},
    ]
    tiny.write_rows(here / "rows.jsonl", rows)
    with serving(target, drafter, context=500) as served:
        settings = EvalConfig(server=served.url + "/v1", max_new_tokens=3)
        found = measure(settings, DataConfig(path="rows.jsonl"), None, 0)["overall"]
        assert served.metrics()["vllm:generation_tokens_total"] == 7 * 3
    assert (found["prompts"], found["tokens"]) == (4, 7 * 2)


def test_a_seed_is_sent_with_each_request(served, here):
    taus = {}
    for seed in (1, 1, 2):
        settings = EvalConfig(server=served.url, temperature=1.0, max_new_tokens=16)
        found = measure(settings, DataConfig(path="rows.jsonl"), None, seed)
        assert taus.setdefault(seed, found["domains"]) == found["domains"]
    assert taus[1] != taus[2]


def test_a_server_that_asks_for_a_key_gets_it(target, drafter, here, capsys, monkeypatch):
    with serving(target, drafter, api_key="secret") as served:
        message = refusal(capsys, "eval", *asked(served))
        assert "401" in message
        assert "FOREDRAFT_API_KEY" in message
        assert command("eval", *asked(served, "eval.api_key=secret", "eval.max_new_tokens=4")) == 0
        monkeypatch.setenv("FOREDRAFT_API_KEY", "secret")
        assert command("eval", *asked(served, "eval.max_new_tokens=4")) == 0


# Servers that are not what they should be ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["eval.model=large"], "eval.model=large: http://127.0.0.1"),
        (["drafter=nowhere"], "drafter=nowhere: no drafter directory"),
        (["eval.n=[3]"], "counts 4 draft positions, eval.n=[3]"),
        (["eval.n=[2,4]"], "counts 4 draft positions, eval.n=[2, 4]"),
        (["eval.max_new_tokens=9999"], "rows.jsonl:1: eval.server="),
        (["data.path=nowhere.jsonl"], "no such file"),
    ],
)
def test_what_does_not_fit_the_server_is_refused(served, here, capsys, more, words):
    assert words in refusal(capsys, "eval", *asked(served), *more)
    assert not (here / "report-server").exists()


def test_a_server_of_another_drafter_is_refused(served, target, directory, here, capsys):
    ours = asked(served, f"drafter={directory}")
    message = refusal(capsys, "eval", *ours)  # the directory names the target by its path
    assert "serves tiny and so another" in message
    assert "write eval.model=tiny" in message
    message = refusal(capsys, "eval", *ours, "eval.model=tiny", "eval.n=[5]")
    assert "trained for 1 to 4 drafts" in message
    checkpoint.write(tiny.dflash(target, block_size=4), here / "short")
    message = refusal(capsys, "eval", *asked(served, "drafter=short", "eval.model=tiny"))
    assert "counts 4 draft positions, drafter=short has [3]: it serves another" in message


def test_a_server_that_drafts_nothing_is_refused(target, here, capsys):
    with serving(target) as served:
        message = refusal(capsys, "eval", *asked(served))
    assert "accepted_tokens_per_pos_total" in message
    assert "start vLLM with --speculative-config" in message


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nowhere", "http://[", "ftp://127.0.0.1"])
def test_a_server_that_cannot_be_reached_is_refused(here, capsys, url):
    assert "cannot be reached" in refusal(capsys, "eval", f"eval.server='{url}'", "data.path=rows.jsonl")


def test_without_a_round_or_a_row_nothing_is_reported(served, here, capsys):
    message = refusal(capsys, "eval", *asked(served, "eval.max_new_tokens=1"))
    assert "no conversation made a round" in message
    (here / "rows.jsonl").write_text("")
    assert "it holds no row" in refusal(capsys, "eval", *asked(served))


# A server by hand ---------------------------------------------------------------------------------------


@dataclass
class Fake:
    """vLLM as evaluation sees it. Each answer has 6 tokens, 5 of them of rounds that accept 1 and 2 drafts.

    ``then(fake)`` is called after it.
    """

    counted: Counter = field(default_factory=Counter)
    then: Callable[[Fake], object] = lambda fake: None
    positions: int = 3
    url: str = ""
    bodies: list[dict] = field(default_factory=list)

    def answer(self, body: dict) -> dict:
        self.bodies.append(body)
        gained = {"answers": 1, "tokens": 6, "rounds": 2, "drafts": 2, "drafted": 6, "accepted": 3}
        self.counted.update({**gained, "0": 2, "1": 1})
        self.then(self)
        return {"choices": [{"message": {"content": "so"}}], "usage": {"completion_tokens": 6}}

    def metrics(self) -> str:
        names = {
            "spec_decode_num_drafts_total": "drafts",
            "spec_decode_num_draft_tokens_total": "drafted",
            "spec_decode_num_accepted_tokens_total": "accepted",
            "generation_tokens_total": "tokens",
        }
        labels = 'model_name="m",engine="0"'
        lines = [f"vllm:{name}{{{labels}}} {self.counted[key]}.0" for name, key in names.items()]
        for k in range(self.positions):
            lines.append(f'{ACCEPTED_AT}{{{labels},position="{k}"}} {self.counted[str(k)]}.0')
        if "rounds" in self.counted:
            lines.append(f"{ROUNDS}{{{labels}}} {self.counted['rounds']}.0")
        for reason in ("stop", "length"):
            half = self.counted["answers"] // 2 + (reason == "stop") * (self.counted["answers"] % 2)
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {half}.0')
        return "\n".join(lines) + "\n"


@contextmanager
def faking(fake: Fake) -> Iterator[Fake]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            card = {"id": "m", "owned_by": "vllm", "root": "/models/m"}
            self.send(fake.metrics() if self.path == "/metrics" else json.dumps({"data": [card]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send(json.dumps(fake.answer(body)))

        def send(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def fake(here, monkeypatch):
    monkeypatch.setattr(counters, "SETTLE", 0.2)
    with faking(Fake(Counter(answers=7, tokens=99, rounds=40, drafts=40, drafted=120, accepted=9))) as fake:
        yield fake


def measured(fake: Fake, **settings) -> dict:
    config = EvalConfig(server=fake.url, clients=1, **settings)
    return measure(config, DataConfig(path="rows.jsonl"), None, 0)


def test_what_was_counted_before_is_left_out(fake):
    found = measured(fake)
    assert (found["target"], found["max_n"], found["method"]) == ("m", 3, "as served")
    assert found["counting"]["survival"] == "drafts accepted, also beyond a stop or the limit"
    for row, prompts in ((found["overall"], 6), (found["domains"]["chat"], 3)):
        assert (row["prompts"], row["rounds"], row["tokens"]) == (prompts, 2 * prompts, 5 * prompts)
        assert (row["tau"], row["survival"]) == (2.5, [1.0, 0.5, 0.0])
        assert row["mean_acceptance_length"] == 2.5
        assert row["tau_ci95"] == [2.5, 2.5]


def test_tools_are_shown_to_vllm_and_calls_are_not_parsed(fake, here):
    """It refuses tools that it is to choose from by itself, unless it was started for that."""
    tool = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    tiny.write_rows(here / "rows.jsonl", [{"messages": HELLO, "tools": [tool]}, {"messages": HELLO}])
    measured(fake)
    with_tools, without = fake.bodies
    assert (with_tools["tools"], with_tools["tool_choice"]) == ([tool], "none")
    assert not {"tools", "tool_choice"} & set(without)


def test_where_rounds_are_not_counted_tau_is_one_and_the_sum_of_survival(fake):
    fake.then = lambda fake: fake.counted.pop("rounds")
    del fake.counted["rounds"]
    found = measured(fake)
    assert found["overall"]["tau"] == 1 + sum(found["overall"]["survival"]) == 2.5
    assert (found["counting"]["rounds"], found["counting"]["eos_rounds"]) == ("those with drafts", "whole")


def test_the_interval_resamples_blocks(fake, here):
    rows = here / "rows.jsonl"
    rows.write_text(rows.read_text() * 6)
    fake.then = lambda fake: fake.counted.update(rounds=2) if len(fake.bodies) <= 9 else None
    found = measured(fake)
    assert [line["domain"] for line in found["conversations"]] == ["chat"] * 8 + ["code"] * 8
    assert found["conversations"][0]["name"] == "rows.jsonl:1 and 1 more"
    chat = found["domains"]["chat"]
    assert chat["tau_ci95"][0] < chat["tau"] < chat["tau_ci95"][1]
    assert found["domains"]["code"]["tau_ci95"] == [2.5, 2.5]


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (lambda fake: fake.counted.clear(), "went back, so it was started anew"),
        (lambda fake: fake.counted.update(answers=-1, tokens=-6), "started anew, or is one of several"),
        (lambda fake: fake.counted.update(answers=1, tokens=6), "somebody else asks it too"),
        (lambda fake: fake.counted.update(tokens=1), "somebody else asks it too"),
        (lambda fake: setattr(fake, "positions", 5), "serves another drafter"),
    ],
    ids=["reset", "counts less", "another client", "another's tokens", "another drafter"],
)
def test_counters_that_are_not_ours_alone_are_refused_with_the_row(fake, happens, words):
    """In the second domain: the first was fine."""
    fake.then = lambda fake: happens(fake) if len(fake.bodies) == 4 else None
    with pytest.raises(ValueError, match=rf"rows.jsonl:2: eval.server=.*{words}"):
        measured(fake)


def test_a_domain_without_a_round_is_refused_by_its_first_row(fake, capsys):
    fake.then = lambda fake: fake.counted.update(rounds=-2) if len(fake.bodies) > 3 else None
    message = refusal(capsys, "eval", *asked(fake, "eval.clients=1"))
    assert "rows.jsonl:2: domain code is empty" in message


def test_a_server_may_take_a_moment_to_count(fake, monkeypatch):
    late = []
    fake.then = lambda fake: late.append(fake.counted.copy())
    metrics = fake.metrics

    def slowly() -> str:
        shown, fake.counted = fake.counted, late.pop(0) if len(late) > 1 else fake.counted
        text = metrics()
        fake.counted = shown
        return text

    monkeypatch.setattr(fake, "metrics", slowly)
    assert measured(fake)["overall"]["tau"] == 2.5


def test_a_page_without_counters_of_drafts_is_refused():
    with pytest.raises(ValueError, match=f"no {NEEDED[0]}"):
        parse("vllm:generation_tokens_total 5.0\n")


def test_a_page_that_is_none_is_refused(fake, monkeypatch):
    monkeypatch.setattr(fake, "metrics", lambda: "<html>")
    with pytest.raises(ValueError, match=r"/metrics cannot be used"):
        Server(EvalConfig(server=fake.url)).reading()


def test_the_engines_of_a_server_are_added_up():
    page = "".join(
        f'{name}{{engine="{engine}"}} {engine + 1}.0\n' for name in (*NEEDED, ROUNDS) for engine in (0, 1)
    )
    for engine, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
        page += f'{ACCEPTED_AT}{{engine="{engine}",position="{k}"}} {9 - k}.0\n'
    found = parse(page)
    assert found.accepted_at == (18.0, 16.0)
    assert {found.counters[name] for name in NEEDED} == {3.0}


def test_the_fake_is_like_our_own_server(served):
    """Its names are those that a server of ours has."""
    names = {line.split("{")[0] for line in Fake(Counter(rounds=1)).metrics().splitlines()}
    httpx.post(served.url + "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2}, timeout=30)
    page = httpx.get(served.url + "/metrics").text
    assert all(f"\n{name}{{" in page for name in names)
