"""`etude tasks`: sets of tasks from real codebases (make, build, show, check, write for others), and demonstrations from them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from etude.cli import options
from etude.cli.options import AsJson, CacheFolder  # noqa: TC001 - typer reads annotations at run time
from etude.errors import UserError, visible
from etude.jsonl import MetricsLog
from etude.progress import Console, Reporter, counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from etude.tasks.manifest import TaskSet
    from etude.tasks.task import Task

app = typer.Typer(help="Task sets from real codebases: make, build, show, check; demonstrations.", no_args_is_help=True)
_recipe = typer.Argument(metavar="RECIPE", help="Recipe of a task set, such as recipes/tasks/quick.toml.")
RecipeFile = Annotated[Path, _recipe]
_manifest = typer.Argument(metavar="MANIFEST", help="Task manifest, such as recipes/tasks/quick.jsonl.")
ManifestFile = Annotated[Path, _manifest]
MOST_REASONS = 24  # of what could not be used, on the terminal
Only = Annotated[str, typer.Option(help="Prefixes of the ids of tasks to use, separated by spaces; default: all.")]


@app.command(epilog="Example: etude tasks make recipes/tasks/quick.toml")
def make(
    recipe: RecipeFile,
    out: Annotated[Path | None, typer.Option(help="Manifest to write; default beside the recipe.")] = None,
    work: Annotated[Path | None, typer.Option(help="Work folder, from which it resumes; default runs/tasks/NAME.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Packages in parallel (0 = one a core).")] = 0,
    cache: CacheFolder = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Make a task set from its recipe; the same command resumes an interrupted one."""
    from etude.tasks.make import Maker, read_settings

    settings, reporter = read_settings(recipe), Reporter()
    folder = work or Path("runs", "tasks", settings.name)
    advice = f"all tries are kept in {folder}; run the same command to go on"
    with options.interruptible(reporter, advice), MetricsLog(folder / "log.jsonl") as log:
        maker = Maker(settings, folder, log, options.cache_folder(cache), reporter)
        asyncio.run(maker.make(workers))
        unused = maker.unused()
        if not as_json:
            _show_unused(unused, folder)
        header = maker.finish(out or recipe.with_suffix(".jsonl"))
    if as_json:
        options.print_json(header)
    else:
        _show_header(header)


def _show_header(header: dict[str, Any]) -> None:
    kept: dict[str, dict[str, int]] = header.get("kept", {})
    table = Table("package", *kept, box=None)
    for package in sorted({name for counts in kept.values() for name in counts}):
        table.add_row(package, *(str(counts.get(package, 0)) for counts in kept.values()))
    Console().print(table)
    tries = counted(header["tries"])
    options.echo(f"{header['name']}: {header['tasks']} tasks; tries: {tries}; {header['seconds']} s of trying")
    for package, why in header["left_out"].items():
        options.echo(f"left out: {package}: {why}")


def _show_unused(rows: list[dict[str, Any]], folder: Path) -> None:
    """Show what could not be used, the most frequent first; the file beside the log has all of it, with examples."""
    if not rows:
        return
    table = Table("not used", "package", "reason", "what to do", box=None, title="What could not be used")
    for row in rows[:MOST_REASONS]:
        words = (f"{row['count']} × {row['of']}", row.get("package", ""), row["reason"], row["fix"])
        table.add_row(*(Text(visible(word)) for word in words))
    Console().print(table)
    more = f"{len(rows) - MOST_REASONS} more reasons, " if len(rows) > MOST_REASONS else ""
    options.echo(f"{more}with examples: {folder / 'unused.jsonl'}")


def _loaded(manifest: Path, cache: Path | None, only: str, sandbox: str = "auto") -> TaskSet:
    from etude.tasks.manifest import load_set

    return load_set(manifest, options.cache_folder(cache), Reporter(), only, sandbox)


@app.command(epilog="Example: etude tasks build recipes/tasks/bench.jsonl --harbor tasks")
def build(
    manifest: ManifestFile, only: Only = "", cache: CacheFolder = None,
    harbor: Annotated[Path | None, typer.Option(help="Folder to export every task to, in Harbor's layout.")] = None,
    swebench: Annotated[Path | None, typer.Option(help="File to export the set to, as SWE-bench rows (JSONL).")] = None,
    acknowledge: Annotated[str, typer.Option(help="proprietary: export tasks of proprietary code, which hold that code.")] = "",
) -> None:  # fmt: skip
    """Build a task set from its manifest: pinned archives and Python versions, all digests checked."""
    from etude.lineage.licences import is_proprietary
    from etude.tasks.formats import write_harbor, write_swebench

    if acknowledge not in {"", "proprietary"}:
        raise UserError(f"--acknowledge {acknowledge}: only proprietary can be acknowledged")
    tasks = _loaded(manifest, cache, only)
    kept = sorted(key for key, codebase in tasks.codebases.items() if is_proprietary(codebase.licence))
    if kept and (harbor or swebench) and not acknowledge:
        what = f"{', '.join(kept)} is proprietary, and an export holds its code"
        raise UserError(f"{what}; if its owner agrees, add --acknowledge proprietary")
    for task in tasks.tasks if harbor else ():
        write_harbor(task, tasks.codebase(task), Path(str(harbor), task.id))
    if swebench:
        write_swebench(tasks, swebench)
    counts = f"{len(tasks.tasks)} tasks of {len(tasks.codebases)} codebases"
    options.echo(f"{tasks.name}: {counts}, digest {tasks.digest[:16]}")


@app.command(epilog="Example: etude tasks show recipes/tasks/bench.jsonl")
def show(manifest: ManifestFile, only: Only = "", as_json: AsJson = False) -> None:
    """Show the contents of a task set; of a single task, also its request."""
    from etude.tasks.manifest import picked, read_rows

    header, _, rows = read_rows(manifest)
    wanted = picked(str(manifest), rows, only)
    if as_json:
        options.print_json({**header, "rows": wanted})
    elif only and len(wanted) == 1:
        options.print_json({key: value for key, value in wanted[0].items() if key not in {"edits", "pass_to_pass"}})
    else:
        _show_header(header)
        lines, files = (median_high(row["difficulty"][what] for row in wanted) for what in ("lines", "files"))
        categories = counted(Counter(row["category"] for row in wanted))
        options.echo(f"categories: {categories}; median lines: {lines:g}; median files: {files:g}")


@app.command(epilog="Example: etude tasks check recipes/tasks/bench.jsonl --sample 20")
def check(
    manifest: ManifestFile, only: Only = "", cache: CacheFolder = None,
    sample: Annotated[int, typer.Option(min=0, help="Number of tasks to check, spread over the set (0 = all).")] = 0,
    log: Annotated[Path | None, typer.Option(help="File of results, from which the same command resumes.")] = None,
    results: Annotated[list[Path] | None, typer.Option(help="Results of `etude bench`, to set unsolved tasks aside.")] = None,
    drop: Annotated[Path | None, typer.Option(metavar="OUT", help="Manifest to write without the invalid tasks.")] = None,
    sandbox: options.SandboxName = "auto",
) -> None:  # fmt: skip
    """Validate tasks: the reference solution passes, doing nothing fails. Exit code 1 if a task is invalid."""
    from etude.bench.trials import unsolved
    from etude.tasks.manifest import write_without

    if drop and (only or sample):
        raise UserError("--drop writes a whole set, so all of it must be checked; leave out --only and --sample")
    loaded = _loaded(manifest, cache, only, sandbox)
    tasks = loaded.tasks[:: max(1, len(loaded.tasks) // sample)][:sample] if sample else loaded.tasks
    with tempfile.TemporaryDirectory() as scratch:
        place = log or Path(scratch) / "checked.jsonl"
        with _alone(place), MetricsLog(place) as checked:
            reasons = asyncio.run(_checked(loaded, tasks, checked))
    reasons = unsolved(results or []) | {task: why for task, why in reasons.items() if why}
    wrong = {task: why for task, why in sorted(reasons.items()) if task in {each.id for each in tasks}}
    for task, why in wrong.items():
        options.echo(f"{task}: {why}")
    options.echo(f"{len(tasks) - len(wrong)} of {len(tasks)} tasks are right")
    if drop:
        write_without(manifest, wrong, drop)
        options.echo(f"{drop} holds those")
    raise typer.Exit(1 if wrong and not drop else 0)


@contextlib.contextmanager
def _alone(log: Path) -> Iterator[None]:
    """Hold a log, which two commands would write over each other."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{log} is being written by another `etude tasks check`; wait for it, or name another --log"
            ) from None
        yield


async def _checked(loaded: TaskSet, tasks: tuple[Task, ...], log: MetricsLog) -> dict[str, str]:
    """Return what is wrong with each task, by its id; empty if nothing is."""
    from etude.tasks import score
    from etude.tasks.suite import side_by_side

    keys = {task.id: f"{task.id}/{loaded.codebase(task).digest[:12]}" for task in tasks}
    todo = [task for task in tasks if keys[task.id] not in log]
    with Reporter().task(f"checking {loaded.name}", len(tasks), "tasks") as progress:
        progress.skip(len(tasks) - len(todo))

        async def one(task: Task) -> None:
            log.put(keys[task.id], wrong=await score.check(task, loaded.codebase(task)))
            progress.advance()

        await side_by_side(one, todo)
    return {name: str((log.get(key) or {})["wrong"]) for name, key in keys.items()}


def demos(  # noqa: PLR0913, PLR0917 - an argument for every option
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="Training set, such as recipes/tasks/train.jsonl.")],
    model: Annotated[str, typer.Option(help="Model to train on them, which gives the tokeniser: run folder or base.")] = "sprout",
    template: Annotated[str, typer.Option(help="Chat template, as in [sft]: auto, base, chatml, or a .jinja file.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Output folder; default runs/demos/NAME.")] = None,
    each: Annotated[int, typer.Option(min=1, max=6, help="Demonstrations of each task, in different styles.")] = 1,
    styles: Annotated[str, typer.Option(help="Request styles; easier: shown, told (the change).")] = "terse,trace,premise,full,vague",
    most: Annotated[int, typer.Option(min=0, help="Limit of demonstrations, spread over the set (0 = none).")] = 0,
    tools: options.ToolNames = "",
    only: Only = "",
    sandbox: options.SandboxName = "auto",
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    cache: CacheFolder = None,
) -> None:  # fmt: skip
    """Make demonstrations for SFT: replay reference solutions, keep those that pass. The same command resumes."""
    from etude.data.chat import choose_template
    from etude.models.bases import locate
    from etude.models.load import load_tokeniser
    from etude.tasks.demos import DemoSettings, make_demos, refuse_benchmarks

    refuse_benchmarks(manifest)
    given = {"tasks": str(manifest), "only": only, "each": each, "most": most, "styles": styles.split(","), "sandbox": sandbox,
             "tools": options.chosen_tools(tools).tools}  # fmt: skip
    settings, reporter = options.checked(DemoSettings, given), Reporter()
    tokeniser = load_tokeniser(locate(model, cache, reporter)[1])
    choose_template(tokeniser, template)  # as the sft stage will leave it
    with options.interruptible(reporter, "what was made is kept; run the same command to go on"):
        traces, made = make_demos(settings, tokeniser, out, options.cache_folder(cache), reporter, seed)
    options.echo(f"{made['kept']} of {made['wanted']} demonstrations in {traces}")
    for what in ("tokens", "styles", "wrong turns", "left out", "other ways"):
        options.echo(f"{what}: {counted(made[what])}")
