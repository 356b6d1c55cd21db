"""git asked about repositories from anywhere: nothing in them runs, and what it says is what plain git says."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from etude.agent.repository import copy_files, files_of
from etude.data.codebase import git_chains, git_revision, tracked_files
from etude.errors import UserError
from etude.git import commit_id, fetching, git, git_says, repository_of
from etude.tasks.generators.history import candidates
from tests import hostile_repositories as hostile
from tests import tiny
from tests.data.sources.reading import entries, opened

SOURCE = Path(__file__).parents[1] / "src/etude"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile.plain(tmp_path_factory.mktemp("plain") / "repository")


def spoilt(plain: Path, tmp_path: Path, *ways: str) -> tuple[Path, Path]:
    """Return a copy that tries some ways, and the mark that it leaves if one works."""
    shutil.copytree(plain.parent, tmp_path / "in", symlinks=True)
    repository = tmp_path / "in/repository"
    program, mark = hostile.program(tmp_path)
    (repository / "sub/.git").write_text(f"gitdir: {repository}/.git/modules/sub\n")
    for way in ways:
        hostile.WAYS[way](repository, program)
    mark.unlink(missing_ok=True)
    (repository / "a.py").write_text("a = 4\n")  # so that its content must be looked at
    return repository, mark


def ask_everything(repository: Path, tmp_path: Path) -> None:
    """Go through all of Etude that asks git about a repository."""
    place = str(repository)

    def copied() -> None:
        copy_files(repository, files_of(repository), tmp_path / "copy")

    for look in (
        copied,
        lambda: tracked_files(repository),
        lambda: git_revision(repository),
        lambda: git_chains(repository, ["a.py"], 1, 2, 1000),
        lambda: entries(opened(folder=place).parts),
        lambda: entries(opened(git=place).parts),
        lambda: entries(opened(git=place, history=9).parts),
        lambda: entries(opened(tmp_path / "cache", git=f"file://{place}").parts),
        lambda: list(candidates(repository, ["a.py"], Counter())),
        lambda: git_says(repository, "rev-parse", "HEAD"),
    ):
        with suppress(UserError):
            look()


@pytest.mark.parametrize("ways", hostile.TOGETHER, ids=lambda ways: f"{ways[0]} and {len(ways) - 1} more")
def test_nothing_of_a_repository_runs(plain: Path, tmp_path: Path, ways: tuple[str, ...]) -> None:
    repository, mark = spoilt(plain, tmp_path, *ways)
    ask_everything(repository, tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("way", sorted(hostile.FIRES))
def test_the_usual_commands_do_run_it(plain: Path, tmp_path: Path, way: str) -> None:
    repository, mark = spoilt(plain, tmp_path, way)
    for words in hostile.USUAL:
        subprocess.run(["git", *words], cwd=repository, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert mark.exists()


def test_nothing_of_the_environment_runs(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, mark = hostile.program(tmp_path)
    shutil.copytree(plain, tmp_path / "repository", symlinks=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(f"[core]\nfsmonitor = {program}\n[diff]\nexternal = {program}\n")
    for name, value in (hostile.environment(program) | {"HOME": str(home)}).items():
        monkeypatch.setenv(name, value)
    ask_everything(tmp_path / "repository", tmp_path)
    assert not mark.exists()
    with pytest.raises(UserError, match="cannot be reached"):
        entries(opened(tmp_path / "cache", git=f"ext::{program}").parts)
    assert fetching(tmp_path / "none", "ls-remote", "--", "ssh://127.0.0.1:1/x").returncode
    assert not mark.exists()


def test_what_it_says_is_what_git_says(plain: Path) -> None:
    repository = repository_of(plain)
    assert repository is not None
    assert (
        commit_id(repository, "HEAD") == commit_id(repository, "main") == tiny.git(plain, "rev-parse", "HEAD").strip()
    )
    for words in (["ls-files", "-s"], ["status", "--porcelain", "--ignore-submodules=all"], ["log", "--format=%H %s"]):
        assert git_says(plain, *words) == tiny.git(plain, *words)
    assert git_says(plain / "tests", "show", "HEAD~1:./test_a.py") == "import a\n"
    assert git(repository, "cat-file", "blob", "HEAD:a.py").stdout == b"a = 2\n"
    assert git_says(plain.parent, "status") is None


def test_packed_refs_tags_work_trees_and_sha256(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "r", symlinks=True)
    head = tiny.git(tmp_path / "r", "rev-parse", "HEAD").strip()
    tiny.git(tmp_path / "r", "tag", "v1")
    tiny.git(tmp_path / "r", "pack-refs", "--all")
    tiny.git(tmp_path / "r", "worktree", "add", "-q", "-b", "side", str(tmp_path / "w"))
    for folder in (tmp_path / "r", tmp_path / "w"):
        repository = repository_of(folder)
        assert repository
        assert [commit_id(repository, ref) for ref in ("HEAD", "v1", "side", "none")] == [head, head, head, None]
        assert git_says(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all") is not None
    (tmp_path / "long").mkdir()
    tiny.git(tmp_path / "long", "init", "-q", "--object-format=sha256")
    (tmp_path / "long/a.py").write_text("a = 1\n")
    tiny.git(tmp_path / "long", "add", ".")
    tiny.git(tmp_path / "long", "commit", "-qm", "first")
    assert git_says(tmp_path / "long", "log", "--format=%H") == tiny.git(tmp_path / "long", "log", "--format=%H")


def test_borrowed_objects_are_refused(plain: Path, tmp_path: Path) -> None:
    tiny.git(tmp_path, "clone", "-q", "--shared", str(plain), "shared")
    with pytest.raises(UserError, match="borrows objects from another repository"):
        files_of(tmp_path / "shared")


def test_what_the_user_ignores_is_ignored(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(plain, tmp_path / "r", symlinks=True)
    (tmp_path / "r/.git/info").mkdir()
    (tmp_path / "r/.git/info/exclude").write_text("one.env\n")
    (tmp_path / "config/git").mkdir(parents=True)
    (tmp_path / "config/git/ignore").write_text("two.env\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("one.env", "two.env", "three.env", "four.env"):
        (tmp_path / "r" / name).write_text("secret")
    assert {name for name in files_of(tmp_path / "r") if name.endswith(".env")} == {"three.env", "four.env"}
    (tmp_path / "ignored").write_text("four.env\n")
    (tmp_path / "config/git/config").write_text(f"[core]\nexcludesFile = {tmp_path / 'ignored'}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert {name for name in files_of(tmp_path / "r") if name.endswith(".env")} == {"three.env"}


def test_nothing_is_left_of_a_call(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = (plain / ".git/index").stat()
    assert git_revision(plain)
    assert (plain / ".git/index").stat() == before
    assert not list(tmp_path.iterdir())


def test_a_fifo_for_a_file_of_git_is_not_waited_for(plain: Path, tmp_path: Path) -> None:
    for number, name in enumerate(
        ("HEAD", "index", "packed-refs", "config", "info/exclude", "shallow", "refs/heads/main")
    ):
        folder = tmp_path / str(number)
        shutil.copytree(plain, folder, symlinks=True)
        (folder / ".git/info").mkdir(exist_ok=True)
        (folder / ".git" / name).unlink(missing_ok=True)
        os.mkfifo(folder / ".git" / name)
        with suppress(UserError):
            files_of(folder)


@pytest.mark.parametrize("place", [".gitignore", "tests/.gitignore", ".gitattributes", ".git/objects/pack/multi-pack-index",
                                   ".git/objects/info/commit-graph", "new/" * 150 + ".gitignore"])  # fmt: skip
def test_no_fifo_is_given_to_git(plain: Path, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "repository"
    shutil.copytree(plain, folder, symlinks=True)
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / place).unlink(missing_ok=True)
    os.mkfifo(folder / place)
    below = folder / "tests" if place in {".gitignore", ".gitattributes"} else folder
    for look in (files_of, tracked_files):
        with pytest.raises(UserError, match=f"{Path(place).name[:3]}.* is no file, and git would wait for it"):
            look(below)


def test_what_lies_too_deep_is_not_asked_about(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "r", symlinks=True)
    (tmp_path / "r" / ("d/" * 203)).mkdir(parents=True)
    with pytest.raises(UserError, match="lies more than 200 folders deep"):
        files_of(tmp_path / "r")


def test_git_itself_does_not_come_from_the_repository(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, mark = hostile.program(tmp_path)
    shutil.copytree(plain, tmp_path / "r", symlinks=True)
    for name in ("node_modules/.bin/git", "git"):
        (tmp_path / "r" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "r" / name).symlink_to(program)
    monkeypatch.setenv("PATH", f"node_modules/.bin:./node_modules/.bin::.:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path / "r")
    ask_everything(tmp_path / "r", tmp_path)
    assert git_says(tmp_path / "r", "rev-parse", "HEAD")
    assert not mark.exists()


@pytest.mark.parametrize("file", [".git", ".git/commondir"])
def test_a_path_with_a_nul_is_no_traceback(plain: Path, tmp_path: Path, file: str) -> None:
    if file != ".git":
        shutil.copytree(plain, tmp_path, symlinks=True, dirs_exist_ok=True)
    (tmp_path / file).write_bytes(b"gitdir: a\0b\n")
    with suppress(UserError):
        files_of(tmp_path)


def test_nothing_else_starts_git() -> None:
    """Every other module that names git as a program to start would be found here."""
    for module in sorted(SOURCE.rglob("*.py")):
        if module == SOURCE / "git.py":
            continue
        for node in ast.walk(ast.parse(module.read_text())):
            words = (
                node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
            )
            first = words[0].value if words and isinstance(words[0], ast.Constant) else ""
            command = isinstance(first, str) and (first == "git" or first.startswith("git ") or first.endswith("/git"))
            harmless = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                ("which", "local", "get", "Literal")
            )
            listed = isinstance(node, ast.Tuple) and len(words) == 1
            # What runs in a benchmark's own container, where git is that image's: that module starts no process here.
            inside = module == SOURCE / "bench" / "public.py" and "subprocess" not in module.read_text()
            assert not command or harmless or listed or inside, (
                f"{module} starts git ({first!r}); etude.git is the place for that"
            )
