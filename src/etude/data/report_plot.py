"""A corpus as one picture: tokens by source, licences, where bytes went, how long documents are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from etude.data.report import added, dropped, largest, lengths, total

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from etude.data.manifest import Manifest

COLOURS = ("#3b6ea8", "#d08020", "#4f9d69", "#a8557f", "#7d7d7d", "#5cb3cc", "#c4b13c", "#6a51a3")
SOURCES, LICENCES = 15, 8  # bars; the rest is added up
NAME = 26  # characters
TOKENS = ((1e9, "billion tokens"), (1e6, "million tokens"), (1e3, "thousand tokens"), (1, "tokens"))
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
         "axes.titleweight": "bold", "text.parse_math": False,
         "figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.12}  # fmt: skip


def draw(manifest: Manifest, path: Path) -> None:
    """Write the picture as PNG, 1800 pixels wide."""
    with mpl.rc_context(STYLE):
        panels(manifest).savefig(path, format="png", dpi=150, metadata={"Software": None})


def panels(manifest: Manifest) -> Figure:
    """Return the picture, as high as its bars need."""
    sources = sorted(manifest.sources, key=lambda source: -sum(source.tokens.values()))
    train = largest({source.name: source.tokens["train"] for source in sources}, SOURCES)
    held = largest({source.name: source.tokens["heldout"] for source in sources}, SOURCES)
    licences = largest(added(manifest.sources, "licences"), LICENCES)
    left, gone = _funnel(manifest)
    heights = [1.2 + 0.26 * max(len(bars), 6) for bars in (max(train, licences, key=len), left)]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    (by_source, by_licence), (by_step, by_length) = figure.subplots(2, 2, height_ratios=heights)
    _bars(by_source, "Tokens by source", {"to train on": train, "held out": held}, TOKENS)
    _bars(by_licence, "Licences of what was kept", {"": licences}, BYTES)
    _bars(by_step, "Where bytes went", {"still in": left, "left out here": gone}, BYTES)
    _histogram(by_length, manifest)
    return figure


def _funnel(manifest: Manifest) -> tuple[dict[str, int], dict[str, int]]:
    """Return for each step the bytes that are left after it and those it dropped."""
    gone = {step: reasons.total() for step, reasons in dropped(manifest, "dropped_bytes").items()}
    left, still = {}, total(manifest.sources, "bytes_in")
    for step, size in gone.items():
        still -= size
        left[step] = still
    return left | {"kept": total(manifest.sources, "kept_bytes")}, gone | {"kept": 0}


def _bars(axis: Any, title: str, parts: Mapping[str, Mapping[str, int]], units: Sequence[tuple[float, str]]) -> None:
    """Draw a bar for each name, its parts one after another, with their numbers behind it."""
    names = list(next(iter(parts.values())))
    ends = [0.0] * len(names)
    longest = max((sum(part[name] for part in parts.values()) for name in names), default=0)
    size, unit = next((each for each in units if longest >= each[0]), units[-1])
    for (label, part), colour in zip(parts.items(), COLOURS, strict=False):
        widths = [part[name] / size for name in names]
        axis.barh(range(len(names)), widths, left=ends, color=colour, height=0.65, label=label)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, name in enumerate(names):
        numbers = " + ".join(_number(part[name] / size) for part in parts.values() if part[name]) or "0"
        axis.annotate(numbers, (ends[place], place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    _label(axis, title, unit)
    axis.set_yticks(range(len(names)), [_name(name) for name in names])
    axis.set_ylim(max(len(names), 4) - 0.4, -0.6)
    axis.set_xlim(0, max(longest / size, 1e-9) * 1.45)
    if len(parts) > 1:
        axis.set_title(title, loc="left", pad=22)
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0.1, borderpad=0.2)


def _histogram(axis: Any, manifest: Manifest) -> None:
    bits, counts = lengths(manifest)
    ordered = sorted(counts, key=lambda domain: -sum(counts[domain]))
    first, rest = ordered[: len(COLOURS) - 1], ordered[len(COLOURS) - 1 :]
    stacked = [(_name(domain), counts[domain]) for domain in first]
    if rest:
        others = [sum(here) for here in zip(*(counts[each] for each in rest), strict=True)]
        stacked.append((f"{len(rest)} more", others))
    below = [0] * len(bits)
    for (name, here), colour in zip(stacked, COLOURS, strict=False):
        axis.bar(bits, here, bottom=below, width=0.85, align="edge", color=colour, label=name)
        below = [under + more for under, more in zip(below, here, strict=True)]
    _label(axis, "Lengths of documents", "tokens", "documents")
    shown = bits[:: 1 + len(bits) // 9]
    axis.set_xticks(shown, [f"{1 << bit % 10}{'_kMGT'[bit // 10]}".replace("_", "") for bit in shown])
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _label(axis: Any, title: str, across: str, up: str = "") -> None:
    axis.set_title(title, loc="left")
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    axis.grid(axis="y" if up else "x", color="#e3e6e9", linewidth=0.6)
    axis.set_axisbelow(True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "<0.001"


def _name(name: str) -> str:
    """Return a name that fits beside a bar, in letters that the font has; names differ at both ends."""
    fitting = name if len(name) <= NAME else f"{name[: NAME // 2]}…{name[1 - NAME // 2 :]}"
    return "".join(char if char.isprintable() and (char < "\u0250" or char == "…") else "·" for char in fitting)
