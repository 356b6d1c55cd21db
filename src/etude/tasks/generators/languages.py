"""Languages other than Python: what their files, functions and tests look like in tree-sitter's trees, one table for all.

Grammars are packages of their own (the extra `languages`), loaded when a file of that language is read. Positions are bytes, as in
`parsed.py`, and files are changed by cutting spans here too.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from etude.errors import UserError
from etude.tasks.generators.parsed import Cut, cut_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tree_sitter import Node, Parser

    from etude.tasks.readers import ReaderName

TEMPORARY = "/tmp"  # noqa: S108 - of the sandbox
WRONG = '"this expectation is wrong"'


@dataclass(frozen=True)
class Language:
    """One language. `fails` is a statement that fails a test, with {p} for the first parameter of the test's function."""

    grammar: str  # module and function that give it
    suffixes: tuple[str, ...]
    functions: frozenset[str]  # types of nodes
    holders: frozenset[str]  # of nodes that functions are in, whose name goes before theirs
    stub: str  # a body that is not there
    fails: str
    is_test: str  # what the text before a test's body holds
    build: str = ""
    test: str = ""
    reader: ReaderName = "junit"
    env: tuple[tuple[str, str], ...] = ()
    hides: tuple[str, ...] = ()  # folders of the system with code of others, perhaps of the package under repair
    braces: bool = True


def _of(*names: str) -> frozenset[str]:
    return frozenset(names)


_JS_FUNCTIONS = _of(
    "function_declaration",
    "generator_function_declaration",
    "method_definition",
    "function_expression",
    "arrow_function",
)
_JS = {
    "functions": _JS_FUNCTIONS, "holders": _of("class_declaration"), "stub": 'throw new Error("not implemented");',
    "fails": f"throw new Error({WRONG});", "is_test": r"\b(test|it|specify)(\.\w+)?\($", "test": "node --test --test-reporter=tap",
    "reader": "tap", "hides": ("/usr/lib/node_modules/npm", "/usr/share/nodejs/npm"),
}  # fmt: skip
LANGUAGES: dict[str, Language] = {
    "javascript": Language("tree_sitter_javascript.language", (".js", ".mjs", ".cjs", ".jsx"), **_JS),  # type: ignore[arg-type]
    "typescript": Language("tree_sitter_typescript.language_typescript", (".ts", ".mts", ".cts"), **_JS),  # type: ignore[arg-type]
    "go": Language(
        "tree_sitter_go.language", (".go",), _of("function_declaration", "method_declaration"), _of(), 'panic("not implemented")',
        f"{{p}}.Fatal({WRONG})", r"^func (\(.*\) )?Test",
        build="go build ./... && go test -count=1 -run NONE -vet=off ./... > /dev/null",
        test="go test -json -count=1 -vet=off ./...", reader="go",
        env=(("GOCACHE", f"{TEMPORARY}/go"), ("GOFLAGS", "-mod=mod"), ("GO111MODULE", "auto"), ("GOPROXY", "off"),
             ("GOTOOLCHAIN", "local")),
        hides=("/usr/share/gocode",),
    ),
    "rust": Language(
        "tree_sitter_rust.language", (".rs",), _of("function_item"), _of("impl_item", "trait_item"), "unimplemented!()",
        f"if true {{{{ panic!({WRONG}) }}}}", r"#\[test\]",
        build="cargo test --offline --tests --no-run", test="cargo test --offline --no-fail-fast --tests", reader="cargo",
        env=(("CARGO_HOME", f"{TEMPORARY}/cargo"), ("CARGO_TARGET_DIR", f"{TEMPORARY}/target"), ("CARGO_INCREMENTAL", "0"),
             ("RUST_BACKTRACE", "0")),
        hides=("/usr/share/cargo/registry",),
    ),
    "c": Language(
        "tree_sitter_c.language", (".c", ".h"), _of("function_definition"), _of(), "__builtin_trap();",
        f"TEST_FAIL_MESSAGE({WRONG});", "",
        build="cmake -S . -B build && cmake --build build", test="ctest --test-dir build -V", reader="unity",
    ),
    "java": Language(
        "tree_sitter_java.language", (".java",), _of("method_declaration", "constructor_declaration"),
        _of("class_declaration", "enum_declaration"), "throw new UnsupportedOperationException();",
        f"if (true) throw new AssertionError({WRONG});", r"@Test|void test[A-Z]",
    ),
    "ruby": Language(
        "tree_sitter_ruby.language", (".rb",), _of("method", "singleton_method"), _of("class", "module"), "raise NotImplementedError",
        f"raise {WRONG}", r"def test_", braces=False,
    ),
}  # fmt: skip


def language_of(path: str) -> str:
    """Return the language of a file's suffix, or nothing."""
    return next((name for name, each in LANGUAGES.items() if path.endswith(each.suffixes)), "")


@lru_cache(maxsize=16)
def parser(language: str) -> Parser:
    """Return the parser of a language."""
    module, _, function = LANGUAGES[language].grammar.rpartition(".")
    try:
        import tree_sitter

        return tree_sitter.Parser(tree_sitter.Language(getattr(importlib.import_module(module), function)()))
    except ImportError:
        raise UserError(f"tasks in {language} need its grammar: pip install 'etude[languages]'") from None


@dataclass(frozen=True)
class Definition:
    """A function with a body of statements."""

    name: str  # qualified
    node: Node
    body: Node


class Source:
    """A file with its syntax tree."""

    def __init__(self, path: str, text: str, language: str) -> None:
        self.path, self.text, self.content, self.language = path, text, text.encode(), language
        self.root = parser(language).parse(self.content).root_node
        self.table = LANGUAGES[language]

    def source(self, node: Node | None) -> str:
        return "" if node is None else self.content[node.start_byte : node.end_byte].decode()

    def replaced(self, node: Node, text: str) -> Cut:
        return Cut(node.start_byte, node.end_byte, text)

    def cut(self, cuts: Iterable[Cut]) -> str:
        return cut_text(self.text, cuts)

    def lines(self, node: Node) -> tuple[int, int]:
        return node.start_point[0] + 1, node.end_point[0] + 1

    def without(self, node: Node) -> Cut:
        """Return the cut of a node with its lines, where it has them to itself."""
        first, last = node.start_byte, node.end_byte
        begin = self.content.rfind(b"\n", 0, first) + 1
        end = self.content.find(b"\n", last) + 1 or len(self.content)
        alone = not self.content[begin:first].strip() and self.content[last:end].strip() in {b"", b";"}
        return Cut(begin, end) if alone else Cut(first, last)

    @property
    def definitions(self) -> Iterator[Definition]:
        """Yield the functions that have a name and a body, those of tests among the code left out."""
        waiting: list[tuple[Any, str]] = [(self.root, "")]
        while waiting:
            node, prefix = waiting.pop()
            if self.is_test(node):
                continue
            if node.type in self.table.functions and (found := self.definition(node, prefix)):
                yield found
                prefix = f"{found.name}."
            elif node.type in self.table.holders:
                name = node.child_by_field_name("name") or node.child_by_field_name("type")
                prefix += f"{self.source(name).partition('<')[0]}."
            waiting += [(child, prefix) for child in reversed(node.children)]

    def definition(self, node: Node, prefix: str) -> Definition | None:
        body = node.child_by_field_name("body")
        name = self._name(node)
        if (
            body is None
            or not name
            or not body.named_children
            or self.table.braces != self.source(body).startswith("{")
        ):
            return None
        receiver = re.search(r"(\w+)(?:\[.*\])?\)$", self.source(node.child_by_field_name("receiver")))
        return Definition(f"{prefix or (f'{receiver[1]}.' if receiver else '')}{name}", node, body)

    def _name(self, node: Node) -> str:
        """Return a function's own name, or the one that it is bound to."""
        name = node.child_by_field_name("name")
        inner = node.child_by_field_name("declarator")
        while inner is not None:  # of C: pointers and parameters stand around it
            name, inner = inner, inner.child_by_field_name("declarator")
        above = node.parent
        if name is None and above is not None:
            fields = ("name", "key", "left", "property")
            name = next((found for each in fields if (found := above.child_by_field_name(each)) is not None), None)
            name = name if name != node else None
        text = self.source(name)
        return text if re.fullmatch(r"[\w$.#?!=]{1,80}", text) else ""

    def is_test(self, node: Node) -> bool:
        """Whether a node of Rust is a test, or a module of tests, beside the code."""
        above = (
            node.prev_named_sibling if self.language == "rust" and node.type in {"mod_item", "function_item"} else None
        )
        while above is not None and above.type == "attribute_item":
            if re.search(r"cfg\(test\)|\[(\w+::)?test\b", self.source(above)):
                return True
            above = above.prev_named_sibling
        return False

    def about(self, found: Definition) -> dict[str, Any]:
        """Return what prompts may say of a function."""
        signature = self.content[found.node.start_byte : found.body.start_byte].decode()
        comment, above = "", found.node.prev_named_sibling
        if above is not None and "comment" in above.type and above.end_point[0] >= found.node.start_point[0] - 1:
            comment = re.sub(r"(?m)^\s*(///?!?|/\*+|\*+/?|#)\s?|\*/\s*$", "", self.source(above))
        return {"name": found.name, "path": self.path, "signature": " ".join(signature.split())[:200],
                "docstring": " ".join(comment.split())[:300]}  # fmt: skip

    def words(self) -> list[bytes]:
        """Return all that is not layout or a comment: equal for texts that mean the same."""
        found, waiting = list[bytes](), [self.root]
        while waiting:
            node = waiting.pop()
            if not node.children or "string" in node.type:
                found += [self.content[node.start_byte : node.end_byte]] if "comment" not in node.type else []
            else:
                waiting += reversed(node.children)
        return found


@dataclass(frozen=True)
class TestFunction:
    """Where a test is written. A test in C may be a program: then it goes by the name of its file."""

    __test__ = False

    name: str
    body: Node
    parameter: str
    program: bool = False
    macro: bool = False  # of Rust: `test!(name, …)`


def test_functions(file: Source) -> Iterator[TestFunction]:
    """Yield the tests of a file: functions with the right name or mark, or calls with a title and a function."""
    waiting = [file.root]
    while waiting:
        node = waiting.pop()
        waiting += reversed(node.children)
        if node.type == "macro_invocation" and (macro := re.match(r"\w*test\w*!\s*[({]\s*(\w+),", file.source(node))):
            yield TestFunction(macro[1], node, "", macro=True)
        if node.type not in file.table.functions or (body := node.child_by_field_name("body")) is None:
            continue
        parameter = re.search(
            r"\w+", file.source(node.child_by_field_name("parameters") or node.child_by_field_name("parameter"))
        )
        called, name = node.parent, file._name(node)  # noqa: SLF001
        if file.language in {"javascript", "typescript"}:
            if (
                called is None
                or called.type != "arguments"
                or called.parent is None
                or not file.source(body).startswith("{")
            ):
                continue
            before = file.content[called.parent.start_byte : called.start_byte + 1].decode()
            title = called.named_children[0]
            name = file.source(title)[1:-1] if title.type in {"string", "template_string"} else ""
            name = re.sub(r"\\(.)", r"\1", name) if re.search(file.table.is_test, before) else ""
        else:
            mark = file.content[(_marks(node) or node).start_byte : body.start_byte].decode()
            name = name if re.search(file.table.is_test, mark) else ""
        if name:
            yield TestFunction(name, body, parameter[0] if parameter else "")
        if name == "main" and file.language == "c":
            yield TestFunction(file.path.rpartition("/")[2].rpartition(".")[0], body, "", program=True)


def _marks(node: Node) -> Node | None:
    """Return the first of the attributes above a function."""
    first, above = None, node.prev_named_sibling
    while above is not None and above.type == "attribute_item":
        first, above = above, above.prev_named_sibling
    return first


def emptied(file: Source, names: Iterable[str]) -> str:
    """Return a file of tests with the bodies of some gone."""
    wanted = set(names)
    cuts = []
    for each in _outermost(file, wanted):
        first, last = each.body.start_byte, each.body.end_byte
        new = "{}" if file.table.braces else "nil"
        cuts.append(Cut(first, last, "" if each.macro else "{ return 0; }" if each.program else new))
    return tidied(file.cut(cuts), file.language)


def failing(file: Source, names: Iterable[str], fails: str = "") -> str:
    """Return a file of tests in which some surely fail, on the lines that they have."""
    cuts = []
    for each in _outermost(file, set(names)):
        if each.macro:
            cuts.append(file.replaced(each.body, f"#[test] fn {each.name}() {{ panic!({WRONG}) }}"))
            continue
        at = each.body.start_byte + (1 if file.table.braces else 0)
        what = "return 1;" if each.program else (fails or file.table.fails).format(p=each.parameter or "t")
        space = ("; " if file.language == "go" else " ") if file.table.braces else "; "
        cuts.append(Cut(at, at, f" {what}{space}"))
    return file.cut(cuts)


def _outermost(file: Source, wanted: set[str]) -> list[TestFunction]:
    found: list[TestFunction] = []
    for each in test_functions(file):
        if each.name in wanted and not any(o.body.start_byte <= each.body.start_byte < o.body.end_byte for o in found):
            found.append(each)
    return found


def tidied(text: str, language: str) -> str:
    """Return a file of Go without the imports that it no longer uses, which its compiler would refuse."""
    if language != "go":
        return text
    file = Source("", text, language)
    cuts, waiting, body = [], [file.root], ""
    imports = [child for child in file.root.children if child.type == "import_declaration"]
    body = text[len(text.encode()[: imports[-1].end_byte].decode()) :] if imports else ""
    while waiting:
        node = waiting.pop()
        if node.type != "import_spec":
            waiting += node.children if node.type in {"source_file", "import_declaration", "import_spec_list"} else []
            continue
        path = file.source(node.child_by_field_name("path")).strip('"`')
        parts = [part for part in path.split("/") if not re.fullmatch(r"v\d+", part)]
        name = file.source(node.child_by_field_name("name")) or re.sub(r"^go-|\.v\d+$", "", parts[-1])
        if name not in {"_", "."} and not re.search(rf"\b{re.escape(name)}\.", body):
            whole = node.parent if node.parent is not None and node.parent.type == "import_declaration" else node
            cuts.append(file.without(whole))
    return file.cut(cuts)
