"""The family tree of a model, from the records it carries: as text, and as a picture.

A model is found by any of: its folder, its stage's folder, or a run's folder (then its last stage with a model).

The picture has ancestors above, the model at the bottom, a box a record. Solid lines are weights; dashed ones are data, teachers and
judges. Each record has a row, one below the lowest of its parents. It stands in the column of the child it was reached from, if it is
the first parent there; further parents open columns of their own. So a line can go down its parent's column, then across in the gap
above the child. Where other records stand in the way, as below a base that is also a judge, it goes around them. All numbers are
pixels from the upper left.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.files import read_json, sha256_file, sha256_files
from etude.lineage.compute import compute_shares, percent, since_base
from etude.lineage.facts import is_notice, shown_source
from etude.lineage.record import LINEAGE_FILE, RECORD_FILE, Record, load_record, manifest_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from etude.lineage.record import Compute, FileDigest, Lineage, Parent
    from etude.progress import Reporter


def find_model(path: Path) -> Path:
    """Return the model folder that `path` means."""
    if not path.exists():
        raise UserError(f"{path} does not exist; give a model's folder, such as runs/NAME/STAGE/model")
    stages = _stages_of_run(path)
    for candidate in (path, path / "model", *(path / stage / "model" for stage in reversed(stages))):
        if (candidate / LINEAGE_FILE).is_file():
            return candidate
    if stages:
        raise UserError(f"{path} is a run that has made no model yet, or only reports; give the folder of a model")
    raise UserError(f"{path} holds no {LINEAGE_FILE}: it was not written by Etude, so its lineage is unknown")


def _stages_of_run(path: Path) -> list[str]:
    """Return the stages a run's folder lists, in order; none if it is not a run's folder."""
    try:
        return [str(stage["name"]) for stage in read_json(path / "run.json")["stages"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def changed_weights(model_folder: Path, record: Record, reporter: Reporter) -> list[str]:
    """Hash the weights again and return what does not agree with the record, a line each."""
    files = sorted(model_folder.glob("*.safetensors"))
    with reporter.task("checking weights", sum(path.stat().st_size for path in files), "B") as task:
        digests = sha256_files(files, task.advance)
    return wrong_files(record.weights, {path.name: digest for path, digest in digests.items()})


def changed_corpora(model_folder: Path, lineage: Lineage) -> list[str]:
    """Return which corpora beside a model in its run have another manifest than was recorded, a line each."""
    wrong = []
    for key, record in lineage.corpora.items():
        folder = model_folder.parent.parent / record.stage
        if (folder / RECORD_FILE).is_file() and load_record(folder).id == key:
            digests = {name: sha256_file(folder / name) for name in manifest_of(record) if (folder / name).is_file()}
            wrong += [f"{record.stage}/{line}" for line in wrong_files(manifest_of(record), digests)]
    return wrong


def wrong_files(wanted: Mapping[str, FileDigest], digests: Mapping[str, str]) -> list[str]:
    """Return which files of a folder, given their digests, are not those that were recorded, a line each."""
    missing = [f"{name} is missing" for name in wanted if name not in digests]
    changed = [name for name, file in wanted.items() if name in digests and digests[name] != file.sha256]
    extra = [f"{name} is in no record" for name in digests if name.endswith(".safetensors") and name not in wanted]
    return [*missing, *(f"{name} is not the file that was recorded" for name in changed), *extra]


def render(lineage: Lineage, title: str) -> list[str]:
    """Draw the tree as lines, the model first, its ancestors below it."""
    return [title, *_branch(lineage, lineage.head, "weights", "")]


def _branch(lineage: Lineage, record_id: str, role: str, indent: str) -> list[str]:
    """Return the lines of one record and of its parents, which stand below and further in."""
    record = lineage.records[record_id]
    first, *rest = describe(record, role)
    inside = f"{indent}   "
    lines = [f"{indent}└─ {first}", *(f"{inside}{line}" for line in rest)]
    for parent in record.parents:
        if parent.record in lineage.records:
            lines += _branch(lineage, parent.record, parent.role, inside)
        else:
            weights = f"weights {parent.model_digest[:12]}"
            lines.append(f"{inside}└─ {parent.name} ({parent.role}): {weights}, it carries no record")
    if record.corpus:
        lines.append(f"{inside}└─ {_corpus(lineage.records[record.corpus])}")
    return lines


def _corpus(record: Record) -> str:
    manifest = next((file.sha256[:12] for file in manifest_of(record).values()), "not recorded")
    dropped = sum(count for use in record.data for count in use.left_out.values())
    sources = f"{len(record.data)} source(s), {sum(use.files for use in record.data):,} files, {dropped:,} left out"
    return f"{record.stage} (corpus)  record {record.id[:12]}, manifest {manifest}: {sources}"


def describe(record: Record, role: str) -> list[str]:
    """Return what a person wants to know of a record, a line each."""
    commit, changes = record.code.revision, " with uncommitted changes" if record.code.dirty else ""
    kept = f"revision {commit[:12]}{changes}" if commit else "revision not recorded"
    lines = [
        f"{record.stage} ({record.kind}, {role})  record {record.id[:12]}, {record.finished}",
        f"weights {record.model_digest[:12]} in {len(record.weights)} file(s), "
        f"{sum(file.bytes for file in record.weights.values()) / 1e6:,.1f} MB",
        f"made by Etude {record.code.etude} ({kept}), recipe {record.recipe.hash[:12]}",
        f"compute here: {describe_compute(record.compute)}",
    ]
    if origin := record.origin:
        revision = f" at {origin.revision}" if origin.revision else ""
        lines.append(f"origin: {origin.name}, {shown_source(origin.source)}{revision}")
        lines += [f"conversion: {origin.conversion}"] if origin.conversion else []
        on_top = f", on top of {origin.continues}" if origin.continues else ""
        unknown = "see below" if record.parents else "not known"
        before = describe_compute(origin.pretraining) + on_top if origin.pretraining else unknown
        lines.append(f"compute before us: {before}")
    lines += [f"data: {use.name}, {use.files} files, {use.bytes:,} bytes, {use.digest[:12]}" for use in record.data]
    for carried in record.licences:
        known = carried.licence or "unknown text, read it"
        lines.append(f"licence: {known} ({carried.file}, from {carried.inherited_from})")
    if not record.licences:
        lines.append("licence: no licence file came with it; find out before you share it")
    return lines


def describe_compute(compute: Compute) -> str:
    """Return compute in one line."""
    if not compute.tokens and not compute.model_flops:
        return "none (no tokens processed)"
    where = f" in {compute.device_seconds:,.0f} s on {compute.device}" if compute.device_seconds is not None else ""
    return f"{compute.tokens:,} tokens, {compute.model_flops:.2e} FLOP ({compute.method}){where}"


BOX, SIDE, GAP, MARGIN = 350, 250, 40, 40  # widths of a record and of its data, distances
LINE, PAD = 17, 11  # height of a line of words, room around them
MOST = 4  # lines of data before the rest is counted
INK, SOFT, GOOD, WARN = "#1d2733", "#5b6b7c", "#23735a", "#b3541e"
FOREIGN, OWN, HEAD, DATA = "#f1f4f7", "#eaf5f0", "#d3ebdf", "#ffffff"
UNSURE = (UNKNOWN := "unknown text", NONE := "no licence file", UNSEEN := "licence not seen")
WIDE = {"normal": 0.56, "bold": 0.66}  # width of a letter, on the whole, in parts of its size
DASHES = (0, (5, 4))
# The same tree is the same file; words stay words, which can be searched.
STABLE = {"svg.hashsalt": "etude", "svg.fonttype": "none", "font.family": "DejaVu Sans", "text.parse_math": False}


@dataclass
class Node:
    """A record, or a parent without one."""

    title: str
    lines: list[str]
    badge: str = ""
    aside: list[str] = field(default_factory=list)
    parents: list[tuple[str, bool]] = field(default_factory=list)  # keys; whether it is weights
    fill: str = FOREIGN
    row: int = 0
    column: int = 0
    left: float = 0
    top: float = 0

    @property
    def height(self) -> float:
        """Return how high its box is."""
        return 2 * PAD + LINE * (1 + len(self.lines))

    @property
    def aside_height(self) -> float:
        """Return how high the box of its data is."""
        return 2 * PAD + LINE * len(self.aside) - 4

    @property
    def middle(self) -> float:
        """Return where lines to its side end."""
        return self.top + self.height / 2


def draw_svg(lineage: Lineage, title: str) -> str:
    """Return the tree as an SVG document."""
    text = io.StringIO()
    _save(lineage, title, text, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    return text.getvalue()


def draw_png(lineage: Lineage, title: str, path: Path) -> None:
    """Write the tree as a PNG, two pixels to each of the drawing's."""
    _save(lineage, title, path, format="png", metadata={"Software": None})


def _save(lineage: Lineage, title: str, target: Any, **options: Any) -> None:
    import matplotlib as mpl

    with mpl.rc_context(STABLE):
        _figure(lineage, title).savefig(target, **options)


def _figure(lineage: Lineage, title: str) -> Figure:
    from matplotlib.figure import Figure

    nodes = _nodes(lineage)
    wide, high = _arrange(list(nodes.values()))
    figure = Figure(figsize=(wide / 100, high / 100), dpi=200, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, wide), ylim=(high, 0))
    axes.axis("off")
    _write(axes, MARGIN, 34, title, 16, INK, weight="bold", room=wide - 2 * MARGIN)
    _write(axes, MARGIN, 56, _subtitle(lineage), room=wide - 2 * MARGIN)
    for child in nodes.values():
        for key, weights in child.parents:
            _arrow(axes, _way(nodes, nodes[key], child), dashed=not weights)
        _draw(axes, child)
    _legend(axes, high - 22)
    return figure


def _subtitle(lineage: Lineage) -> str:
    shares = compute_shares(lineage)
    if not shares.bases:
        return f"made from nothing with {shares.own.value:.2e} FLOP"
    own, part = shares.shares[0].own_share, "a share not known"
    if own is not None:
        part = f"at most {percent(own.high)}" if own.unknown else percent(own.value)
    return f"own compute {shares.own.value:.2e} FLOP: {part} of all that is in it, with {' and '.join(shares.bases)}"


def _nodes(lineage: Lineage) -> dict[str, Node]:
    """Return the nodes by key, with their rows and columns."""
    nodes: dict[str, Node] = {}

    def place(key: str, record: Record | Parent, column: int) -> None:
        node = nodes[key] = _node(record)
        node.column = column
        edges = record.parents if isinstance(record, Record) else []
        for edge in sorted(edges, key=lambda edge: edge.role != "weights"):
            above = edge.record or edge.model_digest
            if edge.record is None and edge.role != "weights":
                node.aside.append(f"{edge.role}: {edge.name}")
                continue
            if above not in nodes:
                aside = column if not node.parents else 1 + max(each.column for each in nodes.values())
                place(above, lineage.records[edge.record] if edge.record else edge, aside)
            node.parents.append((above, edge.role == "weights"))
            node.row = max(node.row, nodes[above].row + 1)

    place(lineage.head, lineage.records[lineage.head], 0)
    for record in since_base(lineage)[0]:
        nodes[record.id].fill = HEAD if record.id == lineage.head else OWN
    return nodes


def _node(record: Record | Parent) -> Node:
    if not isinstance(record, Record):
        return Node(record.name, [f"weights {record.model_digest[:12]}", "it carries no record"], UNSEEN)
    kind = f" ({record.kind})" if record.kind != record.stage else ""
    spent, origin = record.compute, record.origin
    lines = [_spent(spent)]
    lines += [f"{spent.device_seconds:,.0f} s on {spent.device}"] if spent.device_seconds else []
    lines += [f"of it {spent.sampling_flops:.2e} FLOP sampling"] if spent.sampling_flops else []
    if origin is not None:
        unknown = "see above" if record.parents else "compute not known"
        before = _spent(origin.pretraining) if origin.pretraining else unknown
        lines = [shown_source(origin.source), f"before: {before}"]
        lines += [f"on top of {origin.continues}"] if origin.continues else []
    lines.append(f"weights {record.model_digest[:12]}, record {record.id[:12]}")
    sizes = [f"{_count(use.tokens)} tokens" if use.tokens else f"{use.files:,} file(s)" for use in record.data]
    aside = [f"{use.name}: {size}" for use, size in zip(record.data, sizes, strict=True)]
    aside[MOST:] = [f"and {len(aside) - MOST} more"] if len(aside) > MOST else []
    aside += [f"corpus: record {record.corpus[:12]}"] if record.corpus else []
    return Node(f"{origin.name} (base)" if origin else record.stage + kind, lines, _licences(record), aside)


def _licences(record: Record) -> str:
    """Return the licences in a few words; a notice is no licence of its own."""
    known = {each.licence or UNKNOWN for each in record.licences if not is_notice(each.file)}
    names = sorted(known, key=lambda name: (name != UNKNOWN, name))
    return (", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "")) or NONE


def _spent(compute: Compute) -> str:
    spent = f"{_count(compute.tokens)} tokens, {compute.model_flops:.2e} FLOP ({compute.method})"
    return spent if compute.model_flops else "no tokens processed"


def _count(tokens: int) -> str:
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
    return next((f"{tokens / size:.3g}{letter}" for size, letter in sizes if tokens >= size), f"{tokens:,}")


def _arrange(nodes: list[Node]) -> tuple[float, float]:
    """Give each node its place, and return how wide and how high the picture is."""
    left, top = float(MARGIN), 2.0 * MARGIN
    for column in range(1 + max(node.column for node in nodes)):
        here = [node for node in nodes if node.column == column]
        for node in here:
            node.left = left
        left += BOX + GAP + (SIDE + GAP if any(node.aside for node in here) else 0)
    for row in range(1 + max(node.row for node in nodes)):
        here = [node for node in nodes if node.row == row]
        for node in here:
            node.top = top
        top += max(max(node.height, node.aside_height) for node in here) + GAP
    return left - GAP + MARGIN, top + 10


def _way(nodes: dict[str, Node], parent: Node, child: Node) -> list[tuple[float, float]]:
    """Return the points of the line from a parent to its child."""
    blocked = any(node.column == parent.column and parent.row < node.row < child.row for node in nodes.values())
    across, above = child.left + BOX / 2, child.top - GAP / 2
    if not blocked:
        down = parent.left + BOX / 2
        return [(down, parent.top + parent.height), (down, above), (across, above), (across, child.top)]
    lane = parent.left - GAP / 2
    start = [(parent.left, parent.middle), (lane, parent.middle)]
    if parent.column == child.column:
        return [*start, (lane, child.middle), (child.left, child.middle)]
    return [*start, (lane, above), (across, above), (across, child.top)]


def _draw(axes: Axes, node: Node) -> None:
    first, room = node.top + PAD + 12, BOX - 2 * PAD
    _box(axes, node.left, node.top, BOX, node.height, node.fill)
    badge = WARN if node.badge.startswith(UNSURE) else GOOD
    _write(axes, node.left + PAD, first, node.title, 13, INK, weight="bold", room=room / 2)
    _write(axes, node.left + BOX - PAD, first, node.badge, 10, badge, weight="bold", ha="right", room=room / 2)
    for number, line in enumerate(node.lines, 1):
        _write(axes, node.left + PAD, first + LINE * number, line, room=room)
    if node.aside:
        start, high = node.left + BOX + GAP, node.aside_height
        _box(axes, start, node.top, SIDE, high, DATA, ls=DASHES)
        _arrow(axes, [(start, node.top + high / 2), (node.left + BOX, node.top + high / 2)], dashed=True)
        for number, line in enumerate(node.aside):
            _write(axes, start + PAD, first - 2 + LINE * number, line, room=SIDE - 2 * PAD)


def _legend(axes: Axes, y: float) -> None:
    for x, dashed, label in ((MARGIN, False, "weights"), (MARGIN + 110, True, "data, teachers, judges")):
        _arrow(axes, [(x, y), (x + 28, y)], dashed=dashed)
        _write(axes, x + 36, y + 4, label, 10)
    _write(axes, MARGIN + 310, y + 4, "green: own stages", 10)


def _write(
    axes: Axes, x: float, y: float, text: str, size: float = 11, colour: str = SOFT, room: float = 1e4, **style: Any
) -> None:
    """Write a line of words, cut to the room there is."""
    most = int(room / (size * WIDE[style.get("weight", "normal")]))
    shown = text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
    axes.text(x, y, shown, size=0.72 * size, color=colour, **style)  # 72 points are an inch, and 100 pixels


def _box(axes: Axes, x: float, y: float, wide: float, high: float, fill: str, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    rounded = "round,pad=0,rounding_size=7"
    axes.add_patch(FancyBboxPatch((x, y), wide, high, rounded, fc=fill, ec=SOFT, lw=0.7, **style))


def _arrow(axes: Axes, points: list[tuple[float, float]], *, dashed: bool) -> None:
    axes.plot(*zip(*points, strict=True), color=SOFT, lw=1, ls=DASHES if dashed else "solid", zorder=0)
    style = {"arrowstyle": "-|>", "color": SOFT, "lw": 0, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    axes.annotate("", points[-1], points[-2], arrowprops=style)
