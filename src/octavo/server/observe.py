"""What operators see: metrics in Prometheus' form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.outputs import RequestOutput

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)

_GAUGES = (
    ("num_requests_running", "Requests in the running batch.", ("num_running",)),
    ("num_requests_waiting", "Requests that wait for blocks or a place.", ("num_waiting",)),
    ("kv_blocks", "Blocks of the KV cache.", ("blocks", "total")),
    ("kv_blocks_free", "Blocks that can be handed out.", ("blocks", "free")),
    ("kv_blocks_used", "Blocks that requests hold.", ("blocks", "used")),
    ("kv_blocks_cached", "Free blocks whose contents can still be found.", ("blocks", "cached")),
    ("kv_blocks_shared", "Blocks that more than one request holds.", ("blocks", "shared")),
)  # fmt: skip
_COUNTERS = (
    ("steps", "Steps of the engine.", ("num_steps",)),
    ("tokens_computed", "Tokens that went through the model, again after preemptions included, and drafts.", ("num_tokens_computed",)),
    ("generation_tokens", "Tokens generated.", ("num_tokens_generated",)),
    ("draft_tokens", "Drafts that went through the model.", ("speculation", "drafted")),
    ("draft_tokens_accepted", "Drafts that became output.", ("speculation", "accepted")),
    ("preemptions", "Requests that gave up blocks for others.", ("num_preemptions",)),
    ("resumptions", "Preempted requests that went on.", ("num_resumptions",)),
    ("prefix_cache_queries", "Look-ups in the prefix cache.", ("prefix_cache", "queries")),
    ("prefix_cache_hits", "Look-ups that found something.", ("prefix_cache", "hits")),
    ("prefix_cache_tokens_asked", "Prompt tokens looked up.", ("prefix_cache", "tokens_asked")),
    ("prefix_cache_tokens_saved", "Prompt tokens found, and so not computed.", ("prefix_cache", "tokens_saved")),
)  # fmt: skip


class EngineCollector(Collector):
    """Turns the engine's ``stats()`` into metrics; ``update`` brings the newest."""

    def __init__(self) -> None:
        self._stats: dict[str, Any] = {}

    def update(self, stats: dict[str, Any]) -> None:
        """Keep these figures for the next ``collect``."""
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All figures, in Prometheus' form."""
        if not self._stats:
            return
        for name, text, path in _GAUGES:
            yield GaugeMetricFamily(f"octavo_{name}", text, value=self._find(path))
        blocks = self._stats["blocks"]
        yield GaugeMetricFamily("octavo_kv_cache_usage_ratio", "Share of the blocks that requests hold.", blocks["used"] / blocks["total"])
        for name, text, path in _COUNTERS:
            yield CounterMetricFamily(f"octavo_{name}", text, value=self._find(path))
        finished = CounterMetricFamily("octavo_requests_finished", "Samples that ended, by reason.", labels=["reason"])
        for reason, count in self._stats["num_finished"].items():
            finished.add_metric([reason], count)
        yield finished

    def _find(self, path: tuple[str, ...]) -> float:
        value: Any = self._stats
        for key in path:
            value = value[key]
        return float(value)


class Observer:
    """The server's metrics; each server has its own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.mean_latency = 1.0
        """Seconds that a request has taken of late."""

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"octavo_{name}", text, buckets=buckets, registry=self.registry)

        self._first = histogram("time_to_first_token_seconds", "From arrival in the engine to the first token.", _SECONDS)
        self._each = histogram("time_per_output_token_seconds", "Mean time of a request's tokens after the first.", _TOKEN_SECONDS)
        self._queued = histogram("request_queue_time_seconds", "From arrival in the engine to admission.", _SECONDS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival in the engine to the last token.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output = histogram("request_generation_tokens", "Tokens of an output, all samples together.", _TOKENS)
        self._http = Counter("octavo_http_requests", "HTTP requests.", ["path", "status"], registry=self.registry)

    def saw_response(self, path: str, status: int) -> None:
        """Count an HTTP response."""
        self._http.labels(path, str(status)).inc()

    def saw_end(self, output: RequestOutput, num_tokens: int) -> None:
        """Count a request of the engine that ended with ``num_tokens`` tokens."""
        m = output.metrics
        if m is None or m.first_token_time is None or m.finish_time is None or output.error is not None:
            return
        self._prompt.observe(len(output.prompt_token_ids))
        self._output.observe(num_tokens)
        self._first.observe(m.first_token_time - m.arrival_time)
        self._whole.observe(m.finish_time - m.arrival_time)
        self.mean_latency += 0.1 * (m.finish_time - m.arrival_time - self.mean_latency)
        if m.admitted_time is not None:
            self._queued.observe(m.admitted_time - m.arrival_time)
        if num_tokens > 1:
            self._each.observe((m.finish_time - m.first_token_time) / (num_tokens - 1))

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
