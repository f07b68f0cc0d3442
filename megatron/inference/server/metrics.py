"""Counters of the server in Prometheus's text format (/metrics)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core.optional import require

_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters and histograms of requests; gauges of the engine's `stats`."""

    def __init__(self) -> None:
        self._library: Any = require("prometheus_client", "the server")
        self._registry = self._library.CollectorRegistry()
        count = self._library.Counter
        timing = partial(self._make, self._library.Histogram)
        self.requests = self._make(count, "requests", "Finished samples", ["finish_reason"])
        self._answers = self._make(count, "http_responses", "HTTP answers", ["path", "status"])
        self.prompt = self._make(count, "prompt_tokens", "Tokens of prompts")
        self.generated = self._make(count, "generation_tokens", "Generated tokens")
        self.open = self._make(self._library.Gauge, "open_samples", "Samples in progress")
        self.first_token_s = timing(
            "time_to_first_token_seconds", "Until the first token", buckets=_BUCKETS_S
        )
        self.gap_s = timing(
            "time_per_output_token_seconds", "Between tokens", buckets=_GAP_BUCKETS_S
        )
        self.total_s = timing(
            "request_duration_seconds", "Until the last token", buckets=_BUCKETS_S
        )
        self._engine: dict[str, Any] = {}

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP answer; ``path``: of a route."""
        self._answers.labels(path, str(status)).inc()

    def text(self, engine: Mapping[str, Any]) -> bytes:
        """Return all metrics; numbers of ``engine`` are the values of its stats."""
        for name, value in engine.items():
            if isinstance(value, int | float):
                if name not in self._engine:
                    self._engine[name] = self._make(
                        self._library.Gauge, f"engine_{name}", f"The engine's {name}"
                    )
                self._engine[name].set(value)
        found: bytes = self._library.generate_latest(self._registry)
        return found

    def _make(
        self, kind: Any, name: str, text: str, labels: Sequence[str] = (), **more: Any
    ) -> Any:
        return kind(f"megatron_{name}", text, labels, registry=self._registry, **more)


class RequestTimer:
    """Times of one sample."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._metrics.open.inc()
        self._started_s = time.monotonic()
        self._last_s: float | None = None

    def received(self, num_tokens: int) -> None:
        """Note that tokens have arrived."""
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        if self._last_s is None:
            self._metrics.first_token_s.observe(now_s - self._started_s)
        else:
            for _ in range(num_tokens):
                self._metrics.gap_s.observe((now_s - self._last_s) / num_tokens)
        self._last_s = now_s
        self._metrics.generated.inc(num_tokens)

    def finished(self, reason: str) -> None:
        """Note the end."""
        self._metrics.total_s.observe(time.monotonic() - self._started_s)
        self._metrics.open.dec()
        self._metrics.requests.labels(reason).inc()
