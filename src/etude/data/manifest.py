"""The manifest of a corpus: every source with its revision, digest and licences, every drop by reason, every shard by digest.

It is made of facts only: the same inputs give the same file, byte for byte, whoever builds it and with however many workers.
`SourceEntry` is also the one account of documents while the corpus is built: a worker counts its unit in one, and those of
all units are added up.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, field_serializer

from etude.errors import UserError
from etude.files import digest_of, read_json, sha256_file, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from etude.data.document import Drop
    from etude.progress import Reporter

MANIFEST = "manifest.json"
TOOLS = ("fastokens", "identify", "kingfisher-bin", "licenseclassifier", "numpy", "pyarrow", "rensa", "tokenizers",
         "xxhash")  # fmt: skip
BUILD_AGAIN = "delete the corpus's folder and build it again"


class Entry(BaseModel, extra="forbid"):
    """A piece of the manifest."""


class SourceEntry(Entry):
    """One source, or a unit of it: what came in, what stayed, why the rest did not."""

    name: str
    domain: str
    location: str = ""
    revision: str | None = None
    digest: str = ""  # over the names and bytes of all documents that were read
    generated_by: str | None = None  # digest of the model that wrote it, if one did
    documents_in: int = 0
    bytes_in: int = 0
    kept: int = 0
    kept_bytes: int = 0
    drops: Counter[str] = Counter()  # "step: reason" → documents; documents_in = kept + their sum
    dropped_bytes: Counter[str] = Counter()
    scrubbed: Counter[str] = Counter()  # what was replaced, duplicates and contaminated documents included
    repositories: int = 0
    heldout_repositories: list[str] = []  # whole ones; for rows without a repository none is named
    licences: Counter[str] = Counter()  # → bytes
    languages: Counter[str] = Counter()  # → bytes
    evidence: Counter[str] = Counter()  # for the licence → bytes
    tokens: Counter[str] = Counter(train=0, heldout=0)
    text_bytes: Counter[str] = Counter(train=0, heldout=0)  # what bits per byte are counted over
    tokens_in: int = 0  # estimated: the text that came in, at the bytes a token of what stayed
    fim: int = 0  # files with their middle at the end
    made_of: int = 0  # files, or commits, that gave way to the examples made of them
    # Examples by what is wrong in them, and by reason what could not be made; before duplicates go.
    made: Counter[str] = Counter()

    @field_serializer("drops", "dropped_bytes", "scrubbed", "licences", "languages", "evidence", "made")
    def _largest_first(self, counts: Counter[str]) -> dict[str, int]:
        return dict(sorted((+counts).items(), key=lambda entry: (-entry[1], entry[0])))

    def drop(self, drop: Drop) -> None:
        """Count a document that came in and does not stay."""
        self.drops[f"{drop.step}: {drop.reason}"] += 1
        self.dropped_bytes[f"{drop.step}: {drop.reason}"] += drop.size

    def counts(self) -> dict[str, Any]:
        """Return all that was counted, fit for JSON."""
        plain = self.model_dump(mode="json")
        return {key: value for key, value in plain.items() if isinstance(value, (int, dict))}

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add the counts of another entry: numbers to numbers, tables key by key."""
        for key, value in counts.items():
            if isinstance(value, int):
                setattr(self, key, getattr(self, key) + value)
            else:
                getattr(self, key).update(value)


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
            assert source.documents_in == source.kept + source.drops.total(), f"{source.name}: a document disappeared"
            packed = sum(shard.tokens for shard in self.shards if shard.source == source.name)
            assert packed == source.tokens.total(), f"{source.name}: {packed} tokens packed of {source.tokens}"
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
        raise UserError(f"{folder / MANIFEST} cannot be read: {why}; {BUILD_AGAIN}") from None


def check_shards(folder: Path, manifest: str, reporter: Reporter) -> None:
    """Refuse a corpus whose manifest (by its recorded digest) or shards are not, byte for byte, those that were built."""
    if sha256_file(folder / MANIFEST) != manifest:
        raise UserError(f"{folder / MANIFEST} is not what was built; {BUILD_AGAIN}")
    files = [pair for shard in load_manifest(folder).shards for pair in shard.files.items()]
    digests = {folder / "shards" / name: digest for name, digest in files}
    size = sum(path.stat().st_size for path in digests if path.exists())
    with reporter.task("checking the corpus", size, "B") as task:
        for path, digest in digests.items():
            if not path.exists() or sha256_file(path, task.advance) != digest:
                what = "is not what was built" if path.exists() else "is missing"
                raise UserError(f"{path} {what}; {BUILD_AGAIN}")
