from __future__ import annotations

import pytest

from etude.data.document import Document
from etude.data.filters.content import PROSE, is_code, language


def of(path: str, text: str = "x\n") -> str:
    """Return the language, or the reason to drop in angle brackets."""
    document = Document("repository", path, text)
    reason = language(document)
    return f"<{reason}>" if reason else document.language


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/b.py", "python"),
        ("a/b.PYX", "cython"),
        ("src/main.rs", "rust"),
        ("run.bash", "shell"),
        ("index.html", "html"),
        ("style.css", "css"),
        ("Dockerfile", "dockerfile"),
        ("docker/Dockerfile.dev", "dockerfile"),
        ("Makefile", "makefile"),
        ("Makefile.in", "makefile"),
        ("config.h.in", "c"),
        ("pyproject.toml", "toml"),
        (".github/workflows/ci.yml", "yaml"),
        ("setup.cfg", "ini"),
        ("my.cfg", "ini"),
        ("CMakeLists.txt", "cmake"),
        ("README.md", "markdown"),
        ("docs/index.rst", "rst"),
        ("README.rst", "rst"),
        ("README", "plain-text"),
        ("HISTORY", "plain-text"),
        ("LICENSE", "plain-text"),
        ("notes.txt", "plain-text"),
        ("paper.tex", "tex"),
        ("a.d/solve.f", "fortran"),
        ("package.json", "<data file>"),
        ("t.ipynb", "<data file>"),
        ("t.csv", "<data file>"),
        ("icon.svg", "<data file>"),
        ("pom.xml", "<data file>"),
        ("locale/de.po", "<data file>"),
        (".env", "<not text or code>"),
        ("server.pem", "<data file>"),
        ("picture.png", "<not text or code>"),
        ("archive.tar.gz", "<not text or code>"),
        ("table.dat", "<not text or code>"),
        ("bin/run", "<not text or code>"),
    ],
)
def test_by_name(path: str, expected: str) -> None:
    assert of(path) == expected


@pytest.mark.parametrize(
    ("first_line", "expected"),
    [
        ("#!/usr/bin/env python3", "python"),
        ("#!/usr/bin/env -S python3 -u", "python"),
        ("#!/bin/sh -e", "shell"),
        ("#! /usr/bin/perl", "perl"),
        ("#!/opt/unheard-of", "<not text or code>"),
        ("#!", "<not text or code>"),
        ("#!/usr/bin/env pythön", "<not text or code>"),
    ],
)
def test_by_shebang(first_line: str, expected: str) -> None:
    assert of("bin/run", f"{first_line}\nx\n") == expected
    assert of("bin/run.py", f"{first_line}\nx\n") == "python"


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("a.h", "#ifndef A\nint add(int a, int b);\n#endif\n", "c"),
        ("a.h", "#pragma once\nnamespace a {\nclass B {\n public:\n};\n}\n", "c++"),
        ("a.h", "/* a class of functions */\nint public_key;\n", "c"),
        ("a.h", "#import <Foundation/Foundation.h>\n@interface A : NSObject\n@end\n", "objective-c"),
        ("a.m", "% Adds.\nfunction c = add(a, b)\n  c = a + b;\nend\n", "matlab"),
        ("a.m", '#import "A.h"\n@implementation A\n@end\n', "objective-c"),
        ("a.m", "int main(void) { return 0; }\n", "objective-c"),
        ("a.pl", "#!/usr/bin/perl\nuse strict;\nmy $x = 1;\n", "perl"),
        ("a.pl", ":- module(a, [b/1]).\nb(X) :- c(X).\n", "prolog"),
        ("a.ts", "export const x: number = 1;\n", "ts"),
        ("a.ts", '<?xml version="1.0"?>\n<!DOCTYPE TS>\n<TS></TS>\n', "<data file>"),
        ("a.md", "# Title\n\nText; more text.\n", "markdown"),
        ("a.md", ";; Machine description\n(define_insn foo)\n", "gcc-machine-description"),
        ("a.v", "module counter(input clk);\nendmodule\n", "verilog"),
        ("a.v", "Require Import List.\nTheorem t : True.\nProof. auto. Qed.\n", "coq"),
        ("a.fs", "module A\nlet uniform x = x\n", "f#"),
        ("a.fs", "uniform vec4 c;\nvoid main() { gl_FragColor = c; }\n", "glsl"),
    ],
)
def test_by_content_where_the_name_can_mean_two_things(path: str, text: str, expected: str) -> None:
    assert of(path, text) == expected


def test_rows_and_commits_are_what_they_are() -> None:
    for kind, given, expected in [("row", "", "plain-text"), ("row", "python", "python"), ("commit", "", "diff")]:
        document = Document("r", "picture.png", "text", kind=kind, language=given)
        assert language(document) is None
        assert document.language == expected


def test_code_or_prose() -> None:
    kept = ["python", "c++", "yaml", "dockerfile", "html", "diff", "ini"]
    prose = ["markdown", "rst", "plain-text", "tex"]
    assert [*map(is_code, kept), *(each in PROSE for each in prose)] == [True] * 11
    assert not any([*map(is_code, [*prose, "json", ""]), *(each in PROSE for each in [*kept, "json", ""])])
