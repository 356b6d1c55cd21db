"""`etude mtp`: heads that predict several tokens ahead, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Model = Annotated[Path, typer.Argument(help="A model's folder with MTP heads, as the stage `mtp` makes it.")]
Out = Annotated[Path, typer.Argument(help="A new folder.")]
LayoutWish = Annotated[
    Literal["transformers", "mimo"],
    typer.Option(
        help="transformers: the model with its heads, DeepSeek-V3's shape; mimo: heads for vLLM, Llama's shape."
    ),
]


def export(model: Model, out: Out, layout: LayoutWish) -> None:
    """Write MTP heads as transformers or vLLM load them."""
    from etude.models.mtp_export import export_heads

    typer.echo(export_heads(model, out, layout))
