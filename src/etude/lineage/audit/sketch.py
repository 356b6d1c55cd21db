"""A base in a few megabytes: enough of its weights to test a suspect against it, far too little to run it.

Three layers are kept, each row of their up- and gate-projections as `RANK` random signed sums of its values, in eight bits:
cosines of rows survive that, and cosines are all that the tests look at. Measured on SmolLM2-135M with noise added to the rows
until their cosine was 0.32 (log10 p of the neuron test, one layer):

    RANK        64    96    128    192    256
    16 bits    -18   -41   -112   -277   < -300
    8 bits     -17   -42   -109   -274   < -300     so eight bits cost nothing, and few layers with long sums beat many with short ones

The embeddings of the first `WORDS × hidden` words bring rotated copies back. First words are the most frequent: they are trained best
and most vocabularies have them (cosine of rows rotated back after a drift of cosine 0.45: 0.51; with as many random words 0.45).

The library is made of such sketches: those that ship with the package and those a user has added.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from etude.errors import UserError, one_line
from etude.files import digest_of_files, sha256_files, whole_file
from etude.lineage.audit.read_weights import Matrix, Rows, Shape, Tokens, Weights
from etude.progress import BYTES, Reporter

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


FORMAT = "etude-sketch/1"  # of the file; also the seed of the signs, so that another format is another projection
LAYERS = 3
RANK = 256
ROWS = 4096  # of a matrix at most, evenly spaced: more make the file larger, not the answer surer
KEY_ROWS = 128  # they tell layers apart
WORDS = 3
EMBEDDING_BYTES = 32 << 20  # at most: beyond 3,300 dimensions there are fewer words
PARTS = ("up", "gate", "expert up", "expert gate", "router", "key")  # of a layer; the expert is the first routed one


class Facts(BaseModel, extra="forbid", frozen=True):
    """What a sketch was made of."""

    name: str
    source: str  # where the weights came from
    licence: str | None  # known by its text; None: unknown text, or none
    model_digest: str  # over the weight files, as a record has it
    made: str  # date


@dataclass(frozen=True)
class Sketch:
    """A base's sketch; its arrays are read one at a time."""

    facts: Facts
    shape: Shape
    names: frozenset[str]
    read: Callable[[str], NDArray[Any]]

    @property
    def name(self) -> str:
        """The base's name."""
        return self.facts.name

    @property
    def layers(self) -> list[int]:
        """The layers it holds something of."""
        return sorted({int(name.split(".")[0]) for name in self.names if name[0].isdigit()})

    @property
    def tokens(self) -> Tokens | None:
        """The vocabulary, each word as its hash."""
        return _as_tokens(self.read("vocabulary")) if "vocabulary" in self.names else None

    @property
    def words(self) -> Rows:
        """The ids of the words whose embeddings it holds, ascending."""
        return self.read("words").astype(np.int64)

    def part(self, layer: int, name: str) -> Matrix | None:
        """Return a part of a layer, all but keys projected; None where it holds no such part."""
        key = f"{layer}.{name}"
        return _floats(self.read(key), self.read(f"{key}.steps")) if key in self.names else None

    def embedding(self, ids: Rows) -> Matrix:
        """[n, hidden]: the embeddings of some of its words."""
        rows = np.searchsorted(self.words, ids)
        return _floats(self.read("embedding")[rows], self.read("embedding.steps")[rows])

    def save(self, path: Path) -> None:
        """Write the sketch: one safetensors file."""
        from safetensors.numpy import save

        about = {"format": FORMAT, "facts": self.facts.model_dump(), "shape": asdict(self.shape)}
        with whole_file(path) as beside:
            beside.write_bytes(save({name: self.read(name) for name in self.names}, {"sketch": json.dumps(about)}))

    @classmethod
    def load(cls, path: Path) -> Sketch:
        """Open a sketch's file."""
        from safetensors import SafetensorError, safe_open

        try:
            stored: Any = safe_open(path, framework="numpy")
            about = json.loads((stored.metadata() or {})["sketch"])
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']}, not {FORMAT}")
            return cls(Facts(**about["facts"]), Shape(**about["shape"]), frozenset(stored.keys()), stored.get_tensor)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no sketch ({one_line(error)}); make one with etude library add") from None


def make_sketch(weights: Weights, tokens: Tokens | None, facts: Facts) -> Sketch:
    """Read the layers that stand for a base, one matrix at a time."""
    kept: dict[str, NDArray[Any]] = {}
    for layer in middles(LAYERS, range(weights.shape.layers)):
        for part in PARTS:
            rows = weights.part(layer, part)
            if rows is not None:
                short = thinned(rows, KEY_ROWS) if part == "key" else project(thinned(rows, ROWS))
                kept[f"{layer}.{part}"], kept[f"{layer}.{part}.steps"] = _eight_bits(short)
    if tokens:
        kept["vocabulary"] = _hashes(tokens)
    kept["words"] = _first_words(weights.shape, kept.get("vocabulary"))
    kept["embedding"], kept["embedding.steps"] = _eight_bits(weights.embedding(kept["words"]))
    return Sketch(facts, weights.shape, frozenset(kept), kept.__getitem__)


def thinned(matrix: Matrix, most: int) -> Matrix:
    """Return at most so many rows of a matrix, evenly spaced."""
    return matrix if len(matrix) <= most else matrix[np.linspace(0, len(matrix) - 1, most).astype(np.int64)]


def middles(count: int, layers: range | list[int]) -> list[int]:
    """Return the layer in the middle of each of so many equal parts: the ends change most when a model is trained on."""
    return sorted({layers[(2 * step + 1) * len(layers) // (2 * count)] for step in range(count)})


def project(rows: Matrix) -> Matrix:
    """Return `RANK` signed sums of each row's values; of narrow rows half as many as they have values."""
    return np.asarray(rows @ _signs(rows.shape[1]), np.float32)


@lru_cache(maxsize=4)
def _signs(hidden: int) -> Matrix:
    """Return the projection's signs. They come from a hash: a generator's stream may change between versions of numpy."""
    rank = min(RANK, hidden // 2)
    bits = hashlib.shake_256(f"{FORMAT} {hidden}".encode()).digest(-(-hidden * rank // 8))
    signs = np.unpackbits(np.frombuffer(bits, np.uint8))[: hidden * rank]
    return signs.reshape(hidden, rank).astype(np.float32) * 2 - 1


def _eight_bits(rows: Matrix) -> tuple[NDArray[np.int8], Matrix]:
    """Return rows in eight bits, and the length of each row's step."""
    steps = np.maximum(np.abs(rows).max(axis=1), np.finfo(np.float32).tiny) / 127
    return np.round(rows / steps[:, None]).astype(np.int8), steps


def _floats(values: NDArray[np.int8], steps: Matrix) -> Matrix:
    return np.asarray(values * steps[:, None], np.float32)


def hashed(tokens: Tokens) -> Tokens:
    """Return a vocabulary as a sketch keeps its own, so that the two can be compared."""
    return _as_tokens(_hashes(tokens))


def _hashes(tokens: Tokens) -> NDArray[np.uint32]:
    """Return 32 bits for each ordinary word by id; 0 where there is none."""
    words = [None if word in tokens.special else word for word in tokens.strings]
    cut = [hashlib.sha256(word.encode("utf-8", "surrogatepass")).digest()[:4] if word else bytes(4) for word in words]
    return np.frombuffer(b"".join(cut), "<u4").astype(np.uint32)


def _as_tokens(hashes: NDArray[np.uint32]) -> Tokens:
    return Tokens([f"{value:08x}" if value else None for value in hashes.tolist()])


def _first_words(shape: Shape, vocabulary: NDArray[np.uint32] | None) -> Rows:
    known = np.arange(shape.vocab) if vocabulary is None else np.flatnonzero(vocabulary[: shape.vocab])
    return known[: min(WORDS * shape.hidden, EMBEDDING_BYTES // shape.hidden)].astype(np.int64)


SUFFIX = ".sketch.safetensors"
FOLDER = "sketches"  # in the cache
NAME = re.compile(r"[\w][\w.-]{0,99}")


def shipped() -> Path:
    """Return the folder of the sketches that come with the package."""
    return Path(str(resources.files("etude.lineage.audit"))) / FOLDER


def known_sketches(extra: Path | None, reporter: Reporter) -> list[Sketch]:
    """Open the shipped sketches and those of a folder, by name; nothing but their headers is read yet.

    A damaged one is named and left out: a claim of that very base then counts as one that could not be compared.
    """
    sketches = []
    for path in [path for folder in (shipped(), extra) if folder for path in sorted(folder.glob(f"*{SUFFIX}"))]:
        try:
            sketches.append(Sketch.load(path))
        except UserError as damaged:
            reporter.say(f"left out: {damaged}")
    return sketches


def place_for(name: str, folder: Path) -> Path:
    """Return the file for a new sketch in a user's folder; a name that is taken is refused: no base is replaced unseen."""
    if not NAME.fullmatch(name):
        raise UserError(f"{name[:80]!r} is no name for a sketch; use letters, digits, dots and dashes")
    path = folder / f"{name}{SUFFIX}"
    for taken in (path, shipped() / path.name):
        if taken.exists():
            raise UserError(f"the library has a {name!r} already: {taken}; choose another name or delete that file")
    return path


def digest_weights(path: Path, reporter: Reporter) -> str:
    """Return the digest by which records name the weights of a folder, all of its safetensors; or that of a single file."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    with reporter.task("hashing", sum(file.stat().st_size for file in files), BYTES) as task:
        return digest_of_files({file.name: digest for file, digest in sha256_files(files, task.advance).items()})
