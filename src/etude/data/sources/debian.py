"""Packages of Debian or Ubuntu, at a version: the archive as its authors made it, and what Debian found out about its licences.

A source package gives its main archive; patches of Debian's are not applied. Crates of Rust are there as `librust-…-dev`, whole and
with their tests. apt fetches and checks both: sources with lists of its own below the cache, so that the machine's configuration is
read for where packages come from, and stays as it is. Nothing is installed and nothing of a package runs. A version is there as
long as a release of Debian has it.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from etude.data.document import Drop, OpenSource, Part, Raw, entry_of
from etude.data.filters.licence import spdx_of
from etude.data.sources.package import OPENERS, OUTSIDE, Archive
from etude.errors import UserError
from etude.files import read_json, sha256_file, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator

PIN = re.compile(r"[a-z0-9][a-z0-9+.-]+=[0-9][A-Za-z0-9.+:~-]*")
MAIN = re.compile(r"(\.orig|_[^-]+)\.tar\.\w+$")  # without a hyphen in its version, a package is of Debian's own making
CRATE = re.compile(r"librust-[a-z0-9.+-]+-dev")
INSIDE = re.compile(r"\./usr/share/cargo/registry/[^/]+/")
COPYRIGHT = re.compile(r"(\./)?([^/]+/)?debian/copyright|\./usr/share/doc/[^/]+/copyright")
LARGEST = 1 << 20  # bytes of that file
NAMES = {"expat": "MIT", "public-domain": "CC-PDDC", "apache-2": "Apache-2.0", "bsd": "BSD-3-Clause"}  # Debian's own
FIELD = re.compile(r"(?m)^(Files|License):[ \t]*((?:.*\n(?:[ \t].*\n)*)?)")


def open_debian(pin: str, most_bytes: int, cache: Path) -> tuple[OpenSource, str]:
    """Fetch what is not in the cache; return what is in it, and its licence or nothing if that is not plain."""
    folder, name = cache / "debian", pin.partition("=")[0]
    crate, note = CRATE.fullmatch(name), folder / f"{pin}.json"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, KeyError):  # not there, or not whole
        known = read_json(note)
        known = known if sha256_file(folder / known["file"]) == known["sha256"] else {}
    if not known:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            archive, about = (_crate if crate else _upstream)(pin, folder, Path(work))
            known = {"file": archive.name, "sha256": sha256_file(archive), "licence": licence_of(about)}
            archive.replace(folder / archive.name)
        write_json(note, known)
    path = folder / known["file"]
    part = (
        Part(path.stat().st_size, partial(_members, path, most_bytes))
        if crate
        else Archive(str(path), most_bytes).part()
    )
    return OpenSource(f"Debian package {name}", known["sha256"], [part]), known["licence"]


def _upstream(pin: str, lists: Path, work: Path) -> tuple[Path, str]:
    """Fetch a source package; return its main archive, and the text that says what its licences are."""
    (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    targets = _said(pin, "indextargets", "--format", "$(CREATED_BY)|$(REPO_URI) $(RELEASE) $(COMPONENT)").stdout
    places = dict.fromkeys(re.findall(r"(?m)^Packages\|(.+)", targets))
    (lists / "sources.list").write_text("".join(f"deb-src {place}\n" for place in places), encoding="utf-8")
    own = [f"Dir::State::lists={lists.absolute()}/lists", f"Dir::Etc::sourcelist={lists.absolute()}/sources.list",
           "Dir::Etc::sourceparts=-", f"Dir::Cache={lists.absolute()}"]  # fmt: skip
    source = ("source", "--download-only", "--only-source", "-qq")
    done = _said(pin, *source, "--tar-only", "--", pin, work=work, own=own)
    if not any(work.iterdir()):
        _said(pin, "update", "-qq", own=own)
        done = _said(pin, *source, "--tar-only", "--", pin, work=work, own=own)
    archives = [
        path for path in work.iterdir() if MAIN.search(path.name)
    ]  # others that a package may have are not used
    if not archives or archives[0].suffix not in OPENERS:
        _refuse(pin, done, own)
    _said(pin, *source, "--diff-only", "--", pin, work=work, own=own)  # else the licence is what its authors' files say
    tars = [path for path in [*work.glob("*.debian.tar.*"), *archives] if path.suffix in OPENERS]
    return archives[0], next(filter(None, map(_copyright, tars)), "")


def _crate(pin: str, _: Path, work: Path) -> tuple[Path, str]:
    """Fetch a package with a crate; return it, and the text that says what its licences are."""
    done = _said(pin, "download", "-qq", "--", pin, work=work)
    packages = list(work.glob("*.deb"))
    if not packages:
        _refuse(pin, done, [])
    return packages[0], _copyright(packages[0])


def _said(
    pin: str, *words: str, work: Path | None = None, own: list[str] | None = None, program: str = "apt-get"
) -> subprocess.CompletedProcess[str]:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise UserError(
            f"cannot fetch {pin}: this machine has no apt-get; Debian's packages are built on Debian or Ubuntu"
        )
    options = [word for option in [*(own or []), "APT::Sandbox::User=root"] for word in ("-o", option)]
    return subprocess.run([program, words[0], *options, *words[1:]], capture_output=True, text=True, check=False,
                          stdin=subprocess.DEVNULL, cwd=work or "/", env={**os.environ, "LC_ALL": "C"})  # fmt: skip


def _refuse(pin: str, done: subprocess.CompletedProcess[str], own: list[str]) -> None:
    name, _, version = pin.partition("=")
    shown = _said(pin, "madison", "--", name, own=own, program="apt-cache").stdout
    there = list(dict.fromkeys(re.findall(r"\| +(\S+) +\|", shown)))
    if version not in there:
        what = f"the lists of this machine have {', '.join(there) or 'no version'} of it; `apt-get update`"
        raise UserError(f"cannot fetch {pin}: {what}, or name a version that they have and make the set anew")
    reason = (re.findall(r"(?m)^E: (.+)", done.stderr) or ["its archive is none that can be read"])[0]
    raise UserError(f"cannot fetch {pin}: {reason}")


def _opened(path: Path) -> tarfile.TarFile:
    if path.suffix != ".deb":
        return tarfile.open(fileobj=OPENERS[path.suffix](path), mode="r|")
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"{path} is damaged; remove it")
    return tarfile.open(fileobj=io.BytesIO(done.stdout))


def _copyright(path: Path) -> str:
    with _opened(path) as tar:
        for member in tar:
            if member.isfile() and COPYRIGHT.fullmatch(member.name) and (file := tar.extractfile(member)):
                return file.read(LARGEST).decode(errors="replace")
    return ""


def _members(package: Path, most_bytes: int) -> Iterator[Raw | Drop]:
    """Yield the files of a crate, by their paths in it."""
    with _opened(package) as tar:
        for member in tar:
            inside = INSIDE.match(member.name)
            if inside is None or member.isdir():
                continue
            path = posixpath.normpath(member.name[inside.end() :])
            fault = "path leads out of the archive" if OUTSIDE.match(path) else "" if member.isfile() else "a link"
            entry = entry_of(path, "", member.size, fault, most_bytes)
            file = None if entry.fault else tar.extractfile(member)
            yield (
                Raw(package.name, path, file.read())
                if file
                else Drop(package.name, path, "read", entry.fault, entry.size)
            )


def licence_of(copyright_file: str) -> str:
    """Return the licences of all files but Debian's own, joined by AND; nothing where one of them is not known."""
    found: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", copyright_file):
        fields = dict(FIELD.findall(paragraph + "\n"))
        if all(place.startswith("debian/") for place in fields.get("Files", "").split()):
            continue
        name = fields.get("License", "").partition("\n")[0].strip()
        words = re.split(r",?\s+(and|or)\s+", name)  # names, and between them how they are joined
        ids = [word.upper() if i % 2 else NAMES.get(word.lower()) or spdx_of(word) for i, word in enumerate(words)]
        if not all(ids) or {"AND", "OR"} <= set(ids):
            return ""
        found[f"({' '.join(map(str, ids))})" if "OR" in ids else " ".join(map(str, ids))] = None
    return " AND ".join(found)
