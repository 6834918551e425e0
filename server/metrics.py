"""What `/metrics` shows. One registry per app, so that two apps in one process do not add up."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

MAX_ADAPTER_LABELS = 100
OTHER = "other"
UNKNOWN = "unknown"
CLIENT_GONE = "499"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass
class Watch:
    """One request while it runs. Whoever ends it sets `status`; left alone, the client went away."""

    adapter: str = UNKNOWN
    status: str = CLIENT_GONE
    prompt_tokens: int = 0
    completion_tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    first_text: float | None = None

    def chunk(self, chunk: dict[str, Any]) -> None:
        """A chunk of a stream, or a whole answer, goes out."""
        if any(_has_text(choice) for choice in chunk["choices"]):
            self.completion_tokens += 1
            self.first_text = self.first_text or time.monotonic()
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("message") or choice.get("delta", {}).get("content"))


class Metrics:
    """Counters, gauges and histograms of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._adapters: set[str] = set()
        self.requests = Counter(
            "lanewise_requests",
            "Requests for tokens, by how they ended (499: the client went away).",
            ["route", "adapter", "status"],
            registry=self.registry,
        )
        self.running = Gauge("lanewise_requests_running", "Requests being answered.", registry=self.registry)
        self.seconds = Histogram(
            "lanewise_request_seconds",
            "From a request's arrival to its end.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "lanewise_first_token_seconds",
            "From a request's arrival to the first text of a stream, or to a whole answer.",
            ["adapter"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "lanewise_tokens",
            "Tokens; of a stream that did not ask for usage, its chunks with text and no prompt.",
            ["adapter", "kind"],
            registry=self.registry,
        )
        self.pushes = Counter(
            "lanewise_pushes", "Pushes: stored, or the error they met.", ["outcome"], registry=self.registry
        )
        self.push_seconds = Histogram(
            "lanewise_push_seconds",
            "From a push's first byte to its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.activations = Counter(
            "lanewise_activations", "Active versions set.", ["adapter"], registry=self.registry
        )

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show a value that is read when the metrics are."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def adapter_label(self, adapter: str) -> str:
        """The adapter's name, or `other` once there are too many to keep apart."""
        if len(self._adapters) < MAX_ADAPTER_LABELS:
            self._adapters.add(adapter)
        return adapter if adapter in self._adapters else OTHER

    @contextmanager
    def request(self, route: str) -> Generator[Watch]:
        """Count a request from here to the end of the block."""
        watch = Watch()
        self.running.inc()
        try:
            yield watch
        finally:
            self.running.dec()
            self.requests.labels(route, watch.adapter, watch.status).inc()
            self.seconds.labels(route).observe(time.monotonic() - watch.started)
            if watch.first_text is not None:
                self.first_token_seconds.labels(watch.adapter).observe(watch.first_text - watch.started)
            self.tokens.labels(watch.adapter, "prompt").inc(watch.prompt_tokens)
            self.tokens.labels(watch.adapter, "completion").inc(watch.completion_tokens)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)
