"""The index behind `search`: cutting, ranking, its cache, and trees that mean harm."""

from __future__ import annotations

import ast
import asyncio
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import etude
from etude.agent import search as embedders
from etude.agent.search import K1, MOST_LINES, B, Embedder, Searcher, by_words, chunks, fused, words
from etude.agent.tools import Toolset, ToolSettings
from etude.sandbox.box import Place
from etude.sandbox.local import open_sandbox
from tests.agent.bare import BareSandbox

INSTALLED = embedders.installed_embedder()
FILES = {
    "src/shapes.py": "import math\n\n\ndef circle_area(radius):\n    return math.pi * radius**2\n\n\nclass Square:\n    side = 1\n\n    def perimeter(self):\n        return 4 * self.side\n",
    "src/net.py": "def openConnection(host):\n    return host\n\n\ndef close_all(connections):\n    connections.clear()\n",
    "README.md": "# A tree\n\nAbout shapes and networks.\n",
}


class Letters(Embedder):
    """A stand-in for the model: a text is the counts of its letters, and how many texts were asked for is counted."""

    def __init__(self) -> None:
        self.asked = 0

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        self.asked += len(texts)
        made = np.array(
            [[text.lower().count(chr(97 + n % 26)) + 1e-3 for n in range(384)] for text in texts], dtype=np.float32
        )
        made = made.reshape(-1, 384)
        unit: np.ndarray = made / np.linalg.norm(made, axis=1, keepdims=True)
        return unit


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text)
    return tmp_path / "tree"


def find(searcher: Searcher, tree: Path, query: str, k: int = 2) -> tuple[list[str], dict[str, Any]]:
    """Search in a tree; return what was found, and the details."""
    tools = Toolset(BareSandbox(tree), ToolSettings(tools=["search"]), searcher)
    _, details, failed = asyncio.run(searcher.search(tools.ask, query, k))
    assert not failed
    return details["paths"], details


@pytest.mark.parametrize("module", sorted(Path(etude.__file__).parent.rglob("*.py"))[::6], ids=lambda path: path.name)
def test_python_is_cut_where_ast_says(module: Path) -> None:
    """Oracle: ast. Every function outside of functions begins a chunk of its name, decorators included, and ends one."""
    text = module.read_text()
    made = chunks("m.py", text)

    def expected(node: ast.AST, above: str) -> list[tuple[str, int, int]]:
        found = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                found.append((f"{above}{child.name}", first, child.end_lineno or 0))
            elif isinstance(child, ast.ClassDef):
                found += expected(child, f"{above}{child.name}.")
            elif isinstance(child, ast.If | ast.Try | ast.With):
                found += expected(child, above)
        return found

    functions = expected(ast.parse(text), "")
    assert {(name, first) for name, first, _ in functions} <= {(chunk.name, chunk.first) for chunk in made}
    assert {(name, last) for name, _, last in functions} <= {(chunk.name, chunk.last) for chunk in made}


@given(st.text(alphabet="ad ef:\n@class(#", max_size=300), st.sampled_from(["f.py", "f.md"]))
def test_every_line_is_in_one_chunk(text: str, path: str) -> None:
    lines = text.split("\n")
    seen: Counter[int] = Counter()
    for chunk in chunks(path, text):
        assert chunk.text == "\n".join(lines[chunk.first - 1 : chunk.last])
        assert chunk.last - chunk.first < MOST_LINES
        seen.update(range(chunk.first, chunk.last + 1))
    assert max(seen.values(), default=1) == 1
    assert {n for n, line in enumerate(lines, 1) if line.strip()} <= set(seen)


def test_words_split_identifiers() -> None:
    assert list(words("parse_HTTPHeaders getURL2")) == [
        "parse",
        "http",
        "header",
        "parse_httpheaders",
        "get",
        "url",
        "2",
        "geturl2",
    ]
    assert list(words("class Größe42: pass")) == ["class", "gr", "öß", "e", "42", "größe42", "pass"]


def test_ranking_by_words_is_bm25() -> None:
    """Oracle: the textbook's formula, chunk by chunk."""
    query = "area of a circle connections"
    every = [chunk for name, text in FILES.items() for chunk in chunks(name, text)]
    mean = sum(sum(chunk.words.values()) for chunk in every) / len(every)

    def score(place: int) -> float:
        held, total = every[place].words, 0.0
        for word in words(query):
            holders = sum(word in chunk.words for chunk in every)
            rarity = math.log(1 + (len(every) - holders + 0.5) / (holders + 0.5))
            count = held.get(word, 0)
            total += rarity * count * (K1 + 1) / (count + K1 * (1 - B + B * sum(held.values()) / mean))
        return total

    expected = [place for place in sorted(range(len(every)), key=lambda place: (-score(place), place)) if score(place)]
    assert by_words(every, query) == expected
    assert every[expected[0]].name == "circle_area"


def test_fusion_by_hand() -> None:
    """1/10, 1/11 + 2/10, 2/11: the one that both know comes first."""
    assert fused([7, 3], [3, 5]) == [3, 5, 7]
    assert fused([1, 2], []) == [1, 2]


def test_only_changed_files_are_fetched(tree: Path, tmp_path: Path) -> None:
    searcher = Searcher(tmp_path / "cache")
    found, details = find(searcher, tree, "area of a circle")
    assert found[0] == "src/shapes.py:4-5"
    assert (details["files"], details["fetched"], details["ranking"]) == (3, 3, "words")
    assert find(searcher, tree, "open connection")[1]["fetched"] == 0
    (tree / "src/net.py").write_text("def area_of_circle_and_disc():\n    pass\n")
    found, details = find(searcher, tree, "area of a circle")
    assert (found[0], details["fetched"]) == ("src/net.py:1-2", 1)
    (tree / "src/net.py").unlink()
    assert find(searcher, tree, "area of a circle")[0][0] == "src/shapes.py:4-5"
    assert len(list((tmp_path / "cache/search").iterdir())) == 1, "edited versions of a known tree are not kept"


@pytest.mark.parametrize(
    "damage", [b"", b"junk", None, b"x\x9c\xab\xae\x05\x00\x01u\x00\xf9"], ids=["empty", "junk", "cut", "other"]
)
def test_the_cache_is_used_and_a_damaged_one_made_again(tree: Path, tmp_path: Path, damage: bytes | None) -> None:
    first = find(Searcher(tmp_path), tree, "shapes")
    assert find(Searcher(tmp_path), tree, "shapes") == (first[0], {**first[1], "fetched": 0})
    (kept,) = (tmp_path / "search").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-20] if damage is None else damage)
    assert find(Searcher(tmp_path), tree, "shapes") == first
    assert kept.read_bytes() == whole
    assert find(Searcher(), tree, "shapes") == first


def test_vectors_are_made_for_candidates_only_and_once(tree: Path, tmp_path: Path) -> None:
    letters = Letters()
    searcher = Searcher(tmp_path / "cache", letters)
    _, details = find(searcher, tree, "circle")
    assert details["ranking"] == "words, the first 64 by vectors"
    assert letters.asked == 2, "the query, and the one chunk with this word"
    find(searcher, tree, "circle")
    assert letters.asked == 3
    assert find(searcher, tree, "nothing has these wordings")[0] == []


def test_odd_and_hostile_trees(tree: Path, tmp_path: Path) -> None:
    os.mkfifo(tree / "pipe.py")
    (tree / "loop").symlink_to(tree)
    (tree / "secret.py").symlink_to("/etc/passwd")
    (tree / os.fsdecode(b"bad\xff\n.py")).write_text("def circle_of_bad_names(): pass\n")
    (tree / "broken.py").write_text("def circle_broken(:\n" + "(" * 5000 + "\n")
    (tree / "huge.py").write_text("circle = 1\n" * 50_000)
    (tree / "noise.py").write_bytes(np.random.default_rng(0).integers(33, 127, 390_000, dtype=np.uint8).tobytes())
    (tree / "binary.py").write_bytes(b"circle\0")
    found, details = find(Searcher(tmp_path / "cache"), tree, "circle", k=20)
    assert {path.split(":")[0] for path in found} >= {"broken.py", "bad\udcff\n.py", "src/shapes.py"}
    assert not {path.split(":")[0] for path in found} & {"huge.py", "binary.py", "secret.py", "pipe.py"}
    assert details["skipped"] == {"not a file": 1, "link": 2, "too large": 1, "binary": 1}
    assert find(Searcher(tmp_path / "cache"), tree, "circle", k=20)[0] == found


def test_a_tree_of_many_pages(tree: Path) -> None:
    (tree / "many").mkdir()
    for number in range(1500):
        (tree / "many" / f"{number:0100}.py").write_text(f"number_{number} = {number}\n")
    found, details = find(Searcher(), tree, "number_1234")
    assert details["files"] == 1503
    assert found[0] == f"many/{1234:0100}.py:1-1"


@pytest.mark.parametrize(
    "answer",
    [
        {"text": "no", "refused": "killed"},
        {"text": "@", "details": {}},
        {"text": "eJyLBgAAXgBe", "details": {"next": None}},
    ],
)
def test_a_toolbox_that_does_not_answer_is_told(answer: dict[str, Any]) -> None:
    async def ask(*_: Any, **__: Any) -> dict[str, Any]:
        return answer

    text, details, failed = asyncio.run(Searcher().search(ask, "x", 1))
    assert failed
    assert text.startswith("the tree could not be read: ")
    assert details == {"error": "unanswered"}


def test_in_a_real_sandbox(tree: Path) -> None:
    async def episode() -> Any:
        sandbox = await open_sandbox(Place((tree,)))
        try:
            return await Searcher().search(Toolset(sandbox, ToolSettings(tools=["read"])).ask, "open a connection", 1)
        finally:
            await sandbox.close()

    tree.chmod(0o755)
    assert (
        asyncio.run(episode())[0]
        == "src/net.py:1-2 openConnection\n    1\tdef openConnection(host):\n    2\t    return host"
    )


@pytest.mark.skipif(INSTALLED is None, reason="needs the extra `search`")
def test_the_real_embedder_knows_what_words_do_not(tree: Path) -> None:
    assert INSTALLED is not None
    cat, kitten, compiler = INSTALLED.embed(["a cat sleeps", "the kitten is asleep " * 40, "parse a C++ header"])
    assert np.linalg.norm(cat) == pytest.approx(1, abs=1e-5)
    assert cat @ kitten > 0.3 > cat @ compiler
    alone = INSTALLED.embed(["a cat sleeps"])[0]
    assert np.allclose(alone, cat, atol=1e-5), "padding must not change a vector"


@pytest.mark.skipif(INSTALLED is None, reason="needs the extra `search`")
def test_vectors_are_those_of_sentence_transformers() -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    assert INSTALLED is not None
    texts = ["def f(x): return x", "A sentence.", "word " * 300]
    theirs = sentence_transformers.SentenceTransformer(str(INSTALLED.folder), device="cpu")
    theirs.max_seq_length = embedders.TOKENS
    assert np.allclose(INSTALLED.embed(texts), theirs.encode(texts, normalize_embeddings=True), atol=1e-5)
