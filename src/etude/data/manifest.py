"""The manifest of a corpus: every source with its revision, digest and licences, every drop by reason, every shard by digest.

It is made of facts only: the same inputs give the same file, byte for byte, whoever builds it and with however many workers.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from etude.errors import UserError
from etude.files import digest_of, read_json, sha256_file, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from etude.progress import Reporter

MANIFEST = "manifest.json"
TOOLS = ("fastokens", "identify", "kingfisher-bin", "licenseclassifier", "numpy", "pyarrow", "rensa", "tokenizers",
         "xxhash")  # fmt: skip


class Entry(BaseModel, extra="forbid"):
    """A piece of the manifest."""


class SourceEntry(Entry):
    """One source: what came in, what stayed, why the rest did not."""

    name: str
    domain: str
    location: str
    revision: str | None
    digest: str  # over the names and bytes of all documents that were read
    generated_by: str | None = None  # digest of the model that wrote it, if one did
    documents_in: int
    bytes_in: int
    kept: int
    kept_bytes: int
    drops: dict[str, int]  # "step: reason" → documents; documents_in = kept + their sum
    dropped_bytes: dict[str, int]
    scrubbed: dict[str, int]  # what was replaced, duplicates and contaminated documents included
    repositories: int
    heldout_repositories: list[str]  # whole ones; for rows without a repository none is named
    licences: dict[str, int]  # → bytes
    languages: dict[str, int]  # → bytes
    evidence: dict[str, int]  # what told the licence → bytes
    tokens: dict[str, int]  # train, heldout
    text_bytes: dict[str, int]  # train, heldout: what bits per byte are counted over
    tokens_in: int  # estimated: the text that came in, at the bytes a token of what stayed
    fim: int  # files with their middle at the end


class ShardEntry(Entry):
    """One shard."""

    name: str
    source: str
    domain: str
    split: str
    rows: int
    tokens: int
    files: dict[str, str]  # name → SHA-256


class Manifest(Entry):
    """The whole corpus."""

    etude: str
    seed: int  # decides what is held out and where middles are cut
    length: int  # tokens a row
    dtype: str
    separator: int
    vocabulary: int
    tokeniser: str  # SHA-256 of its tokenizer.json
    exact_fast_tokeniser: bool  # whether fastokens agreed with the reference everywhere it was asked
    shares: dict[str, float]  # of tokens, by source
    histogram: dict[str, list[int]]  # domain → documents with 2^i to 2^(i+1) − 1 tokens
    contamination: int | None  # documents that share code with benchmark tasks; None: no tasks were given
    sources: list[SourceEntry]
    shards: list[ShardEntry]
    tools: dict[str, str]
    settings: dict[str, Any]

    @property
    def digest(self) -> str:
        """One digest for all tokens and boundaries."""
        return digest_of([shard.files for shard in self.shards])

    def save(self, folder: Path) -> None:
        """Write it, after checking that everything is accounted for."""
        for source in self.sources:
            assert source.documents_in == source.kept + sum(source.drops.values()), source.name
        write_json(folder / MANIFEST, self.model_dump(mode="json"))


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of a corpus."""
    try:
        return Manifest.model_validate(read_json(folder / MANIFEST))
    except FileNotFoundError:
        advice = "make one with etude data build RECIPE"
        raise UserError(f"{folder} is not a corpus: it has no {MANIFEST}; {advice}") from None
    except ValueError as error:  # pydantic's errors too
        why = str(error).splitlines()[0]
        raise UserError(
            f"{folder / MANIFEST} cannot be read: {why}; delete the corpus's folder and build it again"
        ) from None


def check_shards(folder: Path, reporter: Reporter) -> None:
    """Refuse a corpus whose shards are not, byte for byte, those that were built: damaged ones would be trained on in silence."""
    listed = [
        (folder / "shards" / name, digest)
        for shard in load_manifest(folder).shards
        for name, digest in shard.files.items()
    ]
    with reporter.task(
        "checking the corpus", sum(path.stat().st_size for path, _ in listed if path.exists()), "B"
    ) as task:
        for path, digest in listed:
            if not path.exists() or sha256_file(path, task.advance) != digest:
                what = "is not what was built" if path.exists() else "is missing"
                raise UserError(f"{path} {what}; delete the corpus's folder and build it again")


def tools() -> dict[str, str]:
    """Return the versions of what decides the result."""
    return {name: metadata.version(name) for name in TOOLS}
