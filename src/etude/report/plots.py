"""What all pictures of reports share: one style, axes with labels, and a file that is whole or not there.

matplotlib is imported where something is drawn: commands that draw nothing must not wait for it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from etude.files import whole_file
from etude.report.tables import human

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

COLOURS = ("#3b6ea8", "#d08020", "#4f9d69", "#a8557f", "#7d7d7d", "#5cb3cc", "#c4b13c", "#6a51a3")
RED, SOFT, GRID = "#b3372b", "#c3c9d0", "#e3e6e9"
STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10,
         "axes.titleweight": "bold", "text.parse_math": False,
         "figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.12}  # fmt: skip
Interval = tuple[float, float] | None


@contextmanager
def drawing(path: Path, wide: float, high: float, dpi: int = 150) -> Iterator[Figure]:
    """Give a figure of so many inches to draw on, and save it as PNG: the same figure gives the same bytes."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE), whole_file(path) as beside:
        figure = Figure(figsize=(wide, high), layout="constrained")
        yield figure
        figure.savefig(beside, format="png", dpi=dpi, metadata={"Software": None})


def label(axis: Any, title: str, across: str = "", up: str = "", *, grid: str = "y") -> None:
    axis.set_title(title, loc="left")
    axis.set_xlabel(across)
    axis.set_ylabel(up)
    if grid:
        axis.grid(axis=grid, color=GRID, linewidth=0.6)
        axis.set_axisbelow(True)


def token_scale(axis: Any, linear_to: float = 0.0) -> None:
    """Make the horizontal axis one of token counts: logarithmic, marked 1k, 2k, 5k, 10k; `linear_to`: linear from 0 to there."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if linear_to:
        axis.set_xscale("symlog", linthresh=linear_to)
    else:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda count, _: human(count)))


def stacked(several: Sequence[Sequence[float]]) -> Iterator[tuple[Sequence[float], Sequence[float]]]:
    """Yield each series with where it begins, on top of those before it."""
    base = [0.0] * len(several[0]) if several else []
    for series in several:
        yield series, base
        base = [under + more for under, more in zip(base, series, strict=True)]
