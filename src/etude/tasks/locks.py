"""The environment that a repository asks for: versions from its lock file, and packages of the operating system.

A lock file decides versions. Which packages are installed follows from metadata, extras and the recipe, with their dependencies. The
first of these files counts: uv.lock, pylock.toml, poetry.lock; otherwise a requirements file for tests together with
requirements.txt, whose packages are installed, too. Only names, versions and markers of such a file are passed to pip, never its
options, addresses or paths. If it has hashes, installed archives must match one of them.

Packages of the system (`apt`) are downloaded and unpacked beside the environment, by anybody, without installing them: scripts that
an installation would run are not run, and only what finds its files from its own place works.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import tomllib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from etude.errors import UserError
from etude.files import sha256_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TOML_LOCKS = {"uv.lock": "package", "pylock.toml": "packages", "poetry.lock": "package"}
FOR_TESTS = (
    *(f"requirements{sign}{name}.txt" for name in ("test", "tests", "dev") for sign in "-_/"),
    *(f"{name}{sign}requirements.txt" for name in ("test", "dev") for sign in "-_"),
)
HASH = re.compile(r"--hash[= ]sha256:([0-9a-f]{64})")
INCLUDED = re.compile(r"(?:-r|--requirement|-c|--constraint)[= ]?\s*(\S+)")
DEEPEST = 5  # requirements files that name others
APT_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")
INSTALLED = re.compile(r"^Inst (\S+) (?:\[[^\]]*\] )?\((\S+) ", re.MULTILINE)  # what a simulated installation says
APT = "apt"  # the folder in an environment


@dataclass
class Lock:
    """Versions by package, hashes of what may be installed under them, and what is wanted beside the metadata's."""

    file: str
    sha256: str
    versions: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, frozenset[str]] = field(default_factory=dict)
    wanted: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)  # lines that are options, addresses or paths

    @property
    def constraints(self) -> str:
        """The versions as a file for pip."""
        return "".join(f"{name}=={version}\n" for name, version in sorted(self.versions.items()))


def find_lock(tree: Path, chosen: str) -> Lock | None:
    """Return what a tree's lock file says. `chosen`: auto, none, or a path in the tree."""
    if chosen == "none":
        return None
    usual = [name for name in (*TOML_LOCKS, *FOR_TESTS, "requirements.txt") if (tree / name).is_file()]
    name = next(iter(usual), "") if chosen == "auto" else chosen
    path = tree / name
    if not name:
        return None
    if not path.is_file() or not path.resolve().is_relative_to(tree.resolve()):
        raise UserError(f"lock = {chosen!r} is no file of the repository; name one, or auto, or none")
    lock = Lock(name, sha256_file(path))
    try:
        if name.endswith((".toml", ".lock")):
            _read_toml(lock, tomllib.loads(path.read_text(encoding="utf-8")))
        else:
            for each in dict.fromkeys([name, *(["requirements.txt"] if chosen == "auto" else [])]):
                _read_lines(lock, tree, each, DEEPEST, wanted=True)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f'{name} cannot be read: {error}; set `lock` to another file, or to "none"') from None
    return lock


def _read_toml(lock: Lock, content: dict[str, Any]) -> None:
    versions: dict[str, set[str]] = defaultdict(set)
    hashes: dict[str, set[str]] = defaultdict(set)
    for each in content.get(TOML_LOCKS.get(posixpath.basename(lock.file), "package"), []):
        source = each.get("source", {})
        markers = [*each.get("resolution-markers", []), *filter(None, [each.get("marker")])]
        local = isinstance(source, dict) and {"editable", "virtual", "directory", "path"} & source.keys()
        if local or "version" not in each or not (not markers or any(map(_holds, markers))):
            continue
        name = canonicalize_name(each["name"])
        versions[name].add(str(each["version"]))
        listed = each.get("files", [])  # Poetry's; it may be a table of platforms in its oldest form
        source_archive = filter(None, [each.get("sdist")])
        for archive in [*source_archive, *each.get("wheels", []), *(listed if isinstance(listed, list) else [])]:
            said = archive.get("hash") or f"sha256:{archive.get('hashes', {}).get('sha256', '')}"
            hashes[name] |= {said.removeprefix("sha256:")} if said.startswith("sha256:") else set()
    lock.versions = {name: min(some) for name, some in versions.items() if len(some) == 1}
    known = {name: frozenset(hashes[name] - {""}) for name in lock.versions}
    lock.hashes = {name: some for name, some in known.items() if some}
    lock.passed_over = sorted(name for name, some in versions.items() if len(some) > 1)


def _holds(marker: str) -> bool:
    try:
        return Marker(marker).evaluate({"extra": ""})
    except InvalidMarker:
        return False


def _read_lines(lock: Lock, tree: Path, name: str, deep: int, *, wanted: bool) -> None:
    """Read a requirements file and those that it names, if they lie in the tree."""
    path = tree / name
    if not path.is_file() or not path.resolve().is_relative_to(tree.resolve()) or not deep:
        return
    text = path.read_text(encoding="utf-8", errors="replace").replace("\\\n", " ")
    for line in filter(None, (re.sub(r"(^|\s)#.*", "", each).strip() for each in text.splitlines())):
        if included := INCLUDED.match(line):
            other = posixpath.normpath(posixpath.join(posixpath.dirname(name), included[1]))
            _read_lines(lock, tree, other, deep - 1, wanted=wanted and line.lstrip("-")[0] == "r")
            continue
        try:
            each = Requirement(re.split(r"\s--", line)[0])
        except InvalidRequirement:
            lock.passed_over.append(line[:80])
            continue
        if each.url or (each.marker and not each.marker.evaluate({"extra": ""})):
            lock.passed_over += [line[:80]] * bool(each.url)
            continue
        key, exact = canonicalize_name(each.name), re.fullmatch(r"===?\s*([^*,]+)", str(each.specifier))
        if exact:
            lock.versions[key] = exact[1]
            if found := HASH.findall(line):
                lock.hashes[key] = frozenset(found)
        lock.wanted += [str(each)] if wanted else []


def wrong_hashes(lock: Lock, report: dict[str, Any]) -> list[str]:
    """Return what pip installed, as its report says, that has none of the hashes which the lock file has for it."""
    wrong = []
    for each in report.get("install", []):
        name = canonicalize_name(each["metadata"]["name"])
        found = each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")
        if found not in lock.hashes.get(name, {found}):
            wrong.append(f"{name} {each['metadata']['version']}")
    return wrong


def unpack_system_packages(names: Iterable[str], environment: Path) -> list[str]:
    """Download packages of the system, with what they need and this machine has not, and unpack them; return name=version of each."""
    names = list(names)
    if odd := [name for name in names if not APT_NAME.fullmatch(name)]:
        raise UserError(f"apt: {odd[0]!r} is no name of a Debian package")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        advice = f"install {', '.join(names)} and leave `apt` out"
        raise UserError(f"apt = {names}: this machine has no apt-get and dpkg-deb; {advice}")
    # Simulated, for a list of what would be fetched leaves out what apt has in its cache.
    options = ("-s", "-qq", "--no-install-recommends", "-o", "Debug::NoLocking=1")
    listed = _said("apt-get", "install", *options, "--", *names)
    pins = sorted(f"{name}={version}" for name, version in INSTALLED.findall(listed))
    work, target = environment / "debs", environment / APT
    work.mkdir()
    target.mkdir()
    if pins:  # else all of them are installed here
        _said("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", "--", *pins, folder=work)
    for path in sorted(work.glob("*.deb")):
        _said("dpkg-deb", "-x", str(path), str(target))
    shutil.rmtree(work)
    return pins


def _said(*words: str, folder: Path | None = None) -> str:
    nothing, place = subprocess.DEVNULL, folder or "/"
    done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=nothing, cwd=place)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["it gives no reason"]
        why = lines[-1].removeprefix("E: ")
        raise UserError(f"{words[0]} cannot get packages of the system: {why}; `apt-get update` may help")
    return done.stdout


@lru_cache(maxsize=64)
def system_paths(environment: Path) -> dict[str, str]:
    """Return the variables by which programs and libraries of unpacked packages are found; none where there are none."""
    root = environment / APT
    if not root.is_dir():
        return {}
    programs = [str(path) for path in _folders(root) if path.name in {"bin", "sbin"}]
    libraries = [str(path) for path in _folders(root) if any(path.glob("*.so*"))]
    return {"PATH": ":".join(programs), "LD_LIBRARY_PATH": ":".join(libraries)}


def _folders(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_dir() and not path.is_symlink())
