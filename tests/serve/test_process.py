"""A server that is killed, and one that is asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.serve.scripted import PATIENCE

HELD = 2
ROOT = Path(__file__).parents[2]


class Process:
    """A process that shares nothing with the tests: one of multiprocessing's forkserver sometimes waited for ever for what it is to do."""

    def __init__(self, port: int = 0, held_at: int = -1, drain: int = 0) -> None:
        words = [sys.executable, "-m", "tests.serve.process", str(port), str(held_at), str(drain)]
        self.running = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.running.stdout
        self.port = int(self.running.stdout.readline())  # of one that died: nothing, which is no number

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def stream(self) -> Iterator[str]:
        for chunk in self.client().completions.create(model="tiny", prompt="a", stream=True):
            yield chunk.choices[0].text

    def send(self, number: signal.Signals) -> None:
        os.kill(self.running.pid, number)

    def wait_until_it_refuses(self) -> None:
        while True:
            try:
                self.client().models.list()
            except openai.APIConnectionError:
                return

    def end(self) -> int:
        with self.running:
            return self.running.wait(PATIENCE)


def test_killed_in_the_midst_of_a_stream() -> None:
    killed = Process(held_at=HELD)
    stream = killed.stream()
    next(stream)
    killed.send(signal.SIGKILL)
    with pytest.raises((openai.APIConnectionError, httpx2.TransportError)):
        list(stream)
    assert killed.end() == -signal.SIGKILL
    again = Process(port=killed.port)
    assert "".join(again.stream()) == "import os, return left"
    again.send(signal.SIGTERM)
    assert again.end() == 0


def test_asked_to_stop_it_finishes_what_runs_and_refuses_what_is_new() -> None:
    asked = Process(held_at=HELD, drain=PATIENCE)
    stream = asked.stream()
    heard = next(stream)
    asked.send(signal.SIGTERM)
    asked.wait_until_it_refuses()
    asked.send(signal.SIGUSR1)
    assert heard + "".join(stream) == "import os, return left"
    assert asked.end() == 0


def test_what_does_not_end_in_time_is_told_so() -> None:
    asked = Process(held_at=HELD, drain=0)
    stream = asked.stream()
    next(stream)
    asked.send(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(stream)
    assert asked.end() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    asked = Process(held_at=HELD, drain=PATIENCE)
    next(asked.stream())
    asked.send(signal.SIGTERM)
    asked.wait_until_it_refuses()
    asked.send(signal.SIGINT)
    assert asked.end() == 128 + signal.SIGINT
