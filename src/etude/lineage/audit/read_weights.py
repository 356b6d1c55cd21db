"""The matrices of a model by their role, read one at a time from safetensors or GGUF; neither torch nor a model is needed.

Where tensors lie: a file is mapped for one read and let go again, so that walking through a terabyte takes the memory of one matrix.
GGUF headers are parsed here because gguf's own reader makes an array of every word: seconds, where this takes a tenth.

What tensors show of a model's shape is taken from them and not from the config: a config can be edited without anybody noticing.

Which tensor is which: a table of names by part serves all families; which of them a model has says which family it is of. What is
fused (query, key and value; gate and up) or reordered (GGUF's rotary halves) is a choice of rows: reading a part is reading rows.
"""

from __future__ import annotations

import base64
import functools
import re
import struct
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from etude.errors import UserError, one_line
from etude.files import read_json
from etude.lineage.audit.roles import by_role
from etude.lineage.weight_files import DAMAGED, INDEX, indexed_files, read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Matrix = NDArray[np.float32]
Rows = NDArray[np.int64]

LATENT = ("qk_nope_head_dim", "qk_rope_head_dim")
NESTED = ("text_config", "llm_config", "language_config")
# How the bytes of each kind are mapped. GGUF's quantised kinds are not here: they are bytes, and gguf knows their blocks.
MAPPED = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?",
}  # fmt: skip
SPLIT_GGUF = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_STRING, GGUF_ARRAY = 8, 9
UNREADABLE = (*DAMAGED, OverflowError, struct.error)


@dataclass(frozen=True)
class Declared:
    """What only the config or the GGUF's metadata can say."""

    model_type: str
    layers: int
    heads: int
    head_dim: int | None
    rope_theta: float | None
    q_rank: int = 0
    kv_rank: int = 0
    tied: bool = False  # said so; a model without an output head is tied in any case
    block: tuple[int, int] = (128, 128)  # rows and columns that share one fp8 scale


@dataclass(frozen=True)
class Shape:
    """The structure of a model; 0 where it has no such part."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # rows of a dense layer's up-projection
    vocab: int  # rows of the embedding, padding included
    tied: bool
    rope_theta: float | None
    attention: str  # "mha" | "gqa" | "mla"
    expert_ffn: int = 0
    experts: int = 0
    shared_experts: int = 0
    dense_layers: int = 0  # layers with a dense FFN: all of them in a dense model
    q_rank: int = 0
    kv_rank: int = 0


def declared_by_config(config: Mapping[str, Any], where: Path) -> Declared:
    """Read a Hugging Face config; `where` is named in what goes wrong."""
    try:
        text: Mapping[str, Any] = next((config[key] for key in NESTED if isinstance(config.get(key), dict)), config)
        rope = text.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)  # Gemma has one for each kind of layer
        latent = int(text.get("kv_lora_rank") or 0)
        return Declared(
            model_type=str(text.get("model_type") or config["model_type"]),
            layers=_first(text, "num_hidden_layers", "n_layer", "num_layers"),
            heads=_first(text, "num_attention_heads", "n_head"),
            head_dim=sum(text[key] for key in LATENT) if latent else int(text.get("head_dim") or 0) or None,
            rope_theta=rope.get("rope_theta") or text.get("rope_theta") or text.get("rotary_emb_base"),
            q_rank=int(text.get("q_lora_rank") or 0),
            kv_rank=latent,
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            block=tuple((text.get("quantization_config") or {}).get("weight_block_size") or (128, 128)),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where} is not the config of a language model ({error} is missing or wrong)") from None


def _first(config: Mapping[str, Any], *keys: str) -> int:
    return int(next((config[key] for key in keys if config.get(key)), None) or config[keys[0]])


def declared_by_gguf(meta: Mapping[str, Any], where: Path) -> Declared:
    """Read the metadata of a GGUF file."""
    kind = meta.get("general.architecture")
    said = {key.removeprefix(f"{kind}."): value for key, value in meta.items()}
    try:
        heads = said["attention.head_count"]
        return Declared(
            model_type=str(kind),
            layers=said["block_count"] - said.get("nextn_predict_layers", 0),
            heads=max(heads) if isinstance(heads, list) else heads,
            head_dim=said.get("attention.key_length_mla") or said.get("attention.key_length"),
            rope_theta=said.get("rope.freq_base"),
            q_rank=said.get("attention.q_lora_rank", 0),
            kv_rank=said.get("attention.kv_lora_rank", 0),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{where} is not a language model ({error} is missing or wrong)") from None


@dataclass(frozen=True)
class Tensor:
    """A tensor on the disk, not yet read."""

    file: Path
    offset: int
    kind: str  # safetensors' name of the type, or GGUF's of the quantisation
    shape: tuple[int, ...]

    def mapped(self) -> NDArray[Any]:
        """Map the tensor as it is stored; the mapping ends with the array."""
        if self.kind in MAPPED:
            return np.memmap(self.file, MAPPED[self.kind], "r", self.offset, self.shape)
        from gguf import GGMLQuantizationType, quant_shape_to_byte_shape

        if self.kind not in GGMLQuantizationType.__members__:
            raise UserError(f"{self.file}: numbers of type {self.kind} cannot be read; audit the unquantised weights")
        stored = quant_shape_to_byte_shape(self.shape, GGMLQuantizationType[self.kind])
        return np.memmap(self.file, "u1", "r", self.offset, stored)


def decoded(kind: str, stored: NDArray[Any]) -> NDArray[Any]:
    """Return stored values of a kind as float32 (integers as they are): exact, except for float64."""
    if kind == "BF16":
        return np.left_shift(stored.astype(np.uint32), np.uint32(16)).view(np.float32)
    if kind.startswith("F8"):
        return np.take(_small_floats(kind), stored)
    if kind in MAPPED:
        return np.asarray(stored, np.float32 if kind.startswith("F") else None)
    from gguf import GGMLQuantizationType, dequantize

    try:
        return np.asarray(dequantize(np.ascontiguousarray(stored), GGMLQuantizationType[kind]), np.float32)
    except NotImplementedError:
        raise UserError(f"GGUF quantisation {kind} cannot be read; use a file of another one, such as Q8_0") from None


@functools.cache
def _small_floats(kind: str) -> NDArray[np.float32]:
    """Return the values of all 256 codes of an 8-bit float."""
    import torch

    dtypes = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
    return np.asarray(torch.arange(256, dtype=torch.uint8).view(dtypes[kind]).float().numpy())


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model: all shards of a folder, all parts of a split one of which one is named, or one file."""
    if path.is_dir():
        return _folder_files(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a model folder, a .safetensors or a .gguf")
    if split := SPLIT_GGUF.fullmatch(path.name):
        files = sorted(path.parent.glob(f"{split[1]}-*-of-{split[2]}.gguf"))
        if len(files) != int(split[2]):
            raise UserError(f"{path} is one of {int(split[2])} parts and {len(files)} are here; fetch the others")
        return files
    if path.suffix == ".safetensors":
        return indexed_files(path.parent) or [path]
    if path.suffix != ".gguf":
        raise UserError(f"{path} is neither a folder nor .safetensors nor .gguf; convert it to safetensors first")
    return [path]


def _folder_files(folder: Path) -> list[Path]:
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} holds an adapter; merge it into its base first")
    # Other safetensors beside model*.safetensors are drafts, adapters or optimisers.
    files = indexed_files(folder) or sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no safetensors; convert the weights first, or name the .gguf file itself")
    return files


def read_headers(files: list[Path]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of a model's files by name, and a GGUF's metadata."""
    tensors: dict[str, Tensor] = {}
    meta: dict[str, Any] = {}
    for file in files:
        here, meta_here = _gguf(file) if file.suffix == ".gguf" else (_safetensors(file), {})
        if twice := tensors.keys() & here.keys():
            name = min(twice)
            raise UserError(f"{name} is in {tensors[name].file.name} and in {file}; name the file that is the model")
        tensors, meta = tensors | here, meta_here | meta
    return tensors, meta


def _safetensors(file: Path) -> dict[str, Tensor]:
    start, tensors = read_header(file)
    return {name: Tensor(file, len(start) + each.begin, each.dtype, each.shape) for name, each in tensors.items()}


def _gguf(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with file.open("rb") as opened:
            return _gguf_header(opened, file)
    except UNREADABLE as error:
        raise UserError(f"{file} is not a whole gguf file ({one_line(error)}); fetch it again") from None


def _gguf_header(opened: BinaryIO, file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read metadata (name, type, value), then tensors (name, sizes from the last, type, offset from the aligned end)."""
    from gguf import GGMLQuantizationType

    size = file.stat().st_size

    def numbers(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", opened.read(min(struct.calcsize(f"<{form}"), size)))

    def text() -> str:
        (length,) = numbers("Q")
        (content,) = numbers(f"{length}s")
        return str(content, "utf-8")

    def value(kind: int) -> Any:
        if kind == GGUF_ARRAY:
            item, count = numbers("IQ")
            scalars = GGUF_SCALARS.get(item)
            return list(numbers(f"{count}{scalars}")) if scalars else [value(item) for _ in range(count)]
        return text() if kind == GGUF_STRING else numbers(GGUF_SCALARS[kind])[0]

    magic, _version, tensors, entries = numbers("4sIQQ")
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    meta = {text(): value(numbers("I")[0]) for _ in range(entries)}
    listed = [(text(), numbers(f"{numbers('I')[0]}Q"), *numbers("IQ")) for _ in range(tensors)]
    alignment = meta.get("general.alignment", 32)
    start = -(-opened.tell() // alignment) * alignment
    stored = {}
    for name, sizes, kind, offset in sorted(listed, key=lambda entry: entry[-1]):
        stored[name] = Tensor(file, start + offset, GGMLQuantizationType(kind).name, tuple(reversed(sizes)))
    for last in list(stored.values())[-1:]:
        last.mapped()  # fails where the file ends too soon
    return stored, meta


# What the tensors of a layer are called, by part.
PARTS: dict[str, list[str]] = tomllib.loads((Path(__file__).parent / "tensor_names.toml").read_text(encoding="utf-8"))
ENDINGS = (".weight", "", ".weight_packed")
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embed", "token_embd")
OUTPUT = re.compile(r"(?:.*\.)?(?:lm_head|embed_out|output_layer)\.weight|(?:output|head)\.weight")
STACK = re.compile(r"((?:.*?\.)?(?:layers|h|blk)\.)(\d+)\.(.+)")
NOT_LANGUAGE = re.compile(r"vision|visual|audio|speech|mtp|encoder\.")
FUSED_UP = {"phi3", "glm4", "chatglm"}  # GGUF architectures whose ffn_up holds the gate as well
INTERLEAVED = {"gpt_oss"}  # gate and up alternate, row by row
# GGUF architectures whose query and key rows llama.cpp's converter reorders: a head's two rotary halves are interleaved.
ROTARY_PAIRS = {"llama", "smollm3", "granite", "granitemoe", "arcee", "minicpm"}


@dataclass(frozen=True)
class Place:
    """Where a matrix lies. `rows` are those of the matrix as [units, hidden], whichever way round it is stored."""

    tensor: str
    rows: Rows
    expert: int | None = None


class Layout:
    """Finds the parts of a model among its tensors."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], declared: Declared, where: Path) -> None:
        self._shapes, self._declared, self._where = shapes, declared, where
        self._stack, others = _stacks_of(shapes, where)
        language = (name for name in shapes if not NOT_LANGUAGE.search(name))
        embeddings = [name for name in language if name.removesuffix(".weight").split(".")[-1] in EMBEDDINGS]
        if not embeddings:
            raise UserError(_unknown(shapes, where, "embedding"))
        self.embedding = min(embeddings, key=len)  # a longer one belongs to a further prediction layer
        further = [name for name in embeddings if name != self.embedding and not STACK.fullmatch(name)]
        self.unread = [*others, *further]  # layers and embeddings beside the model's own, by the start of their names
        self.vocab, self.hidden = shapes[self.embedding]
        self.head_dim = declared.head_dim or self.hidden // declared.heads
        self._refuse_other_depth()
        self._refuse_mixed_layers()

    def part(self, layer: int, name: str, expert: int = 0) -> Place | None:
        """Find a part: "router", "query", "key", "up", "gate", or "expert up" and "expert gate" of one routed expert.

        Query and key of latent attention are what comes first after the residual stream. Up and gate are the dense FFN's, else the
        shared expert's.
        """
        if name == "router":
            tensor = self._find(layer, name)
            return Place(tensor, np.arange(self._units(tensor))) if tensor else None
        if name in {"query", "key"}:
            return self._attention(layer, name)
        owner, _, part = name.rpartition(" ")
        if owner:
            return self.ffn(layer, part, "expert ", expert) or self.ffn(layer, part, "experts ", expert)
        return self.ffn(layer, part) or self.ffn(layer, part, "shared ")

    def ffn(self, layer: int, part: str, owner: str = "", expert: int | None = None) -> Place | None:
        """Find "up" or "gate" of the dense FFN ("") or the "shared ", "expert " or stacked "experts " one; a fused gate is first."""
        fused = self._find(layer, f"{owner}gate_up", expert)
        if self._declared.model_type in FUSED_UP and not owner:
            fused = fused or self._find(layer, "up")
        name = self._only(fused, self._find(layer, f"{owner}{part}", expert))
        if name is None:
            return None
        rows = np.arange(self._units(name))
        if fused and self._declared.model_type in INTERLEAVED:
            rows = rows[part == "up" :: 2]
        elif fused:
            rows = np.split(rows, 2)[part == "up"]
        return Place(name, rows, expert if owner == "experts " else None)

    def _attention(self, layer: int, part: str) -> Place | None:
        name, stacked, grouped = (self._find(layer, each) for each in (part, "stacked", "grouped"))
        if name and self._only(name, stacked, grouped):
            rows = np.arange(self._units(name))
            if name.startswith("blk.") and self._declared.model_type in ROTARY_PAIRS:
                rows = rows.reshape(-1, self.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
            return Place(name, rows)
        fused = stacked or grouped
        return Place(fused, self._of_fused(part, self._units(fused), stacked=fused == stacked)) if fused else None

    def _of_fused(self, part: str, units: int, *, stacked: bool) -> Rows:
        """Pick a part's rows of fused query, key and value: all queries first, or each key after the queries it serves."""
        heads, dim = self._declared.heads, self.head_dim
        keys = (units // dim - heads) // 2
        if stacked:
            return np.arange(heads * dim) if part == "query" else np.arange(heads * dim, (heads + keys) * dim)
        group = heads // keys
        served = np.arange(units).reshape(keys, group + 2, dim)
        return (served[:, :group] if part == "query" else served[:, group]).reshape(-1)

    def _find(self, layer: int, part: str, expert: int | None = None) -> str | None:
        names = (f"{self._stack}{layer}.{name}{ending}" for name in PARTS[part] for ending in ENDINGS)
        return self._only(*(full for name in names if (full := name.format(expert)) in self._shapes))

    def _only(self, *tensors: str | None) -> str | None:
        """Return the one tensor of a part. A second one may be a decoy: whoever loads the model reads one of the two."""
        names = sorted({name for name in tensors if name})
        if len(names) > 1:
            raise UserError(f"{self._where}: {names[0]} and {names[1]} cannot both be in use; remove what is not")
        return names[0] if names else None

    def _refuse_mixed_layers(self) -> None:
        """Refuse a layer that is dense and has experts as well: which of the two is loaded, its tensors cannot tell."""
        for layer in range(self._declared.layers):
            dense, router = self.ffn(layer, "up"), self.part(layer, "router")
            if dense and not dense.tensor.startswith("blk."):  # GGUF has models with both
                experts = [router, self.ffn(layer, "up", "expert ", 0), self.ffn(layer, "up", "experts ", 0)]
                [self._only(dense.tensor, expert.tensor) for expert in experts if expert]

    def _refuse_other_depth(self) -> None:
        """Refuse a config that tells of other layers than there are; some models keep a few further prediction layers."""
        matches = (STACK.fullmatch(name) for name in self._shapes)
        said = self._declared.layers
        there = 1 + max(int(name[2]) for name in matches if name and name[1] == self._stack)
        if not 0 < said <= there <= said + 1 + said // 4:
            raise UserError(f"{self._where}: {said} layers are declared, the weights have {there}; correct the config")

    def _units(self, name: str) -> int:
        return self._shapes[name][-1 if self.transposed(name) else -2]

    def vectors(self, layer: int) -> list[str]:
        """Return the tensors as long as the hidden state: those of a layer, or all where their names do not tell."""
        names = [name for name, shape in self._shapes.items() if shape == (self.hidden,)]
        return [name for name in names if name.startswith(f"{self._stack}{layer}.")] or names

    def transposed(self, name: str) -> bool:
        """Say whether a tensor is stored as [hidden, units] (GPT-2, some experts); a square one is taken as it is."""
        if len(self._shapes[name]) < 2:
            raise UserError(f"{self._where}: {name} is not a matrix; fetch the weights again")
        units, columns = self._shapes[name][-2:]
        return units == self.hidden != columns and not name.endswith("_packed")

    def shape(self) -> Shape:
        """Measure what tensors show; take the rest from what the model declares."""
        declared, layers = self._declared, range(self._declared.layers)

        def units(*places: Place | None) -> int:
            return next((len(place.rows) for place in places if place), 0)

        dense = [place for layer in layers if (place := self.ffn(layer, "up"))]
        shared = units(*(self.ffn(layer, "up", "shared ") for layer in layers))
        expert_ffn = units(*(self.part(layer, "expert up") for layer in layers))
        latent = any("kv_a_" in name for name in self._shapes)
        keys = units(*(self.part(layer, "key") for layer in layers)) // self.head_dim
        keys = declared.heads if latent else keys
        said = ("model_type", "layers", "heads", "rope_theta", "q_rank", "kv_rank")
        return Shape(
            **{name: getattr(declared, name) for name in said},
            hidden=self.hidden,
            vocab=self.vocab,
            head_dim=self.head_dim,
            kv_heads=keys,
            tied=declared.tied or not any(OUTPUT.fullmatch(name) for name in self._shapes),
            attention="mla" if latent else "mha" if keys == declared.heads else "gqa",
            ffn=units(*dense),
            dense_layers=len(dense),
            expert_ffn=expert_ffn,
            experts=units(*(self.part(layer, "router") for layer in layers)),
            shared_experts=max(1, shared // expert_ffn) if shared and expert_ffn else 0,
        )


def _stacks_of(names: Mapping[str, tuple[int, ...]], where: Path) -> tuple[str, list[str]]:
    """Return the prefix of the language model's layers, that under which most layers have parts we know, and the other ones."""
    layers = _known_stacks(names)
    if not layers:
        raise UserError(_unknown(names, where, "layers"))
    first, *others = sorted(layers, key=lambda prefix: -len(layers[prefix]))
    return first, others


def _known_stacks(names: Iterable[str]) -> dict[str, set[int]]:
    """Return which layers have parts whose names are known, by what their names begin with."""
    known = {re.sub(r"\.\{\}", ".0", name) for part in PARTS.values() for name in part}
    layers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        match = STACK.fullmatch(name)
        if match and not NOT_LANGUAGE.search(match[1]) and re.sub(r"\.weight(_packed)?$", "", match[3]) in known:
            layers[match[1]].add(int(match[2]))
    return layers


def _unknown(names: Mapping[str, tuple[int, ...]], where: Path, what: str) -> str:
    shown = ", ".join(list(names)[:4]) or "nothing"
    return f"{where}: no {what} known to this audit, which reads decoder language models; its tensors: {shown}, …"


class Weights:
    """A model's matrices as float32, rows = units, columns = residual dimensions.

    Every call reads anew and keeps nothing; `bytes_read` counts what was read from the files.
    """

    def __init__(
        self, path: Path, files: list[Path], tensors: Mapping[str, Tensor], declared: Declared, *, renamed: bool = False
    ) -> None:
        self.path, self.files = path, files
        self.renamed = renamed  # known by shape, so that up and gate may be the other way round
        self.bytes_read = 0
        self.bytes_total = sum(file.stat().st_size for file in files)
        self._tensors, self._block = tensors, declared.block
        self._layout = Layout({name: tensor.shape for name, tensor in tensors.items()}, declared, path)
        self.unread = self._layout.unread
        self.shape = self._layout.shape()

    def part(self, layer: int, name: str, expert: int = 0, rows: Rows | None = None) -> Matrix | None:
        """[units, hidden]: a part by its name in `Layout.part`, or some of its rows; None where a layer has no such part."""
        place = self._layout.part(layer, name, expert)
        if place is None:
            return None
        return self._rows(place.tensor, place.rows if rows is None else place.rows[rows], place.expert)

    def embedding(self, rows: Rows | None = None) -> Matrix:
        """[n, hidden]: the rows asked for, or all."""
        return self._rows(self._layout.embedding, np.arange(self.shape.vocab) if rows is None else rows)

    def folded(self, layer: int, rows: Matrix) -> list[Matrix]:
        """Return rows that read the residual stream times the gain of the norm before them, the likeliest first, at most two.

        Which norm that is, its name need not say: where factors were moved between the two, it is the one that evens the columns out.
        """
        tensors = [self._tensors[name] for name in self._layout.vectors(layer)]
        vectors = [decoded(tensor.kind, np.array(tensor.mapped())) for tensor in tensors]
        lengths = np.linalg.norm(rows, axis=0)
        gains = [gain for vector in vectors for gain in (vector, 1 + vector)]  # Gemma's are gain - 1
        gains.sort(key=lambda gain: float(np.std(np.log(lengths * np.abs(gain) + 1e-12))))
        return [np.asarray(rows * gain, np.float32) for gain in gains[:2]] or [rows]

    def _rows(self, name: str, index: Rows, expert: int | None = None) -> Matrix:
        tensor, transposed = self._tensors[name], self._layout.transposed(name)
        stored = tensor.mapped() if expert is None else tensor.mapped()[expert]
        taken = np.array(stored) if transposed else _chosen(stored, index)
        self.bytes_read += taken.nbytes
        values = decoded(tensor.kind, taken)
        if name.endswith("_packed"):
            values = unpacked(values, self.shape.hidden)
        elif values.dtype != np.float32:
            raise UserError(f"{self.path}: {name} holds {tensor.kind}, not numbers; audit the unquantised weights")
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
    renamed = _by_role(tensors)
    try:
        declared = declared_by_gguf(meta, path) if meta else _declared_beside(files)
    except UserError:
        if not renamed:
            raise
        declared = _declared_by_nothing(renamed)
    try:
        return Weights(path, files, renamed or tensors, declared, renamed=bool(renamed))
    except (*UNREADABLE, ZeroDivisionError) as error:
        raise UserError(f"{path}: tensors and config do not fit ({one_line(error)}); fetch both again") from None


def _by_role(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model whose names are unknown by the names they might have, scales included; else none."""
    language = {name: tensor.shape for name, tensor in tensors.items() if not NOT_LANGUAGE.search(name)}
    if _known_stacks(language):
        return {}
    weights = {name: shape for name, shape in language.items() if not name.endswith(("_scale_inv", "_scale"))}
    vectors = {f"vector.{name}": tensors[name] for name, shape in weights.items() if len(shape) == 1}
    roles = by_role(weights).items()
    pairs = [(usual + end, name + end) for usual, name in roles for end in ("", "_scale_inv", "_scale")]
    return vectors | {usual: tensors[name] for usual, name in pairs if name in tensors}


def _declared_by_nothing(renamed: Mapping[str, Tensor]) -> Declared:
    """Return what a renamed model is taken to be whose config cannot be read either: nothing but its depth matters here."""
    layers = {match[2] for name in renamed if (match := STACK.fullmatch(name))}
    return Declared("unknown", layers=len(layers), heads=1, head_dim=None, rope_theta=None)


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


CONTROL_TOKEN = 3  # GGUF's token type for special tokens
MOST_IDS = 1 << 24  # far more than any vocabulary has; a list is made of them


@dataclass(frozen=True)
class Tokens:
    """A vocabulary by id, its words as the tokeniser writes them (byte-level, or with ▁); None where an id has no word."""

    strings: list[str | None]
    merges: Sequence[str] = ()  # "left right", first learned first; none in other kinds of tokeniser
    special: frozenset[str] = frozenset()

    def ids(self) -> dict[str, int]:
        """Return the id of each word; the first of those that are there twice."""
        return {word: index for index, word in reversed(list(enumerate(self.strings))) if word is not None}


def read_tokens(path: Path) -> Tokens | None:
    """Read the vocabulary of a model folder, of the folder of a .safetensors, or of a GGUF; None where there is none.

    SentencePiece's own tokenizer.model is not read: whoever has it nearly always has a tokenizer.json as well.
    """
    if path.suffix == ".gguf":
        return _from_gguf(weight_files(path)[0])
    folder = path if path.is_dir() else path.parent
    for name, reader in (("tokenizer.json", _from_tokenizer_json), ("tiktoken.model", _from_tiktoken)):
        if (file := folder / name).is_file():
            try:
                return reader(file)
            except UNREADABLE as error:
                raise UserError(f"{file} is damaged ({one_line(error)}); fetch it again") from None
    return None


def _from_tokenizer_json(file: Path) -> Tokens:
    whole = read_json(file)
    model, added = whole["model"], whole.get("added_tokens") or []
    words = model["vocab"]
    if isinstance(words, list):  # unigram: [word, score] by id
        words = {word: index for index, (word, _) in enumerate(words)}
    by_id = [(index, word) for word, index in words.items()] + [(token["id"], token["content"]) for token in added]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]
    special = frozenset(token["content"] for token in added if token.get("special"))
    return Tokens(_strings(by_id), merges, special)


def _from_tiktoken(file: Path) -> Tokens:
    """Read `base64 rank` lines (Kimi), written as byte-level words so that they compare with other files."""
    letters = _byte_letters()
    pairs = (line.split() for line in file.read_text(encoding="utf-8").splitlines() if line)
    by_id = [(int(rank), "".join(letters[byte] for byte in base64.b64decode(word))) for word, rank in pairs]
    config = file.with_name("tokenizer_config.json")
    added = (read_json(config) if config.is_file() else {}).get("added_tokens_decoder", {})
    by_id += [(int(index), token["content"]) for index, token in added.items()]
    special = frozenset(token["content"] for token in added.values() if token.get("special"))
    return Tokens(_strings(by_id), special=special)


def _from_gguf(file: Path) -> Tokens | None:
    _, meta = read_headers([file])
    words, kinds = meta.get("tokenizer.ggml.tokens"), meta.get("tokenizer.ggml.token_type", [])
    if not words:
        return None
    special = frozenset(word for word, kind in zip(words, kinds, strict=False) if kind == CONTROL_TOKEN)
    return Tokens(words, meta.get("tokenizer.ggml.merges", []), special)


def _strings(by_id: Iterable[tuple[int, str]]) -> list[str | None]:
    words = dict(by_id)
    if any(not 0 <= index < MOST_IDS for index in words):
        raise ValueError("an id of a word is out of range")
    return [words.get(index) for index in range(max(words, default=-1) + 1)]


def _byte_letters() -> list[str]:
    """Return GPT-2's letter for each byte: itself if printable, else the next unused one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def shared(a: Tokens, b: Tokens, *, rows: tuple[int, int] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of the ordinary words both have, in a's order; ids at or beyond `rows`, an embedding's end, are left out."""
    ends = rows or (len(a.strings), len(b.strings))
    others, special = b.ids(), a.special | b.special
    both = [(index, others[word]) for word, index in a.ids().items() if word in others and word not in special]
    pairs = sorted(pair for pair in both if pair[0] < ends[0] and pair[1] < ends[1])
    ids = np.array(pairs, np.int64).reshape(-1, 2)
    return ids[:, 0], ids[:, 1]
