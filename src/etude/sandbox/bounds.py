"""What a keeper itself bounds: how much it keeps of an output and, where no control group counts, how much memory is used."""

from __future__ import annotations

import os


class Kept:
    """The beginning and the end of a stream, and how much was between."""

    def __init__(self, limit: int) -> None:
        self.head_size, self.tail_size = limit // 2, limit - limit // 2
        self.head, self.tail = bytearray(), bytearray()
        self.cut = 0

    def add(self, block: bytes) -> None:
        """Take the next bytes."""
        room = self.head_size - len(self.head)
        self.head += block[:room]
        self.tail += block[room:]
        if (over := len(self.tail) - self.tail_size) > 0:
            del self.tail[:over]
            self.cut += over

    def whole(self) -> bytes:
        """Return what is kept."""
        return bytes(self.head + self.tail)


def usage() -> tuple[int, int]:
    """Return the memory, in bytes, and the number of all processes of this sandbox but the keeper."""
    memory = processes = 0
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                    sizes = [line.split()[1] for line in file if line.startswith(("RssAnon", "RssShmem"))]
            except OSError:  # it has just ended
                continue
            processes += 1
            memory += 1024 * sum(map(int, sizes))
    return memory, processes
