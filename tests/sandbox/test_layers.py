"""Layers: what is copied into one, and to whom it belongs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from etude.sandbox import isolate
from etude.sandbox.box import Entry
from etude.sandbox.layers import prepare, write_layer


def test_prepare_copies_all_but_special_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "folder").mkdir(parents=True)
    (tree / "folder" / "file").write_bytes(b"x")
    (tree / "folder" / "file").chmod(0o4751)
    (tree / "closed").write_bytes(b"y")
    (tree / "closed").chmod(0o000)
    os.utime(tree / "folder" / "file", ns=(1, 2_000_000_001))
    os.utime(tree / "folder", ns=(1, 3_000_000_001))
    (tree / "loose").symlink_to("/nowhere")
    (tree / "to-folder").symlink_to("folder")
    os.mkfifo(tree / "fifo")
    if os.geteuid() != 0:
        (tree / "closed").chmod(0o600)
    layer = tmp_path / "layer"
    assert prepare(tree, layer) == 1
    assert sorted(path.relative_to(layer).as_posix() for path in layer.rglob("*")) == [
        "closed", "folder", "folder/file", "loose", "to-folder",
    ]  # fmt: skip
    assert (layer / "loose").readlink() == Path("/nowhere")
    assert (layer / "to-folder").is_symlink()
    found = (layer / "folder" / "file").stat()
    assert stat.S_IMODE(found.st_mode) == 0o751
    assert found.st_mtime_ns == 2_000_000_001
    assert stat.S_IMODE((layer / "closed").stat().st_mode) == 0o600
    assert (layer / "folder").stat().st_mtime_ns == 3_000_000_001
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in [layer, *layer.rglob("*")]}
    assert owners == {isolate.owner()}


def test_a_written_layer_keeps_the_modes_of_folders_it_passes_through(tmp_path: Path) -> None:
    below = tmp_path / "below"
    (below / "private").mkdir(parents=True)
    (below / "private").chmod(0o700)
    entries = [
        Entry("made", "folder", 0, 0o2750),
        Entry("made/link", "link", 0, 0o777, b"../\xff"),
        Entry("private/new", "file", 2, 0o6755, b"hi"),
        Entry("socket", "other"),
    ]
    layer = write_layer(tmp_path / "layer", entries, (below,))
    assert stat.S_IMODE((layer / "private").stat().st_mode) == 0o700
    assert stat.S_IMODE((layer / "private" / "new").stat().st_mode) == 0o755
    assert stat.S_IMODE((layer / "made").stat().st_mode) == 0o750
    assert os.fsencode((layer / "made" / "link").readlink()) == b"../\xff"
    gap = (layer / "socket").lstat()
    assert stat.S_ISCHR(gap.st_mode)
    assert gap.st_rdev == 0
