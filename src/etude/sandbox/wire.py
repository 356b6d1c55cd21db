"""Messages between host, launcher and keeper: a JSON header and raw bytes, both with their lengths before them.

File names are any bytes: they are decoded with surrogateescape, which JSON carries as escapes.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = struct.Struct(">IQ")


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return one message as bytes."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


def take(buffer: bytearray) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the whole messages at the beginning of a buffer and remove them from it."""
    begin = 0
    while len(buffer) - begin >= LENGTHS.size:
        header_size, payload_size = LENGTHS.unpack_from(buffer, begin)
        middle = begin + LENGTHS.size + header_size
        end = middle + payload_size
        if len(buffer) < end:
            break
        yield json.loads(buffer[begin + LENGTHS.size : middle]), bytes(buffer[middle:end])
        begin = end
    del buffer[:begin]
