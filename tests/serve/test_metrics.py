"""What a Prometheus server reads."""

from __future__ import annotations

from etude.serve.app import Metrics


def test_the_engine_is_asked_when_the_page_is_read() -> None:
    counts = {"written_tokens": 3}
    metrics = Metrics(lambda: 2, lambda: counts)
    assert b"etude_engine_written_tokens 3.0" in metrics.text()
    counts["written_tokens"] = 8
    assert b"etude_engine_written_tokens 8.0" in metrics.text()
    assert b"etude_requests_in_flight 2.0" in metrics.text()


def test_an_engine_that_does_not_count_is_left_out() -> None:
    assert b"etude_engine" not in Metrics(lambda: 0).text()
