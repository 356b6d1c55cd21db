"""Draw docs/layers.svg and docs/chain.svg from the code, so that the pictures cannot say what the code does not.

    python docs/draw_architecture.py

The layers are the folders of src/etude in the order below, which tests/test_layers.py enforces; each folder says what it is for in
the first sentence of its `__init__.py`. The chain is the kinds of stages, in the order of the recipe. tests/test_docs.py fails
when a picture on disk is not what this script draws.
"""

from __future__ import annotations

import ast
import textwrap
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "src" / "etude"
LAYERS = (  # from below; those on one level may import each other
    ("lineage",),
    ("models",),
    ("training", "inference", "sandbox", "data"),
    ("agent", "tasks", "rewards", "questions"),
    ("rl", "bench"),
    ("recipe", "run", "report"),
    ("cluster",),
    ("cli", "web", "serve"),
)
CHAIN = {  # the kinds of stages in the order of a recipe, with what each does
    "base": "an open model, checked",
    "data": "repositories to packed tokens",
    "cpt": "continued pretraining",
    "extend": "long context",
    "mtp": "multi-token prediction",
    "sft": "supervised fine-tuning",
    "rl": "rollouts in sandboxes",
    "bench": "tasks solved, with intervals",
    "release": "signed, with its family tree",
}
ASIDE = {"pretrain": "from random weights", "compare": "which base suits your code", "merge": "two models in one"}
FONT = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif"'
STYLE = (
    ".box { fill: #dbe8f7; stroke: #2b5c94; stroke-width: 1.4; } .ground { fill: #e4efdc; stroke: #4d7a2e; stroke-width: 1.4; }"
    " .name { font-size: 15px; font-weight: bold; fill: #14304f; } .what { font-size: 12px; fill: #30363d; }"
    " .file { font-size: 11px; fill: #4a525b; } .arrow { stroke: #30363d; stroke-width: 1.6; fill: none; }"
)
HEAD = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 L10 5 L0 10 z" fill="#30363d"/></marker></defs>'
)
WIDTH, LEFT, GAP, LINE = 1000, 34, 8, 15


def purpose(module: Path) -> str:
    """Return the first sentence of a module's docstring."""
    return (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split("\n\n")[0].replace("\n", " ")


def modules(folder: Path) -> str:
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    names += sorted(f"{path.parent.name}/" for path in folder.glob("*/__init__.py"))
    return ", ".join(names)


def text(x: float, y: float, kind: str, words: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def picture(title: str, height: float, parts: list[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {FONT} role="img" aria-label="{escape(title)}">'
    return "\n".join(
        [head, f"<style>{STYLE}</style>", HEAD, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""]
    )


def folder_box(name: str, x: float, y: float, width: float) -> tuple[float, list[str]]:
    """Return the height and the parts of one folder's box: its name, what it is for, its modules."""
    rows = [("what", line) for line in textwrap.wrap(purpose(PACKAGE / name / "__init__.py"), int(width / 6.9))]
    rows += [("file", line) for line in textwrap.wrap(modules(PACKAGE / name), int(width / 6.2))]
    parts = [text(x + 10, y + 20, "name", f"{name}/")]
    parts += [text(x + 10, y + 22 + LINE * number, kind, words) for number, (kind, words) in enumerate(rows, 1)]
    return 30 + LINE * len(rows), parts


def layers() -> str:
    """Draw one row a layer, the highest first, and the files that every layer may use at the bottom."""
    y, parts = 10.0, []
    for names in reversed(LAYERS):
        width = (WIDTH - LEFT - GAP * len(names)) / len(names)
        drawn = [(LEFT + place * (width + GAP), *folder_box(name, LEFT + place * (width + GAP), y, width))
                 for place, name in enumerate(names)]  # fmt: skip
        height = max(each[1] for each in drawn)
        for x, _, words in drawn:
            parts += [box(x, y, width, height), *words]
        y += height + GAP
    files = sorted(path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__"))
    ground = f"foundation, for every layer: {', '.join(files)}"
    parts += [
        box(LEFT, y, WIDTH - LEFT - GAP, 30, "ground"),
        text(LEFT + 10, y + 20, "what", ground),
    ]
    parts += [f'<path class="arrow" d="M20 {14} V{y + 20:g}" marker-end="url(#head)"/>',
              f'<text class="what" transform="translate(14 {y / 2:g}) rotate(-90)">may import</text>']  # fmt: skip
    return picture("The layers of Etude: each may import from those below it and from its own row", y + 40, parts)


def chain() -> str:
    """Draw the stages of a recipe from left to right, in two rows, and those beside the way below them."""
    steps, across, parts = [*CHAIN.items(), ("etude serve, etude agent", "the model at work")], 5, list[str]()
    width = (WIDTH - 20) / across
    for number, (name, does) in enumerate(steps):
        x, y = 10 + (number % across) * width, 10 + (number // across) * 88
        last = number == len(steps) - 1
        parts += [
            box(x, y, width - 26, 64, "ground" if last else "box"),
            text(x + 10, y + 22, "what" if last else "name", name),
        ]
        parts += [text(x + 10, y + 40 + LINE * row, "what", line) for row, line in enumerate(textwrap.wrap(does, 22))]
        if number % across < across - 1:
            parts.append(
                f'<path class="arrow" d="M{x + width - 24:g} {y + 32:g} H{x + width - 4:g}" marker-end="url(#head)"/>'
            )
    words = "also: " + "; ".join(f"{name} ({does})" for name, does in ASIDE.items())
    every = "every stage: a record of parents, data, code, settings and compute; killed at any moment, it resumes"
    parts += [text(12, 196, "what", words), text(12, 216, "what", every)]
    return picture("One recipe, from an open base to your own coding agent", 228, parts)


PICTURES = {"layers.svg": layers, "chain.svg": chain}

if __name__ == "__main__":
    for file, draw in PICTURES.items():
        (DOCS / file).write_text(draw(), encoding="utf-8")
