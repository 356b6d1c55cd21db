"""Etude from Python: open a policy, train, play a task, benchmark. `import etude` offers these names, and loads this when one is used.

Every call blocks until it is done, so none may be made inside a running event loop. Errors that a user can put right are
`etude.UserError`. Settings, files and results are those of the commands: a run that Python began, `etude run` resumes.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from etude.agent.harness import Harness
from etude.agent.policies import find
from etude.agent.repository import settings_for
from etude.agent.tools import ToolSettings
from etude.agent.trace import Trace
from etude.bench.agents import BUILT_IN, Agent, BenchSettings, Policies, model_agent, run_benchmark
from etude.bench.arenas import run_arena
from etude.bench.public import PublicBenchmark, PublicSet, public_set, write_runs
from etude.bench.trials import read_results
from etude.errors import UserError
from etude.files import digest_of, read_json
from etude.inference.policy import Completion, Sampling
from etude.lineage.record import Record, load_record
from etude.models.fetch import default_cache
from etude.progress import Reporter
from etude.questions.settings import CODE
from etude.recipe.recipe import load_recipe
from etude.report.benchmark import Scored, write_report
from etude.rl.arenas import Choice
from etude.run.folder import lock_run
from etude.sandbox.images import settled
from etude.tasks.attempt import searcher_for, work_on
from etude.tasks.formats import read_task
from etude.tasks.manifest import TaskSet, load_set
from etude.tasks.prompts import asked
from etude.tasks.public import is_public
from etude.tasks.score import Score, score

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from etude.agent.formats import ChatFormat as Format
    from etude.bench.statistics import Estimate
    from etude.inference import policy as sampler
    from etude.tasks.task import Style


def _cache(given: str | Path | None) -> Path:
    return Path(given).absolute() if given else default_cache()


class Policy:
    """A model that samples: ours, on this machine, or a server's. Close it, or use it as a context manager."""

    def __init__(self, inner: sampler.Policy, talk: Format, loop: asyncio.Runner) -> None:
        self.inner, self.talk, self._loop = inner, talk, loop
        self.name, self.context = inner.info.name, inner.info.context

    def generate(self, prompt: str | Sequence[int], *, max_tokens: int = 128, **sampling: Any) -> Completion:
        """Return a completion: token ids, log-probs and weight versions. `sampling`: temperature, top_p, top_k, seed, stop."""
        tokens = self.talk.encode(prompt) if isinstance(prompt, str) else prompt
        return self._loop.run(self.inner.generate(tokens, Sampling(max_tokens, **sampling)))

    def text(self, completion: Completion) -> str:
        return str(self.talk.text(completion.token_ids))

    def close(self) -> None:
        self._loop.run(self.inner.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_policy(model: str | Path, *, device: str = "auto", cache: str | Path | None = None, **server: Any) -> Policy:
    """Open a known base, a run, a model folder or a server's address. `server`: its `name`, `token`, `tokeniser`, `context`."""
    loop = asyncio.Runner()

    async def opened() -> tuple[sampler.Policy, Format]:
        return await (await find(str(model), device, _cache(cache), Reporter(), **server)).open()

    return Policy(*loop.run(opened()), loop)


def train(
    recipe: str | Path, changes: Sequence[str] = (), *, out: str | Path | None = None, until: str | None = None,
    cache: str | Path | None = None,
) -> dict[str, Record]:  # fmt: skip
    """Run a recipe as `etude run` does; return the record of every stage by its name. `changes`: "stage.key=value"."""
    from etude.run.runner import Runner, stage_settings
    from etude.run.stages import STAGES

    loaded = load_recipe([Path(recipe)], changes, stage_settings())
    folder = Path(out or Path("runs") / loaded.name)
    steps = Runner(folder, _cache(cache), Reporter(), STAGES).execute(loaded, until)
    return {step.entry.name: load_record(folder / step.entry.name) for step in steps}


@dataclass(frozen=True)
class Episode:
    """One attempt at a task: every message and token, and what the hidden tests say of the result."""

    trace: Trace
    score: Score

    @property
    def solved(self) -> bool:
        return self.score.outcome == "pass"


def play(  # noqa: PLR0913 - an argument for every option
    tasks: str | Path, task: str, model: Policy | str, *, style: Style = "terse", turns: int = 50, minutes: float = 30.0,
    temperature: float = 0.7, seed: int = 0, sandbox: str = "auto",
    cache: str | Path | None = None,
) -> Episode:  # fmt: skip
    """Have a model (or "oracle", "noop") work on one task of a set in a sandbox, and score what it left."""
    place = _cache(cache)
    task_set = load_set(Path(tasks), place, Reporter(), task, sandbox)
    chosen, tools = task_set.tasks[0], ToolSettings()
    codebase = task_set.codebase(chosen)

    async def episode() -> Episode:
        agent = _agent_of(model) if isinstance(model, Policy) else (await agents([model], place))[0]
        trace = Trace(f"{agent.name}:{chosen.id}", asked(chosen, style)[1])
        async with agent.open() as policies:
            policy, talk = policies(chosen)
            limits = settings_for(policy, turns=turns, seconds=60 * minutes, temperature=temperature)
            left = await work_on(
                chosen, codebase, trace, tools, searcher_for(tools, place),
                lambda toolset: Harness(policy, talk, toolset, limits, trace, seed=seed),
            )  # fmt: skip
        return Episode(trace, await score(chosen, codebase, left.entries))

    return model._loop.run(episode()) if isinstance(model, Policy) else asyncio.run(episode())  # noqa: SLF001


def benchmark(
    models: Sequence[str], tasks: str | Path, *, out: str | Path | None = None, cache: str | Path | None = None,
    device: str = "auto", **settings: Any,
) -> dict[str, Estimate | None]:  # fmt: skip
    """Measure models as `etude bench` does, with its report; return each model's avg@k with its 95 % interval (None: no valid trial).

    `settings`: k, limit, concurrency, style, harness, tools, arena, questions.
    """
    place, checked = _cache(cache), BenchSettings.model_validate(settings)

    async def work() -> Path:
        return await measure(models, Path(tasks), checked, Path(out) if out else None, place, device=device)

    folder = asyncio.run(work())
    write_report([folder], folder)
    return Scored(read_results(folder)).scores


async def measure(
    models: Sequence[str], tasks: Path, settings: BenchSettings, out: Path | None, cache: Path, reporter: Reporter | None = None,
    only: str = "", **server: str,
) -> Path:  # fmt: skip
    """Make the trials that are missing; return their folder. `server`: see `agents`."""
    reporter = reporter or Reporter()
    if settings.arena != CODE:
        choice = Choice(
            settings.arena, str(tasks), settings.harness, questions=settings.questions, cache=cache, setting="bench"
        )
        choice.open()  # before a model is looked for
        folder, chosen = out or Path("runs", "bench", tasks.stem), await agents(models, cache, **server)
        with lock_run(folder, reporter.say):
            await run_arena(choice, chosen, settings, folder, reporter)
        return folder
    chosen, task_set = await agents(models, cache, **server), read_tasks(tasks, cache, reporter, settings.sandbox, only)
    folder = out or Path("runs", "bench", task_set.name)
    with lock_run(folder, reporter.say):
        public = isinstance(task_set, PublicSet)
        await run_benchmark(
            task_set, chosen, settings, folder, cache, reporter, kind=PublicBenchmark if public else None
        )
        if isinstance(task_set, PublicSet):
            write_runs(folder, task_set)
    return folder


async def agents(
    words: Sequence[str], cache: Path, *, device: str = "auto", token: str = "", tokeniser: str = ""
) -> list[Agent]:
    """Return the models to measure. All are found before any is loaded."""
    made: dict[str, Agent] = {}
    for word in words:
        each = BUILT_IN.get(word)
        each = each or model_agent(await find(word, device, cache, Reporter(), token=token, tokeniser=tokeniser))
        if each.name in made:
            raise UserError(f"{each.name} is named twice; measure endpoints of one name into folders of their own")
        made[each.name] = each
    return list(made.values())


def _agent_of(policy: Policy) -> Agent:
    """Return an opened policy as an agent, which leaves it open."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Policies]:
        yield lambda _task: (policy.inner, policy.talk)

    return Agent(policy.name, opened)


def read_tasks(path: Path, cache: Path, reporter: Reporter, sandbox: str = "auto", only: str = "") -> TaskSet:
    """Build a set from its manifest, or from task folders: those that `etude tasks build --harbor` wrote, or a public benchmark's."""
    if path.is_dir() and (is_public(path) or any(map(is_public, path.iterdir()))):
        return public_set(path, only)
    if path.is_dir():
        folders = [path] if (path / "task.toml").exists() else sorted(each.parent for each in path.glob("*/task.toml"))
        read = [read_task(folder, cache, reporter) for folder in folders]
        backend = settled(sandbox)
        codebases = {f"{codebase.name}=={codebase.version}": replace(codebase, sandbox=backend) for _, codebase in read}
        digest = digest_of([read_json(folder / "tests" / "etude.json") for folder in folders])
        task_set = TaskSet(path.absolute().name, digest, tuple(task for task, _ in read), codebases)
    else:
        task_set = load_set(path, cache, reporter, only, sandbox)
    if not task_set.tasks:
        raise UserError(f"{path} holds no tasks; make a set with `etude tasks make`")
    return task_set
