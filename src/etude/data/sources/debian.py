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
COPYRIGHT = "debian/copyright"
CRATE = re.compile(r"librust-[a-z0-9.+-]+-dev")
INSIDE = re.compile(r"\./usr/share/cargo/registry/[^/]+/")
DOCUMENTED = r"\./usr/share/doc/[^/]+/copyright$"
NO_APT = "this machine has no apt-get; sets of Debian packages are built on Debian or Ubuntu"
LARGEST = 1 << 20  # bytes of that file
NAMES = {"expat": "MIT", "public-domain": "CC-PDDC", "apache-2": "Apache-2.0", "bsd": "BSD-3-Clause"}  # Debian's own
SIMPLE = re.compile(r"(?m)^(Files|License):[ \t]*((?:.*\n(?:[ \t].*\n)*)?)")


def open_debian(pin: str, most_bytes: int, cache: Path) -> tuple[OpenSource, str]:
    """Fetch what is not in the cache; return its archive, and its licence or nothing if that is not plain."""
    folder, name = cache / "debian", pin.partition("=")[0]
    crate = CRATE.fullmatch(name) is not None
    note = folder / f"{pin}.json"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = read_json(note)
    if not known or not (folder / known["file"]).is_file() or sha256_file(folder / known["file"]) != known["sha256"]:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            archive, about = _crate(pin, Path(work)) if crate else _upstream(pin, folder, Path(work))
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


def _fetch(pin: str, folder: Path, work: Path) -> None:
    """Download a source package into a folder; its lists are brought up to date if it is not in them."""
    if not shutil.which("apt-get"):
        raise UserError(f"cannot fetch {pin}: {NO_APT}")
    lists = folder / "lists"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    sources = folder / "sources.list"
    targets = _said("indextargets", "--format", "$(CREATED_BY)|$(REPO_URI) $(RELEASE) $(COMPONENT)").stdout.splitlines()
    places = [line.partition("|")[2] for line in targets if line.startswith("Packages|")]
    sources.write_text("".join(f"deb-src {place}\n" for place in dict.fromkeys(places)))
    options = [f"Dir::State::lists={lists.absolute()}", f"Dir::Etc::sourcelist={sources.absolute()}", "Dir::Etc::sourceparts=-",
               f"Dir::Cache={folder.absolute()}", "APT::Sandbox::User=root"]  # fmt: skip
    words = [word for option in options for word in ("-o", option)]
    source = ("source", "--download-only", "--only-source", "-qq", *words)
    done = _said(*source, "--tar-only", "--", pin, folder=work)
    if not any(work.iterdir()):
        _said("update", "-qq", *words)
        done = _said(*source, "--tar-only", "--", pin, folder=work)
    shown = _said("showsrc", "--only-source", *words, "--", pin.partition("=")[0], program="apt-cache").stdout
    there = list(dict.fromkeys(re.findall(r"(?m)^Version: (.+)$", shown)))
    archives = [
        path for path in work.iterdir() if MAIN.search(path.name)
    ]  # others that a package may have are not used
    if not archives and pin.partition("=")[2] not in there:
        what = f"this machine's package archives have {', '.join(there) or 'no version'} of it"
        raise UserError(f"cannot fetch {pin}: {what}; name one that they have, and make the set anew")
    if not archives:
        reason = (re.findall(r"(?m)^E: (.+)", done.stderr) or ["apt-get gives no reason"])[0]
        raise UserError(f"cannot fetch {pin}: {reason}")
    _said(*source, "--diff-only", "--", pin, folder=work)  # else the licence is what its authors' files say


def _said(*words: str, folder: Path | None = None, program: str = "apt-get") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LC_ALL": "C"}
    return subprocess.run([program, *words], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
                          cwd=folder or "/", env=environ)  # fmt: skip


def _upstream(pin: str, lists: Path, folder: Path) -> tuple[Path, str]:
    """Fetch a source package; return the archive of its authors, and the text that says what its licences are."""
    _fetch(pin, lists, folder)
    tars = sorted(path for path in folder.iterdir() if re.search(r"\.tar\.\w+$", path.name))
    archives = [path for path in tars if MAIN.search(path.name)]
    if len(archives) != 1 or archives[0].suffix not in OPENERS:
        raise UserError(
            f"cannot use {pin}: it is not one archive but {', '.join(path.name for path in tars) or 'none'}"
        )
    texts = [text for path in tars for text in _copyright(path)]
    return archives[0], texts[0] if texts else ""


def _crate(pin: str, folder: Path) -> tuple[Path, str]:
    """Fetch a package with a crate; return it, and the text that says what its licences are."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise UserError(f"cannot fetch {pin}: {NO_APT}")
    done = _said("download", "-qq", "-o", "APT::Sandbox::User=root", "--", pin, folder=folder)
    if done.returncode:
        shown = _said("madison", "--", pin.partition("=")[0], program="apt-cache").stdout
        there = ", ".join(dict.fromkeys(re.findall(r"\| (\S+) \| .* Packages", shown))) or "no version"
        raise UserError(f"cannot fetch {pin}: this machine's package lists have {there} of it; `apt-get update`, "
                        "or name one that they have and make the set anew")  # fmt: skip
    (package,) = folder.glob("*.deb")
    with _contents(package) as tar:
        texts = [tar.extractfile(each) for each in tar if each.isfile() and re.match(DOCUMENTED, each.name)]
        about = next((file.read(LARGEST).decode(errors="replace") for file in texts if file), "")
    return package, about


def _contents(package: Path) -> tarfile.TarFile:
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"{package.name} is damaged; remove it: {package}")
    return tarfile.open(fileobj=io.BytesIO(done.stdout))


def _members(package: Path, most_bytes: int) -> Iterator[Raw | Drop]:
    """Yield the files of a crate, by their paths in it."""
    with _contents(package) as tar:
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


def _copyright(path: Path) -> Iterator[str]:
    with OPENERS[path.suffix](path) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
        for member in tar:
            if (
                member.isfile()
                and re.sub(r"^\./|^[^/]+/(?=debian/)", "", member.name) == COPYRIGHT
                and member.size <= LARGEST
            ):
                file = tar.extractfile(member)
                yield file.read(LARGEST).decode(errors="replace") if file else ""
                return


def licence_of(copyright_file: str) -> str:
    """Return the licences of all files but Debian's own, joined by AND; nothing where one of them is not known."""
    found: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", copyright_file):
        fields = dict(SIMPLE.findall(paragraph + "\n"))
        places = fields.get("Files", "").split()
        if not places or all(place.startswith("debian/") for place in places):
            continue
        name = fields.get("License", "").partition("\n")[0].strip()
        words = re.split(r",?\s+(and|or)\s+", name)  # names, and between them how they are joined
        ids = [word.upper() if i % 2 else NAMES.get(word.lower()) or spdx_of(word) for i, word in enumerate(words)]
        if not all(ids) or {"AND", "OR"} <= set(ids):
            return ""
        found[f"({' '.join(map(str, ids))})" if "OR" in ids else " ".join(map(str, ids))] = None
    return " AND ".join(found)
