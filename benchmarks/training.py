"""How fast does training go? The same model and tokens through Etude's loop and through transformers, in one process.

    python benchmarks/training.py gpu     SmolLM2-135M's shape at 2,048, 8,192 and 32,768 tokens, against compiled transformers
                                          (--lengths 2048: only there)
    python benchmarks/training.py cpu     sprout against transformers' Trainer

On the GPU every row is either filled with documents of a corpus's lengths (`documents`) or holds one document (`whole`), which
is the most attention can cost. transformers computes plain causal attention over the rows: less than what is asked for, since
its documents see each other. Both use bf16 and fused AdamW; Etude also keeps float32 masters.
MFU: the model's FLOPs (causal attention inside documents only) by the time, of 990 TFLOP/s and of a measured matrix product.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from etude.data.loader import Batch
from etude.lineage.compute import training_flops
from etude.models.shape import shape_of
from etude.training.distributed import World
from etude.training.run import corpus_session
from etude.training.settings import TrainSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SHAPE = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=32768, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
)  # fmt: skip
MEDIAN_DOCUMENT, SPREAD = (
    900,
    1.3,
)  # tokens, and standard deviation of the logarithm: as in recipes/corpus.toml, roughly
STEPS, WARM = 8, 4
KINDS = {
    "attention": ("flash", "cudnn", "sdpa", "fmha"),
    "matrix products": ("nvjet", "gemm", "cutlass", "sm90_xmma"),
    "optimiser": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "copies and fills": ("memcpy", "memset"),
    "element-wise (compiled)": ("triton",),
}


class Synthetic:
    """Batches of random tokens in documents of realistic lengths, or one a row."""

    def __init__(self, rows: int, length: int, *, whole: bool, vocabulary: int = 49152) -> None:
        self.rows, self.length, self.whole, self.vocabulary = rows, length, whole, vocabulary
        self._rng = np.random.default_rng(0)

    def _positions(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        if self.whole:
            return np.arange(self.length, dtype=np.int32)
        sizes: list[int] = []
        while sum(sizes) < self.length:
            size = int(np.clip(self._rng.lognormal(np.log(MEDIAN_DOCUMENT), SPREAD), 8, self.length - sum(sizes)))
            sizes.append(max(1, size))
        return np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])[: self.length]

    def __next__(self) -> Batch:
        positions = np.stack([self._positions() for _ in range(self.rows)])
        documents = (positions == 0).cumsum(1, dtype=np.int32) - 1
        tokens = np.asarray(self._rng.integers(0, self.vocabulary, positions.shape))
        return Batch(tokens, documents, positions, ["synthetic"] * self.rows)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def state(self) -> dict[str, Any]:
        """There is nothing to resume."""
        return {}

    def load_state(self, state: Any) -> None:
        """There is nothing to resume."""

    def achieved(self) -> dict[str, dict[str, float]]:
        """There are no shares."""
        return {"sources": {}, "domains": {}, "epochs": {}}


def seconds_a_step(step: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a warm step and of the first, which compiles.

    Rows that are one piece come in shares, and each share is compiled when it first comes: a step that compiled is not counted.
    """
    first = _seconds(step)
    for _ in range(WARM - 1):
        step()
    warm: list[float] = []
    for _ in range(4 * STEPS):
        graphs = _compiled()
        seconds = _seconds(step)
        warm += [seconds] if _compiled() == graphs else []
        if len(warm) == STEPS:
            break
    assert warm, "every step compiled something"
    return sum(warm) / len(warm), first


def _seconds(step: Callable[[], object]) -> float:
    _wait()
    began = time.perf_counter()
    step()
    _wait()
    return time.perf_counter() - began


def _compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])  # noqa: SLF001 - torch has no public way to ask


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured_peak() -> float:
    """Return the TFLOP/s of a large bf16 matrix product of random numbers."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds, _ = seconds_a_step(lambda: left @ right)
    return 2 * 8192**3 / seconds / 1e12


def ours(length: int, tokens: int, *, whole: bool) -> dict[str, Any]:
    """Train with Etude's session."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE)
    rows = tokens // length
    settings = TrainSettings(tokens=10**12, batch=rows, micro=rows, evaluations=0, device="cuda")
    with tempfile.TemporaryDirectory() as folder:
        batches = Synthetic(rows, length, whole=whole)
        session = corpus_session(model, settings, batches, length, World(), Path(folder))
        steps = session.loop.steps(10**9)
        torch.cuda.reset_peak_memory_stats()
        seconds, first = seconds_a_step(lambda: next(steps))
        pieces = next(steps).pieces
        shares = where_time_goes(lambda: next(steps)) if length == 2048 else {}
    flops = sum(training_flops(shape_of(SHAPE).compute, size) * count for size, count in pieces.items())
    return {"tokens_per_second": tokens / seconds, "first_step_seconds": first, "tflops": flops / seconds / 1e12,
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9, "where": shares}  # fmt: skip


def theirs(length: int, tokens: int) -> dict[str, Any]:
    """Train with a compiled transformers model."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SHAPE, dtype=torch.bfloat16, attn_implementation="sdpa").cuda()
    for layer in model.model.layers:
        layer.compile(fullgraph=True)  # as fast as compiling the whole, and ten times sooner ready
    loss_of = torch.compile(lambda hidden, labels: model.loss_function(model.lm_head(hidden), labels, SHAPE.vocab_size))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batches = Synthetic(tokens // length, length, whole=True)

    def step() -> None:
        ids = torch.from_numpy(next(batches).tokens).cuda()
        loss = loss_of(model.model(input_ids=ids, use_cache=False).last_hidden_state, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        loss.item()

    torch.cuda.reset_peak_memory_stats()
    seconds, first = seconds_a_step(step)
    return {"tokens_per_second": tokens / seconds, "first_step_seconds": first,
            "memory_gb": torch.cuda.max_memory_allocated() / 1e9}  # fmt: skip


def where_time_goes(step: Callable[[], object]) -> dict[str, float]:
    """Return the shares of a step's time by kind of kernel, and when the GPU waits."""
    from torch.profiler import ProfilerActivity, profile

    began = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    total = (time.perf_counter() - began) * 1e6
    sums: defaultdict[str, float] = defaultdict(float)
    for event in found.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other kernels")
        sums[kind] += event.self_device_time_total
    busy = sum(sums.values())
    return {kind: value / busy for kind, value in sorted(sums.items(), key=lambda item: -item[1])} | {
        "GPU busy, profiler's own time included": min(1.0, busy / total)
    }


def gpu(lengths: Sequence[int]) -> dict[str, Any]:
    """Measure rows of these lengths."""
    torch.set_float32_matmul_precision("high")
    peak = measured_peak()
    rows = []
    for length in lengths:
        tokens, peer = 131072, theirs(length, 65536)
        torch.cuda.empty_cache()
        for whole in (False, True):
            mine = ours(length, tokens, whole=whole)
            torch.cuda.empty_cache()
            rows.append({
                "length": length, "rows": "whole" if whole else "documents", "etude": mine, "transformers_compiled": peer,
                "ratio": mine["tokens_per_second"] / peer["tokens_per_second"],
                "mfu_990": mine["tflops"] / 990, "mfu_measured": mine["tflops"] / peak,
            })  # fmt: skip
            print(f"{length:>6} {rows[-1]['rows']:>10}  etude {mine['tokens_per_second']:>9,.0f}  transformers, compiled"
                  f" {peer['tokens_per_second']:>9,.0f}  ratio {rows[-1]['ratio']:.2f}  MFU {rows[-1]['mfu_990']:.1%} of 990,"
                  f" {rows[-1]['mfu_measured']:.1%} of {peak:.0f}  {mine['memory_gb']:.0f} GB", flush=True)  # fmt: skip
            for kind, share in mine["where"].items():
                print(f"{'':>20}{kind}: {share:.1%}")
    return {"matmul_peak_tflops": peak, "rows": rows}


def cpu() -> dict[str, Any]:
    """Train sprout on two thousand-token rows with both."""
    import etude
    from etude.models.load import load_model

    sprout = Path(etude.__file__).parent / "models" / "sprout"
    length, rows, steps = 1024, 4, 8
    batches = Synthetic(rows, length, whole=False, vocabulary=6144)
    same = [next(batches) for _ in range(steps + 1)]
    # The Trainer first: Etude tells the C library to keep freed memory, which would help it too.
    trainer = _cpu_trainer(load_model(sprout, torch.device("cpu"), torch.float32), same, rows, length)
    return {
        "etude": _cpu_ours(load_model(sprout, torch.device("cpu"), torch.float32), same, rows, length),
        "trainer": trainer,
    }


def _cpu_ours(model: Any, same: list[Batch], rows: int, length: int) -> dict[str, Any]:
    class Same(Synthetic):
        def __init__(self) -> None:
            super().__init__(rows, length, whole=False)
            self._left = iter(same)

        def __next__(self) -> Batch:
            return next(self._left)

    settings = TrainSettings(tokens=rows * length * len(same), batch=rows, micro=rows, evaluations=0, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        session = corpus_session(model, settings, Same(), length, World(), Path(folder))
        steps = session.loop.steps(len(same))
        first = next(steps)
        began = time.perf_counter()
        losses = [first.loss, *(step.loss for step in steps)]
        seconds = time.perf_counter() - began
    return {"tokens_per_second": rows * length * (len(same) - 1) / seconds, "losses": losses}


def _cpu_trainer(model: Any, same: list[Batch], rows: int, length: int) -> dict[str, Any]:
    """The same rows through the Trainer: positions tell documents apart, and no cache, else they would see each other."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from etude.training.batch import target_weights

    model.config.use_cache = False
    model.train()
    examples: list[dict[str, torch.Tensor]] = []
    for batch in same:
        labels = np.where(np.roll(target_weights(batch), 1, 1) > 0, batch.tokens, -100)
        each = zip(batch.tokens, batch.positions.astype(np.int64), labels, strict=True)
        names = ("input_ids", "position_ids", "labels")
        examples += [dict(zip(names, map(torch.from_numpy, row), strict=True)) for row in each]
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=rows, max_steps=len(same), use_cpu=True, report_to=[], save_strategy="no",
            learning_rate=3e-4, weight_decay=0.1, adam_beta2=0.95, lr_scheduler_type="cosine", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip

        class InOrder(Trainer):  # type: ignore[misc]
            def _get_train_sampler(self, *_: Any) -> Any:
                return torch.utils.data.SequentialSampler(examples)

        trainer = InOrder(model=model, args=arguments, train_dataset=examples, callbacks=[Clock()])
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"tokens_per_second": rows * length * (len(times) - 1) / (times[-1] - times[0]), "losses": losses}


def main() -> None:
    """Measure, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", choices=["gpu", "cpu"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="of the rows, on a GPU")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    found = gpu(args.lengths) if args.where == "gpu" else cpu()
    if args.where == "cpu":
        found["ratio"] = found["etude"]["tokens_per_second"] / found["trainer"]["tokens_per_second"]
        print(f"etude {found['etude']['tokens_per_second']:,.0f} tokens/s, Trainer {found['trainer']['tokens_per_second']:,.0f},"
              f" ratio {found['ratio']:.2f}")  # fmt: skip
    import transformers

    from etude.lineage import environment

    head = {"script": "training.py", "command": f"python benchmarks/training.py {args.where}", "date": time.strftime("%Y-%m-%d"),
            "hardware": torch.cuda.get_device_name() if args.where == "gpu" else environment.hardware().model_dump(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}  # fmt: skip
    line = json.dumps({**head, **found})
    if args.out:
        args.out.write_text(json.dumps({**head, **found}, indent=1) + "\n")
    print(line)


if __name__ == "__main__":
    main()
