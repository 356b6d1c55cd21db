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
import threading
import traceback
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
FUSED, DOWN = ".experts.gate_up_proj", ".experts.down_proj"  # of all experts at once, as transformers names them
HEAD = "lm_head.weight"


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
    shapes: Shapes = {}
    tied = config_of(model).get("tie_word_embeddings")
    for file in checkpoint(model):
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if tied:
        shapes.pop(HEAD, None)
    return shapes


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
        for fused, parts in ((FUSED, ("gate_proj", "up_proj")), (DOWN, ("down_proj",))):
            if name.endswith(fused):
                layer = name.removesuffix(fused)
                for number, expert in enumerate(tensor):
                    pieces = zip(parts, expert.chunk(len(parts)), strict=True)
                    split |= {f"{layer}.experts.{number}.{part}.weight": piece for part, piece in pieces}
                break
        else:
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
            raise UserError(
                f"the weights are of another shape: {name} is {tuple(tensor.shape)} instead of {shapes[name]}"
            )
        if not tensor.isfinite().all():
            raise UserError(f"the weights are damaged: {name} holds values that are not finite")
    return weights


class Fetcher:
    """Has versions of a store ready in main memory; one is fetched at a time, by a thread."""

    def __init__(self, folder: Path, model: Path, served: Path, dtype: torch.dtype) -> None:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not on this machine; the trainer and its engines must see one folder of weights"
            )
        self.shapes, self.model, self.store, self.dtype = shapes_of(model), model, WeightStore(folder, 0), dtype
        if self.shapes != shapes_of(served):
            raise UserError(f"vLLM serves {served}, whose tensors are not those of {model}, which is trained")
        self._base: Weights | None = None
        self._held: Held | None = None
        self._ready: tuple[int, Weights] | None = None
        self._reply: dict[str, Any] | None = None
        self._thread: threading.Thread | None = None

    def fetch(self, version: int) -> dict[str, Any]:
        """Begin to fetch a version, or say how that went: `ready`, or `why` not, and whether a later one may be had (`wait`)."""
        if self._thread and self._thread.is_alive():
            return {"ready": False}
        reply, self._reply = self._reply, None
        if reply and reply["version"] == version:
            return reply
        if self._ready and self._ready[0] == version:
            return {"version": version, "ready": True, "bytes": 0}
        self._thread = threading.Thread(target=self._fetch, args=(version,), daemon=True)
        self._thread.start()
        return {"ready": False}

    def take(self, version: int) -> Weights:
        """Return what was fetched, once."""
        if not self._ready or self._ready[0] != version:
            raise UserError(f"version {version} of the weights was not fetched; ask etude_fetch for it first")
        (_, weights), self._ready = self._ready, None
        return weights

    def _fetch(self, version: int) -> None:
        self._ready = None
        reply: dict[str, Any] = {"version": version, "ready": True, "bytes": 0}
        try:
            self._ready = version, self._whole(version)
            reply["bytes"] = self._held.bytes if self._held and version else 0
        except Exception as error:  # noqa: BLE001 - a thread's end would say nothing, and who asks would wait for ever
            reply |= {"ready": False, "why": one_line(error), "wait": isinstance(error, BrokenStore)}
        self._reply = reply

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


def unshown(config: Any) -> str:
    """Return what of a vLLM's configuration was never compared with transformers after an update, or ''."""
    said = config_of(Path(config.model_config.model))  # vLLM's own has names of its own
    family, experts = said.get("model_type"), any("expert" in name for name in said)
    asked = {
        "tensor, pipeline or data parallelism": config.parallel_config.world_size_across_dp > 1,
        "quantised weights": config.model_config.quantization,
        "draft models": config.speculative_config,
        "--enable-lora": config.lora_config,
        f"experts of {family}": experts and family not in EXPERTS,
    }
    return next((what for what, wanted in asked.items() if wanted), "")


class Transfer:
    """The life cycle of an update, for a class of vLLM's to inherit (`engine_class`)."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    fetcher: Fetcher | None = None
    model: Any
    vllm_config: Any
    model_config: Any
    device: torch.device

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if what := unshown(self.vllm_config):
            raise UserError(f"{what} after an update of the weights: not compared with transformers yet, so not used")
        served = Path(self.model_config.model)
        self.fetcher = Fetcher(Path(init_info.folder), Path(init_info.model), served, self.model_config.dtype)

    def start_weight_update(self) -> None:
        """Do nothing yet: what begins here would have to end, and requests may still run."""

    def finish_weight_update(self) -> None:
        """Do nothing more: `update_weights` was all of it."""

    def shutdown(self) -> None:
        self.fetcher = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Compute with a version that was fetched, or end this process."""
        self.receive_weights(UpdateInfo(**update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.fetcher is None:
            raise UserError("vLLM was not told where the weights are; post to /init_weight_transfer_engine first")
        weights = self.fetcher.take(update_info.version)
        try:
            self.load(weights)
        except BaseException:  # noqa: BLE001 - part of the model is new and part is old: nobody may sample from it
            traceback.print_exc()
            self.end(f"etude: version {update_info.version} of the weights broke off half-way; this engine ends")

    def load(self, weights: Weights) -> None:
        """Copy weights over the old ones, and have what was computed from those computed anew."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self.device.type == "cpu":
            for module in self.model.modules():  # a kernel that is there would keep experts as they come, unpacked
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    module.quant_method.moe_kernel = None
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(self.model, self.model_config)
        tied = tied_head(self.model)
        if (
            left := {name for name, _ in self.model.named_parameters()}
            - set(loaded)
            - {HEAD if tied is not None else ""}
        ):
            raise RuntimeError(f"vLLM left {sorted(left)} old")
        if tied is not None and self.device.type == "cpu":
            tied.quant_method.process_weights_after_loading(tied)
        if self.device.type != "cpu":
            import torch

            torch.accelerator.synchronize()

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
        engine = self.weight_transfer_engine
        fetcher = engine.fetcher if isinstance(engine, Transfer) else None
        if fetcher is None:
            return {"ready": False, "why": "vLLM has no weight transfer by etude", "wait": False}
        return fetcher.fetch(int(version))


def engine_class() -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    return type("EtudeWeights", (Transfer, WeightTransferEngine), {})


def check() -> str:
    """Return vLLM's version, or say in one line why this plug-in cannot be used here."""
    from importlib.metadata import PackageNotFoundError, entry_points

    try:
        from vllm import __version__ as found
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory as _  # noqa: F401 - is it there?
    except (ImportError, PackageNotFoundError) as error:
        raise UserError(f"{sys.executable} has no vLLM that can be used: {one_line(error)}") from None
    if not found[:1].isdigit() or tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        raise UserError(f"vLLM {found} is too old; install {'.'.join(map(str, OLDEST))} or later")
    if not any(
        point.value.startswith(f"{__package__}.vllm_plugin") for point in entry_points(group="vllm.general_plugins")
    ):
        raise UserError(
            f"{sys.executable} has vLLM {found} without etude's plug-in; run pip install --no-deps etude there"
        )
    return str(found)


def register() -> None:
    """Make the backend known to vLLM, which calls this in each of its processes, some twice."""
    try:
        check()
    except UserError as error:  # whoever runs this vLLM for something else is not kept from it
        print(f"etude's plug-in is not used: {error}", file=sys.stderr)  # noqa: T201 - vLLM's log
        return
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if "etude" not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it has no other question
        WeightTransferEngineFactory.register_engine("etude", engine_class())


def main(write: Any = sys.stdout.write) -> int:
    """Say whether this Python's vLLM can follow our weights."""
    try:
        write(f"vLLM {check()} with etude's plug-in\n")
    except UserError as error:
        write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
