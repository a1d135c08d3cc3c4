"""What ``/metrics`` tells, under the names and labels that vLLM 0.32 gives them, so that its dashboards fit.

Each application has a registry of its own. vLLM counts accepted drafts before an answer is cut at its end;
here, as everywhere in this project, accepted drafts are those that were emitted.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serve.schedule import Summary
from serve.types import Round

LABELS = ("model_name", "engine")
SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    25,
    50,
    100,
    250,
    500,
    1000,
)


class Metrics:
    """Counters and histograms of one served model; ``running`` and ``waiting`` are asked when read."""

    def __init__(
        self, model: str, num_drafts: int, running: Callable[[], int], waiting: Callable[[], int]
    ) -> None:
        self.registry = CollectorRegistry()
        self.labels = {"model_name": model, "engine": "0"}
        self._gauge("vllm:num_requests_running", "Requests in a slot.", running)
        self._gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", waiting)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished prefills.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens emitted.")
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds with drafts.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafts verified.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted and emitted.")
        by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted and emitted, by position in their round.",
            (*LABELS, "position"),
            registry=self.registry,
        )
        self.accepted_at = [by_position.labels(**self.labels, position=str(k)) for k in range(num_drafts)]
        self.finished = Counter(
            "vllm:request_success", "Answers.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.between = self._histogram("inter_token_latency_seconds", "Between the outputs of two rounds.")
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Of an answer: from its first token to the last, over the tokens after the first.",
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.")

    def show_schedule(self, ask: Callable[[], Summary]) -> None:
        """What decides the number of drafts, as gauges of our own."""
        self._gauge(
            "foredraft:schedule_drafts",
            "N of now of the trained drafter; 0: it does not draft.",
            lambda: ask().drafts,
        )
        self._gauge(
            "foredraft:schedule_plain_share",
            "Of all rounds, those that asked for no drafts.",
            lambda: ask().plain_share,
        )
        self._gauge(
            "foredraft:schedule_verified_drafts",
            "Drafts verified for a request, in the mean of rounds that asked for some.",
            lambda: ask().verified,
        )

    def count_round(self, verified: Round) -> None:
        """A round; one without drafts is not counted, as in vLLM."""
        if not verified.drafted:
            return
        self.drafts.inc()
        self.draft_tokens.inc(verified.drafted)
        self.accepted.inc(verified.accepted)
        for counter in self.accepted_at[: verified.accepted]:
            counter.inc()

    def count_finish(self, reason: str) -> None:
        self.finished.labels(**self.labels, finished_reason=reason).inc()

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, help: str, ask: Callable[[], float]) -> None:
        gauge = Gauge(name, help, LABELS, registry=self.registry)
        gauge.labels(**self.labels).set_function(ask)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"vllm:{name}", help, LABELS, registry=self.registry).labels(**self.labels)

    def _histogram(self, name: str, help: str) -> Histogram:
        made = Histogram(f"vllm:{name}", help, LABELS, registry=self.registry, buckets=SECONDS)
        return made.labels(**self.labels)
