"""Arrays on disk, in a way that a full disk is said and not a crash.

`np.save` hides the reason of a failed write, and writing through a map of a file that has no room ends the process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.files import whole_file

if TYPE_CHECKING:
    from pathlib import Path


def save_array(path: Path, values: Any) -> None:
    """Write a .npy file, whole or not at all."""
    with whole_file(path) as beside, beside.open("wb") as file:
        header = {"descr": values.dtype.str, "fortran_order": False, "shape": values.shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(np.ascontiguousarray(values).data)


def empty_array(path: Path, shape: tuple[int, int], dtype: Any) -> Any:
    """Return an array in a file of its own, for which there is room."""
    size = shape[0] * shape[1] * np.dtype(dtype).itemsize
    if not size:
        return np.zeros(shape, dtype)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return np.memmap(path, dtype, "r+", shape=shape)


def mapped(path: Path, dtype: Any) -> Any:
    """Return the numbers in a flat file without reading them; a file of none cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
