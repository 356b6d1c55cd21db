"""From bytes to text: UTF-8 unless the file itself says otherwise, line ends as LF, nothing else changed.

Encodings are never guessed: a wrong guess gives fluent nonsense. Unicode is not normalised either (no NFC): in code the
code points are the meaning. A test of normalisation, or a pattern over combining marks, would no longer do what it says.
"""

from __future__ import annotations

import codecs
import re

from etude.data.document import UNKNOWN, Document, Raw

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


class _Unreadable(Exception):  # noqa: N818 - a reason to drop, nobody's error
    """The content is no text; the argument says why."""


def decode(raw: Raw) -> Document | str:
    """Return the document, or the reason to drop it."""
    try:
        text = _normalised(raw.content if isinstance(raw.content, str) else _decoded(raw.content))
    except _Unreadable as reason:
        return str(reason)
    licence, evidence = (raw.licence, "metadata") if raw.licence else (UNKNOWN, "")
    return Document(raw.repository, raw.path, text, kind=raw.kind, licence=licence, evidence=evidence)


def _decoded(content: bytes) -> str:
    marked = next((name for mark, name in BOMS.items() if content.startswith(mark)), None)
    if b"\0" in content and marked is None:
        raise _Unreadable("binary")
    try:
        return content.decode(marked or "utf-8")
    except UnicodeDecodeError:
        declared = DECLARED.match(content[:1000])
    try:
        encoding = codecs.lookup(declared[1].decode()).name if declared else ""
        if CHARACTER_SETS.match(encoding):
            return content.decode(encoding)
    except (LookupError, UnicodeDecodeError):
        pass
    raise _Unreadable("not UTF-8")


def _normalised(text: str) -> str:
    if "\0" in text:
        raise _Unreadable("binary")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = text.removeprefix("\ufeff")
    if not text or text.isspace():
        raise _Unreadable("empty")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise _Unreadable("lone surrogates") from None
    if len(encoded) - len(encoded.translate(None, CONTROLS)) > max(FEW, len(encoded) // 1000):
        raise _Unreadable("control characters")
    return text
