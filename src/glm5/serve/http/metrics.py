"""Prometheus metrics, under the names that users of other engines know (`num_requests_running`, ...), prefix `glm5:`.

Gauges and engine counters are read from the backend when Prometheus asks; what happens to a request is counted as its
deltas pass by. Read next: `control`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from glm5.serve.client import Backend
from glm5.serve.request import Delta, Request

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
LABEL = ["model_name"]


class Metrics:
    """The counters of one server, in a registry of their own.

    Args:
        backend: asked for its statistics at each scrape.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self.registry = backend, CollectorRegistry()
        self._name = backend.model_name
        self.registry.register(self)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens read from earlier requests' pages")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.steps = self._counter("spec_decode_num_drafts", "Verification steps")
        self.finished = self._counter("request_success", "Answers by how they ended", "finished_reason")
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by place in the draft", "position"
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.between = self._histogram("inter_token_latency_seconds", "Between two tokens of one answer", SECONDS)
        self.latency = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", SECONDS)
        self.prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request", TOKENS)
        self.pace = Pace()
        self.answer_size = self._histogram("request_generation_tokens", "Tokens of all answers to a request", TOKENS)

    def _counter(self, stem: str, text: str, *labels: str) -> Counter:
        metric = Counter(f"glm5:{stem}", text, [*LABEL, *labels], registry=self.registry)
        if not labels:
            metric.labels(self._name)  # so that it is there, at zero, before anything happened
        return metric

    def _histogram(self, stem: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"glm5:{stem}", text, LABEL, buckets=buckets, registry=self.registry)
        metric.labels(self._name)
        return metric

    def collect(self) -> Iterator[Metric]:
        """The backend's figures, for the registry."""
        s = self._backend.stats()
        gauges = {
            "num_requests_running": ("Requests in the running batch", s.running),
            "num_requests_waiting": ("Requests that wait for it", s.waiting),
            "kv_cache_usage_perc": ("Share of the pages in use, 1 being all", s.cache_usage),
        }
        counters = {
            "prefix_cache_queries": ("Tokens looked up in the prefix cache", s.prefix_queries),
            "prefix_cache_hits": ("Tokens found there", s.prefix_hits),
            "num_preemptions": ("Sequences that gave their pages to others", s.preemptions),
            "engine_steps": ("Steps of the engine", s.steps),
        }
        for stem, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"glm5:{stem}", text, labels=LABEL)
            gauge.add_metric([self._name], value)
            yield gauge
        for stem, (text, value) in counters.items():
            counter = CounterMetricFamily(f"glm5:{stem}", text, labels=LABEL)
            counter.add_metric([self._name], value)
            yield counter

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)

    def watch(self, request: Request) -> Watch:
        """Count a request that was accepted."""
        self.prompt_tokens.labels(self._name).inc(len(request.input_ids))
        self.prompt_size.labels(self._name).observe(len(request.input_ids))
        return Watch(self, self._name, request)


class Pace:
    """How many tokens all answers together got in a second, of late: while it was busy, an idle time is left out.

    Attributes:
        tokens_per_second: of the last whole second of work; 0 before there was one.
    """

    def __init__(self) -> None:
        self.tokens_per_second = 0.0
        self._begin = self._last = -1e9
        self._count = 0

    def take(self, count: int, now: float) -> None:
        """Count tokens at a time."""
        if now - self._last > 1.0:  # the first after a rest begins a second, and is not of it
            self._begin, self._count = now, 0
        else:
            self._count += count
        self._last = now
        if now - self._begin >= 1.0:
            self.tokens_per_second = self._count / (now - self._begin)
            self._begin, self._count = now, 0


class Watch:
    """Measures one request as its deltas pass."""

    def __init__(self, metrics: Metrics, name: str, request: Request) -> None:
        self._m, self._name, self._arrival = metrics, name, request.arrival
        self._left = request.params.n
        self._last: dict[int, float] = {}
        self._tokens = self._cached = 0
        self._closed = False

    def take(self, delta: Delta) -> None:
        """Count a delta at the moment of its arrival."""
        m, now, count = self._m, time.monotonic(), len(delta.ids)
        self._cached = max(self._cached, delta.cached_tokens)
        if count:
            before = self._last.get(delta.index)
            if before is None:
                m.first_token.labels(self._name).observe(now - self._arrival)
            else:
                m.between.labels(self._name).observe((now - before) / count)
            self._last[delta.index] = now
            self._tokens += count
            m.generation_tokens.labels(self._name).inc(count)
            m.pace.take(count, now)
        if delta.drafted:
            m.steps.labels(self._name).inc()
            m.drafted.labels(self._name).inc(delta.drafted)
            m.accepted.labels(self._name).inc(delta.accepted)
            for position in range(delta.accepted):
                m.accepted_at.labels(self._name, str(position)).inc()
        if delta.finish is not None:
            self._left -= 1
            m.finished.labels(self._name, delta.finish.type).inc()
            if self._left == 0:
                m.latency.labels(self._name).observe(now - self._arrival)

    def close(self) -> None:
        """The request is over. Answers that had not ended were given up by their reader."""
        if self._closed:
            return
        self._closed = True
        if self._left:
            self._m.finished.labels(self._name, "abort").inc(self._left)
        self._m.cached_tokens.labels(self._name).inc(self._cached)
        self._m.answer_size.labels(self._name).observe(self._tokens)
