"""The plug-in for vLLM where there is none: a stand-in for its worker, and the client that drives it. The real one: test_vllm.py."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import etude
from etude.errors import UserError
from etude.inference import vllm_plugin
from etude.inference.client import RemotePolicy, ServerFailed
from etude.inference.policy import PolicyInfo
from etude.inference.vllm_plugin import Fetcher, Fetching, Transfer, UpdateInfo, tied_head, unshown
from etude.inference.weight_sync import BrokenStore, Weights, WeightStore
from etude.rl.engine import VllmWeights
from tests import tiny


class Model(torch.nn.Module):  # type: ignore[misc]
    """Holds what it was given, as vLLM's models do by other means."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Weights = {}


def ranks(**more: Any) -> Any:
    usual = {"world_size_across_dp": 2, "tensor_parallel_size": 2, "enable_expert_parallel": False}
    return types.SimpleNamespace(**usual | more)


class Worker(Fetching, Transfer):
    """A worker of vLLM and its engine for weights in one."""

    def __init__(self, served: Path, **more: Any) -> None:
        self.weight_transfer_engine = self
        self.model, self.device, self.breaks, self.ended = Model(), torch.device("cpu"), False, ""
        self.model_config = types.SimpleNamespace(model=str(served), dtype=torch.float32, quantization=None)
        parallel = ranks()
        config = {
            "model_config": self.model_config,
            "parallel_config": parallel,
            "speculative_config": None,
            "lora_config": None,
        }
        self.vllm_config = types.SimpleNamespace(**config | more)

    def load(self, weights: Weights) -> None:
        self.model.given = dict(list(weights.items())[:3])
        if self.breaks:
            raise RuntimeError("no memory")
        self.model.given = weights

    def end(self, why: str) -> None:
        self.ended = why
        raise ConnectionError


class Server(RemotePolicy):
    """Answers as vLLM's routes do: an exception in the worker is status 500, and its text."""

    def __init__(self, worker: Worker) -> None:
        super().__init__("http://127.0.0.1:1", 10)
        self.worker, self.told = worker, list[str]()
        self.paused = False

    async def connect(self, model: str = "") -> PolicyInfo:
        return self.info

    async def tell(self, path: str, body: Any = None) -> Any:
        path = path.partition("?")[0]
        self.told.append(path)
        try:
            if path == "/init_weight_transfer_engine":
                self.worker.init_transfer_engine(self.worker.init_info_cls(**body["init_info"]))
            elif path == "/collective_rpc":
                assert not self.paused
                return {"results": [getattr(self.worker, body["method"])(*body["args"])]}
            elif path == "/update_weights":
                assert self.paused
                self.worker.receive_weights(UpdateInfo(**body["update_info"]))
            self.paused = path == "/pause" or (self.paused and path != "/resume")
        except (UserError, AttributeError, ConnectionError) as error:
            raise ServerFailed(f"Worker failed with error '{error}' (status 500)") from None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.save_model(tmp_path / "model", "qwen3")


def state(folder: Path) -> Weights:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


def moved(weights: Weights, seed: int) -> Weights:
    torch.manual_seed(seed)
    return {name: each + 0.1 * torch.randn_like(each) for name, each in weights.items()}


def follow(folder: Path, store: WeightStore, worker: Worker | None = None) -> tuple[Server, VllmWeights]:
    server = Server(worker or Worker(folder))
    return server, VllmWeights(server, folder, store)


def assert_same(got: Weights, expected: Weights) -> None:
    assert got.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(got[name], each), name


def test_every_version_is_brought_whole_and_fetched_before_the_pause(folder: Path, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "weights", 100)
    server, weights = follow(folder, store)
    versions = {0: state(folder)}

    async def work() -> None:
        await weights.ready()
        assert_same(server.worker.model.given, versions[0])
        for version in (3, 4, 7):  # an anchor, a delta, and after another one the next
            versions[version] = moved(versions[0], version)
            store.publish(versions[version], version, version)
            if version == 4:
                continue
            server.told.clear()
            swap = await weights.update(version)
            assert_same(server.worker.model.given, versions[version])
            assert (swap.version, server.version) == (version, version)
            assert swap.bytes == sum(file.stat().st_size for file in store.folder.glob(f"{version:08d}*")) + (
                (store.folder / "00000004-00000003.delta").stat().st_size if version == 7 else 0
            )
            asked = [path for path in server.told if path != "/collective_rpc"]
            assert server.told[-6:] == asked == ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
                                                 "/reset_prefix_cache", "/resume"]  # fmt: skip
        late, joins = follow(folder, store)
        await joins.ready()
        assert_same(late.worker.model.given, versions[7])
        late.told.clear()
        await joins.update(7)
        assert late.told == []

    asyncio.run(work())


def test_adapters_are_added_to_the_base_and_not_to_each_other(folder: Path, tmp_path: Path) -> None:
    store, base = WeightStore(tmp_path / "weights", 100), state(folder)
    server, weights = follow(folder, store)
    name = "model.layers.1.mlp.up_proj.weight"

    async def work() -> None:
        await weights.ready()
        for version in (1, 2):
            torch.manual_seed(version)
            down, up = torch.randn(3, base[name].shape[1]), torch.randn(base[name].shape[0], 3)
            store.publish({f"{name}.lora_A": down, f"{name}.lora_B": up}, version, version)
            await weights.update(version)
            torch.testing.assert_close(server.worker.model.given[name], base[name] + up @ down)
            assert_same({**server.worker.model.given, name: base[name]}, base)
        store.publish({f"{name}.lora_A": down}, 3, 3)
        with pytest.raises(UserError, match=r"lora_A, which is no adapter of this model"):
            await weights.update(3)
        assert server.worker.model.given[name].shape == base[name].shape

    asyncio.run(work())


def test_experts_get_the_names_they_are_saved_by(tmp_path: Path) -> None:
    """The oracle: what transformers saves."""
    from safetensors.torch import load_file

    folder = tiny.save_model(tmp_path / "model", "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(moved(dict(model.state_dict()), 1))
    model.save_pretrained(tmp_path / "saved")
    store = WeightStore(tmp_path / "weights", 100)
    store.publish(model.state_dict(), 1, 1)
    server, weights = follow(folder, store)
    asyncio.run(weights.ready())
    assert any("experts.gate_up_proj" in name for name in model.state_dict())
    assert_same(server.worker.model.given, load_file(tmp_path / "saved" / "model.safetensors"))


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda w: {name: each for name, each in w.items() if "layers.1.mlp.up" not in name}, r"lack model.layers.1.mlp.up_proj"),
    (lambda w: w | {"mtp.weight": torch.ones(1)}, "have mtp.weight"),
    (lambda w: w | {"model.norm.weight": torch.ones(3)}, r"model.norm.weight is \(3,\) instead of \(32,\)"),
    (lambda w: w | {"model.norm.weight": torch.full((32,), torch.nan)}, "not finite"),
])  # fmt: skip
def test_what_is_not_all_of_this_model_is_refused_before_a_pause(
    folder: Path, tmp_path: Path, spoil: Any, says: str
) -> None:
    store = WeightStore(tmp_path / "weights", 100)
    server, weights = follow(folder, store)

    async def work() -> None:
        await weights.ready()
        store.publish(spoil(state(folder)), 1, 1)
        server.told.clear()
        with pytest.raises(UserError, match=says):
            await weights.update(1)

    asyncio.run(work())
    assert {*server.told} == {"/collective_rpc"}
    assert_same(server.worker.model.given, state(folder))


def test_a_damaged_version_is_waited_out(folder: Path, tmp_path: Path) -> None:
    store, base = WeightStore(tmp_path / "weights", 100), state(folder)
    server, weights = follow(folder, store)

    async def work() -> None:
        await weights.ready()
        store.publish(moved(base, 1), 1, 1)
        await weights.update(1)
        store.publish(moved(base, 2), 2, 2)
        (broken,) = store.folder.glob("*.delta")
        broken.write_bytes(broken.read_bytes()[:-1])
        with pytest.raises(BrokenStore, match="no way to version 2"):
            await weights.update(2)
        assert_same(server.worker.model.given, moved(base, 1))
        late, joins = follow(folder, store)
        await joins.ready()  # the newest cannot be had: it begins with the model itself
        assert_same(late.worker.model.given, base)
        store.publish(moved(base, 3), 3, 3)  # the reader's note asked for an anchor
        for there, brings in ((server, weights), (late, joins)):
            await brings.update(3)
            assert_same(there.worker.model.given, moved(base, 3))

    asyncio.run(work())


def test_an_update_that_breaks_half_way_ends_the_engine(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = WeightStore(tmp_path / "weights", 100)
    server, weights = follow(folder, store)

    async def work() -> None:
        await weights.ready()
        store.publish(moved(state(folder), 1), 1, 1)
        server.worker.breaks = True
        with pytest.raises(ServerFailed, match="failed to take version 1 of the weights and must be started again"):
            await weights.update(1)

    asyncio.run(work())
    assert server.paused  # nobody sampled from it again
    assert "version 1 of the weights broke off half-way" in server.worker.ended
    assert "no memory" in capfd.readouterr().err


def test_the_end_of_an_engine_is_the_end_of_its_process() -> None:
    code = "from etude.inference.vllm_plugin import Transfer; Transfer().end('half-way'); print('went on')"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "half-way\n")


def test_what_was_not_fetched_is_not_taken(folder: Path, tmp_path: Path) -> None:
    worker = Worker(folder)
    with pytest.raises(UserError, match="was not told where the weights are"):
        worker.receive_weights(UpdateInfo(1))
    worker.init_transfer_engine(worker.init_info_cls(str(tmp_path), str(folder)))
    with pytest.raises(UserError, match="version 1 of the weights was not fetched"):
        worker.receive_weights(UpdateInfo(1))
    assert not worker.ended


@pytest.mark.parametrize(("more", "says"), [
    ({"parallel_config": ranks(world_size_across_dp=4)}, "data or expert parallelism"),
    ({"parallel_config": ranks(enable_expert_parallel=True)}, "parallelism"),
    ({"speculative_config": "heads"}, "draft models"), ({"lora_config": "on"}, "--enable-lora"),
    ({"config": {"model_type": "mixtral", "num_local_experts": 4}}, "experts of mixtral"),
    ({"config": {"model_type": "qwen3_moe", "num_experts": 4}}, ""), ({}, ""),
])  # fmt: skip
def test_what_was_never_compared_is_refused(folder: Path, tmp_path: Path, more: dict[str, Any], says: str) -> None:
    if config := more.pop("config", None):
        (folder / "config.json").write_text(json.dumps(config))
    worker = Worker(folder, **more)
    what = unshown(worker.vllm_config, vllm_plugin.config_of(folder))
    assert says in what if says else what == ""
    if says:
        _, weights = follow(folder, WeightStore(tmp_path / "weights", 1), worker)
        with pytest.raises(UserError, match=rf"{says}.* not compared with transformers yet, .*docs/inference.md"):
            asyncio.run(weights.ready())


def test_quantised_weights_are_refused(folder: Path) -> None:
    worker = Worker(folder)
    worker.model_config.quantization = "fp8"
    assert unshown(worker.vllm_config, {}) == "quantised weights"


def test_a_folder_that_is_not_there_or_another_models_is_said(folder: Path, tmp_path: Path) -> None:
    for store, model, served, says in (
        (
            tmp_path / "none",
            folder,
            folder,
            "none is not on this machine; trainer and engines must see one folder",
        ),
        (tmp_path, tmp_path / "gone", folder, "gone is no folder of a model on this machine"),
        (tmp_path, folder, tiny.save_model(tmp_path / "other", "llama"), "other, whose tensors are not those of"),
    ):
        with pytest.raises(UserError, match=says):
            Fetcher(store, model, served, torch.float32)
    assert not (tmp_path / "none").exists()


def test_a_model_in_several_files_is_read_by_its_index(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "split", max_shard_size="20KB")
    assert not (tmp_path / "split" / "model.safetensors").exists()
    (tmp_path / "split" / "heads.safetensors").write_bytes(b"not of the model")
    assert vllm_plugin.shapes_of(tmp_path / "split") == vllm_plugin.shapes_of(folder)
    assert_same(vllm_plugin.load_base(tmp_path / "split", vllm_plugin.shapes_of(folder)), state(folder))


def test_tied_output_layers_are_found() -> None:
    model = torch.nn.Module()
    model.embed, model.lm_head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)
    assert tied_head(model) is None
    model.lm_head.weight = model.embed.weight
    assert tied_head(model) is model.lm_head


def test_a_server_without_the_plug_in_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    class Plain(Fetching):
        weight_transfer_engine = None

    assert "no weight transfer by etude" in Plain().etude_fetch("1")["why"]

    class Old(Server):
        async def tell(self, path: str, body: Any = None) -> Any:
            raise UserError("http://127.0.0.1:1 refuses the request: Not Found (status 404)")

    weights = VllmWeights(Old(Worker(folder)), folder, WeightStore(tmp_path / "weights", 1))
    with pytest.raises(UserError, match=r"^[^\n]*Not Found[^\n]*docs/inference.md, weight sync to vLLM$"):
        asyncio.run(weights.ready())


@pytest.mark.parametrize(("version", "plugged", "says"), [
    ("0.31.2", True, "vLLM 0.31.2 is too old; install 0.32 or later"),
    ("0.32.0", False, "has vLLM 0.32.0 without etude's plug-in"),
    ("0.33.1+cpu", True, "vLLM 0.33.1+cpu with etude's plug-in"), ("", True, "has no vLLM that can be used"),
])  # fmt: skip
def test_the_check_says_in_one_line_what_is_wrong(tmp_path: Path, version: str, plugged: bool, says: str) -> None:
    """In a process with nothing of Etude's but these two files and what they import: what vLLM's environment has."""
    if version:
        factory = tmp_path / "vllm" / "distributed" / "weight_transfer"
        factory.mkdir(parents=True)
        (tmp_path / "vllm" / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (factory.parent / "__init__.py").touch()
        (factory / "__init__.py").write_text("class WeightTransferEngineFactory: pass\n")
    about = tmp_path / "stand_in-0.dist-info"
    about.mkdir()
    point = "etude = etude.inference.vllm_plugin:register" if plugged else "other = other:register"
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{point}\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 0\n")
    code = f"""
import importlib.metadata as metadata, runpy, sys
sys.path[:0] = [{str(tmp_path)!r}, {str(Path(etude.__file__).parents[1])!r}]
points = metadata.entry_points
metadata.entry_points = lambda **how: [each for each in points(**how) if each.dist.name == "stand-in"]
runpy.run_module("etude.inference.vllm_plugin", run_name="__main__", alter_sys=True)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    good = "with etude" in says
    said, silent = (done.stdout, done.stderr) if good else (done.stderr, done.stdout)
    assert says in said
    assert (said.count("\n"), silent, done.returncode) == (1, "", 0 if good else 1)


def test_it_needs_nothing_that_vllm_does_not_bring() -> None:
    code = "import sys, etude.inference.vllm_plugin; print(*{name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} - {"__main__", "_virtualenv", "_distutils_hack"} <= {
        "etude",
        "numpy",
        "xxhash",
        "zstandard",
        "_cffi_backend",
        "_editable_impl_etude",
    }
