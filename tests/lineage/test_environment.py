from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import etude
from etude.lineage import environment
from tests import tiny

SOURCE = Path(etude.__file__).resolve().parent


def has_checkout() -> bool:
    asked = ["git", "-C", str(SOURCE), "ls-files", "--error-unmatch", "__init__.py"]
    return shutil.which("git") is not None and subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_checkout(), reason="needs Etude's own checkout")
def test_the_code_is_the_commit_that_git_says() -> None:
    found = environment.code()
    assert found.revision == tiny.git(SOURCE, "rev-parse", "HEAD").strip()
    committed = tiny.git(SOURCE, "diff", "HEAD", "--name-only", "--", ".")
    untracked = tiny.git(SOURCE, "ls-files", "--others", "--exclude-standard", "--", ".")
    assert found.dirty == bool(committed or untracked)
    assert found.etude == etude.__version__


def copied_package(folder: Path) -> Path:
    """Put a stand-in for the package into a folder."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("", encoding="utf-8")
    return folder / "__init__.py"


def test_the_dirty_flag_sees_changes_to_the_package_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = copied_package(tmp_path / "src" / "etude")
    monkeypatch.setattr(etude, "__file__", str(init))
    (tmp_path / ".gitignore").write_text("*.pyc\n", encoding="utf-8")
    tiny.git(tmp_path, "init", "-q")
    tiny.git(tmp_path, "add", ".")
    tiny.git(tmp_path, "commit", "-q", "-m", "first")
    head = tiny.git(tmp_path, "rev-parse", "HEAD").strip()

    def state() -> tuple[str | None, bool | None]:
        return environment.code().revision, environment.code().dirty

    assert state() == (head, False)
    (tmp_path / "README.md").write_text("not code", encoding="utf-8")
    (init.parent / "cached.pyc").write_bytes(b"")
    assert state() == (head, False)
    (init.parent / "new.py").write_text("", encoding="utf-8")
    assert state() == (head, True)
    (init.parent / "new.py").unlink()
    init.write_text("changed = True\n", encoding="utf-8")
    assert state() == (head, True)


def test_a_package_that_is_not_the_repositorys_own_has_no_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = copied_package(tmp_path / ".venv" / "etude")
    monkeypatch.setattr(etude, "__file__", str(init))
    assert environment.code().revision is None  # no repository at all
    tiny.git(tmp_path, "init", "-q")
    tiny.git(tmp_path, "commit", "-q", "--allow-empty", "-m", "somebody else's")
    assert environment.code() == environment.Code(etude=etude.__version__, revision=None, dirty=None)


def test_without_git_there_is_no_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.code() == environment.Code(etude=etude.__version__, revision=None, dirty=None)


def test_packages_are_the_versions_that_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = environment.packages()
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["numpy"] == np.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(versions) == {"python", *environment.RECORDED_PACKAGES}
    monkeypatch.setattr(environment, "RECORDED_PACKAGES", ("etude-no-such-package",))
    assert environment.packages() == {"python": versions["python"], "etude-no-such-package": "absent"}


def test_the_hardware_is_this_machine() -> None:
    machine = environment.hardware()
    assert machine.system == f"{os.uname().sysname} {platform.machine()}"
    assert machine.cores == len(os.sched_getaffinity(0))
    kilobytes = next(
        line for line in Path("/proc/meminfo").read_text("utf-8").splitlines() if line.startswith("MemTotal")
    )
    assert machine.memory_bytes == int(kilobytes.split()[1]) * 1024
    assert len(machine.accelerators) == torch.cuda.device_count()


def test_the_identity_of_the_machine_does_not_need_torch() -> None:
    program = """
import json, sys
from etude.lineage.environment import machine_identity
before, without = machine_identity(), "torch" not in sys.modules
import torch
print(json.dumps([without, before, machine_identity()]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    without, before, after = json.loads(done.stdout)
    assert without
    assert before == after == environment.machine_identity()
    assert before[:2] == [environment.hardware().cpu, environment.hardware().cores]
