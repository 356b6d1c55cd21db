"""Every attack of the issue's list against every backend of this machine, as root and as nobody; see hostile.py."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox import attacks, hostile
from tests.sandbox.backends import BACKENDS

ROOT = Path(__file__).parents[2]
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
SCENARIOS = ("output", "forged", "daemon", "stubborn", "odd_files", "links", "races", "marks", "orphans", "forged_status",
             "planted", "proxy", "locks", "leaks")  # fmt: skip
USERS = ("root", "unprivileged") if os.getuid() == 0 else ("unprivileged",)
NEED_ROOT = {
    "raw_sockets",
    "make_devices",
    "open_devices",
    "type_for_the_host",
    "kernel_settings",
    "kernel_parameters",
    "socket_families",
}  # to succeed without a sandbox


def python_for(user: str) -> list[str]:
    """Return the words that run a Python as a user: nobody may not be allowed to run this one."""
    if user == "root" or os.getuid():
        return [sys.executable]
    candidates = [sys.executable, *filter(None, [shutil.which("python3", path="/usr/local/bin:/usr/bin")])]
    for python in candidates:
        words = [*NOBODY, python]
        if not subprocess.run(
            [
                *words,
                "-c",
                "import subprocess, sys, tests.sandbox.hostile; subprocess.run([sys.executable, '-c', ''], check=True)",
            ],
            **surroundings(),
            check=False,
        ).returncode:
            return words
    pytest.skip("nobody may run no Python ≥ 3.11 here")


def surroundings() -> dict[str, Any]:
    paths = f"{ROOT / 'src'}:{ROOT}"
    return {
        "cwd": ROOT,
        "env": {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        "capture_output": True,
    }


@functools.cache
def report(backend: str, user: str) -> dict[str, Any]:
    command = [*python_for(user), "-m", "tests.sandbox.hostile", backend]
    done = subprocess.run(command, **surroundings(), text=True, timeout=300, check=False, start_new_session=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def slow_where_an_engine_is(backend: str) -> Any:
    return pytest.param(backend, marks=pytest.mark.slow) if backend in {"podman", "docker"} else backend


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("backend", list(map(slow_where_an_engine_is, BACKENDS)))
@pytest.mark.parametrize("attack", [*attacks.attacks(), *hostile.BOMBS, *SCENARIOS])
def test_holds(attack: str, backend: str, user: str) -> None:
    found = report(backend, user)
    if "unavailable" in found:
        pytest.skip(f"{backend} as {user}: {found['unavailable']}")
    assert found["found"][attack] == []


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("attack", sorted(hostile.SHARED | hostile.OWN_NAMESPACE))
def test_the_same_attack_succeeds_without_a_sandbox(attack: str, user: str) -> None:
    if user == "unprivileged" and attack in NEED_ROOT:
        pytest.skip("only root can do that at all")
    found = report("bare", user)["found"][attack]
    assert found, f"{attack} would hold without a sandbox: it proves nothing"
    assert "failed" not in found[0]


@pytest.mark.parametrize("user", USERS)
def test_a_sandbox_of_our_own_works_here(user: str) -> None:
    assert "found" in report("namespaces", user), report("namespaces", user)
