"""What a file is written in: by its name first (library `identify`), by its first lines where the name can mean two things.

Kept as code: programs, markup and style sheets, build files and configuration that people write (TOML, YAML, INI,
Dockerfile, Makefile). Kept as prose: Markdown, reStructuredText, plain text, TeX and the like. HTML counts as code: as
prose it is mostly tags. Left out: data (JSON, CSV, XML, notebooks, translations, keys) and everything not known by name.
"""

from __future__ import annotations

import io
import re
from functools import lru_cache
from typing import TYPE_CHECKING

from identify import identify

from etude.data.document import PROSE

if TYPE_CHECKING:
    from etude.data.document import Document

# fmt: off
DATA = frozenset({
    "avro-schema", "cson", "csv", "dbc", "dotenv", "icalendar", "image", "json", "json5", "lazarus-form", "mailmap", "manifest",
    "map", "pem", "plist", "pofile", "sln", "swiftdeps", "tsv", "vdx", "wkt", "xcodebuild", "xml",
})
MORE = {  # suffixes that `identify` does not know, or calls just "text"
    "ac": "autoconf", "adb": "ada", "ads": "ada", "am": "makefile", "awk": "awk", "cfg": "ini", "cl": "opencl", "conf": "ini",
    "d": "d", "el": "emacs-lisp", "f": "fortran", "f77": "fortran", "for": "fortran", "frag": "glsl", "glsl": "glsl", "hx": "haxe",
    "lisp": "lisp", "mojo": "mojo", "org": "org", "pod": "pod", "raku": "raku", "rkt": "racket", "rmd": "quarto", "tcl": "tcl",
    "texi": "texinfo", "vert": "glsl", "wgsl": "wgsl",
}
# Of several tags the one that names the language; else the first of the alphabet.
BROAD = ("python", "ruby", "shell", "javascript", "groovy", "scala", "clojure", "pascal", "c#", "f#", "c", "c++", "html", "erlang",
         "yaml", "toml", "ini")
OBJECTIVE_C = r"^\s*(?:@(?:interface|implementation|protocol|import|end|class)\b|#\s*import\b)"
AMBIGUOUS = {suffix: [(re.compile(pattern, re.M), told) for pattern, told in cases] for suffix, cases in {
    "fs": [(r"\bgl_FragColor\b|^\s*(?:varying|uniform|precision)\s", "glsl")],
    "h": [(OBJECTIVE_C, "objective-c"),
          (r"^\s*(?:template\s*<|namespace\b|class\s+\w+[^;]*$|using\s|(?:public|private)\s*:)|\bstd::", "c++")],
    "m": [(OBJECTIVE_C + r"|^\s*#\s*include\b", "objective-c"), (r"^\s*(?:function\b|%|end\b|classdef\b)", "matlab")],
    "md": [(r"\A\s*;;|^\(define_(?:insn|expand|mode)\b", "gcc-machine-description")],
    "pl": [(r"^\s*(?:use|package|my|sub)\s+[\w:$@%(]|\A#!.*perl", "perl"), (r"^\s*:-|^[a-z]\w*(?:\(.*\))?\s*(?::-|\.$)", "prolog")],
    "ts": [(r"\A\s*<(?:\?xml|!DOCTYPE TS)", "xml")],
    "v": [(r"^\s*(?:Require|Theorem|Lemma|Proof|Definition|Inductive)\b", "coq")],
}.items()}
# fmt: on


def language(document: Document) -> str | None:
    """Set the document's language; return why it is dropped, or None."""
    if document.kind != "file":
        document.language = document.language or ("diff" if document.kind == "commit" else "plain-text")
        return None
    name = document.path.rpartition("/")[2]
    document.language = _by_name(name) or _by_shebang(document.text)
    for pattern, told in AMBIGUOUS.get(name.rpartition(".")[2], ()):
        if pattern.search(document.text, 0, 8192):
            document.language = told
            break
    if document.language in DATA:
        return "data file"
    return None if document.language else "not text or code"


def is_code(language: str) -> bool:
    """Say whether it is code, configuration included."""
    return bool(language) and language not in PROSE | DATA


def is_text(language: str) -> bool:
    """Say whether it is prose."""
    return language in PROSE


@lru_cache(maxsize=10_000)
def _by_name(name: str) -> str:
    name = name.removesuffix(".in")  # config.h.in is filled in by a build, and reads like config.h
    told = _named(identify.tags_from_filename(name)) or MORE.get(name.rpartition(".")[2].lower(), "")
    return told or ("plain-text" if re.fullmatch(r"[A-Z][A-Z_-]{2,}", name) else "")  # TODO, HISTORY, THANKS


def _by_shebang(text: str) -> str:
    command = identify.parse_shebang(io.BytesIO(text[:200].encode())) if text.startswith("#!") else ()
    return _named(identify.tags_from_interpreter(command[0])) if command else ""


def _named(tags: set[str]) -> str:
    """Choose the language among the tags of a file; nothing for binary files."""
    tags = set() if "binary" in tags else tags - {"text"}
    tags -= {"plain-text"} if len(tags) > 1 else set()  # README.md is Markdown
    return min(tags & DATA, default="") or next((tag for tag in BROAD if tag in tags), min(tags, default=""))
