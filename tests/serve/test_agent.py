"""`etude agent` against a real `etude serve`: in token ids where the tokeniser is here, in messages where it is not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.agent.trace import read_traces
from etude.models.bases import resolve
from tests.conftest import Etude


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A copy of sprout, served under a name that no base has; its address and its folder."""
    folder = tmp_path_factory.mktemp("served") / "mine"
    base = resolve("sprout").folder
    assert base is not None
    shutil.copytree(base, folder)
    words = [sys.executable, "-m", "etude", "serve", str(folder), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        address = next(match[0] for line in process.stdout if (match := re.search(r"http://[\d.:]+/v1", line)))
        yield address, folder
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize("in_messages", [False, True])
def test_the_agent_works_against_our_own_server(
    etude: Etude, served: tuple[str, Path], tmp_path: Path, in_messages: bool
) -> None:
    address, folder = served
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/app.py").write_text("def add(a, b):\n    return a - b\n")
    if in_messages:  # as on another machine
        (folder / "tokenizer_config.json").rename(folder / "gone")
    try:
        said = etude(
            "agent", "add subtracts", "--model", address, "--repo", tmp_path / "repo", "--turns", 3 if in_messages else 1, "--trace", tmp_path / "t",
            "--temperature", 0,  # the same text every time
        )  # fmt: skip
    finally:
        if in_messages:
            (folder / "gone").rename(folder / "tokenizer_config.json")
    assert said.code == 0, said.err
    assert ("is asked in messages, not in token ids" in said.out + said.err) is in_messages
    (trace,), _ = read_traces(tmp_path / "t")
    sampled = [node for node in trace.nodes if node.sampled and node.tokens]  # a turn that did not fit has none
    assert sampled
    assert all(node.trainable is not in_messages for node in sampled)
    assert trace.made_by["settings"]["turn_tokens"] == 512 * (
        4 if in_messages else 1
    )  # a quarter of the context it tells
