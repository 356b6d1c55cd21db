"""The commands about a model's origin.

`lineage`: what it was made from, with how much compute, and a picture of it. `audit`: do its weights descend from another's;
`library`: the known bases it is compared with. `licences`: what the licences of all ancestors ask of a product.
`release` and `verify`: a model with its whole family tree, signed; and how a stranger checks one.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli.options import AsJson, CacheFolder, cache_folder, echo, print_json
from etude.errors import UserError
from etude.files import whole_file
from etude.lineage.compute import Item, compute_shares
from etude.lineage.duties import Duty, LicenceUse, evaluate, licence_uses, load_product, notice, unmet
from etude.lineage.licences import identify, licence_files
from etude.lineage.record import Lineage, load_lineage
from etude.lineage.tree import changed_corpora, changed_weights, draw_png, draw_svg, find_model, render
from etude.models.bases import ancestors, locate, resolve
from etude.progress import Console, Reporter
from etude.report.page import Table, print_parts, terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from etude.lineage.audit.sketch import Sketch
    from etude.lineage.facts import Measured
    from etude.lineage.verify import Verification

app = typer.Typer(help="Lineage: what a model was made from.", no_args_is_help=True)
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="Model: model folder, stage folder or run folder.")]
Verify = Annotated[bool, typer.Option("--verify", help="Check of the weights against the digests in the records.")]


@app.command(epilog="Example: etude lineage show runs/quickstart/base/model --verify")
def show(model: ModelFolder, verify: Verify = False, as_json: AsJson = False) -> None:
    """Print a model's family tree back to its base, from the records it carries."""
    folder, lineage = _tree(model)
    wrong = changed_weights(folder, lineage.records[lineage.head], Reporter()) if verify else []
    wrong += changed_corpora(folder, lineage) if verify else []
    if wrong:
        raise UserError(f"{folder} does not agree with its record: {'; '.join(wrong)}")
    if as_json:
        print_json(lineage.model_dump(mode="json"))
        return
    echo("\n".join(render(lineage, str(folder))))
    if verify:
        echo("the weights agree with the record")


def _tree(model: Path) -> tuple[Path, Lineage]:
    folder = find_model(model)
    return folder, load_lineage(folder)


@app.command(epilog="Example: etude lineage compute runs/quickstart")
def compute(model: ModelFolder, as_json: AsJson = False) -> None:
    """Split a model's compute into your own and its base's, in three conventions, beside the EU's thresholds."""
    shares = compute_shares(_tree(model)[1], ancestors())
    if as_json:
        print_json(shares.to_json())
        return
    rows = [(item.name, "base" if item.generation else "own", *_cells(item)) for item in shares.items]
    table = Table(("stage", "whose", ">tokens", ">FLOP", ">between", "known by", ">hours"), rows)
    print_parts(Console(), [terminal(table), *shares.lines()])


def _cells(item: Item) -> tuple[str, ...]:
    if item.compute is None:
        return ("not known",)
    seconds, flops = item.compute.device_seconds, item.flops
    hours = "not known" if seconds is None else f"{seconds / 3600:,.3f}"
    between = f"{flops.low:.1e}–{flops.high:.1e}"
    return f"{item.compute.tokens:,}", f"{flops.value:.2e}", between, item.compute.method, hours


@app.command(epilog="Example: etude lineage draw runs/quickstart tree.svg")
def draw(
    model: ModelFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Picture to write (.svg or .png).")],
    title: Annotated[str | None, typer.Option(help="Title of the picture; default: the model's folder.")] = None,
) -> None:
    """Draw a model's family tree."""
    if out.suffix not in {".svg", ".png"}:
        raise UserError(f"{out}: a picture's name must end in .svg or .png")
    folder, lineage = _tree(model)
    with whole_file(out) as beside:
        if out.suffix == ".svg":
            beside.write_text(draw_svg(lineage, title or str(folder)), encoding="utf-8")
        else:
            draw_png(lineage, title or str(folder), beside)
    echo(f"drawn: {out}")


library_app = typer.Typer(help="Sketches of known bases, for the audit.", no_args_is_help=True)

_model = typer.Argument(metavar="MODEL", help="Model: run folder, model folder, .gguf or .safetensors file, or base.")


def audit(
    suspect: Annotated[str, _model],
    other: Annotated[str | None, typer.Argument(metavar="OTHER", help="Model to compare with.")] = None,
    library: Annotated[bool, typer.Option("--library", help="Compare with every base of the library.")] = False,
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Test from the weights alone whether two models share an initialisation; nothing is loaded or run."""
    from etude.lineage.audit.examine import examine, examine_library, show, show_library

    if (other is None) is not library:
        raise UserError("give two models, or one and --library: etude audit MODEL OTHER, etude audit MODEL --library")
    reporter, console = Reporter(), Console(highlight=False, markup=False)
    opened = _opened(suspect, cache, reporter)
    if other is not None:
        finding = examine(_opened(other, cache, reporter), opened, reporter)
        print_json(asdict(finding)) if as_json else show(finding, console)
        return
    findings = examine_library(opened, _sketches(cache), reporter)
    print_json([asdict(finding) for finding in findings]) if as_json else show_library(findings, console)


@library_app.command(epilog="Example: etude library add runs/quickstart/base/model my-base")
def add(
    model: Annotated[str, _model],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name in the library.")],
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Add a sketch of a base, so that models can be compared with it without its weights."""
    from etude.lineage.audit.examine import open_model
    from etude.lineage.audit.sketch import Facts, digest_weights, make_sketch, place_for

    reporter, folder = Reporter(), sketch_folder(cache)
    file = place_for(name, folder)  # refused before gigabytes are hashed
    _, path, source = _find(model, cache, reporter)
    opened, today = open_model(path), datetime.now(UTC).date().isoformat()
    digest = digest_weights(opened.weights.path, reporter)
    facts = Facts(name=name, source=source, licence=_licence(path), model_digest=digest, made=today)
    make_sketch(opened.weights, opened.tokens, facts).save(file)
    size = file.stat().st_size
    about = facts.model_dump() | {"file": str(file), "bytes": size}
    print_json(about) if as_json else echo(f"{name}: {file}, {size / 1e6:.1f} MB")


@library_app.command("list", epilog="Example: etude library list --json")
def list_(cache: CacheFolder = None, as_json: AsJson = False) -> None:
    """List the bases in the library."""
    known = [sketch.facts for sketch in _sketches(cache)]
    if as_json:
        print_json([facts.model_dump() for facts in known])
        return
    rows = [
        (each.name, each.model_digest[:12], each.licence or "unknown text", each.made, each.source) for each in known
    ]
    table = Table(("name", "weights", "licence", "made", "from"), rows)
    Console().print(terminal(table, title="Sketches of known bases"))


def _opened(word: str, cache: Path | None, reporter: Reporter) -> Any:
    """Open the model that a word means."""
    from etude.lineage.audit.examine import open_model

    name, path, _ = _find(word, cache, reporter)
    return open_model(path, name)


def _find(word: str, cache: Path | None, reporter: Reporter) -> tuple[str, Path, str]:
    """Return what to call a model, where it lies, and where it came from."""
    path = Path(word).expanduser()
    if path.suffix in {".gguf", ".safetensors"} and path.is_file():
        return path.name, path, f"file {path.name}"
    name, folder, origin = locate(word, cache, reporter)
    return name, folder, origin.source if origin else f"folder {folder}"


def sketch_folder(cache: Path | None) -> Path:
    """Return where a user's own sketches lie."""
    from etude.lineage.audit.sketch import FOLDER

    return cache_folder(cache) / FOLDER


def _licence(path: Path) -> str | None:
    """Return the licence by the text that lies with the weights."""
    folder = path if path.is_dir() else path.parent
    known = (identify(file.read_text(encoding="utf-8", errors="replace")) for file in licence_files(folder))
    return next((licence for licence in known if licence), None)


ProductFile = Annotated[Path | None, typer.Option("--product", help="Facts of the product, such as docs/product.toml.")]
ADVICE = "Facts for engineering, not legal advice."
ORDER = ("fires", "asks", "not")


def licences(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model: run folder, model folder or known base.")],
    product: ProductFile = None,
    as_json: AsJson = False,
    cache: CacheFolder = None,
) -> None:
    """Show which licence duties apply to a product, which do not, and which facts are missing to know."""
    facts = load_product(product) if product else None
    uses = _uses(model, cache)
    duties = evaluate(uses, facts)
    missing = unmet(duties, facts, None, notice(duties, model)) if facts else []
    if as_json:
        plain = [asdict(duty) | {"questions": [asked._asdict() for asked in duty.questions]} for duty in duties]
        print_json({"licences": [asdict(use) for use in uses], "duties": plain, "unmet": missing})
        return
    for line in [*_lines(uses, duties), *(f"not met yet: {line}" for line in missing), ADVICE]:
        echo(line)


def _uses(word: str, cache: Path | None) -> list[LicenceUse]:
    """Return the licences of a model. Known bases on the hub may be a terabyte: those are as listed, their text is not fetched."""
    base = resolve(word)
    if base.known and base.place == "hub":
        return [LicenceUse(word, "weights", base.known.licence, seen=False)]
    return licence_uses(locate(word, cache, Reporter())[1])


def _lines(uses: list[LicenceUse], duties: list[Duty]) -> Iterator[str]:
    """Yield the duties ancestor by ancestor, then those of data in a few lines, then what is to be answered."""
    teachers = {use.ancestor for use in uses if use.role == "teacher"}
    of_models = (duty for duty in duties if duty.kind != "data")
    for (ancestor, licence), group in groupby(of_models, lambda duty: (duty.ancestor, duty.licence)):
        yield f"{ancestor} ({'its outputs were trained on' if ancestor in teachers else 'weights'}): {licence}"
        for duty in sorted(group, key=lambda duty: ORDER.index(duty.outcome)):
            because = duty.reason or ", ".join(asked.key for asked in duty.questions)
            yield f"  {duty.outcome:5}  {duty.text}" + (f"  [{because}]" if because else "")
    if data := [duty for duty in duties if duty.kind == "data"]:
        sources, under = ({getattr(duty, name) for duty in data} for name in ("ancestor", "licence"))
        asking = sorted({f"{duty.ancestor} ({duty.licence})" for duty in data if duty.outcome == "asks"})
        yield f"data: {len(sources)} source(s) under {len(under)} licence(s)"
        yield from (f"  asks   {name}  [product.data_acknowledged]" for name in asking)
    if asked := dict(asked for duty in duties for asked in duty.questions if duty.kind != "data"):
        yield "to be answered in product.toml:"
        yield from (f"  {key}: {text}" for key, text in asked.items())


def release(  # noqa: PLR0913, PLR0917 - an argument for every option
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model: model folder, stage folder or run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Release folder to make.")],
    name: Annotated[str, typer.Option(help="Name of the model; default: as product.toml says, else as OUT.")] = "",
    product: Annotated[Path | None, typer.Option(help="product.toml to check licences against; part of the release.")] = None,
    licence: Annotated[Path | None, typer.Option(help="Your own licence file for what you added; released as LICENSE.")] = None,
    evaluation: Annotated[Path | None, typer.Option(help="Results folder of `etude bench` with this model.")] = None,
    base: Annotated[list[Path] | None, typer.Option(help="Folder of a claimed base that is not in the run.")] = None,
    acknowledge: Annotated[list[str] | None, typer.Option(help="Kinds of data to release: unknown-data, proprietary.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key (PEM, P-256); default: your own, created if needed.")] = None,
    cache: CacheFolder = None,
) -> None:  # fmt: skip
    """Make a signed release folder, or list the reasons against it. Exit code 1 if it is refused."""
    from etude.lineage.release import PROPRIETARY_DATA, UNKNOWN_DATA, Order, RefusedError, make_release
    from etude.lineage.signing import default_key, fingerprint, public_pem

    if unknown := set(acknowledge or ()) - {UNKNOWN_DATA, PROPRIETARY_DATA}:
        raise UserError(f"--acknowledge {min(unknown)}: only {UNKNOWN_DATA} and {PROPRIETARY_DATA} can be acknowledged")
    measured = _measured(evaluation, find_model(model)) if evaluation else ()
    called = name or (load_product(product).model_name if product else None) or out.absolute().name
    order = Order(called, key or default_key(), product, licence, measured, base or (), acknowledge or ())
    try:
        make_release(model, out, order, _sketches(cache), ancestors(), Reporter())
    except RefusedError as refused:
        for refusal in refused.refusals:
            echo(f"refused ({refusal.reason}): {refusal}", err=True)
        echo(f"{out} was not made: {len(refused.refusals)} reason(s)", err=True)
        raise typer.Exit(1) from None
    echo(f"{order.name} is released in {out}, signed with key {fingerprint(public_pem(order.key))}")
    echo(f"publish the key's fingerprint where buyers trust it; they run: etude verify {out}")


def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Release folder.")],
    key: Annotated[Path | None, typer.Option(help="Public key of the owner, from a source you trust.")] = None,
    cache: CacheFolder = None,
    as_json: AsJson = False,
) -> None:
    """Check a release offline: signature, files, records, licences, card, base. Exit code 1 if anything is wrong."""
    from etude.lineage.verify import verify_release

    result = verify_release(folder, key, _sketches(cache), Reporter())
    print_json(result.to_json()) if as_json else _show(result)
    raise typer.Exit(1 if result.failed else 0)


def _sketches(cache: Path | None) -> list[Sketch]:
    from etude.lineage.audit.sketch import known_sketches

    return known_sketches(sketch_folder(cache), Reporter())


def _show(result: Verification) -> None:
    console = Console(highlight=False, soft_wrap=True)
    styles = {"ok": "green", "failed": "bold red", "open": "yellow"}
    width = max(len(check.name) for check in result.checks)
    for check in result.checks:
        for line in check.lines:
            console.print(f"[{styles[check.outcome]}]{check.outcome:6}[/]  {check.name:{width}}  ", end="")
            console.print(line, markup=False)
    failed, left = len(result.failed), sum(check.outcome == "open" for check in result.checks)
    verdict = (
        f"NOT verified: {failed} of {len(result.checks)} checks failed" if failed else f"verified: {result.folder}"
    )
    console.print(verdict + f"; {left} could not be made here" * bool(left), markup=False, style="bold")


def _measured(folder: Path, model: Path) -> Sequence[Measured]:
    from etude.bench.trials import read_results
    from etude.run.stages.bench import scores_of

    if scores := scores_of(folder, model):
        return scores
    others = ", ".join(read_results(folder).models)
    raise UserError(f"{folder} has no valid trial of {model}, only of {others}; measure this model first")
