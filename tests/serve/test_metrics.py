"""What a Prometheus server reads."""

from __future__ import annotations

from prometheus_client import generate_latest

from etude.inference.http import Metrics


def test_the_engine_is_asked_when_the_page_is_read() -> None:
    counts = {"written_tokens": 3}
    metrics = Metrics(lambda: 2, lambda: counts)
    assert b"etude_engine_written_tokens 3.0" in generate_latest(metrics.registry)
    counts["written_tokens"] = 8
    page = generate_latest(metrics.registry)
    assert b"etude_engine_written_tokens 8.0" in page
    assert b"etude_requests_in_flight 2.0" in page


def test_an_engine_that_does_not_count_is_left_out() -> None:
    assert b"etude_engine" not in generate_latest(Metrics(lambda: 0).registry)
