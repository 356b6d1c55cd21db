"""The matrices of a model by meaning, read one at a time from safetensors or GGUF; the model itself is never loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from etude.errors import UserError, one_line
from etude.files import read_json
from etude.lineage.audit.names import Layout
from etude.lineage.audit.shapes import Declared, Shape, declared_by_config, declared_by_gguf
from etude.lineage.audit.storage import DAMAGED, INDEX, decoded, read_headers, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from etude.lineage.audit.names import Place
    from etude.lineage.audit.storage import Tensor

Matrix = NDArray[np.float32]
Rows = NDArray[np.int64]
Part = Literal["up", "gate"]


class Weights:
    """A model's matrices as float32, rows = units, columns = residual dimensions; None where a layer has no such part.

    Every call reads anew and keeps nothing; `bytes_read` counts what was read from the files.
    """

    def __init__(self, path: Path, files: list[Path], tensors: Mapping[str, Tensor], declared: Declared) -> None:
        self.path, self.files = path, files  # the files, for digests
        self.bytes_read = 0
        self.bytes_total = sum(file.stat().st_size for file in files)
        self._tensors, self._block = tensors, declared.block
        self._layout = Layout({name: tensor.shape for name, tensor in tensors.items()}, declared, path)
        self.unread = self._layout.unread  # further layers and embeddings, by the start of their names
        self.shape = _shape(self._layout, declared)

    def up(self, layer: int, rows: Rows | None = None) -> Matrix | None:
        """[ffn, hidden]: the dense FFN's up-projection, else the shared expert's."""
        return self._read(self._layout.ffn(layer, "up") or self._layout.ffn(layer, "up", "shared "), rows)

    def gate(self, layer: int, rows: Rows | None = None) -> Matrix | None:
        """[ffn, hidden]: the dense FFN's gate, else the shared expert's; None in an FFN without gate."""
        return self._read(self._layout.ffn(layer, "gate") or self._layout.ffn(layer, "gate", "shared "), rows)

    def expert(self, layer: int, index: int, part: Part, rows: Rows | None = None) -> Matrix | None:
        """[expert_ffn, hidden]: "up" or "gate" of a routed expert."""
        return self._read(_expert(self._layout, layer, index, part), rows)

    def router(self, layer: int) -> Matrix | None:
        """[experts, hidden]."""
        return self._read(self._layout.router(layer))

    def query(self, layer: int) -> Matrix | None:
        """[heads × head_dim, hidden]; with latent attention its q_a, or q where it has none."""
        return self._read(self._layout.attention(layer, "query"))

    def key(self, layer: int) -> Matrix | None:
        """[kv_heads × head_dim, hidden]; with latent attention its kv_a."""
        return self._read(self._layout.attention(layer, "key"))

    def embedding(self, rows: Rows | None = None) -> Matrix:
        """[n, hidden]: the rows asked for, or all."""
        return self._rows(self._layout.embedding, np.arange(self.shape.vocab) if rows is None else rows)

    def _read(self, place: Place | None, rows: Rows | None = None) -> Matrix | None:
        if place is None:
            return None
        return self._rows(place.tensor, place.rows if rows is None else place.rows[rows], place.expert)

    def _rows(self, name: str, index: Rows, expert: int | None = None) -> Matrix:
        tensor, transposed = self._tensors[name], self._layout.transposed(name)
        stored = tensor.mapped() if expert is None else tensor.mapped()[expert]
        taken = np.array(stored) if transposed else _chosen(stored, index)
        self.bytes_read += taken.nbytes
        values = decoded(tensor.kind, taken)
        if name.endswith("_packed"):
            values = unpacked(values, self.shape.hidden)
        elif values.dtype != np.float32:
            raise UserError(
                f"{self.path}: {name} is of type {tensor.kind}, not of numbers; audit the unquantised weights"
            )
        scale = self._scale(name, expert)
        if scale is not None:
            rows, columns = np.arange(len(values)) if transposed else index, np.arange(values.shape[1])
            row_step = _step(tensor.shape[-2], scale.shape[0], self._block[0])
            column_step = _step(len(columns), scale.shape[1], self._block[1])
            values = values * scale[rows // row_step][:, columns // column_step]
        made = np.ascontiguousarray(values.T[index] if transposed else values)
        if made.shape != (len(index), self.shape.hidden):
            raise UserError(f"{self.path}: {name} does not fit a model of width {self.shape.hidden}; fetch it again")
        if not np.isfinite(made).all():
            raise UserError(f"{self.path}: {name} holds NaN or infinity: the model is broken, nothing can be compared")
        return made

    def _scale(self, name: str, expert: int | None) -> Matrix | None:
        """Return the scales of a quantised tensor, one for each block of rows and columns."""
        stem = name.removesuffix("_packed")
        names = (f"{stem}_scale_inv", f"{stem}_scale", f"{stem.removesuffix('weight')}scale")
        tensor = next((self._tensors[scale] for scale in names if scale in self._tensors), None)
        if tensor is None:
            return None
        stored = np.array(tensor.mapped()[expert] if expert is not None and len(tensor.shape) == 3 else tensor.mapped())
        self.bytes_read += stored.nbytes
        return decoded(tensor.kind, stored.reshape(len(stored), -1) if stored.ndim else stored.reshape(1, 1))


def open_weights(path: Path) -> Weights:
    """Open a folder of safetensors, one .safetensors with its config beside it, or a .gguf; only headers are read."""
    files = weight_files(path)
    tensors, meta = read_headers(files)
    declared = declared_by_gguf(meta, path) if meta else _declared_beside(files)
    try:
        return Weights(path, files, tensors, declared)
    except (*DAMAGED, ZeroDivisionError) as error:
        raise UserError(
            f"{path}: its tensors and its config do not fit ({one_line(error)}); fetch both again"
        ) from None


def _declared_beside(files: list[Path]) -> Declared:
    config = files[0].with_name("config.json")
    try:
        said = read_json(config)
    except FileNotFoundError:
        raise UserError(f"{config} is missing; the audit needs it beside the weights") from None
    except ValueError as error:
        raise UserError(f"{config} is not JSON ({error}); fetch it again") from None
    declared = declared_by_config(said, config)
    named = said.get("transformers_weights")  # what transformers loads then, whatever else is there
    if named and named not in [INDEX, *(file.name for file in files)]:
        raise UserError(f"{config} names {named!r} as its weights, which are not those audited; name that file")
    return declared


def _chosen(stored: NDArray[Any], index: Rows) -> NDArray[Any]:
    """Copy rows; in one piece where they follow each other, so that the disk is read once and in order."""
    if len(index) and np.array_equal(index, np.arange(index[0], index[0] + len(index))):
        return np.array(stored[index[0] : index[0] + len(index)])
    return np.array(stored[index])


def _step(size: int, parts: int, block: int) -> int:
    """Return how many rows (or columns) share a scale: the block, unless the number of scales says otherwise."""
    return block if -(-size // block) == parts else -(-size // parts)


def unpacked(packed: NDArray[np.int32], columns: int) -> Matrix:
    """Return the integers that compressed-tensors packs into int32, lowest bits first, stored with an offset."""
    together = columns // packed.shape[1]
    bits = 32 // together
    codes = packed.view(np.uint32)[:, :, None] >> (bits * np.arange(together, dtype=np.uint32))
    codes &= np.uint32((1 << bits) - 1)
    return np.reshape(codes.astype(np.float32) - (1 << (bits - 1)), (len(packed), columns))


def _expert(layout: Layout, layer: int, index: int, part: Part) -> Place | None:
    return layout.ffn(layer, part, "expert ", index) or layout.ffn(layer, part, "experts ", index)


def _shape(layout: Layout, declared: Declared) -> Shape:
    """Measure what tensors show; take the rest from what the model declares."""
    layers = range(declared.layers)

    def units(find: Callable[[int], Place | None]) -> int:
        return next((len(place.rows) for layer in layers if (place := find(layer))), 0)

    experts, expert_ffn = units(layout.router), units(lambda layer: _expert(layout, layer, 0, "up"))
    keys = declared.heads if layout.latent else units(lambda layer: layout.attention(layer, "key")) // layout.head_dim
    shared = units(lambda layer: layout.ffn(layer, "up", "shared "))
    return Shape(
        model_type=declared.model_type,
        hidden=layout.hidden,
        layers=declared.layers,
        heads=declared.heads,
        kv_heads=keys,
        head_dim=layout.head_dim,
        ffn=units(lambda layer: layout.ffn(layer, "up")),
        vocab=layout.vocab,
        tied=layout.tied,
        rope_theta=declared.rope_theta,
        attention="mla" if layout.latent else "mha" if keys == declared.heads else "gqa",
        expert_ffn=expert_ffn,
        experts=experts,
        shared_experts=max(1, shared // expert_ffn) if shared and expert_ffn else 0,
        dense_layers=sum(layout.ffn(layer, "up") is not None for layer in layers),
        q_rank=declared.q_rank,
        kv_rank=declared.kv_rank,
    )
