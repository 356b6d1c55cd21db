"""What a file is, and whether its text is worth training on. Nothing here looks at more than one document.

**Decoding**: from bytes to text, UTF-8 unless the file itself says otherwise, line ends as LF, nothing else changed. Encodings are
never guessed: a wrong guess gives fluent nonsense. Unicode is not normalised either (no NFC): in code the code points are the
meaning. A test of normalisation, or a pattern over combining marks, would no longer do what it says.

**Language**: by a file's name first (library `identify`), by its first lines where the name can mean two things. Kept as code:
programs, markup and style sheets, build files and configuration that people write (TOML, YAML, INI, Dockerfile, Makefile). Kept as
prose: Markdown, reStructuredText, plain text, TeX and the like. HTML counts as code: as prose it is mostly tags. Left out: data
(JSON, CSV, XML, notebooks, translations, keys) and everything not known by name.

**Generated**: what nobody wrote here (vendored copies, generated and minified files, lock files), by path, and by what a file says
of itself in its heading. Words about generating elsewhere in a file mean nothing: code generators, their templates and their tests
are hand-written. Very long lines are left to `quality`.

**Quality**: counts only, the cheapest first, each with its own limit in `[data.filters]`.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import re
import string
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

from identify import identify

from etude.data.codebase import TABLES
from etude.data.document import UNKNOWN, Document, Raw

if TYPE_CHECKING:
    from etude.data.settings import FilterSettings

FEW = 8  # control characters that may stray into a text, or one in a thousand; more are a terminal recording or a binary format
CONTROLS = bytes(sorted({*range(32), 127} - set(b"\t\n\f")))
BOMS = {  # UTF-32 first: its little-endian mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
# PEP 263, Emacs, Vim, XML: in the first two lines.
DECLARED = re.compile(rb"(?:[^\n]*\n)?[^\n]*?coding[:=][ \t]*[\"']?([-\w.]+)")
# Character sets only. Python also knows codecs that are programs in disguise (unicode_escape, punycode).
CHARACTER_SETS = re.compile(r"iso8859|cp\d|koi8|mac|euc|shift_jis|iso2022|gb|big5|ascii")


def decode(raw: Raw) -> Document | str:
    """Return the document, or the reason to drop it."""
    text = decoded(raw.content)
    if text is None:
        return "not UTF-8"
    if "\0" in text:
        return "binary"
    if not text or text.isspace():
        return "empty"
    encoded = text.encode()
    if len(encoded) - len(encoded.translate(None, CONTROLS)) > max(FEW, len(encoded) // 1000):
        return "control characters"
    licence, evidence = (raw.licence, "metadata") if raw.licence else (UNKNOWN, "")
    return Document(raw.repository, raw.path, text, kind=raw.kind, licence=licence, evidence=evidence)


def _normalised(text: str) -> str:
    """Return a text with line ends as LF, and no byte order mark."""
    return (text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text).removeprefix("\ufeff")


def decoded(content: bytes) -> str | None:
    """Return the text of a file, normalised; one that holds a NUL where there is none in text stands for binary files."""
    marked = next((name for mark, name in BOMS.items() if content.startswith(mark)), None)
    if b"\0" in content and marked is None:
        return "\0"
    try:
        return _normalised(content.decode(marked or "utf-8"))
    except UnicodeDecodeError:
        declared = DECLARED.match(content[:1000])
    with contextlib.suppress(LookupError, UnicodeDecodeError):
        encoding = codecs.lookup(declared[1].decode()).name if declared else ""
        if CHARACTER_SETS.match(encoding):
            return _normalised(content.decode(encoding))
    return None


PROSE, DATA = frozenset(TABLES["prose"]), frozenset(TABLES["data"])
AMBIGUOUS = {suffix: [(re.compile(pattern, re.MULTILINE), tag) for pattern, tag in cases]
             for suffix, cases in TABLES["ambiguous"].items()}  # fmt: skip


def language(document: Document) -> str | None:
    """Set the document's language; return why it is dropped, or None."""
    if document.kind != "file":
        document.language = document.language or ("diff" if document.kind == "commit" else "plain-text")
        return None
    name = document.path.rpartition("/")[2]
    document.language = _by_name(name) or _by_shebang(document.text)
    for pattern, tag in AMBIGUOUS.get(name.rpartition(".")[2], ()):
        if pattern.search(document.text, 0, 8192):
            document.language = tag
            break
    if document.language in DATA:
        return "data file"
    return None if document.language else "not text or code"


def is_code(language: str) -> bool:
    """Say whether it is code, configuration included."""
    return bool(language) and language not in PROSE | DATA


@lru_cache(maxsize=10_000)
def _by_name(name: str) -> str:
    name = name.removesuffix(".in")  # config.h.in is filled in by a build, and reads like config.h
    tag = _named(identify.tags_from_filename(name)) or TABLES["suffixes"].get(name.rpartition(".")[2].lower(), "")
    return tag or ("plain-text" if re.fullmatch(r"[A-Z][A-Z_-]{2,}", name) else "")  # TODO, HISTORY, THANKS


def _by_shebang(text: str) -> str:
    command = identify.parse_shebang(io.BytesIO(text[:200].encode())) if text.startswith("#!") else ()
    return _named(identify.tags_from_interpreter(command[0])) if command else ""


def _named(tags: set[str]) -> str:
    """Choose the language among the tags of a file; nothing for binary files."""
    tags = set() if "binary" in tags else tags - {"text"}
    tags -= {"plain-text"} if len(tags) > 1 else set()  # README.md is Markdown
    return min(tags & DATA, default="") or next((tag for tag in TABLES["broad"] if tag in tags), min(tags, default=""))


HEAD = 4096  # characters; no heading worth reading is longer
_QUOTES = [('[ru]?"""', '"""'), ("[ru]?'''", "'''")]
_BLOCKS = [*_QUOTES, (r"/\*", r"\*/"), ("<!--", "-->"), (r"\{-", "-}"), (r"\(\*", r"\*\)")]
_BLOCK = "|".join(rf"{opening}(?s:.*?)(?:{closing}|\Z)" for opening, closing in _BLOCKS)
_LINE = r"""\.\.[^\n]*(?:\n[ \t]+[^\n]*)*|(?:\#|//|--|;|%|"|'|<\?|<!|@?rem\b|dnl\b|@echo\b)[^\n]*"""
_HEADING = re.compile(rf"(?:\s+|{_BLOCK}|{_LINE})*+", re.IGNORECASE)
_SIGNS = r"#+:?|//+!?|/?\*+|--+|;+|%+|<!--|\{-|\(\*|\.\.|rem\b|dnl\b|[ru]?\"{3}|[ru]?'{3}"
_SIGN = re.compile(rf"(?im)^[ \t]*(?:{_SIGNS})[ \t]?")


def heading(text: str) -> str:
    """Return the comments and the docstring before the first line of code, without comment signs.

    What a file says about itself (who licenses it, what generated it) stands there. The same words further down are what
    it says about other files: the template of a code generator, a licence checker's patterns, a test's example.
    """
    match = _HEADING.match(text, 0, HEAD)
    return _SIGN.sub("", match.group()) if match else ""


# `build`, `dist` and `external` are names of packages too, so they count at the top of a repository only; `dist` also over web files.
PATHS = [(reason, re.compile(rf"(?:^|/)(?:{pattern})", re.IGNORECASE)) for reason, pattern in [
    ("lock file", r"(?:package-lock\.json|npm-shrinkwrap\.json|(?:pnpm|conda)-lock\.ya?ml|pylock(?:\.[\w-]+)?\.toml|go(?:\.work)?\.sum"
                  r"|packages\.lock\.json|\.terraform\.lock\.hcl|[\w.-]+\.lock(?:b|file)?)$"),
    ("vendored", r"(?:_?vendor(?:ed|ized)?|third[_-]?party|3rd[_-]?party|node_modules|site-packages|externals|bower_components"
                 r"|jspm_packages|Godeps|Pods)/|(?<![^/]/)c?extern(?:al)?/"),
    ("minified", r"[^/]+[.-](?:min|bundle|chunk|pack)\.(?:m?js|css)$|[^/]+\.(?:js|css)\.map$"),
    ("generated", r"(?:__pycache__|_build|\.?venv|\.tox|\.nox|\.eggs|\.git|[^/]+\.(?:egg|dist)-info)/|PKG-INFO$|parsetab\.py$"
                  r"|[^/]+(?:_pb2(?:_grpc)?\.pyi?|\.pb(?:\.gw)?\.(?:go|cc|h)|_pb\.(?:d\.ts|js|ts)|[._]generated\.[\w.]+|\.designer\.cs)$"
                  r"|dist/(?:[^/]+/)*[^/]+\.(?:m?js|css|map|html)$|(?<![^/]/)(?:build|dist)/"),
]]  # fmt: skip
_SENTENCE = r"(?:^\W*(?-i:(?=[A-Z@]))|(?:\A|[.!:*=-]\s*\n|\n[ \t]*\n)\W*)"  # a new one, not "… files\ngenerated by …"
_THIS_FILE = r"this\s+(?:[\w-]+\s+){0,2}?(?:file|module|script|header|document|code|package)\s+(?:is|was|has\s+been)\s+"
_MARKER = re.compile(
    rf"""{_SENTENCE}(?:
        @generated\b
      | (?:{_THIS_FILE}|(?:file|[\w/-]+\.\w+)\s+)?(?:auto(?:matically)?[-\s]?)?generated\s+(?:automatically\s+|file\s+)?
        (?:by|from|with|using)\b
      | (?:{_THIS_FILE})?auto(?:matically)?[-\s]?generated(?:\s+(?:file|code|on|at|via|and|during)\b|\s*[.!:;,(*-]|\W*$)
    )
    | (?-i:DO\s+NOT\s+(?:EDIT|MODIFY))(?:\s+(?:THIS|THE)\s+FILE\b|\s+(?:manually|by\s+hand|directly)\b|\W*$|\s*[-.!;:(])
    | \bdo\s+not\s+(?:edit|modify|change)\s+(?:this\s+(?:file|code)\s+|it\s+)?(?:manually|by\s+hand|directly)\b""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_SOURCE_MAP = re.compile(r"^\s*(?://|/\*)[#@] sourceMappingURL=", re.MULTILINE)


def generated(document: Document) -> str | None:
    """Return why the document is dropped, or None."""
    if document.kind == "file":
        for reason, pattern in PATHS:
            if pattern.search(document.path):
                return reason
    head = document.text[:HEAD].lower()
    if ("generated" in head or "do not" in head) and _MARKER.search(heading(document.text)):
        return "generated"
    script = document.language in {"javascript", "css"}
    return "generated" if script and _SOURCE_MAP.search(document.text, max(0, len(document.text) - 500)) else None


ALPHANUMERIC = (string.ascii_letters + string.digits).encode()
NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
FEWEST_LINES = 20  # below, a share of repeated lines says nothing


def quality(document: Document, limits: FilterSettings) -> str | None:
    """Return why a document is dropped: too short, too long, too wide, too bare of words, too repetitive; or None."""
    text = document.text
    if len(text) < limits.min_chars:
        return "too short"
    if len(text) > limits.max_bytes:
        return "too long"
    # A paragraph of prose may well be one line.
    if document.language not in PROSE and len(text) / (text.count("\n") + 1) > limits.max_mean_line:
        return "long lines on average"
    lines = text.split("\n")
    if len(text) > limits.max_line and len(max(lines, key=len)) > limits.max_line:
        return "a very long line"
    enough = limits.min_alphanumeric * len(text)
    # Half a text mostly has enough for all.
    if alphanumeric(text[: len(text) // 2]) < enough and alphanumeric(text) < enough:
        return "few letters and digits"
    if len(lines) > FEWEST_LINES and repeated_share(lines) > limits.max_repeated_lines:
        return "repeated lines"
    return "repetitive" if compresses(text, limits.max_compression) else None


def alphanumeric(text: str) -> int:
    """Count letters and digits of any script."""
    plain = text.encode("ascii", "ignore")
    count = len(plain) - len(plain.translate(None, ALPHANUMERIC))
    return count + sum(map(str.isalnum, "".join(NOT_ASCII.findall(text)))) if len(plain) < len(text) else count


def repeated_share(lines: list[str]) -> float:
    """Return the share of lines that occurred before, among those that are not blank; indentation counts."""
    written = [line for line in lines if line and not line.isspace()]
    return (len(written) - len(set(written))) / max(1, len(written))


def compresses(text: str, ratio: float) -> bool:
    """Say whether zlib (level 1, the fastest) makes the text more than `ratio` times smaller.

    Compressing a part gives about as many bytes as that part adds to the whole. If they are too many already, the answer
    is no, and for ordinary text it is found in the first third.
    """
    content = text.encode()
    enough = len(content) / ratio
    return all(len(zlib.compress(part, 1)) < enough for part in (content[: len(content) // 3], content))
