"""Repositories that try to run a program when git is asked about them: each way on its own, with the program leaving a mark."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOOKS = (
    "post-index-change",
    "post-checkout",
    "reference-transaction",
    "pre-auto-gc",
    "fsmonitor-watchman",
    "post-merge",
)


def plain(folder: Path) -> Path:
    """A repository with two commits, a submodule, an attribute on every file, and a change that is not committed."""
    sub = folder.parent / f"{folder.name}-sub"
    for each in (sub, folder):
        each.mkdir()
        tiny.git(each, "init", "-q", "-b", "main", "--template=")
    (sub / "s.py").write_text("s = 1\n")
    tiny.git(sub, "add", ".")
    tiny.git(sub, "commit", "-qm", "sub")
    (folder / "a.py").write_text("a = 1\n")
    (folder / "tests").mkdir()
    (folder / "tests/test_a.py").write_text("import a\n")
    (folder / ".gitattributes").write_text("*.py filter=bad diff=bad merge=bad\n")
    tiny.git(folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(sub), "sub")
    tiny.git(folder, "add", ".")
    tiny.git(folder, "commit", "-qm", "first")
    (folder / "a.py").write_text("a = 2\n")
    (folder / "tests/test_a.py").write_text("import a  # two\n")
    tiny.git(folder, "commit", "-qam", "second")
    (folder / "a.py").write_text("a = 3\n")
    return folder


def _set(*keys: str, more: dict[str, str] | None = None) -> Callable[[Path, str], None]:
    def way(repository: Path, program: str) -> None:
        for key, value in {**(more or {}), **dict.fromkeys(keys, program)}.items():
            tiny.git(repository, "config", key, value)

    return way


def _lose(repository: Path, _: str = "") -> None:
    """Remove the object of a file, which a partial clone would fetch."""
    key = tiny.git(repository, "rev-parse", "HEAD:tests/test_a.py").strip()
    (repository / ".git/objects" / key[:2] / key[2:]).unlink()


def _partial(**more: str) -> Callable[[Path, str], None]:
    def way(repository: Path, program: str) -> None:
        _lose(repository)
        settings = {
            "core.repositoryFormatVersion": "1",
            "extensions.partialClone": "origin",
            "remote.origin.promisor": "true",
        }
        for key, value in (settings | {key.replace("_", "."): value for key, value in more.items()}).items():
            tiny.git(repository, "config", key, value.replace("PROGRAM", program))

    return way


def _hooks(repository: Path, program: str, folder: str = ".git/hooks") -> None:
    (repository / folder).mkdir(parents=True, exist_ok=True)
    for name in HOOKS:
        shutil.copy(program, repository / folder / name)


def _hooks_path(repository: Path, program: str) -> None:
    _hooks(repository, program, "hooks")
    tiny.git(repository, "config", "core.hooksPath", str(repository / "hooks"))


def _include(key: str) -> Callable[[Path, str], None]:
    def way(repository: Path, program: str) -> None:
        (repository / "settings").write_text(f"[core]\nfsmonitor = {program}\n")
        tiny.git(repository, "config", key, str(repository / "settings"))

    return way


def _worktree_config(repository: Path, program: str) -> None:
    tiny.git(repository, "config", "extensions.worktreeConfig", "true")
    (repository / ".git/config.worktree").write_text(f"[core]\nfsmonitor = {program}\n")


def _submodule(repository: Path, program: str) -> None:
    tiny.git(repository / "sub", "config", "core.fsmonitor", program)


def _nested(repository: Path, program: str) -> None:
    """A repository that lies in the work tree, and is not tracked."""
    (repository / "inner").mkdir()
    tiny.git(repository / "inner", "init", "-q", "--template=")
    (repository / "inner/i.py").write_text("i = 1\n")
    tiny.git(repository / "inner", "add", ".")
    for key in ("core.fsmonitor", "core.hooksPath", "diff.external"):
        tiny.git(repository / "inner", "config", key, program)


def _git_link(repository: Path, program: str) -> None:
    """`.git` itself is a link."""
    tiny.git(repository, "config", "core.fsmonitor", program)
    (repository / ".git").rename(repository / "elsewhere")
    (repository / ".git").symlink_to("elsewhere")


def _bare(repository: Path, program: str) -> None:
    """As an agent could have written it: no .git, but HEAD, config, objects and refs in the folder itself."""
    for path in (repository / ".git").iterdir():
        shutil.move(path, repository / path.name)
    (repository / ".git").rmdir()
    tiny.git(repository, "--git-dir=.", "config", "core.bare", "false")
    tiny.git(repository, "--git-dir=.", "config", "core.worktree", str(repository))
    tiny.git(repository, "--git-dir=.", "config", "core.fsmonitor", program)


def _git_file(repository: Path, program: str) -> None:
    tiny.git(repository, "config", "core.fsmonitor", program)
    (repository / ".git").rename(repository / "elsewhere")
    (repository / ".git").write_text("gitdir: elsewhere\n")


def _common(repository: Path, program: str) -> None:
    """Settings that come from another folder by `commondir`, as those of a work tree do."""
    tiny.git(repository, "config", "core.fsmonitor", program)
    (repository / ".git").rename(repository / "elsewhere")
    (repository / ".git").mkdir()
    for name in ("HEAD", "index"):
        shutil.copy(repository / "elsewhere" / name, repository / ".git" / name)
    (repository / ".git/commondir").write_text("../elsewhere\n")


def _alternates(repository: Path, program: str) -> None:
    (repository / ".git/objects/info").mkdir(exist_ok=True)
    other = repository.parent / f"{repository.name}-sub/.git/objects"
    (repository / ".git/objects/info/alternates").write_text(f"{other}\n")
    tiny.git(repository, "config", "core.alternateRefsCommand", program)


def _signed(repository: Path, program: str) -> None:
    """A commit that looks signed, so that asking for signatures runs the program that checks them."""
    head = tiny.git(repository, "cat-file", "commit", "HEAD")
    about, message = head.split("\n\n", 1)
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n x\n -----END PGP SIGNATURE-----"
    (repository / "commit").write_text(f"{about}\n{signature}\n\n{message}")
    key = tiny.git(repository, "hash-object", "-t", "commit", "-w", "commit").strip()
    tiny.git(repository, "update-ref", "refs/heads/main", key)
    for name, value in {"log.showSignature": "true", "gpg.program": program, "gpg.openpgp.program": program}.items():
        tiny.git(repository, "config", name, value)


WAYS: dict[str, Callable[[Path, str], None]] = {
    "fsmonitor": _set("core.fsmonitor"),
    "fsmonitor of a submodule": _submodule,
    "hooks": _hooks,
    "hooksPath": _hooks_path,
    "clean filter": _set("filter.bad.clean"),
    "smudge filter": _set("filter.bad.smudge"),
    "filter process": _set("filter.bad.process"),
    "required filter": _set("filter.bad.clean", more={"filter.bad.required": "true"}),
    "external diff": _set("diff.external"),
    "diff command": _set("diff.bad.command"),
    "textconv": _set("diff.bad.textconv", more={"diff.bad.cachetextconv": "true"}),
    "merge driver": _set("merge.bad.driver"),
    "pager": _set("core.pager", "pager.log", "pager.status", "pager.diff", "pager.show", "pager.ls-files"),
    "editor": _set("core.editor", "sequence.editor"),
    "askPass": _set("core.askPass"),
    "credential helper": _set("credential.helper"),
    "proxy": _set("core.gitProxy"),
    "aliases": _set("alias.ls-files", "alias.status", "alias.log"),
    "signature": _signed,
    "trailer": _set("trailer.fix.command", "trailer.fix.cmd"),
    "diffFilter": _set("interactive.diffFilter"),
    "include": _include("include.path"),
    "includeIf": _include("includeIf.gitdir:/**.path"),
    "work tree's settings": _worktree_config,
    "partial clone by ssh": _partial(remote_origin_url="ssh://host/x", core_sshCommand="PROGRAM"),
    "partial clone by a command": _partial(remote_origin_url="ext::PROGRAM", protocol_ext_allow="always"),
    "partial clone by upload-pack": _partial(remote_origin_url=".", remote_origin_uploadpack="PROGRAM"),
    "pack-objects hook": _set("uploadpack.packObjectsHook"),
    "alternates": _alternates,
    "bare in disguise": _bare,
    "git file": _git_file,
    "git link": _git_link,
    "nested repository": _nested,
    "common folder": _common,
}
# Ways that do not stand in each other's way; the others change what a repository is, and are tried alone.
_KINDS = {"alternates", "bare in disguise", "git file", "git link", "common folder"}
_ALONE = [name for name in WAYS if name.startswith("partial") or name in _KINDS]
_FILTERS = [name for name in WAYS if "filter" in name]
_DIFFS = ["external diff", "diff command", "textconv", "signature", "merge driver"]
_REST = [name for name in WAYS if name not in {*_ALONE, *_FILTERS, *_DIFFS}]
TOGETHER = [*((name,) for name in _ALONE), tuple(_FILTERS), tuple(_DIFFS), tuple(_REST)]
# Of these, the plain commands of a user do run the program: so the corpus is not a list of things that never worked.
FIRES = {
    "fsmonitor", "fsmonitor of a submodule", "hooks", "hooksPath", "clean filter", "filter process", "required filter", "external diff",
    "diff command", "textconv", "include", "includeIf", "work tree's settings", "signature", "partial clone by ssh",
    "partial clone by upload-pack", "bare in disguise", "git file", "git link", "common folder",
}  # fmt: skip
USUAL = (
    ["status"],
    ["diff"],
    ["log", "-p"],
    ["ls-files"],
    ["show", "HEAD:tests/test_a.py"],
    ["cat-file", "-p", "HEAD:tests/test_a.py"],
)


def program(folder: Path) -> tuple[str, Path]:
    """Return a program, and the file that is there once it has run."""
    mark, script = folder / "it-ran", folder / "program"
    script.write_text(f"#!/bin/sh\ntouch {mark}\nexit 0\n")
    script.chmod(0o755)
    return str(script), mark


def environment(program_: str) -> dict[str, str]:
    """Settings of the surroundings that make git run a program."""
    names = (
        "GIT_EXTERNAL_DIFF",
        "GIT_SSH",
        "GIT_SSH_COMMAND",
        "GIT_PAGER",
        "GIT_EDITOR",
        "GIT_ASKPASS",
        "GIT_PROXY_COMMAND",
        "SSH_ASKPASS",
    )
    keys = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": program_}
    return dict.fromkeys(names, program_) | keys | {"GIT_TRACE_SETUP": os.devnull}
