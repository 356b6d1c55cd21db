"""A plug-in for vLLM: its engines follow a folder of published weights (weight_sync.py), as ours do, late joiners too.

How to install and start it: docs/inference.md. vLLM finds it by its entry point (`vllm.general_plugins`), in its own environment:
there only numpy, torch, safetensors, xxhash and zstandard are needed, and nothing of Etude but what this file imports.

**Fetch before the pause.** vLLM's weight life cycle blocks the engine while it runs, so a version is first read, decoded, merged and
checked by a thread of the worker (`Fetching.etude_fetch`, asked over /collective_rpc until it is there). Between /pause and /resume
remains what vLLM calls the update: the copy.

**All or nothing.** A version must have every tensor of the checkpoint on disk, in its shape, or it is refused before anything is
changed: vLLM takes part of a layer without an error, and computes nonsense. What breaks during the copy ends the worker's process,
and so the server: a lost engine is replaced, a mixture of two versions would go on writing.

**What vLLM leaves old.** On a CPU it computes with packed copies. After an update it does not pack anew what a tied output layer
shares, and packs experts once and never again; both are put right here. Each kind of update was compared with transformers by
log-probs (tests/inference/test_vllm.py); what was not is refused by `unshown`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import UserError, one_line
from etude.files import read_json
from etude.inference.weight_sync import BrokenStore, Held, Weights, WeightStore

if TYPE_CHECKING:
    import torch

    Shapes = dict[str, tuple[int, ...]]

OLDEST = (0, 32)  # of vLLM: before it, engines by other names were not to be had, or not right
EXPERTS = {"olmoe", "qwen2_moe", "qwen3_moe"}  # families with experts that were compared with transformers
LORA = (".lora_A", ".lora_B")  # after a weight's name: it becomes what it was at first plus B · A
FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}  # of all experts, as transformers has them
HEAD = "lm_head.weight"
PLUG_IN = "etude.inference.vllm_plugin:register"


# ---- a version as vLLM's loader wants it


def config_of(model: Path) -> Any:
    """Return a model's config as it was saved."""
    if not (model / "config.json").is_file():
        raise UserError(f"{model} is no folder of a model on this machine; start vLLM with the folder that is trained")
    return read_json(model / "config.json")


def checkpoint(model: Path) -> list[Path]:
    """Return the files that hold a model's tensors; others may lie beside them."""
    index = model / "model.safetensors.index.json"
    names = {*read_json(index)["weight_map"].values()} if index.is_file() else {"model.safetensors"}
    return [model / name for name in sorted(names)]


def shapes_of(model: Path) -> Shapes:
    """Return the shape of every tensor of a model's folder. Tied embeddings are saved once or twice: here they are there once."""
    tied, shapes = config_of(model).get("tie_word_embeddings"), dict[str, tuple[int, ...]]()
    for file in checkpoint(model):
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return {name: shape for name, shape in shapes.items() if not (tied and name == HEAD)}


def load_base(model: Path, shapes: Shapes) -> Weights:
    """Return version 0: the model's folder itself."""
    from safetensors.torch import load_file

    return {name: each for file in checkpoint(model) for name, each in load_file(file).items() if name in shapes}


def merged(weights: Weights, base: Weights, dtype: torch.dtype) -> Weights:
    """Return whole weights for a version that is adapters alone, added as in `Runner.replace`; `dtype` is what vLLM computes in."""
    import torch

    whole = dict(base)
    for name in weights:
        under = name.removesuffix(LORA[0]).removesuffix(LORA[1])
        if under == name or under not in base or not weights.keys() >= {under + part for part in LORA}:
            raise UserError(f"the weights hold {name}, which is no adapter of this model; they are of another one")
        down, up = (weights[under + part].float() for part in LORA)
        whole[under] = torch.addmm(base[under].float(), up, down).to(dtype)
    return whole


def one_by_one(weights: Weights) -> Weights:
    """Return experts under the names they are saved by: transformers computes with those of a layer in one tensor."""
    split: Weights = {}
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".experts.")
        parts = FUSED.get(kind, ()) if layer else ()
        for number, expert in enumerate(tensor if parts else ()):
            pieces = zip(parts, expert.chunk(len(parts)), strict=True)
            split |= {f"{layer}.experts.{number}.{part}.weight": piece for part, piece in pieces}
        if not parts:
            split[name] = tensor
    return split


def fitting(weights: Weights, shapes: Shapes) -> Weights:
    """Return the weights if they are those of this model, all of them; vLLM would load some without a word."""
    for names, what in ((shapes.keys() - weights.keys(), "lack"), (weights.keys() - shapes.keys(), "have")):
        if names:
            first = f"{what} {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            raise UserError(f"the weights {first}, against the model's folder; they are of another model")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"the weights do not fit: {name} is {tuple(tensor.shape)} instead of {shapes[name]}")
        if not tensor.isfinite().all():
            raise UserError(f"the weights are damaged: {name} holds values that are not finite")
    return weights


class Fetcher:
    """Has versions of a store ready in main memory; one is fetched at a time, by a thread."""

    def __init__(self, folder: Path, model: Path, served: Path, dtype: torch.dtype) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder} is not on this machine; trainer and engines must see one folder of weights")
        self.shapes, self.model, self.store, self.dtype = shapes_of(model), model, WeightStore(folder, 0), dtype
        if self.shapes != shapes_of(served):
            raise UserError(f"vLLM serves {served}, whose tensors are not those of {model}, which is trained")
        self._base: Weights | None = None
        self._held: Held | None = None
        self._pool = ThreadPoolExecutor(1)
        self._job: tuple[int, Future[Weights]] | None = None

    def fetch(self, version: int) -> dict[str, Any]:
        """Begin to fetch a version, or say how that went: `ready`, or `why` not, and whether a later one may be had (`wait`)."""
        if self._job is None or (self._job[0] != version and self._job[1].done()):
            self._job = version, self._pool.submit(self._whole, version)
        under_way, job = self._job
        if under_way != version or not job.done():
            return {"ready": False}
        if error := job.exception():
            self._job = None
            return {"ready": False, "why": one_line(error), "wait": isinstance(error, BrokenStore)}
        return {"ready": True, "bytes": self._held.bytes if self._held and version else 0}

    def take(self, version: int) -> Weights:
        """Return what was fetched, once."""
        if self._job is None or self._job[0] != version or not self._job[1].done():
            raise UserError(f"version {version} of the weights was not fetched; ask etude_fetch for it first")
        (_, job), self._job = self._job, None
        return job.result()

    def _whole(self, version: int) -> Weights:
        if not version:
            return fitting(load_base(self.model, self.shapes), self.shapes)
        self._held = self.store.pull(version, self._held)
        weights = self._held.tensors
        if any(name.endswith(LORA) for name in weights):
            self._base = self._base or load_base(self.model, self.shapes)
            weights = merged(weights, self._base, self.dtype)
        return fitting(one_by_one(weights), self.shapes)


# ---- in vLLM's worker


@dataclass
class InitInfo:
    """Where the weights are published, and the folder of the model that they are versions of."""

    folder: str
    model: str


@dataclass
class UpdateInfo:
    """Which version to compute with; it was fetched."""

    version: int


def unshown(config: Any, model: Any) -> str:
    """Return what of vLLM's configuration, or of the model's, was never compared with transformers after an update; or ''."""
    ranks = config.parallel_config
    asked = {
        "pipeline, data or expert parallelism": ranks.world_size_across_dp > ranks.tensor_parallel_size
        or ranks.enable_expert_parallel,
        "quantised weights": config.model_config.quantization,
        "draft models": config.speculative_config,
        "--enable-lora": config.lora_config,
        f"experts of {model.get('model_type')}": model.get("model_type") not in EXPERTS and "expert" in " ".join(model),
    }
    return next((what for what, wanted in asked.items() if wanted), "")


class Transfer:
    """The life cycle of an update, which vLLM's own base class is added to (`register`)."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    fetcher: Fetcher | None = None

    def init_transfer_engine(self: Any, init_info: InitInfo) -> None:
        served = Path(self.model_config.model)
        if what := unshown(self.vllm_config, config_of(served)):
            raise UserError(f"{what} after an update of the weights: not compared with transformers yet, so not used")
        self.fetcher = Fetcher(Path(init_info.folder), Path(init_info.model), served, self.model_config.dtype)

    def start_weight_update(self) -> None:
        """Do nothing yet: what begins here would have to end, and requests may still run."""

    def finish_weight_update(self) -> None:
        """Do nothing more: `receive_weights` was all of it."""

    def shutdown(self) -> None:
        self.fetcher = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Compute with a version that was fetched, or end this process."""
        if self.fetcher is None:
            raise UserError("vLLM was not told where the weights are; post to /init_weight_transfer_engine first")
        weights = self.fetcher.take(update_info.version)
        try:
            self.load(weights)
        except BaseException:  # noqa: BLE001 - part of the model is new and part is old: nobody may sample from it
            traceback.print_exc()
            self.end(f"etude: version {update_info.version} of the weights broke off half-way; this engine ends")

    def load(self: Any, weights: Weights) -> None:
        """Copy weights over the old ones, and have what was computed from those computed anew."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        packs = self.device.type == "cpu"
        for module in self.model.modules() if packs else ():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None  # else experts would be kept as they come, unpacked
        initialize_layerwise_reload(self.model)
        loaded = {*(self.model.load_weights(iter(weights.items())) or ())}
        finalize_layerwise_reload(self.model, self.model_config)
        if left := {name for name, _ in self.model.named_parameters()} - loaded:  # which has a tied weight once
            raise RuntimeError(f"vLLM left {sorted(left)} old")
        if packs and (tied := tied_head(self.model)) is not None:
            tied.quant_method.process_weights_after_loading(tied)

    def end(self, why: str) -> None:
        print(why, file=sys.stderr, flush=True)  # noqa: T201 - vLLM's log
        os._exit(1)


def tied_head(model: Any) -> Any:
    """Return the output layer if it shares the memory of the embeddings, or None."""
    head = getattr(model, "lm_head", None)
    shared = (each for each in model.modules() if each is not head and getattr(each, "weight", None) is not None)
    return head if head is not None and any(each.weight is head.weight for each in shared) else None


class Fetching:
    """What vLLM's workers answer over /collective_rpc besides their own methods (`--worker-extension-cls`)."""

    weight_transfer_engine: Any

    def etude_fetch(self, version: str) -> dict[str, Any]:
        """Begin to fetch a version, or say how that went."""
        if fetcher := getattr(self.weight_transfer_engine, "fetcher", None):
            return dict(fetcher.fetch(int(version)))
        return {"ready": False, "why": "vLLM has no weight transfer by etude", "wait": False}


def check() -> str:
    """Return vLLM's version, or say in one line why this plug-in cannot be used here."""
    from importlib.metadata import entry_points

    try:
        from vllm import __version__ as found
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory as _  # noqa: F401 - is it there?
    except ImportError as error:
        raise UserError(f"{sys.executable} has no vLLM that can be used: {one_line(error)}") from None
    if not found[:1].isdigit() or tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise UserError(f"vLLM {found} is too old; install {'.'.join(map(str, OLDEST))} or later")
    if not any(point.value == PLUG_IN for point in entry_points(group="vllm.general_plugins")):
        raise UserError(f"{sys.executable} has vLLM {found} without etude's plug-in; pip install --no-deps etude there")
    return str(found)


def register() -> None:
    """Make the backend known to vLLM, which calls this in each of its processes, some twice."""
    try:
        check()
    except UserError as error:  # whoever runs this vLLM for something else is not kept from it
        print(f"etude's plug-in is not used: {error}", file=sys.stderr)  # noqa: T201 - vLLM's log
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    if "etude" not in Factory._registry:  # noqa: SLF001 - it has no other question
        Factory.register_engine("etude", type("EtudeWeights", (Transfer, WeightTransferEngine), {}))


if __name__ == "__main__":
    try:
        print(f"vLLM {check()} with etude's plug-in")  # noqa: T201 - it was asked
    except UserError as error:
        sys.exit(str(error))
