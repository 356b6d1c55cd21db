"""The two ways a command can end without being done, and how strangers' words in a message are made harmless.

`UserError` is for what a user can cause and can put right: the command line shows its one line and exits with 2.
`Interrupted` is for Ctrl-C and SIGTERM: work is saved, and the command line says how to go on.
Everything else is a programmer's mistake and is left to raise.
"""

from __future__ import annotations

import difflib
import errno
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class UserError(Exception):
    """One clear line: what happened, where, and what to do."""


class Interrupted(Exception):  # noqa: N818 - it is not an error
    """The user asked to stop; everything finished so far is on disk."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with the known words closest to `word`, or the known words if none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word.lower(), names, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(repr(name) for name in close)}?"
    return f"; known: {', '.join(names)}" if names else ""


LAYOUT = "\n\t"


def visible(text: str, layout: str = "") -> str:
    r"""Return a text that does nothing to a terminal: what does not show, or changes how the rest does, as escapes such as \x1b.

    Names, paths and messages may be the words of strangers. Characters in `layout` stay. Applied twice it is as applied once.
    """
    if text.isprintable():
        return text
    shows = (char in layout or char.isprintable() or unicodedata.category(char) == "Zs" for char in text)
    return "".join(c if plain else c.encode("unicode_escape").decode() for c, plain in zip(text, shows, strict=True))


def one_line(error: BaseException) -> str:
    """Return what another library says of an error, in one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


STORAGE_TROUBLE = {
    errno.ENOSPC: "no space left on the device; free some and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some and run the same command again",
    errno.EROFS: "the file system is read-only; choose another folder with --out or --cache",
    errno.EACCES: "permission denied; choose another folder with --out or --cache, or change its permissions",
    errno.ENOTDIR: "a part of this path is a file, not a folder; choose another one",
    errno.EEXIST: "there is a file where a folder is needed; choose another place with --out or --cache",
    errno.EISDIR: "there is a folder where a file is needed; choose another one",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
    errno.ELOOP: "it is a link that leads back to itself; choose another one",
    errno.EPERM: "not permitted; choose another folder with --out or --cache, or change its permissions",
}


def storage_error(error: OSError, working_in: str = "") -> UserError | None:
    """Translate an operating-system error that a user can put right; None for any other.

    The system names the file only when it was opened, not when it was written to: then `working_in` is named.
    """
    advice = STORAGE_TROUBLE.get(error.errno or 0)
    if advice is None:
        return None
    where = error.filename2 or error.filename or working_in  # of a copy, the second is where it goes
    return UserError(f"cannot use{f' {where}' if where else ''}: {advice}")
