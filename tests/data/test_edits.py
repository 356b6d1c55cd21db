from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.data.codebase import (
    EDITS,
    FENCE,
    Codebase,
    EditChain,
    SourceFile,
    cut_piece,
    git_chains,
    made_chain,
    made_chains,
    unified_diff,
)
from tests import tiny

LINES = st.lists(
    st.sampled_from(
        [
            "def move(source, target):",
            "    total = 10",
            "",
            "    return source + 1",
            "}",
            "# 42 and 7",
            "import value",
            "\t-x",
        ]
    ),
    min_size=6,
    max_size=15,
)
TEXTS = LINES.map(lambda lines: "\n".join(lines) + "\n")
HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def apply(text: str, diff: str) -> str:
    """Apply the hunks of a unified difference, checking every line of context and every count."""
    before, after, taken = text.splitlines(), [], 0
    lines = diff.split("\n") if diff else []
    at = 0
    while at < len(lines):
        header = HUNK.fullmatch(lines[at])
        assert header is not None, lines[at]
        at += 1
        old_start, old, new_start, new = (int(number) if number else 1 for number in header.groups())
        start = old_start - 1 if old else old_start
        after += before[taken:start]
        taken = start
        assert len(after) == (new_start - 1 if new else new_start)
        while old or new:
            mark, rest = lines[at][:1], lines[at][1:]
            assert mark in {" ", "-", "+"}
            if mark in {" ", "-"}:
                assert before[taken] == rest
                taken += 1
                old -= 1
            if mark in {" ", "+"}:
                after.append(rest)
                new -= 1
            at += 1
    after += before[taken:]
    return "".join(f"{line}\n" for line in after)


@settings(deadline=None)
@given(TEXTS, st.integers(1, 5), st.integers(0, 2**32))
def test_the_differences_lead_from_the_first_version_to_the_last(text: str, steps: int, seed: int) -> None:
    chain = made_chain("a.py", text, steps, random.Random(seed))
    assert chain is not None
    assert (chain.path, chain.origin, chain.versions[0]) == ("a.py", "made", text)
    assert len(chain.versions) == len(set(chain.versions)) == steps + 1
    assert len(chain.diffs) == steps
    assert all(chain.diffs)
    version = text
    for diff, expected in zip(chain.diffs, chain.versions[1:], strict=True):
        version = apply(version, diff)
        assert version == expected


@pytest.mark.parametrize("seed", range(6))
def test_the_program_patch_reads_the_differences_alike(seed: int, tmp_path: Path) -> None:
    text = "".join(f"def function_{line}(value):\n    return value + {line}\n" for line in range(12))
    chain = made_chain("a.py", text, 4, random.Random(seed))
    assert chain is not None
    file = tmp_path / "a.py"
    file.write_text(text, encoding="utf-8")
    for diff in chain.diffs:
        patch = f"--- a.py\n+++ a.py\n{diff}\n"
        subprocess.run(["patch", "--fuzz=0", "--silent", str(file)], input=patch, text=True, check=True)
    assert file.read_text("utf-8") == chain.versions[-1]
    assert not list(tmp_path.glob("*.rej"))


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_the_difference_of_any_two_texts_can_be_applied(before: str, after: str) -> None:
    assert apply(before, unified_diff(before, after)) == after
    assert (unified_diff(before, after) == "") == (before == after)


def test_a_difference_has_one_line_of_context_and_no_header() -> None:
    before = "a\nb\nc\nd\ne\n"
    assert unified_diff(before, before.replace("c", "C")) == "@@ -2,3 +2,3 @@\n b\n-c\n+C\n d"


@settings(deadline=None)
@given(LINES, st.sampled_from(["rename", "delete", "insert", "move", "renumber"]), st.integers(0, 2**32))
def test_an_edit_changes_no_more_than_it_says(lines: list[str], kind: str, seed: int) -> None:
    edit = {edit.__name__: edit for edit in EDITS}[f"_{kind}"]
    before = list(lines)
    after = edit(lines, random.Random(seed))
    assert lines == before  # the list it was given is left alone
    assert len(after) - len(before) == {"delete": -1, "insert": 1}.get(kind, 0)
    if kind == "move":
        assert sorted(after) == sorted(before)
    if kind == "renumber":
        assert sum(old != new for old, new in zip(before, after, strict=True)) <= 1
    if kind == "insert":
        assert any(after[:at] + after[at + 1 :] == before for at in range(len(after)))
    if kind == "delete":
        assert any(before[:at] + before[at + 1 :] == after for at in range(len(before)))


@settings(deadline=None)
@given(TEXTS, st.integers(0, 2**32))
def test_a_chain_is_the_same_for_a_seed(text: str, seed: int) -> None:
    chains = [made_chain("a.py", text, 3, random.Random(seed)) for _ in range(2)]
    assert chains[0] == chains[1]


def codebase(files: dict[str, str]) -> Codebase:
    return Codebase(Path(), tuple(SourceFile(path, text) for path, text in sorted(files.items())), {})


FILES = {
    f"m{index}.py": f"name_{index} = {index}\nvalue = 1\nresult = name_{index} + value\nprint(result)\n"
    for index in range(9)
}


def test_chains_of_a_tree_are_the_same_for_a_seed_and_others_for_another() -> None:
    chains = made_chains(codebase(FILES), 4, 2, 1000, seed=5)
    assert len({chain.path for chain in chains}) == 4
    assert made_chains(codebase(FILES), 4, 2, 1000, seed=5) == chains
    assert made_chains(codebase(FILES), 4, 2, 1000, seed=6) != chains
    assert made_chains(codebase(FILES), 2, 2, 1000, seed=5) == chains[:2]
    assert {chain.path: chain.versions[0] for chain in chains}.items() <= FILES.items()


def test_files_with_a_fence_or_too_short_are_not_made_into_chains() -> None:
    files = {"fence.py": FILES["m0.py"] + f"# {FENCE}\n", "short.py": "a = 1\nb = 2\n", "good.py": FILES["m1.py"]}
    assert [chain.path for chain in made_chains(codebase(files), 9, 2, 1000, seed=0)] == ["good.py"]
    assert made_chain("short.py", files["short.py"], 1, random.Random(0)) is None


@settings(deadline=None)
@given(st.text("ab\n", max_size=40), st.integers(0, 50))
def test_a_piece_is_the_longest_run_of_whole_first_lines_that_fits(text: str, most: int) -> None:
    lines = [f"{line}\n" for line in text.splitlines()]
    fitting = [count for count in range(len(lines) + 1) if len("".join(lines[:count])) <= most]
    assert cut_piece(text, most) == "".join(lines[: max(fitting)])


def test_made_chains_start_with_a_piece_within_the_limit() -> None:
    text = "".join(f"value_{line} = {line}\n" for line in range(100))
    (chain,) = made_chains(codebase({"long.py": text}), 1, 2, 200, seed=0)
    assert chain.versions[0] == cut_piece(text, 200)
    assert 0 < len(chain.versions[0]) <= 200


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a known history: a file of five versions, and commits that do not touch it in between."""
    tiny.git(tmp_path, "init", "-q", "-b", "main")
    for version in range(5):
        commit(tmp_path, "src/a.py", numbered(version))
        commit(tmp_path, "other.txt", f"{version}\n")
    return tmp_path


def numbered(version: int) -> str:
    return f"# version {version}\nvalue = {version}\n"


def commit(repository: Path, path: str, text: str) -> None:
    file = repository / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
    tiny.git(repository, "add", path)
    tiny.git(repository, "commit", "-q", "-m", path)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_chains_from_git_are_the_last_versions_oldest_first(repository: Path, steps: int) -> None:
    versions = tuple(numbered(version) for version in range(4 - steps, 5))
    assert git_chains(repository, ["src/a.py"], 3, steps, 1000) == [EditChain("src/a.py", versions, "git")]
    assert git_chains(repository / "src", ["a.py"], 3, steps, 1000) == [EditChain("a.py", versions, "git")]


def test_too_short_a_history_gives_no_chain(repository: Path) -> None:
    assert git_chains(repository, ["src/a.py"], 3, 5, 1000) == []


def test_no_history_gives_no_chain(tmp_path: Path, code_tree: Path) -> None:
    assert git_chains(code_tree, ["package_0/module_0.py"], 3, 1, 1000) == []
    assert git_chains(tmp_path, ["nowhere.py"], 3, 1, 1000) == []


def test_files_too_long_or_with_a_fence_in_any_version_are_not_taken(repository: Path) -> None:
    short = numbered(0)
    for texts, name in (
        ((short * 10, short), "was_long.py"),
        ((short, short * 10), "is_long.py"),
        ((f"{FENCE}\n", short), "had_fence.py"),
        ((short, f"{FENCE}\n"), "has_fence.py"),
        (("", short), "was_empty.py"),
    ):
        for text in texts:
            commit(repository, name, text)
    paths = ["was_long.py", "is_long.py", "had_fence.py", "has_fence.py", "was_empty.py", "src/a.py"]
    assert [chain.path for chain in git_chains(repository, paths, 9, 1, 100)] == ["src/a.py"]
    # with room enough, length is no obstacle
    assert [chain.path for chain in git_chains(repository, paths, 9, 1, 1000)] == [
        "was_long.py",
        "is_long.py",
        "src/a.py",
    ]


def test_a_file_that_went_away_and_came_back_is_not_taken(repository: Path) -> None:
    tiny.git(repository, "rm", "-q", "src/a.py")
    tiny.git(repository, "commit", "-q", "-m", "away")
    assert git_chains(repository, ["src/a.py"], 3, 1, 1000) == []
    commit(repository, "src/a.py", numbered(9))
    assert git_chains(repository, ["src/a.py"], 3, 1, 1000) == []


def test_a_change_that_was_taken_back_is_not_a_chain(repository: Path) -> None:
    commit(repository, "src/a.py", numbered(3))
    assert git_chains(repository, ["src/a.py"], 3, 2, 1000) == []  # versions 3, 4, 3
    assert len(git_chains(repository, ["src/a.py"], 3, 1, 1000)) == 1


def test_no_more_chains_than_asked_for_in_the_order_of_the_paths(repository: Path) -> None:
    for name in ("x.py", "y.py", "z.py"):
        for version in range(2):
            commit(repository, name, numbered(version))
    paths = ["z.py", "nowhere.py", "y.py", "x.py"]
    assert [chain.path for chain in git_chains(repository, paths, 2, 1, 1000)] == ["z.py", "y.py"]


def test_what_is_not_committed_is_not_history(repository: Path) -> None:
    (repository / "src" / "a.py").write_text("not committed\n", encoding="utf-8")
    (chain,) = git_chains(repository, ["src/a.py"], 3, 1, 1000)
    assert chain.versions[-1] == numbered(4)


def test_every_step_from_git_can_be_seen_in_its_difference(repository: Path) -> None:
    commit(repository, "end.py", "value = 1\nother = 2")
    commit(repository, "end.py", "value = 1\nother = 2\n")  # only the end of the last line changes
    assert all(all(chain.diffs) for chain in git_chains(repository, ["end.py", "src/a.py"], 3, 1, 1000))
