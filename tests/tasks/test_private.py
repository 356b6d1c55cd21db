"""A private repository as a new user brings it: proprietary, versions in a requirements file, unittest-style tests, a service."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import tiny
from tests.tasks import small

if TYPE_CHECKING:
    from tests.conftest import Etude

CODE = '''"""Orders of the shop."""


def order_total(lines):
    """Return what lines of (price, count) cost."""
    amount = 0
    for price, count in lines:
        if count < 0:
            raise ValueError("a negative count")
        amount += price * count
    return amount


def with_discount(price, percent):
    """Return a price less a discount."""
    return price - price * percent // 100
'''
TESTS = """import pathlib
import socket
import unittest

from shop import order_total, with_discount


class OrderTests(unittest.TestCase):
    def setUp(self):
        self.assertEqual(pathlib.Path("/tmp/stock").read_text(), "open\\n")

    def test_total(self):
        self.assertEqual(order_total([(250, 2), (100, 3)]), 800)

    def test_nothing(self):
        self.assertEqual(order_total([]), 0)

    def test_negative(self):
        with self.assertRaises(ValueError):
            order_total([(1, -1)])

    def test_discount(self):
        self.assertEqual(with_discount(1000, 15), 850)

    def test_no_discount(self):
        self.assertEqual(with_discount(1000, 0), 1000)

    def test_elsewhere(self):
        socket.getaddrinfo("shop.invalid", 80)
"""
SERVICE = """
services = [{ run = "echo open > /tmp/stock; exec sleep 60", ready = "grep -q open /tmp/stock" }]
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in small.offline().items():
        monkeypatch.setenv(name, value)
    folder, pinned = tmp_path / "shop", f"pytest=={importlib.metadata.version('pytest')}\n"
    for name, text in {"src/shop/__init__.py": CODE, "tests/test_orders.py": TESTS, "requirements.txt": pinned}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    tiny.git(folder, "init", "-q")
    tiny.git(folder, "add", ".")
    tiny.git(folder, "commit", "-qm", "all of it")
    monkeypatch.chdir(tmp_path)
    return folder


def test_init_make_check_and_an_export_that_asks(etude: Etude, shop: Path) -> None:
    small.run(asyncio.sleep(0))  # skips where there is no sandbox
    assert etude("init", shop).code == 0
    recipe = Path("mine-tasks.toml")
    text = (
        recipe.read_text(encoding="utf-8")
        .replace("mutation = 8 ", "mutation = 1 ")
        .replace("deletion = 4", "deletion = 1")
    )
    recipe.write_text(text + SERVICE, encoding="utf-8")
    made = etude("tasks", "make", recipe, "--cache", "cache")
    assert made.code == 0, made.err
    assert "needs a network" in made.out
    unused = [json.loads(line) for line in Path("runs/tasks/shop-tasks/unused.jsonl").read_text().splitlines()]
    (network,) = [row for row in unused if row["of"] == "test"]
    assert (network["reason"], network["count"]) == ("needs a network", 1)
    assert "test_elsewhere" in network["example"]
    header, codebase, *tasks = [json.loads(line) for line in Path("mine-tasks.jsonl").read_text().splitlines()]
    assert header["tasks"] == len(tasks) == 2
    assert codebase["licence"] == "LicenseRef-proprietary"
    assert codebase["lock"]["file"] == "requirements.txt"
    assert len(codebase["tests"]["tests/test_orders.py"]) == 5
    assert etude("tasks", "check", "mine-tasks.jsonl", "--cache", "cache", "--sample", "1").code == 0
    export = ("tasks", "build", "mine-tasks.jsonl", "--cache", "cache", "--swebench", "rows.jsonl")
    said = etude(*export)
    assert (said.code, "--acknowledge proprietary" in said.err) == (2, True)
    assert etude(*export, "--acknowledge", "proprietary").code == 0
    assert len(Path("rows.jsonl").read_text().splitlines()) == 2
    said = etude(
        "tasks", "build", "mine-tasks.jsonl", "--cache", "cache", "--harbor", "out", "--acknowledge", "proprietary"
    )
    assert (said.code, "has services" in said.err) == (2, True)
