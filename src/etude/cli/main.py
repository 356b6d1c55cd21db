"""The command `etude`: its subcommands, and how errors are reported.

Nothing here imports torch: `etude --help` must answer at once. Results go to standard output, messages to standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import etude
from etude.cli import agent, bench, cluster, lineage, recipe, rl, run, sandbox, serve, tasks, web
from etude.cli.options import echo
from etude.errors import UserError, storage_error, visible
from etude.progress import Console

app = typer.Typer(
    help="From an open base model to your own coding agent: one recipe, every stage measured, its lineage recorded.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(lineage.app, name="lineage")
data_app = typer.Typer(help="Corpora: build one from a recipe, show its contents.", no_args_is_help=True)
app.add_typer(data_app, name="data")
mtp_app = typer.Typer(help="MTP heads (multi-token prediction): export them.", no_args_is_help=True)
app.add_typer(mtp_app, name="mtp")
app.add_typer(bench.app, name="bench")
app.add_typer(tasks.app, name="tasks")
tasks.app.command(epilog="Example: etude tasks demos recipes/tasks/quick.jsonl --model sprout")(tasks.demos)
app.add_typer(rl.app, name="rl")
app.add_typer(cluster.app, name="cluster")
app.add_typer(agent.trace_app, name="trace")
app.add_typer(sandbox.app, name="sandbox")
app.add_typer(lineage.library_app, name="library")
app.add_typer(web.app, name="web")

app.command(epilog="Example: etude init ~/my-project")(recipe.init)
app.command(epilog="Example: etude schema > recipe.schema.json")(recipe.schema)
app.command(epilog="Example: etude run recipes/quickstart.toml --set compare.max_bytes=200000")(run.run)
app.command(epilog="Example: etude plan recipes/quickstart.toml --on 8xh200")(run.plan)
app.command(epilog="Example: etude compare smollm2-135m sprout --on ~/my-project")(run.compare)
app.command(epilog="Example: etude serve runs/quickstart")(serve.serve)
app.command(epilog='Example: etude agent "the parser drops the last line" --model runs/quickstart')(agent.agent)
app.command(epilog="Example: etude status runs/quickstart --watch")(run.status)
app.command(epilog="Example: etude summary runs/quickstart")(run.summary)
app.command(epilog="Example: etude log runs/quickstart --to tensorboard")(run.log)
app.command(epilog="Example: etude bases smollm2-135m")(run.bases)
app.command(epilog="Example: etude licences runs/quickstart --product docs/product.toml")(lineage.licences)
app.command(epilog="Example: etude audit runs/quickstart smollm2-135m")(lineage.audit)
app.command(epilog="Example: etude release runs/quickstart my-model --product product.toml")(lineage.release)
app.command(epilog="Example: etude verify my-model --key owner.pub")(lineage.verify)
building = "Example: etude data build recipes/quickstart.toml --set data.length=4096"
data_app.command("build", epilog=building)(run.build_corpus)
data_app.command("report", epilog="Example: etude data report runs/quickstart")(run.corpus_report)
exporting = "Example: etude mtp export runs/quickstart/mtp/model draft --layout mimo"
mtp_app.command("export", epilog=exporting)(run.export)


def main() -> NoReturn:
    """Run the command line; an error that a user can fix ends as one line and exit code 2."""
    if str(Path.cwd()) not in sys.path:  # a worker's Python would look there first, and it may be anybody's repository
        os.environ["PYTHONSAFEPATH"] = "1"
    try:
        left = app(standalone_mode=False)  # a command that leaves early hands its exit code back
        code = left if isinstance(left, int) else 0
    except typer.Abort:
        code = 130
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        sys.stderr.close()
        code = 141
    except (OSError, UserError) as error:
        message = storage_error(error) if isinstance(error, OSError) else error
        if message is None:
            raise
        code = _complain(message)
    except UnicodeEncodeError as error:
        code = _complain(UserError(f"a name is not valid UTF-8: {error.object[:80]!r}; rename it"))
    except Exception as error:
        if not hasattr(error, "show"):  # only click's own usage errors have it
            raise
        setattr(error, "message", visible(str(getattr(error, "message", ""))))  # noqa: B010 - words of the command line
        error.show()
        code = int(getattr(error, "exit_code", 2))
    sys.exit(code)


def _complain(error: Exception) -> int:
    Console(stderr=True, highlight=False).print(
        f"error: {visible(str(error))}", style="red", markup=False, soft_wrap=True
    )
    return 2


def _version(wanted: bool) -> None:  # noqa: FBT001 - called by typer
    if wanted:
        echo(f"etude {etude.__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)]


@app.callback()
def _top(version: Version = False) -> None:
    assert not version  # its callback has answered and left


if __name__ == "__main__":
    main()
