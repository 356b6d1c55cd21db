"""Which code, on which packages, on which machine: the part of a record that the surroundings decide."""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel

import etude
from etude.git import git_says

RECORDED_PACKAGES = (
    "fastokens", "gguf", "huggingface-hub", "identify", "kingfisher-bin", "licenseclassifier", "numpy", "peft", "pyarrow", "rensa",
    "safetensors", "tokenizers", "torch", "transformers", "xxhash",
)  # fmt: skip


class Code(BaseModel, extra="forbid"):
    """The program that did the work."""

    etude: str  # its version
    revision: str | None  # git commit of the checkout it ran from; None for an installed package
    dirty: bool | None  # whether the checkout had changes that no commit holds; None if there is no checkout


class Hardware(BaseModel, extra="forbid"):
    """The machine that did the work."""

    system: str
    cpu: str
    cores: int
    memory_bytes: int
    accelerators: list[str]


def code() -> Code:
    """Describe this copy of Etude."""
    folder = Path(etude.__file__).resolve().parent
    revision = git_says(folder, "rev-parse", "HEAD")
    # A package installed under somebody else's repository (a venv inside a checkout) is not that repository's code.
    if revision is None or git_says(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return Code(etude=etude.__version__, revision=None, dirty=None)
    dirty = bool(git_says(folder, "status", "--porcelain", "--ignore-submodules=all", "--", "."))
    return Code(etude=etude.__version__, revision=revision.strip(), dirty=dirty)


def packages() -> dict[str, str]:
    """Return the versions of the packages that can change a result, and of Python."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in RECORDED_PACKAGES}}


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def hardware() -> Hardware:
    """Describe this machine. Accelerators are named only once torch is loaded: looking must not cost an import."""
    torch = sys.modules.get("torch")
    accelerators = []
    if torch is not None and torch.cuda.is_available():
        accelerators = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Hardware(
        system=f"{platform.system()} {platform.machine()}",
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        accelerators=accelerators,
    )


def device_name(kind: str) -> str:
    """Return the name of what computed, given torch's kind of device."""
    machine = hardware()
    return machine.accelerators[0] if kind == "cuda" else f"{machine.cpu}, {machine.cores} cores"


def machine_identity() -> list[object]:
    """Return what tells machines apart whose speeds differ; the same whether torch is loaded or not."""
    drivers = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in drivers for line in file.read_text(errors="replace").splitlines()]
    machine = hardware()
    return [machine.cpu, machine.cores, *(line for line in lines if line.startswith("Model"))]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    named = re.search(r"^model name[ \t]*:[ \t]*(.+)", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()
