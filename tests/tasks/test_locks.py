"""Lock files, packages of the system, and services."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.tasks.codebase import PackageSettings, requirements
from etude.tasks.locks import INSTALLED, find_lock, system_paths, unpack_system_packages, wrong_hashes
from etude.tasks.services import NOT_READY, ServiceSettings, start_lines
from etude.tasks.task import Codebase

A, B = "a" * 64, "b" * 64
UV = f"""version = 1
[[package]]
name = "shop"
version = "2.0"
source = {{ editable = "." }}
[[package]]
name = "Six_Pack"
version = "1.16.0"
source = {{ registry = "x" }}
sdist = {{ url = "x", hash = "sha256:{A}" }}
wheels = [{{ url = "y", hash = "sha256:{B}" }}]
[[package]]
name = "forked"
version = "1"
resolution-markers = ["python_full_version < '3.0'"]
[[package]]
name = "forked"
version = "2"
resolution-markers = ["python_full_version >= '3.0'"]
[[package]]
name = "either"
version = "1"
[[package]]
name = "either"
version = "2"
"""
PYLOCK = f"""lock-version = "1.0"
[[packages]]
name = "six"
version = "1.16.0"
wheels = [{{ name = "y", hashes = {{ sha256 = "{B}" }} }}]
[[packages]]
name = "colorama"
version = "0.4"
marker = "sys_platform == 'win32'"
[[packages]]
name = "own"
directory = {{ path = "." }}
"""
POETRY = f"""[[package]]
name = "six"
version = "1.16.0"
files = [{{ file = "y", hash = "sha256:{B}" }}]
"""
LINES = f"""--index-url https://example.org/simple
-e .
-r base.txt
-c pinned.txt
-r ../outside.txt
pytest >= 7   # at least
six==1.16.0 \\
    --hash=sha256:{A} --hash=sha256:{B}
gone==1; python_version < "3"
far @ https://example.org/far.whl
"""


def write(tree: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = tree / name.replace("__", "/").replace("_", ".", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tree


@pytest.mark.parametrize(("name", "text", "versions", "hashes"), [
    ("uv.lock", UV, {"six-pack": "1.16.0", "forked": "2"}, {"six-pack": {A, B}}),
    ("pylock.toml", PYLOCK, {"six": "1.16.0"}, {"six": {B}}),
    ("poetry.lock", POETRY, {"six": "1.16.0"}, {"six": {B}}),
])  # fmt: skip
def test_a_lock_file_gives_versions_for_this_python(
    tmp_path: Path, name: str, text: str, versions: dict[str, str], hashes: dict[str, set[str]]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    lock = find_lock(tmp_path, "auto")
    assert lock
    assert (lock.file, lock.versions, lock.wanted) == (name, versions, [])
    assert lock.hashes == hashes
    assert lock.constraints.startswith("".join(f"{key}=={value}\n" for key, value in sorted(versions.items())))
    assert find_lock(tmp_path, "none") is None


def test_requirements_files_give_names_and_versions_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path.parent / "outside.txt").write_text("evil\n", encoding="utf-8")
    texts = {"requirements-test.txt": LINES, "base.txt": "attrs\n-r requirements-test.txt\n", "pinned.txt": "idna==3.1\n",
             "requirements.txt": "rich\n"}  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    lock = find_lock(tmp_path, "auto")
    assert lock
    assert lock.file == "requirements-test.txt"
    assert set(lock.wanted) == {"attrs", "pytest>=7", "six==1.16.0", "rich"}
    assert lock.versions == {"idna": "3.1", "six": "1.16.0"}
    assert lock.hashes == {"six": {A, B}}
    assert {"-e .", "--index-url https://example.org/simple"} <= set(lock.passed_over)
    wanted = requirements(Codebase("p", "1", "", tmp_path, ("p",), ("t",)), PackageSettings(folder="p"), lock.wanted)
    assert wanted == ["attrs", "coverage", "pytest", "rich", "six==1.16.0"]


def test_the_order_is_fixed_and_a_file_can_be_named(tmp_path: Path) -> None:
    for name, text in {"requirements.txt": "a==1\n", "poetry.lock": POETRY, "uv.lock": UV}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        found = find_lock(tmp_path, "auto")
        assert found
        assert found.file == name
    named = find_lock(tmp_path, "requirements.txt")
    assert named
    assert named.versions == {"a": "1"}
    with pytest.raises(UserError, match="is no file of the repository"):
        find_lock(tmp_path, "../x.lock")
    (tmp_path / "uv.lock").write_text("[[package]]\nversion = '1'\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"uv\.lock cannot be read"):
        find_lock(tmp_path, "auto")


def test_what_was_installed_must_have_a_hash_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_text(POETRY, encoding="utf-8")
    lock = find_lock(tmp_path, "auto")
    assert lock

    def report(name: str, found: str) -> dict[str, object]:
        return {
            "metadata": {"name": name, "version": "1"},
            "download_info": {"archive_info": {"hashes": {"sha256": found}}},
        }

    assert not wrong_hashes(lock, {"install": [report("Six", B), report("other", A)]})
    assert wrong_hashes(lock, {"install": [report("Six", A)]}) == ["six 1"]


PROJECT = """[project]
dependencies = ["six"]
[project.optional-dependencies]
redis = ["redis"]
dev = ["mock"]
[dependency-groups]
dev = ["attrs", {include-group = "more"}]
more = ["idna", {include-group = "dev"}]
"""


def test_extras_and_groups_are_chosen_by_name_and_dev_counts_where_none_is_for_tests(tmp_path: Path) -> None:
    codebase = Codebase("p", "1", "", tmp_path, ("p",), ("t",), metadata={"pyproject.toml": PROJECT})
    found = requirements(codebase, PackageSettings(folder="p"))
    assert found == ["attrs", "coverage", "idna", "pytest", "six"]
    assert "redis" in requirements(codebase, PackageSettings(folder="p", extras=["redis"]))
    tests = PROJECT + 'test = ["rich"]\n'
    with_tests = Codebase("p", "1", "", tmp_path, ("p",), ("t",), metadata={"pyproject.toml": tests})
    assert requirements(with_tests, PackageSettings(folder="p")) == ["coverage", "pytest", "rich", "six"]


SETUP = """from setuptools import setup
needed = ["six", "attrs"]
setup(install_requires=needed, tests_require=["mock"], extras_require={"test": ["idna"], "docs": ["sphinx"]}, x=open("/etc/passwd"))
"""


def test_setup_py_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text(SETUP, encoding="utf-8")
    codebase = Codebase("p", "1", "", tmp_path, ("p",), ("t",))
    assert requirements(codebase, PackageSettings(folder="p")) == ["attrs", "coverage", "idna", "mock", "pytest", "six"]


def test_packages_of_the_system_are_named_and_found_where_they_were_unpacked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no name of a Debian package"):
        unpack_system_packages(["--download-only"], tmp_path)
    said = "Inst libpq5 [15.1-1] (15.20-0+deb12u1 Debian-Security:12/stable [amd64])\nInst redis (5:7.0 Debian:12 [all])\nConf x (1 y)\n"
    assert INSTALLED.findall(said) == [("libpq5", "15.20-0+deb12u1"), ("redis", "5:7.0")]
    assert not system_paths(tmp_path / "none")
    for name in ("usr/bin/tool", "usr/lib/db/1/bin/initdb", "usr/lib/x86_64-linux-gnu/libx.so.1"):
        (tmp_path / "apt" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "apt" / name).touch()
    root = tmp_path / "apt/usr"
    assert system_paths(tmp_path) == {
        "PATH": f"{root}/bin:{root}/lib/db/1/bin",
        "LD_LIBRARY_PATH": f"{root}/lib/x86_64-linux-gnu",
    }


def run(services: list[ServiceSettings], command: str) -> subprocess.CompletedProcess[str]:
    lines = start_lines(services) + command
    return subprocess.run(["sh", "-c", lines], capture_output=True, text=True, check=False, timeout=60)


def test_a_service_is_ready_before_the_command_and_the_next_one(tmp_path: Path) -> None:
    one = ServiceSettings(run=f"echo 'it'\\''s one' > {tmp_path}/one; exec sleep 1", ready=f"test -s {tmp_path}/one")
    two = ServiceSettings(run=f"cat {tmp_path}/one > {tmp_path}/two; exec sleep 1", ready=f"grep -q one {tmp_path}/two")
    done = run([one, two], f"cat {tmp_path}/two")
    assert (done.stdout, done.returncode) == ("it's one\n", 0)
    assert start_lines([]) == ""


def test_a_service_that_does_not_start_ends_the_call_and_its_log_is_told() -> None:
    broken = ServiceSettings(run="echo no such database; exit 3", ready="false", seconds=1)
    done = run([broken], "echo never")
    assert (done.stdout, done.returncode) == ("", NOT_READY)
    assert "not ready after 1 s: echo no such database" in done.stderr
    assert done.stderr.endswith("no such database\n")
