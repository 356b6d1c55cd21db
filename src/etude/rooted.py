"""A folder that is not trusted, held by its descriptor: every path in it is walked name by name, and no link is followed.

`a/b` in a repository from anywhere may name a file while `a` is a link to somebody's home folder, now or a moment later. Paths
that are joined and opened lead there; names that are opened one by one, each in the folder opened before it, do not. Nothing
waits for a FIFO or reads a device, and paths may be longer than the system's longest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
DEEPEST = 200  # folders in one another that are entered
NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL}
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def parts_of(path: str) -> list[str]:
    """Return the names of a path; OSError if they lead anywhere but down."""
    parts = path.split("/")
    if {"", ".", ".."} & set(parts) or "\0" in path:
        raise OSError(errno.EINVAL, "not a path below a folder", path)
    return parts


class Rooted:
    """A folder and what is below it. The folder itself may be named through links: that is its user's word."""

    def __init__(self, root: Path) -> None:
        self.descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    @contextlib.contextmanager
    def holder(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the folder that a path lies in, as a descriptor, and its name there. OSError: there is none, or a link to one."""
        *above, name = parts_of(path)
        held = os.dup(self.descriptor)
        try:
            for part in above:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=held)
                outer, held = held, os.open(part, FOLDER, dir_fd=held)
                os.close(outer)  # a signal may end this between any two lines: `held` is never one that was closed
            yield held, name
        finally:
            os.close(held)

    def stat(self, path: str) -> os.stat_result | None:
        """Return what is at a path, a link as itself; None if nothing is, it lies behind a link, or leads anywhere but down."""
        try:
            with self.holder(path) as (held, name):
                return os.stat(name, dir_fd=held, follow_symlinks=False)
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            raise

    def read(self, path: str, most: int = -1) -> bytes:
        """Return the bytes of a regular file, no more than `most`, or where a link leads. OSError: it is neither."""
        with self.holder(path) as (held, name):
            if stat.S_ISLNK(os.stat(name, dir_fd=held, follow_symlinks=False).st_mode):
                return os.readlink(os.fsencode(name), dir_fd=held)
            with os.fdopen(os.open(name, READ, dir_fd=held), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "neither a file nor a link", path)
                return file.read(most)

    def walk(self, path: str = "", passed: Container[str] = ()) -> Iterator[tuple[str, os.stat_result]]:
        """Yield all that is below a folder, folders before what is in them; those named in `passed`, or too deep, are not entered."""
        folders = [path]
        while folders:
            folder = folders.pop()
            inner = self._opened(folder)
            try:
                for each in sorted(os.listdir(inner)):  # noqa: PTH208 - of a descriptor
                    about = os.stat(each, dir_fd=inner, follow_symlinks=False)
                    below = f"{folder}/{each}" if folder else each
                    yield below, about
                    if stat.S_ISDIR(about.st_mode) and each not in passed and below.count("/") <= DEEPEST:
                        folders.append(below)
            finally:
                os.close(inner)

    def _opened(self, folder: str) -> int:
        if not folder:
            return os.open(".", FOLDER, dir_fd=self.descriptor)
        with self.holder(folder) as (held, name):
            return os.open(name, FOLDER, dir_fd=held)
