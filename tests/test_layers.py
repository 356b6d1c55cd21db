"""The architecture, enforced: each layer imports only from those below it, and the command line answers without torch."""

from __future__ import annotations

import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import etude

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
from draw_architecture import ASIDE, CHAIN, DOCS, LAYERS, PICTURES

ROOT = Path(etude.__file__).parent
FOUNDATION = {"errors", "files", "git", "jsonl", "progress", "rooted", "syntax", "toml", "work"}
# The one place where the size of the package is bounded. A decision, not a formality: to raise it, say in the commit what was cut first.
# Issue 23 asked for 26,000 lines; it came down from 32,999 to about 28,900 without losing a feature. What attack and first use asked
# for (issue 24) added about 1,850. Larger models (issue 25) so far: experts in training and RL 360, loading, states and the plan 550, the
# engine's families and adapters 400, sizes of families by arithmetic and stages that need no torch to be read 300. A cluster (issue 26):
# 1,500, of which the layer that imports Ray 1,080 and vLLM's plug-in 220. Tasks from anything (issue 27): 3,600, of which other languages 850,
# a repository's own environment and losses 600, containers and public benchmarks 800, arenas and questions 1,200. The page (issue 29):
# 2,200. Repairs (issue 28): 480. Then a pass over eight folders took out 755, of which 210 are tables and texts that now lie in TOML files
# beside the code and were not removed, and another took 217 out of the page; no feature went. Added since: agents on the page 450, sinks of
# metrics 255, spans of traces 155, packages of Debian 180, shares of weights, the trainer's log-probs and plans of clusters 150. Beyond
# Composer 2 (issue 30) so far: forecasts from short runs 230, on-policy distillation 165. Drafts that are looked up 50.
MOST_LINES, MOST_FILES = 41_600, 283  # counted lines of code, and files, of src/etude
LONGEST_FILE, LONGEST_FUNCTION = 700, 50  # lines as they stand
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MODULES = sorted(ROOT.rglob("*.py"))


def imported_parts(module: Path) -> set[str]:
    """Return the top-level parts of Etude that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("etude"):
            names = (
                [node.module.partition("etude.")[2].split(".")[0]]
                if "." in node.module
                else [a.name for a in node.names]
            )
            found |= set(names)
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("etude.")}
    return found - {""}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_layer_imports_only_from_below(module: Path) -> None:
    part = module.relative_to(ROOT).parts[0].removesuffix(".py")
    imports = imported_parts(module)
    if part in FOUNDATION:
        assert imports <= FOUNDATION
    elif part in LEVEL:
        wrong = {name for name in imports if name not in FOUNDATION and LEVEL[name] > LEVEL[part]}
        assert not wrong, f"{module} is in layer {part} and imports {wrong}"
    else:
        assert part in {"__init__", "__main__"}, f"{part} is in no layer"


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert folders <= set(LEVEL)


def test_the_checker_sees_an_import_from_above(tmp_path: Path) -> None:
    module = tmp_path / "bad.py"
    module.write_text("def f():\n    from etude.cli.main import main\n    import etude.report.bases\n")
    assert imported_parts(module) == {"cli", "report"}


@pytest.mark.parametrize("file", PICTURES)
def test_pictures_show_the_code_as_it_is(file: str) -> None:
    assert (DOCS / file).read_text(encoding="utf-8") == PICTURES[file](), "run python docs/draw_architecture.py"


def test_the_chain_has_every_kind_of_stage() -> None:
    from etude.run.stages import STAGES

    assert {*CHAIN, *ASIDE} == set(STAGES)


def walks() -> dict[str, list[tuple[str, str]]]:
    """Return the stops of each walk through the code in docs/architecture.md, as `file.py name`."""
    sections = re.split(r"^### ", (DOCS / "architecture.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        each.splitlines()[0]: re.findall(r"^\d+\. `([\w/]+\.py) ([\w.]+)`", each, re.MULTILINE) for each in sections
    }


@pytest.mark.parametrize("walk", walks())
def test_every_stop_of_a_walk_exists(walk: str) -> None:
    stops = walks()[walk]
    assert 5 <= len(stops) <= 20
    for file, name in stops:
        names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
                 if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}  # fmt: skip
        assert set(name.split(".")) <= names, f"{file} has no {name}"


ASK = """
import contextlib, io, sys
from typer.main import get_command
from etude.cli.main import app
def commands(command, words=()):
    yield [*words, "--help"]
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, [*words, name])
asked = [*commands(get_command(app)), ["bases"], ["bases", "sprout"], ["status", "nowhere"], ["summary", "nowhere"], ["trace", "list", "nowhere"],
         ["schema"], ["run", "recipes/quickstart.toml", "--dry-run"], ["run", "recipes/smollm2.toml", "--dry-run"],
         ["plan", "recipes/mine-sprout.toml"], ["plan", sys.argv[1]]]
for words in asked:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit, Exception):
        app(words, standalone_mode=False)
    assert out.getvalue() or words[-1] == "nowhere", words
    heavy = {"torch", "transformers", "matplotlib", "scipy", "sklearn", "pandas", "tokenizers", "huggingface_hub", "datasets"} & set(sys.modules)
    assert not heavy, (words, heavy)
print(len(asked))
"""


def test_every_command_answers_without_loading_torch_or_the_like(tmp_path: Path) -> None:
    """What takes seconds to import is imported where work begins: help, and commands that only look or plan, answer at once."""
    shutil.copyfile(Path(__file__).parent / "run" / "shapes" / "qwen3-8b.json", tmp_path / "config.json")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'name = "big"\nbase = "{tmp_path}"\nstages = ["cpt", "extend", "mtp", "rl"]\n[cpt]\ntokens = 1_000_000\nrecompute = true\n'
        "[extend]\ntokens = 1_000_000\nlength = 65536\n[extend.lora]\n[mtp]\ntokens = 1_000_000\nlength = 4096\n"
        '[rl]\ntasks = "x.jsonl"\nlength = 8192\n[rl.lora]\n[data]\nlength = 65536\n[[data.source]]\nname = "x"\nfolder = "."\n'
        'domain = "code"\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(recipe)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 40


def lines_of_code(source: str) -> int:
    """Count lines that hold code: not blank ones, not comments, not docstrings, which we want more of."""
    kept: set[int] = set()
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in empty:
            kept |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            kept -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(kept)


def test_lines_of_code_are_counted() -> None:
    assert (
        lines_of_code('"""Doc."""\n\nx = (\n    1\n)  # why\n# no\ndef f():\n    """Doc\n    more."""\n    return 1\n')
        == 5
    )


def functions(source: str) -> dict[str, int]:
    """Return the length of each function, in lines, without its decorators and docstring."""
    lengths = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            lengths[node.name] = (node.end_lineno or 0) - first.lineno + 1
    return lengths


def layer_of(file: str) -> str:
    return file.partition("/")[0] if "/" in file else "foundation"


def test_nothing_is_too_long(record_property: Callable[[str, object], None]) -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in MODULES}
    assert not [file for file, text in sources.items() if len(text.splitlines()) > LONGEST_FILE]
    long = [
        (file, name)
        for file, text in sources.items()
        for name, length in functions(text).items()
        if length > LONGEST_FUNCTION
    ]
    assert set(long) <= {("inference/kernels.py", "_attend")}  # one Triton kernel cannot be cut in two
    lines, files = Counter[str](), Counter(layer_of(file) for file in sources)
    for file, text in sources.items():
        lines[layer_of(file)] += lines_of_code(text)
    by_layer = ", ".join(f"{name} {lines[name]:,} in {files[name]}" for name in sorted(lines))
    total = f"src/etude: {lines.total():,} of {MOST_LINES:,} counted lines, {files.total()} of {MOST_FILES} files"
    record_property("summary", f"{total}: {by_layer}")  # tests/conftest.py prints it last
    assert lines.total() <= MOST_LINES
    assert files.total() <= MOST_FILES


APART = {
    "run/runner.py",
    "sandbox/local.py",
}  # a command that is printed for the user; one that is isolated two lines later


def test_no_python_is_started_that_imports_from_the_current_folder() -> None:
    """It may be anybody's repository, with a runpy.py of its own: every Python is started with -P or -I."""
    found = []
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            parts = [ast.unparse(each) for each in node.elts] if isinstance(node, (ast.List, ast.Tuple)) else []
            places = [place for place, part in enumerate(parts) if part == "sys.executable"]
            name = str(module.relative_to(ROOT))
            found += [(name, parts[place + 1 :]) for place in places if place + 1 < len(parts) and name not in APART]
    assert len(found) >= 7
    assert [each for each in found if each[1][0] not in {"'-P'", "'-I'"}] == []
