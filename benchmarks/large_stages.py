"""Every stage of the recipe on the shapes people really use, with random weights: does it run, and how long does it take?

    python benchmarks/large_stages.py qwen3-8b --lora --cache CACHE      on a GPU; CACHE: `etude`'s, filled where there is a network
    python benchmarks/large_stages.py qwen3-30b-a3b --tiny               small widths, on a CPU: only to see that it runs

A model of the shape is made in bf16, with sprout's tokeniser, and saved as people get theirs: a folder of safetensors. Then `etude
run` takes it through a recipe of a few steps a stage, on the files of this package and tasks of recipes/tasks/quick.jsonl.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import etude.models
import report
from large_models import SHAPES, config_of, model_of

SPROUT = Path(etude.models.__file__).parent / "sprout"
HERE = Path(__file__).resolve().parents[1]
STAGES = ["cpt", "extend", "mtp", "sft", "rl", "bench", "release"]
TASKS = f"""tasks = "{HERE}/recipes/tasks/quick.jsonl"
only = "texttable-mutation-4e3e texttable-mutation-758e uritemplate-mutation-0532 uritemplate-mutation-7d19"
style = "told"
tools = {{ tools = ["edit"] }}
harness = {{ turns = 1, tokens = 60, turn_tokens = 60, seconds = 120.0, summary = {{ kind = "none" }} }}
"""


def recipe_of(options: argparse.Namespace, base: Path) -> str:
    """Return a recipe of a few steps a stage."""
    length, long = (512, 2048) if options.tiny else (4096, options.long)
    steps, lora = options.steps, "[{}.lora]\n" if options.lora else ""
    each = "recompute = true\nevaluations = 0\nevaluation_rows = 2\n"
    files = 'include = ["*.py"]\ndomain = "code"\nlicence = "Apache-2.0"\n'
    batch = max(1, long // length)  # a step takes whole rows of the corpus
    whole = f"tokens = {batch * length * steps}\nlength = {length}\nbatch = {batch}\n"
    return (
        f'name = "large"\nbase = "{base}"\nstages = {json.dumps([s for s in STAGES if s in options.stages])}\n'
        f"[data]\nlength = {long}\nheldout = 0.2\n"
        f'[[data.source]]\nname = "own"\nfolder = "{HERE}/src/etude"\n{files}[[data.source]]\nname = "tests"\n'
        f'folder = "{HERE}/tests"\n{files}hold_out = "all"\n'
        f"[cpt]\n{whole}{each}{lora.format('cpt')}"
        f"[extend]\ntokens = {long * steps}\nlength = {long}\nbatch = 1\n{each}retrieval_items = 2\n{lora.format('extend')}"
        f"[mtp]\n{whole}evaluations = 0\nevaluation_rows = 2\n"
        f'[sft]\ndemos = {{ tasks = "{HERE}/recipes/tasks/quick.jsonl", styles = ["told"], tools = ["edit"] }}\n'
        f"tokens = {2048 * steps}\nlength = 1024\nbatch = 2\nheldout = 0.0\n{each}{lora.format('sft')}"
        f"[rl]\n{TASKS}steps = {steps}\ngroups = 2\ngroup_size = 4\nepochs = 40\nlength = 1024\nrecompute = true\n"
        f"curriculum = {{ hard = 0.0, solved = 0.0 }}\n{lora.format('rl')}"
        f'[bench]\n{TASKS}k = 1\n[release]\nname = "large"\n'
    )


def save_base(options: argparse.Namespace, folder: Path) -> None:
    """Save random weights of the shape, as people get theirs; the licence is sprout's, whose tokeniser it has."""
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    config = config_of(options)
    if options.tiny:
        config.vocab_size, config.max_position_embeddings = 16384, 1024
    model = model_of(config, device).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"):
        shutil.copyfile(SPROUT / name, folder / name)


def stage_rows(run: Path) -> list[dict[str, Any]]:
    """Return what each stage took, as its record says."""
    rows = []
    for file in sorted(run.glob("*/record.json")):
        record = json.loads(file.read_text())
        compute = record.get("compute") or {}
        rows.append(
            {"stage": file.parent.name, "tokens": compute.get("tokens"), "seconds": compute.get("device_seconds")}
        )
    return rows


def main() -> None:
    """Make the base, run the recipe, keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--long", type=int, default=65536, help="tokens of the stage `extend`: more than the context of the shape"
    )
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES)
    parser.add_argument("--work", type=Path, default=Path("runs/large-stages"))
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--hardware", default="")
    options = parser.parse_args()
    began, work = time.perf_counter(), options.work.absolute() / options.shape
    shutil.rmtree(work, ignore_errors=True)
    (work / "base").mkdir(parents=True)
    save_base(options, work / "base")
    made = time.perf_counter() - began
    (work / "recipe.toml").write_text(recipe_of(options, work / "base"))
    command = [sys.executable, "-P", "-m", "etude", "run", str(work / "recipe.toml"), "--out", str(work / "run")]
    done = subprocess.run(
        [*command, *(["--cache", str(options.cache)] if options.cache else [])], check=False, cwd=HERE
    )
    rows = [
        {"shape": options.shape, "lora": options.lora, "base_made_s": round(made, 1), "code": done.returncode},
        *stage_rows(work / "run"),
    ]
    for row in rows:
        print(row, flush=True)
    if options.hardware:
        name = f"large_stages-{options.shape}{'-lora' if options.lora else ''}"
        report.finish(name, rows, options.hardware, seconds=time.perf_counter() - began)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
