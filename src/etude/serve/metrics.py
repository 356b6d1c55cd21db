"""What a Prometheus server reads at `/metrics`. Each app has its own registry, so that two in one process do not mix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class EngineCollector(Collector):
    """What the engine itself counts, asked when somebody reads the page."""

    def __init__(self, statistics: Callable[[], Mapping[str, int]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a figure for each."""
        for name, value in self._statistics().items():
            yield GaugeMetricFamily(f"etude_engine_{name}", f"The engine's {name.replace('_', ' ')}.", value)


class Metrics:
    """Counts of one app; of its engine too, if it has one that counts."""

    def __init__(
        self, in_flight: Callable[[], float], statistics: Callable[[], Mapping[str, int]] | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        if statistics:
            self.registry.register(EngineCollector(statistics))
        labels = ("endpoint", "outcome")  # a status, or why there was none
        self.requests = Counter("etude_requests", "Requests that ended.", labels, registry=self.registry)
        self.prompt_tokens = Counter("etude_prompt_tokens", "Tokens of prompts answered.", registry=self.registry)
        self.completion_tokens = Counter("etude_completion_tokens", "Tokens sampled.", registry=self.registry)
        running = Gauge("etude_requests_in_flight", "Requests admitted and not ended.", registry=self.registry)
        running.set_function(in_flight)
        about = ("etude_request_seconds", "Time from a request's headers to its end.", ("endpoint",))
        self.seconds = Histogram(*about, registry=self.registry, buckets=SECONDS)
        first = ("etude_first_token_seconds", "Time to a stream's first token.")
        self.first_token = Histogram(*first, registry=self.registry, buckets=SECONDS)

    def text(self) -> bytes:
        """Return the page."""
        return generate_latest(self.registry)
