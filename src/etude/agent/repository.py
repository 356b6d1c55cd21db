"""The user's own repository as a layer: a copy of what belongs to it, and nothing that is secret by custom.

In a git repository that is what git knows or would add; elsewhere all files but those of version control, environments and caches.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from etude.errors import UserError

SKIPPED = {
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".tox",
}
LARGEST = 2 << 30  # bytes of a repository that is copied


def files_of(repository: Path) -> list[str]:
    """Return the files and links that belong to a folder, relative to it."""
    if not repository.is_dir():
        raise UserError(f"{repository} is no folder; name one with --repo")
    listed = subprocess.run(
        ["git", "-C", str(repository), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        names = sorted({os.fsdecode(name) for name in listed.stdout.split(b"\0") if name})
        return [name for name in names if _is_file(repository / name)]
    found = []
    for folder, folders, names in os.walk(repository):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        found += [os.path.relpath(Path(folder) / name, repository) for name in [*names, *linked]]
    return sorted(name for name in found if _is_file(repository / name))


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def check_size(repository: Path, names: list[str]) -> int:
    """Return the bytes of the files; refuse what nobody wants copied into memory."""
    size = sum((repository / name).lstat().st_size for name in names)
    if size > LARGEST:
        raise UserError(
            f"{repository} holds {size / 2**30:.1f} GiB in {len(names)} files; name a smaller folder with --repo, or add to .gitignore"
        )
    return size
