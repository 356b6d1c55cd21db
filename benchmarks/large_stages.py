"""Every stage of the recipe on the shapes people really use, with random weights: does it run, and how long does it take?

    python benchmarks/large_stages.py qwen3-8b --lora --cache CACHE      on a GPU; CACHE: `etude`'s, filled where there is a network
    python benchmarks/large_stages.py qwen3-30b-a3b --tiny               small widths, on a CPU: only to see that it runs
    … --apart        each stage by itself on the base, its model deleted after it: for a disk that holds three models, not eight

A model of the shape is made in bf16, with sprout's tokeniser, and saved as people get theirs: a folder of safetensors. Then `etude
run` takes it through a recipe of a few steps a stage, on the files of this package and tasks of recipes/tasks/quick.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import etude.models
import report
from large_models import SHAPES, config_of, model_of

SPROUT = Path(etude.models.__file__).parent / "sprout"
HERE = Path(__file__).resolve().parents[1]
STAGES = ["compare", "cpt", "extend", "mtp", "sft", "rl", "bench", "release", "serve"]
KEEPS_RELEASE = "cpt"  # whose model is released, where stages run apart
TASKS = f"""tasks = "{HERE}/recipes/tasks/quick.jsonl"
only = "texttable-mutation-4e3e texttable-mutation-758e uritemplate-mutation-0532 uritemplate-mutation-7d19"
style = "told"
tools = {{ tools = ["edit"] }}
harness = {{ turns = 1, tokens = TOKENS, turn_tokens = TOKENS, seconds = 120.0, summary = {{ kind = "none" }} }}
"""


def long_documents(work: Path, tokens: int) -> Path:
    """Write the files of this package as documents that are longer than a row of so many tokens."""
    text = "\n".join(file.read_text() for file in sorted((HERE / "src" / "etude").rglob("*.py")))
    folder, size = work / "documents", 5 * tokens  # characters
    folder.mkdir(exist_ok=True)
    for begin in range(0, max(len(text) - size, 1), size):
        (folder / f"{begin:08}.py").write_text(text[begin : begin + size])
    return folder


def recipe_of(options: argparse.Namespace, work: Path, base: Path, stages: list[str]) -> str:
    """Return a recipe of a few steps a stage."""
    length, long = (512, 2048) if options.tiny else (4096, options.long)
    steps, lora = options.steps, "[{}.lora]\n" if options.lora else ""
    each = f"recompute = true\nevaluations = 0\nevaluation_rows = 1\nmicro = {options.micro}\n"
    cache = f"engine_memory = {options.engine_memory}\n"
    files = 'include = ["*.py"]\ndomain = "code"\nlicence = "Apache-2.0"\n'
    batch = max(1, long // length)  # a step takes whole rows of the corpus
    whole = f"tokens = {batch * length * steps}\nlength = {length}\nbatch = {batch}\n"
    tokens, groups, size = (60, 2, 4) if options.tiny else (1024, 4, 8)
    tasks = TASKS.replace("TOKENS", str(tokens))
    parts = {
        "compare": f'on = "{HERE}/src/etude/rl"\nbases = ["sprout"]\nmax_bytes = 20_000\nstate_tasks = 2\n',
        "cpt": f"{whole}{each}{lora.format('cpt')}",
        "extend": f"tokens = {long * steps}\nlength = {long}\nbatch = 1\n{each}retrieval_items = 1\n"
        f"retrieval_lengths = [{long}]\nposition_rows = 1\n{lora.format('extend')}",
        "mtp": f"{whole}micro = {options.micro}\nevaluations = 0\nevaluation_rows = 1\n",
        "sft": f'demos = {{ tasks = "{HERE}/recipes/tasks/quick.jsonl", styles = ["told"], tools = ["edit"] }}\n'
        f"tokens = {2048 * steps}\nlength = 1024\nbatch = 2\nheldout = 0.0\n{each}{lora.format('sft')}",
        "rl": f"{tasks}steps = {steps}\ngroups = {groups}\ngroup_size = {size}\nepochs = 40\n"
        f"length = {1024 if options.tiny else 2048}\nrecompute = true\n"
        f"micro = {options.micro}\n{cache}curriculum = {{ hard = 0.0, solved = 0.0 }}\n"
        # Random weights write texts that earn alike; groups alike are trained on only with a penalty that can tell them apart.
        f"kl = {{ coefficient = 0.01 }}\n{lora.format('rl')}",
        "bench": f"{tasks}k = 1\n{cache}",
        "release": 'name = "large"\n',
    }
    data = (
        f"[data]\nlength = {long}\nheldout = 0.2\nfilters = {{ scrub = false }}\n"
        f'[[data.source]]\nname = "own"\nfolder = "{long_documents(work, long)}"\n{files}[[data.source]]\nname = "tests"\n'
        f'folder = "{HERE}/tests"\n{files}hold_out = "all"\n'
    )
    head = f'name = "large"\nbase = "{base}"\nstages = {json.dumps(stages)}\n'
    return (
        head
        + (data if {"cpt", "extend", "mtp", "sft"} & {*stages} else "")
        + "".join(f"[{stage}]\n{parts[stage]}" for stage in stages)
    )


def save_base(options: argparse.Namespace, folder: Path) -> None:
    """Save random weights of the shape, as people get theirs; the licence is sprout's, whose tokeniser it has."""
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    config = config_of(options)
    if options.tiny:
        config.vocab_size, config.max_position_embeddings = 16384, 1024
    model = model_of(config, device).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        shutil.copyfile(SPROUT / name, folder / name)


def stage_rows(run: Path) -> list[dict[str, Any]]:
    """Return what each stage took, as its record says."""
    rows = []
    for file in sorted(run.glob("*/record.json")):
        record = json.loads(file.read_text())
        compute = record.get("compute") or {}
        row = {"stage": file.parent.name, "tokens": compute.get("tokens"), "seconds": compute.get("device_seconds")}
        rows.append(row | memory_and_steps(file.parent / "metrics.jsonl"))
    return rows


def memory_and_steps(metrics: Path) -> dict[str, Any]:
    """Return the memory that was planned and that a step took at its peak, and of `rl` the metrics of its steps."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    planned = max((line["needed_bytes"] for line in lines if "needed_bytes" in line), default=0.0)
    peak = max((line["peak_bytes"] for line in lines if "peak_bytes" in line), default=0.0)
    row: dict[str, Any] = {"planned_gb": round(planned / 1e9, 1), "peak_gb": round(peak / 1e9, 1)}
    steps = [line for line in lines if "trained" in line]
    return row | ({"steps": steps} if steps else {})


def run_recipe(options: argparse.Namespace, work: Path, stages: list[str]) -> tuple[int, list[dict[str, Any]]]:
    """Run some stages; return the exit status and what each took."""
    name = "-".join(stages) if options.apart else "run"
    (work / f"{name}.toml").write_text(recipe_of(options, work, options.base or work / "base", stages))
    command = [sys.executable, "-P", "-m", "etude", "run", str(work / f"{name}.toml"), "--out", str(work / name)]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, *(["--cache", str(options.cache)] if options.cache else [])], check=False, cwd=HERE
    )
    rows = [row for row in stage_rows(work / name) if row["stage"] in stages]
    if options.apart:
        rows = [row | {"command_s": round(time.perf_counter() - began, 1), "code": done.returncode} for row in rows]
        shutil.rmtree(work / name, ignore_errors=True)
    return done.returncode, rows


def keep(options: argparse.Namespace, rows: list[dict[str, Any]], began: float) -> None:
    if options.hardware:
        part = f"-{'-'.join(options.stages)}" if options.stages != STAGES else ""
        name = f"large_stages-{options.shape}{'-lora' if options.lora else ''}{part}"
        report.finish(name, rows, options.hardware, seconds=time.perf_counter() - began)


def wait_for(address: str) -> None:
    """Return when somebody listens at an address, which is announced before."""
    host, port = address.removeprefix("http://").split(":")
    for _ in range(1200):
        with suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
            return
        time.sleep(0.1)


def serve(base: Path, engine_memory: float) -> dict[str, Any]:
    """Start `etude serve` on the base, ask it once, and return what that took."""
    began = time.perf_counter()
    command = [sys.executable, "-P", "-m", "etude", "serve", str(base), "--port", "0", "--context", "512"]
    command += ["--engine-memory", str(engine_memory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=HERE) as server:
        try:
            lines = iter(server.stdout or ())
            address = next((at[0] for line in lines if (at := re.search(r"http://[\w.]+:\d+", line))), "")
            wait_for(address)
            ready, body = (
                time.perf_counter() - began,
                {"model": base.name, "prompt": "def add(a, b):", "max_tokens": 32},
            )
            request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())  # noqa: S310
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - the server above
                tokens = json.load(answer)["usage"]["completion_tokens"]
            return {"stage": "serve", "code": 0, "ready_s": round(ready, 1), "tokens": tokens,
                    "answer_s": round(time.perf_counter() - began - ready, 2)}  # fmt: skip
        except (OSError, ValueError) as error:
            return {"stage": "serve", "code": 1, "error": str(error)[:200]}
        finally:
            server.terminate()


def main() -> None:
    """Make the base, run the recipe, keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro", type=int, default=0, help="rows at once; 0: by the plan")
    parser.add_argument("--engine-memory", type=float, default=0.0, help="KV cache in GB; 0: by the plan")
    parser.add_argument(
        "--long", type=int, default=65536, help="tokens of the stage `extend`: more than the context of the shape"
    )
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--work", type=Path, default=Path("runs/large-stages"))
    parser.add_argument("--base", type=Path, help="folder of the base: made if it is not there, and kept")
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--hardware", default="")
    options = parser.parse_args()
    began, work = time.perf_counter(), options.work.absolute() / options.shape
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    base = options.base or work / "base"
    if not (base / "LICENSE").exists():
        base.mkdir(parents=True)
        save_base(options, base)
    made = time.perf_counter() - began
    layers = config_of(options).num_hidden_layers
    rows: list[dict[str, Any]] = [
        {"shape": options.shape, "layers": layers, "lora": options.lora, "base_made_s": round(made, 1)}
    ]
    wanted, codes = [stage for stage in STAGES if stage in options.stages and stage != "serve"], [0]
    alone = [stage for stage in wanted if not (stage == "release" and KEEPS_RELEASE in wanted)]
    chains = [[stage, "release"] if stage == KEEPS_RELEASE and "release" in wanted else [stage] for stage in alone]
    for stages in chains if options.apart else [wanted]:
        code, done = run_recipe(options, work, stages)
        codes, rows = [*codes, code], rows + (done or [{"stage": stages[0], "code": code}])
        print(rows[-1], flush=True)
        keep(options, rows, began)
    if "serve" in options.stages:
        rows.append(serve(base, options.engine_memory))
        print(rows[-1], flush=True)
        codes.append(rows[-1]["code"])
        keep(options, rows, began)
    shutil.rmtree(work, ignore_errors=True)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
