"""What a recipe says about its corpus: the table `[data]` and its `[[data.source]]` entries.

Each field stands beside what it means; docs/data.md explains them at length.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, Field, model_validator

from etude.data.filters.licence import canonical

CREDENTIALS = re.compile(r"https?://[^/]*@|://[^/]*:[^/]*@")
PIN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?==[A-Za-z0-9][A-Za-z0-9._!+-]*")
SELF = "self"  # replay from the base itself
LOCATIONS = ("folder", "git", "pypi", "jsonl", "parquet", "dataset")
ROWS, FILES = {"jsonl", "parquet", "dataset"}, {"folder", "git", "pypi"}
APPLIES = {  # settings that mean something for some places only
    "revision": {"git"}, "history": {"git"}, "reports": {"git"}, "files": {"dataset"}, "text": ROWS,
    "repository_column": ROWS, "licence_column": ROWS, "keep": FILES, "include": FILES, "exclude": FILES,
}  # fmt: skip


class Settings(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Unknown keys and wrong types are refused."""


Licences = Literal["permissive", "copyleft", "any"] | list[str]


class RepairSettings(Settings):
    """Examples of repairs made from code: functions with an error in one of them, or in none, and the answer."""

    each: int = Field(4, ge=1, le=32, description="most errors made in a function, one an example, of different kinds")
    nothing_wrong: float = Field(0.1, ge=0, le=0.5, description="share of examples with nothing wrong, answered so")
    functions: int = Field(4, ge=1, description="functions shown at most, neighbours in their file")
    characters: int = Field(3000, ge=200, description="characters of code shown at most")


class SourceSettings(Settings):
    """One place documents come from: exactly one of folder, git, pypi, jsonl, parquet and dataset."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", description="name in counts, shards and the manifest")
    domain: str = Field("code", pattern=r"^[a-z0-9][a-z0-9_-]*$", description="domain: code, docs, commits, general, …")
    weight: float = Field(1.0, gt=0, description="sampling weight of its tokens, relative to a source of weight 1")
    hold_out: bool | Literal["all"] = Field(default=True, description="held-out split: a share of it, none, or all")
    licences: Licences = Field(
        "permissive", description="allowed: permissive, copyleft (includes permissive), any, ids"
    )
    unknown: Literal["drop", "keep"] = Field("drop", description="what to do with documents of unknown licence")
    licence: str | None = Field(None, description="licence of all its documents, if you know it (SPDX)")
    keep: Literal["all", "code", "prose"] = Field("all", description="files: all, code, or prose such as Markdown")
    include: list[str] = Field([], description="files: patterns of paths to read, such as src/*; none means all")
    exclude: list[str] = Field([], description="files: patterns of paths to leave out")
    folder: str | None = Field(None, description="a folder with files")
    git: str | None = Field(None, description="a git repository: a folder, or anything git can clone")
    revision: str = Field("HEAD", description="git: the commit, tag or branch to read")
    kind: Literal["files", "repair"] = Field("files", description="files as they are, or repairs of their functions")
    repair: RepairSettings = RepairSettings()
    history: int = Field(0, ge=0, description="git: read this many last commits (message and diff) instead of files")
    reports: str | None = Field(None, description="git history: where bug reports lie, such as issues/{number}.md")
    pypi: list[str] = Field([], description="packages at versions: name==version")
    jsonl: str | None = Field(None, description="a JSONL file, plain or .gz, or a pattern such as data/*.jsonl")
    parquet: str | None = Field(None, description="a Parquet file, or a pattern")
    dataset: str | None = Field(None, description="a Hugging Face dataset: owner/name@revision")
    files: str = Field("**/*.parquet", description="dataset: which of its files to read (.parquet or .jsonl)")
    text: str = Field("text", description="rows: the column with the text")
    repository_column: str | None = Field(None, description="rows: the column with the repository of each")
    licence_column: str | None = Field(None, description="rows: the column with the licence of each")

    @model_validator(mode="after")
    def _one_location(self) -> SourceSettings:
        given = [name for name in LOCATIONS if getattr(self, name)]
        if len(given) != 1:
            wanted = f"exactly one of {', '.join(LOCATIONS)}"
            raise ValueError(f"source {self.name!r} must have {wanted}; it has {given or 'none'}")
        self._refuse_idle(given[0])
        if self.name == SELF:
            raise ValueError(f"a source cannot be called {SELF!r}: that is text sampled from the base")
        for licence in [*(self.licences if isinstance(self.licences, list) else []), self.licence]:
            if licence is not None and canonical(licence) is None:
                examples = "such as MIT, or proprietary for code of your own"
                raise ValueError(f"{licence!r} is no SPDX licence expression, {examples}")
        if self.git and CREDENTIALS.search(self.git):
            why = "`git` holds a password or a token, which would go into every record"
            raise ValueError(f"{why}; leave it to git's credential helper")
        for package in self.pypi:
            if not PIN.fullmatch(package):
                raise ValueError(f"{package!r} is no package at a version; write it as name==version")
        return self

    def _refuse_idle(self, location: str) -> None:
        """Refuse a setting that would do nothing."""
        for key, places in APPLIES.items():
            given = getattr(self, key) != SourceSettings.model_fields[key].default
            if given and location not in places:
                where = " and ".join(sorted(places))
                raise ValueError(f"`{key}` has no effect on a source with `{location}`; it is for {where}")
        if self.kind == "files" and self.repair != RepairSettings():
            raise ValueError('`repair` has no effect on a source of files; it is for kind = "repair"')
        if self.kind == "repair" and self.keep != "all":
            raise ValueError("`keep` has no effect on repairs: they are made of code")
        if self.reports and not self.history:
            raise ValueError("`reports` goes with `history`")


class FilterSettings(Settings):
    """When a document is not worth training on."""

    max_bytes: int = Field(1_000_000, ge=1, le=1 << 30, description="file size limit, bytes; above: data or generated")
    min_chars: int = Field(32, ge=0, description="shortest document in characters")
    max_mean_line: float = Field(200.0, gt=0, description="mean line length limit; above: minified or generated")
    max_line: int = Field(20_000, ge=1, description="line length limit; above: data")
    min_alphanumeric: float = Field(0.25, ge=0, le=1, description="least share of letters and digits; below: a table")
    max_repeated_lines: float = Field(0.6, gt=0, le=1, description="most repeated lines, as a share, if over 20 lines")
    max_compression: float = Field(12.0, gt=1, description="zlib compression limit; above: repetitive")
    scrub: bool = Field(default=True, description="replace secrets and personal data; false: already done")


class DuplicateSettings(Settings):
    """Near-duplicates by MinHash: two documents are candidates if all hashes of one band agree."""

    ngram: int = Field(5, ge=1, description="MinHash: words in a shingle")
    bands: int = Field(14, ge=1, le=256, description="MinHash: bands")
    rows: int = Field(8, ge=1, le=256, description="MinHash: hashes in a band")
    similarity: float = Field(0.7, ge=0, le=1, description="estimated similarity that makes a near-duplicate")
    near: bool = Field(default=True, description="drop near-duplicates; exact ones are always dropped")


class ContaminationSettings(Settings):
    """Benchmark tasks that must not be learnt by heart."""

    tasks: list[str] = Field([], description="files or folders with the tasks: JSON, JSONL (all its texts), plain text")
    ngram: int = Field(13, ge=3, description="length of an n-gram in code tokens")
    hits: int = Field(3, ge=1, description="shared n-grams that make a document contaminated; 1 also hits idioms")


FIM_TOKENS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]


class FimSettings(Settings):
    """Fill-in-the-middle, for files of code only."""

    rate: float = Field(0.0, ge=0, le=1, description="share of code files rearranged for fill-in-the-middle")
    spm: float = Field(0.5, ge=0, le=1, description="share of those in suffix-prefix-middle order")
    tokens: list[str] = Field(FIM_TOKENS, min_length=3, max_length=3, description="tokens for prefix, middle, suffix")


class ReplaySettings(Settings):
    """General text against forgetting."""

    share: float = Field(ge=0, lt=1, description="share of the tokens seen in training")
    source: str = Field(description='name of a source; or "self": text sampled from the base')
    tokens: int = Field(100_000, ge=1, description="self: how many tokens to sample")
    length: int = Field(256, ge=8, description="self: tokens in a sampled text")
    batch: int = Field(16, ge=1, description="self: texts sampled together")
    temperature: float = Field(1.0, gt=0, description="self: sampling temperature; 1 is the base's own distribution")


class TokeniserSettings(Settings):
    """Which tokeniser turns text into tokens."""

    source: str = Field("base", description='"base": the base\'s own; "train": train one on this corpus; or a folder')
    vocabulary: int = Field(8192, ge=300, description="train: size of the vocabulary, special tokens included")
    sample_bytes: int = Field(50_000_000, ge=1, description="train: bytes of text to train it on, about")


class DataSettings(Settings):
    """The table `[data]`."""

    source: list[SourceSettings] = Field(min_length=1, description="sources of documents; the earlier wins duplicates")
    length: int = Field(2048, ge=16, le=1 << 24, description="tokens in a packed row")
    separator: str | None = Field(None, description="token after each document; default <|endoftext|> or another end")
    heldout: float = Field(0.02, ge=0, lt=1, description="share of each domain that is held out, in whole repositories")
    repositories: Literal["off", "path", "imports"] = Field("off", description="order of a repository's joined files")
    repository_chars: int = Field(200_000, ge=1000, description="longest joined document, in characters")
    shares: dict[str, float] = Field({}, description="share of tokens by domain; the rest is split as the weights say")
    filters: FilterSettings = FilterSettings()
    duplicates: DuplicateSettings = DuplicateSettings()
    contamination: ContaminationSettings = ContaminationSettings()
    fim: FimSettings = FimSettings()
    replay: ReplaySettings | None = None
    tokeniser: TokeniserSettings = TokeniserSettings()
    samples: int = Field(5, ge=0, description="examples of dropped documents in the report, by filter and reason")
    seed: int | None = Field(None, description="random seed of the corpus; none: the recipe's seed")
    workers: int = Field(0, ge=0, description="worker processes (0 = one a core); the result is the same")

    @model_validator(mode="after")
    def _consistent(self) -> DataSettings:
        names = [source.name for source in self.source]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two sources are called {twice[0]!r}; give each its own name")
        replayed = self.replay.source if self.replay else None
        if replayed not in {*names, SELF, None}:
            raise ValueError(f'replay.source {replayed!r} is neither a source ({", ".join(names)}) nor "self"')
        if replayed == SELF and self.tokeniser.source != "base":
            raise ValueError('replay.source = "self" gives tokens of the base, so tokeniser.source must be "base"')
        if len(set(self.fim.tokens)) < len(self.fim.tokens):
            raise ValueError("fim.tokens must be three different tokens")
        domains = {source.domain for source in self.source if source.name != replayed}
        if unknown := set(self.shares) - domains:
            raise ValueError(f"shares names the domain {min(unknown)!r}, which no source has, replay aside")
        total = sum(self.shares.values()) + (self.replay.share if self.replay else 0)
        if total > 1 + 1e-9 or any(share < 0 for share in self.shares.values()):
            raise ValueError("shares (and replay.share) must not be negative and must not add up to more than 1")
        if total < 1 - 1e-9 and not domains - set(self.shares):
            raise ValueError("shares (and replay.share) add up to less than 1, and no domain is left for the rest")
        return self
