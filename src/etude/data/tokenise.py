"""Text into tokens: the tokeniser of a corpus, and the build's second pass, which tokenises the documents that stay.

**The tokeniser** is the base's own, another folder's, or one trained here. `tokenizers` is the reference; `fastokens` gives the
same tokens several times as fast (benchmarks/corpus.py), for the kinds of tokeniser it knows. It is trusted only after it has
agreed with the reference on odd text and on the first documents of the unit at hand; where it does not, the reference is used
and the manifest says so. Text that spells a special token, such as `<|endoftext|>` in a file about tokenisers, is encoded as
ordinary text: no document can forge a boundary. Trained ones are byte-level BPE, so that every text can be written: words with
at most one sign before them, single digits, runs of signs, indentation. The chat, tool and fill-in-the-middle tokens and some
reserved ones come first in the vocabulary.

**Documents** end with the separator. The files of a repository may be joined, so that they are long enough to learn how files
depend on each other: in the order `path`, as a person sees the tree; or `imports`, a file after those it imports, so that a
model has read a function before it sees it used (DeepSeek-Coder 2024). Only Python's imports are followed; all else keeps path
order. Cycles are cut at the file that comes first by path.

**Fill-in-the-middle** (Bavarian et al. 2022): a file is cut at two characters, and its middle is moved to the end.

    PSM  <prefix> P <suffix> S <middle> M
    SPM  <prefix> <suffix> S <middle> P M      (the variant that shares the prefix token, as Code Llama has it)

The cuts fall between characters, not tokens, because an editor's cursor does too. Each part is tokenised for itself. Taking
the tokens away and the parts back into order gives the file again; a test does.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from importlib import resources
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.data.deduplicate import DOCUMENTS, KEPT
from etude.data.document import Document, in_groups
from etude.data.filters.content import is_code
from etude.data.filters.licence import all_of
from etude.data.heldout import draw, is_heldout
from etude.data.manifest import SourceEntry
from etude.errors import UserError, one_line
from etude.files import publish_folder, whole_file

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from etude.data.settings import DataSettings

    Tokens = npt.NDArray[np.uint32]
    Pieces = list[str | int]  # text to be tokenised, and tokens as they are

CHECKED_BYTES = 100_000  # of each unit, encoded twice
MARKUP = re.compile(r"<.+>|\[[A-Z_]+\]|\{\{.+\}\}", re.DOTALL)
ODD_TEXTS = ("", " ", "\n\n  \n", "a\tb\f", "naïve e\u0301 Ａ\u3000漢字 \U0001f600\u200b", "x" * 2000,
             "0123456789 1,000.5e-3", "<|x|>")  # fmt: skip
END = "<|endoftext|>"
NAMED_TOKENS = (
    END, "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
RESERVED_TOKENS = 16
SEPARATORS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = "chat_template.jinja"
IMPORT = re.compile(r"(?m)^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+import[ \t]+\(?([\w, \t]*)|import[ \t]+([\w., \t]+))")
TOKENS, TABLE = "tokens.bin", "table.parquet"  # in a unit's folder: tokens one after another, and what they are of
READ_ROWS = 256  # documents read at once: each may have a megabyte
JOINED_BYTES = 64_000_000  # of one repository held in memory
TABLE_ROWS = 10_000  # written at once
TABLE_SCHEMA = pa.schema(
    [("repository", pa.string()), ("paths", pa.list_(pa.string())), ("licence", pa.string()), ("heldout", pa.bool_()),
     ("tokens", pa.int64()), ("bytes", pa.int64())]
)  # fmt: skip


class Encoder:
    """One tokeniser file."""

    def __init__(self, file: Path) -> None:
        import fastokens
        from tokenizers import Tokenizer

        try:
            tokeniser = json.loads(file.read_text(encoding="utf-8"))
            # Some declare their tool and fill-in-the-middle tokens as ordinary: text could spell them. Runs of spaces stay so.
            for token in tokeniser.get("added_tokens") or []:
                token["special"] = token["special"] or bool(MARKUP.fullmatch(token["content"]))
            self.reference = Tokenizer.from_str(json.dumps(tokeniser))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise UserError(f"{file} is not a tokeniser: {one_line(error)}") from None
        self.reference.encode_special_tokens = True
        self.reference.no_truncation()
        self.fast: Any = None
        with contextlib.suppress(Exception):  # a kind of tokeniser it does not know: the reference serves
            self.fast = fastokens.Tokenizer.from_json_str(json.dumps(tokeniser))
        # Added tokens by name: those that no text is encoded to.
        self.added = {token.content: number for number, token in self.reference.get_added_tokens_decoder().items()}
        self.use_fast = self._agrees([*ODD_TEXTS, *(f"a{content}b" for content in self.added)])
        self._unchecked = CHECKED_BYTES

    @property
    def vocabulary(self) -> int:
        """How many ids there are, added tokens included."""
        return 1 + max(self.reference.get_vocab(with_added_tokens=True).values())

    def separator(self, wanted: str | None) -> int:
        """Return the id of the token after each document."""
        usual = (name for name in SEPARATORS if name in self.added)
        name = wanted if wanted is not None else next(usual, None)
        if name is None:
            raise UserError("the tokeniser has no usual end token; name the one after each document in data.separator")
        if name not in self.added:
            raise UserError(f"data.separator {wanted!r} is not a token of the tokeniser")
        return self.added[name]

    def fim_tokens(self, names: Sequence[str]) -> list[int]:
        """Return the ids of the tokens for prefix, middle and suffix."""
        for name in names:
            if name not in self.added:
                advice = "name its own in data.fim.tokens, or set data.fim.rate = 0"
                raise UserError(f"data.fim: the tokeniser has no token {name!r}; {advice}")
        return [self.added[name] for name in names]

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text."""
        if self.use_fast and self._unchecked > 0:
            before = accumulate(map(len, texts), initial=0)  # characters of the texts before each, and of all
            pairs = zip(texts, before, strict=False)
            some = [text[: self._unchecked] for text, size in pairs if size <= self._unchecked]
            self._unchecked -= sum(map(len, some))
            self.use_fast = self._agrees(some)
        return self._fast(texts) if self.use_fast else self._slow(texts)

    def _agrees(self, texts: Sequence[str]) -> bool:
        return self.fast is not None and all(map(np.array_equal, self._fast(texts), self._slow(texts)))

    def _fast(self, texts: Sequence[str]) -> list[Tokens]:
        if not texts:
            return []  # numpy would split nothing into one part
        ids, offsets = self.fast.encode_batch_flat(list(texts), split_special_tokens=True)
        return np.split(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64)[1:-1].astype(np.int64))

    def _slow(self, texts: Sequence[str]) -> list[Tokens]:
        # One by one: the library keeps some twenty times the size of a text until it is done with all.
        encodings = (self.reference.encode(text, add_special_tokens=False) for text in texts)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def train_tokeniser(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE and save it as a Hugging Face tokeniser with a ChatML template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*NAMED_TOKENS, *(f"<|reserved_{number}|>" for number in range(RESERVED_TOKENS))]
    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocabulary, **options))
    if (size := made.get_vocab_size()) < vocabulary:
        advice = "add text or lower data.tokeniser.vocabulary"
        raise UserError(f"this corpus gives a vocabulary of {size} tokens, not {vocabulary}; {advice}")
    roles = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
    saved = PreTrainedTokenizerFast(tokenizer_object=made, **roles, extra_special_tokens=special[1:])
    saved.chat_template = resources.files("etude.models").joinpath("sprout", TEMPLATE).read_text(encoding="utf-8")
    work = folder.with_name(f"{folder.name}.work")
    saved.save_pretrained(work)
    publish_folder(work, folder)


def copy_tokeniser(model: Path, folder: Path) -> None:
    """Place a model's tokeniser into a folder of its own, as tokenizer.json and what goes with it."""
    folder.mkdir(parents=True, exist_ok=True)
    if (model / "tokenizer.json").is_file():
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", TEMPLATE):
            if (model / name).is_file():
                shutil.copyfile(model / name, folder / name)
        return
    from etude.models.load import load_tokeniser  # and torch with it

    tokeniser: Any = load_tokeniser(model)
    if not getattr(tokeniser, "is_fast", False):
        none = "has no tokenizer.json and none can be made of what it has"
        raise UserError(f"{model} {none}; convert its tokeniser first")
    tokeniser.save_pretrained(folder)


class TokeniseJob(NamedTuple):
    """A unit whose documents become tokens."""

    folder: Path  # of the unit
    data: DataSettings
    tokeniser: Path
    separator: int
    heldout: frozenset[str] | float  # repositories; or for loose rows the share, decided by each row's hash
    seed: int


class Shaped(NamedTuple):
    """A document in pieces, and the files it holds."""

    pieces: Pieces
    files: Sequence[Document]
    joined: bool  # each under its name
    fim: int  # files in it that were rearranged


def tokenise_unit(job: TokeniseJob) -> dict[str, Any]:
    """Do one unit; return its counts, and whether the fast tokeniser was right."""
    encoder, entry = Encoder(job.tokeniser), SourceEntry(name="", domain="")
    fim = encoder.fim_tokens(job.data.fim.tokens) if job.data.fim.rate else None
    with unit_writer(job.folder) as write:
        for documents in _repositories(job):
            for document in documents:
                size = len(document.text.encode())
                entry.licences[document.licence] += size
                entry.languages[document.language] += size
                entry.evidence[document.evidence or "none"] += size
            for shaped, tokens in _encoded(list(_shape(documents, job, fim)), encoder, job):
                held = is_heldout(shaped.files[0].repository, job.heldout, job.seed)
                size = write(tokens, shaped.files, held)
                entry.tokens["heldout" if held else "train"] += len(tokens)
                entry.text_bytes["heldout" if held else "train"] += size
                entry.fim += shaped.fim
    counts = entry.counts()
    return {"written_tokens": entry.tokens.total(), "exact_fast_tokeniser": encoder.use_fast, "counts": counts}


def read_kept(folder: Path) -> Iterator[list[Document]]:
    """Yield the documents of a unit that stay, some at a time."""
    kept = np.load(folder / KEPT)
    position = 0
    columns = list(Document.__slots__)
    for batch in pq.ParquetFile(folder / DOCUMENTS).iter_batches(READ_ROWS, columns=columns):
        stays = pa.array(kept[position : position + batch.num_rows])
        position += batch.num_rows
        yield [Document(**fields) for fields in batch.filter(stays).to_pylist()]


def _repositories(job: TokeniseJob) -> Iterator[list[Document]]:
    """Yield neighbouring documents: those of one repository if files are to be joined, else as they come."""
    if job.data.repositories == "off":
        yield from read_kept(job.folder)
    else:
        everything = chain.from_iterable(read_kept(job.folder))
        for _, documents in groupby(everything, key=lambda document: document.repository):
            yield from in_groups(documents, lambda document: len(document.text), JOINED_BYTES)


def _shape(documents: list[Document], job: TokeniseJob, fim: list[int] | None) -> Iterator[Shaped]:
    order = job.data.repositories
    files = [document for document in documents if document.kind == "file" and order != "off"]
    for document in documents:
        if document.kind != "file" or order == "off":
            yield _shaped([document], job, fim, joined=False)
    for group in in_groups(in_order(files, order), joined_length, job.data.repository_chars):
        yield _shaped(group, job, fim, joined=True)


def _shaped(files: Sequence[Document], job: TokeniseJob, fim: list[int] | None, *, joined: bool) -> Shaped:
    """Return files as one document, each under its name if they are joined, some with their middle at the end."""
    pieces: Pieces = []
    moved = 0
    for file in files:
        body: Pieces = [file.text]
        if fim and file.kind == "file" and is_code(file.language):
            rng = draw(job.seed, "fim", file.repository, file.path)
            if rng.random() < job.data.fim.rate:
                body = rearrange(file.text, fim, rng, job.data.fim.spm)
                moved += 1
        pieces += [header(file.path), *body, "\n"] if joined else body
    return Shaped(pieces, files, joined, moved)


def rearrange(text: str, tokens: Sequence[int], rng: random.Random, spm_share: float) -> Pieces:
    """Cut a text at two places and move its middle to the end; `tokens` are those for prefix, middle and suffix."""
    first, second = sorted(rng.randint(0, len(text)) for _ in range(2))
    before, between, after = text[:first], text[first:second], text[second:]
    prefix, middle, suffix = tokens
    if rng.random() < spm_share:
        return [prefix, suffix, after, middle, before + between]
    return [prefix, before, suffix, after, middle, between]


def _encoded(shaped: list[Shaped], encoder: Encoder, job: TokeniseJob) -> Iterator[tuple[Shaped, Tokens]]:
    for each, tokens in zip(shaped, _tokens(shaped, encoder, job.separator), strict=True):
        if each.fim and len(tokens) > job.data.length:
            # Cut over two rows, a middle would be asked for without what surrounds it.
            plain = _shaped(each.files, job, None, joined=each.joined)
            yield plain, _tokens([plain], encoder, job.separator)[0]
        else:
            yield each, tokens


def _tokens(shaped: Sequence[Shaped], encoder: Encoder, separator: int) -> list[Tokens]:
    pieces = [[*each.pieces, separator] for each in shaped]
    encoded = iter(encoder.encode([piece for each in pieces for piece in each if isinstance(piece, str)]))
    parts = [[next(encoded) if isinstance(one, str) else np.array([one], np.uint32) for one in each] for each in pieces]
    return [np.concatenate(each) for each in parts]


@contextlib.contextmanager
def unit_writer(folder: Path) -> Iterator[Callable[[Tokens, Sequence[Document], bool], int]]:
    """Yield what writes the documents of a unit as they come: their tokens, the files they hold, whether held out.

    It returns the bytes of the files.
    """
    rows: list[dict[str, Any]] = []
    with (
        whole_file(folder / TOKENS) as beside, beside.open("wb") as file,
        whole_file(folder / TABLE) as table, pq.ParquetWriter(table, TABLE_SCHEMA, compression="zstd") as writer,
    ):  # fmt: skip

        def flush() -> None:
            writer.write_table(pa.Table.from_pylist(rows, TABLE_SCHEMA))
            rows.clear()

        def write(tokens: Tokens, files: Sequence[Document], heldout: bool) -> int:  # noqa: FBT001 - a column
            file.write(tokens.astype("<u4").data)
            paths, size = [each.path for each in files], sum(len(each.text.encode()) for each in files)
            rows.append({"repository": files[0].repository, "paths": paths, "heldout": heldout, "tokens": len(tokens),
                         "licence": all_of(sorted({each.licence for each in files})), "bytes": size})  # fmt: skip
            if len(rows) >= TABLE_ROWS:
                flush()
            return size

        yield write
        flush()


def header(path: str) -> str:
    """Return the line that names a file inside a joined document."""
    return f"### {path}\n"


def joined_length(file: Document) -> int:
    """Return the characters a file takes in a joined document."""
    return len(header(file.path)) + len(file.text) + 1


def in_order(files: Sequence[Document], order: str) -> list[Document]:
    """Return the files of a repository in the stated order."""
    ordered = sorted(files, key=lambda file: file.path)
    if order == "path":
        return ordered
    modules = {name: index for index, file in enumerate(ordered) for name in module_names(file.path)}
    needs = [sorted(_imported(file, modules) - {index}) for index, file in enumerate(ordered)]
    return [ordered[index] for index in _after_needs(needs)]


def _after_needs(needs: Sequence[Sequence[int]]) -> list[int]:
    """Return all numbers, each after those it needs where that is possible; depth first, without recursion."""
    done: dict[int, None] = {}
    seen: set[int] = set()
    for start in range(len(needs)):
        stack = [start]
        while stack:
            seen.add(stack[-1])
            waiting = next((other for other in needs[stack[-1]] if other not in seen), None)
            if waiting is None:
                done.setdefault(stack.pop())
            else:
                stack.append(waiting)
    return list(done)


def module_names(path: str) -> list[str]:
    """Return the names a Python file can be imported by: with and without its leading folders (`src/a/b.py` is also a.b)."""
    if not path.endswith(".py"):
        return []
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return [".".join(parts[start:]) for start in range(min(2, len(parts)))]


def _imported(file: Document, modules: dict[str, int]) -> set[int]:
    numbers: set[int] = set()
    package = file.path.split("/")[:-1]
    for module, names, plain in IMPORT.findall(file.text) if file.path.endswith(".py") else []:
        dots = len(module) - len(module.lstrip("."))
        above = ".".join(package[: len(package) - dots + 1]) if dots else ""
        start = ".".join(part for part in (above, module.lstrip(".")) if part)
        wanted = [name.split(" as ")[0].strip() for name in (names or plain).split(",")]
        candidates = [start, *(f"{start}.{name}" for name in wanted)] if start else wanted
        numbers |= {modules[name] for name in candidates if name in modules}
    return numbers
