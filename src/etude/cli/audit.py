"""`etude audit`: does one model descend from another? `etude library`: the known bases it is compared with."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from etude.cli.options import AsJson, CacheFolder, print_json
from etude.errors import UserError
from etude.progress import Reporter

if TYPE_CHECKING:
    from etude.lineage.audit.examine import Opened

app = typer.Typer(help="Sketches of known bases, for the audit.", no_args_is_help=True)

_model = typer.Argument(metavar="MODEL", help="A folder, a run, a .gguf or .safetensors, or a base's name.")
_other = typer.Argument(metavar="OTHER", help="The model it is compared with.")
_library = typer.Option("--library", help="Compare it with every base of the library instead.")


def audit(
    suspect: Annotated[str, _model],
    other: Annotated[str | None, _other] = None,
    library: Annotated[bool, _library] = False,
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Test from the weights alone whether two models share an initialisation; nothing is loaded or run."""
    from etude.lineage.audit.examine import examine, examine_library
    from etude.lineage.audit.library import known_sketches
    from etude.lineage.audit.report import show, show_library

    if (other is None) is not library:
        raise UserError("give two models, or one and --library: etude audit MODEL OTHER, etude audit MODEL --library")
    reporter, console = Reporter(), Console(highlight=False, markup=False)
    opened = open_word(suspect, cache, reporter)
    if other is not None:
        finding = examine(open_word(other, cache, reporter), opened, reporter)
        print_json(finding.to_json()) if as_json else show(finding, console)
        return
    found = examine_library(opened, known_sketches(sketch_folder(cache)), reporter)
    print_json([finding.to_json() for finding in found]) if as_json else show_library(found, console)


@app.command(epilog="Example: etude library add runs/quickstart/base/model my-base")
def add(
    model: Annotated[str, _model],
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the library calls it.")],
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Make a sketch of a base, so that models can be compared with it when it is not at hand."""
    from etude.lineage.audit.examine import open_model
    from etude.lineage.audit.library import add_sketch, digest_weights, place_for
    from etude.lineage.audit.sketch import Facts, make_sketch

    reporter, folder = Reporter(), sketch_folder(cache)
    place_for(name, folder)  # refused before gigabytes are hashed
    _, path, source = _find(model, cache, reporter)
    opened, today = open_model(path), datetime.now(UTC).date().isoformat()
    digest = digest_weights(opened.weights.path, reporter)
    facts = Facts(name=name, source=source, licence=_licence(path), model_digest=digest, made=today)
    file = add_sketch(make_sketch(opened.weights, opened.tokens, facts), folder)
    told = facts.model_dump() | {"file": str(file), "bytes": file.stat().st_size}
    print_json(told) if as_json else typer.echo(f"{name}: {file}, {file.stat().st_size / 1e6:.1f} MB")


@app.command("list", epilog="Example: etude library list --json")
def list_(cache: CacheFolder = None, as_json: AsJson = False) -> None:
    """List the bases that the library knows."""
    from etude.lineage.audit.library import known_sketches
    from etude.lineage.audit.report import show_sketches

    known = known_sketches(sketch_folder(cache))
    print_json([each.facts.model_dump() for each in known]) if as_json else show_sketches(
        known, Console(highlight=False, markup=False)
    )


def open_word(word: str, cache: Path | None, reporter: Reporter) -> Opened:
    """Open the model that a word means."""
    from etude.lineage.audit.examine import open_model

    name, path, _ = _find(word, cache, reporter)
    return open_model(path, name)


def _find(word: str, cache: Path | None, reporter: Reporter) -> tuple[str, Path, str]:
    """Return what to call a model, where it lies, and where it came from."""
    from etude.models.locate import locate

    path = Path(word).expanduser()
    if path.suffix in {".gguf", ".safetensors"} and path.is_file():
        return path.name, path, f"file {path.name}"
    name, folder, origin = locate(word, cache, reporter)
    return name, folder, origin.source if origin else f"folder {folder}"


def sketch_folder(cache: Path | None) -> Path:
    """Return where a user's own sketches lie."""
    from etude.lineage.audit.library import FOLDER
    from etude.models.fetch import default_cache

    return (cache.absolute() if cache is not None else default_cache()) / FOLDER


def _licence(path: Path) -> str | None:
    """Return the licence by the text that lies with the weights."""
    from etude.lineage.licences import identify, licence_files

    folder = path if path.is_dir() else path.parent
    known = (identify(file.read_text(encoding="utf-8", errors="replace")) for file in licence_files(folder))
    return next((licence for licence in known if licence), None)
