"""On-policy distillation as the cure for forgetting: sprout is taught to call a tool, forgets code, and is to remember it.

    python benchmarks/distil.py FOLDER [--seeds 3] [--cache FOLDER]      from the repository's root; one process at a time

For every seed `sft` on the quickstart's demonstrations makes the student. Four cures begin with it:

    distil   it writes on from lines of src/etude, and sprout as it was scores that
    both     two teachers by domain: sprout for code, and the student as it was for the requests in the traces of its benchmark
    merge    the mean of student and sprout
    cpt      plain training on the text of src/etude itself, as many updates at the same learning rate

Told are bits per byte of Python from tests/, which no stage read, and the share of attempts at the quickstart's seven tasks that are
solved (those tasks are among the demonstrations).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import etude
from etude.agent.trace import Node, Trace, from_json
from etude.inference.policy import Sampling
from etude.models.load import load_tokeniser
from etude.rl.environment import Episode, Item

CHARS, TOKENS, ITEMS = 300, 48, 200  # of a prompt; of what is sampled; prompts

SFT = """
[sft]
demos = { tasks = "recipes/tasks/quick.jsonl", styles = ["told"], tools = ["edit"] }
tokens = 50_000
length = 1024
batch = 2
evaluations = 0
heldout = 0.0
optimiser = { lr = 1e-3, weight_decay = 0.0 }
"""
DISTIL = """
[distil]
kind = "rl"
arena = "python:benchmarks.distil.Continue"
tasks = "src/etude"
teacher = { models = { "" = "sprout" } }
steps = 24
groups = 8
group_size = 2
mode = "sync"
staleness = 0
normaliser = 48
length = 256
optimiser = { lr = 3e-4 }
"""
BOTH = (
    DISTIL.replace('"" = "sprout" }', '"" = "sprout", call = "STUDENT/sft/model" }')
    .replace('tasks = "src/etude"', 'tasks = "src/etude STUDENT/solved/traces.jsonl"')
    .replace("length = 256", "length = 1024")
)
MERGE = """
[merge]
method = "linear"
others = ["sprout"]
weights = [0.5, 0.5]
"""
CPT = """
[data]
length = 512
heldout = 0.1
[[data.source]]
name = "etude"
folder = "src/etude"
[cpt]
tokens = 49_152
batch = 4
evaluations = 0
optimiser = { lr = 3e-4 }
"""
MEASURED = """
[solved]
kind = "bench"
tasks = "recipes/tasks/quick.jsonl"
only = \"\"\"
  texttable-deletion-1504 texttable-deletion-9bd9 texttable-mutation-4e3e texttable-mutation-758e
  uritemplate-deletion-67e2 uritemplate-mutation-0532 uritemplate-mutation-7d19
\"\"\"
style = "told"
k = 4
tools = { tools = ["edit"] }
harness = { turns = 1, tokens = 100, turn_tokens = 100, seconds = 60.0, summary = { kind = "none" } }
[code]
kind = "compare"
on = "tests"
max_bytes = 30_000
state_tasks = 0
"""


class Continue:
    """Write on from a place in somebody's code. Nothing is rewarded: only a teacher has something to say of it."""

    def __init__(self, tasks: str, harness: Any) -> None:
        code, *traces = tasks.split()
        rng, files = random.Random(code), sorted(Path(code).rglob("*.py"))  # noqa: S311 - by a fixed seed
        self.temperature, self.prompts = harness.temperature, dict[str, list[int]]()
        self.tokeniser = load_tokeniser(Path(etude.__file__).parent / "models" / "sprout")
        for number in range(ITEMS):
            text = files[rng.randrange(len(files))].read_text(encoding="utf-8")
            begin = rng.randrange(max(1, len(text) - CHARS))
            prompt = self.tokeniser.encode(text[begin : begin + CHARS], add_special_tokens=False)
            self.prompts[f"place-{number:03d}"] = prompt
        asked = {
            tuple(from_json(line, path).context(0)) for path in traces for line in Path(path).read_bytes().splitlines()
        }
        for number in range(ITEMS if asked else 0):  # as many of both
            self.prompts[f"call-{number:03d}"] = list(sorted(asked)[number % len(asked)])
        self.items = [Item(name) for name in self.prompts]

    async def run_episode(self, item: str, policy: Any, talk: Any, *, name: str, seed: int, journal: Path) -> Episode:  # noqa: ARG002 - so short that none is kept
        prompt, tokens = self.prompts[item], 100 if item.startswith("call") else TOKENS
        done = await policy.generate(prompt, Sampling(tokens, temperature=self.temperature, seed=seed), session=name)
        opening = Node(None, "opening", prompt, self.tokeniser.decode(prompt))
        said = self.tokeniser.decode(done.token_ids)
        turn = Node(0, "turn", done.token_ids, said, True, done.logprobs, done.raw_logprobs, done.versions)  # noqa: FBT003
        trace = Trace(name, item, [opening, turn])
        trace.stop, trace.counts, trace.rewards = "finished", {"turns": 1}, {"outcome": 0.0}
        return Episode(trace, "fail", {"thinking_tokens": 0.0})


def run(folder: Path, base: str, stages: list[str], text: str, seed: int, cache: Path) -> dict[str, Any]:
    """Run a recipe and return what its measurements recorded."""
    listed = json.dumps([*stages, "solved", "code"])
    recipe = folder.with_suffix(".toml")
    recipe.parent.mkdir(parents=True, exist_ok=True)
    recipe.write_text(f'name = "{folder.name}"\nbase = "{base}"\nseed = {seed}\nstages = {listed}\n{text}{MEASURED}')
    command = [sys.executable, "-P", "-m", "etude", "run", recipe, "--out", folder, "--cache", cache]
    subprocess.run(list(map(str, command)), check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    summaries = {
        name: json.loads((folder / name / "record.json").read_text())["summary"] for name in ("solved", "code")
    }
    return {name: value for summary in summaries.values() for name, value in summary.items()}


def main() -> None:
    """Run all seeds and write what was seen after each arm."""
    from report import finish  # not needed, nor found, where this file is imported as an arena

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--arms", nargs="*", default=[], help="only these; all others must be there")
    given = parser.parse_args()
    cache, out = given.cache or given.folder / "cache", given.folder / f"seen{'-'.join(['', *given.arms])}.json"
    seen: dict[str, Any] = {}
    for seed in range(given.seeds):
        here = given.folder.absolute() / str(seed)
        student = str(here / "student/sft/model")
        arms = [("student", "sprout", ["sft"], SFT), ("distil", student, ["distil"], DISTIL),
                ("both", student, ["distil"], BOTH.replace("STUDENT", str(here / "student"))),
                ("merge", student, ["merge"], MERGE), ("cpt", student, ["cpt"], CPT)]  # fmt: skip
        for name, base, stages, text in (arm for arm in arms if not given.arms or arm[0] in given.arms):
            seen[f"{seed} {name}"] = run(here / name, base, stages, text, seed, cache)
            out.write_text(json.dumps(seen, indent=1))
    for other in given.folder.glob("seen*.json"):  # of arms that were run by another call
        seen = json.loads(other.read_text()) | seen
    finish("distil", [{"seed": name[0], "arm": name[2:], **row} for name, row in sorted(seen.items())], "cpu")


if __name__ == "__main__":
    main()
