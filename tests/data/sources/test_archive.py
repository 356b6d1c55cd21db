from __future__ import annotations

import gzip
import io
import lzma
import random
import tarfile
import tempfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data.document import Drop, Raw
from etude.data.sources.package import LONGEST_HEADER, Archive
from tests.data.sources.reading import MOST, entries, reasons, texts

METADATA = b"Metadata-Version: 2.4\nName: toolz\nLicense-Expression: mit\n\nBody\nLicense-Expression: GPL-3.0-only\n"
DAMAGED = {"toolz-1.2.0.tar.gz": "archive is damaged"}
TOO_MUCH = "archive unpacks to too much"


def member(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(content)
    return info, content


def write_tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> Path:
    suffix = path.suffix.removeprefix(".").replace("tgz", "gz")
    with tarfile.open(path, f"w:{suffix}", format=form) as archive:  # type: ignore[call-overload]
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return path


def package(path: Path, **files: bytes) -> Path:
    return write_tar(path, [member(f"toolz-1.2.0/{name}", content) for name, content in files.items()])


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz", "tar.bz2", "tar.xz"])
def test_a_package_is_read_in_its_order_without_its_leading_folder(tmp_path: Path, suffix: str) -> None:
    path = package(tmp_path / f"toolz-1.2.0.{suffix}", **{"b.py": b"b", "a/c.py": b"\xff", "empty.py": b""})
    assert entries([Archive(str(path), MOST)]) == [
        Raw("toolz-1.2.0", "b.py", b"b"),
        Raw("toolz-1.2.0", "a/c.py", b"\xff"),
        Raw("toolz-1.2.0", "empty.py", b""),
    ]


def test_without_a_common_folder_the_archive_names_the_repository(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "toolz-1.2.0.tar.gz", [member("setup.py", b"x"), member("toolz/a.py", b"y")])
    assert [(raw.repository, raw.path) for raw in entries([Archive(str(path), MOST)])] == [
        ("toolz-1.2.0", "setup.py"),
        ("toolz-1.2.0", "toolz/a.py"),
    ]
    alone = write_tar(tmp_path / "one-1.tar.gz", [member("setup.py", b"x")])
    assert entries([Archive(str(alone), MOST)]) == [Raw("one-1", "setup.py", b"x")]


NAMES = st.lists(st.text("aä/.\n =", min_size=1, max_size=200), min_size=1, max_size=6)


@given(NAMES, st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), st.data())
def test_any_tar_is_read_as_the_standard_library_reads_it(names: list[str], form: int, data: st.DataObject) -> None:
    members = [member(f"top/{name}x{at}", data.draw(st.binary(max_size=1100))) for at, name in enumerate(names)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "top.tar.gz"
        try:
            write_tar(path, members, form)
        except ValueError:  # ustar cannot hold the name
            return
        read = entries([Archive(str(path), MOST)])
        with tarfile.open(path) as archive:
            expected = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    kept = {entry.path: entry.content for entry in read if isinstance(entry, Raw)}
    assert len(read) == len(names)
    for name, content in expected.items():
        clean = str(Path(name)).removeprefix("top/")
        assert len(content) > MOST or ".." in name.split("/") or kept[clean] == content


ESCAPING = ["/etc/passwd", "toolz-1.2.0/../../x", "..", "C:/x", "c:x", "toolz-1.2.0\\..\\x", "a/../b"]


@pytest.mark.parametrize("suffix", [".tar.gz", ".zip"])
def test_members_that_lead_out_are_dropped(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"toolz-1.2.0{suffix}"
    names = ["toolz-1.2.0/good.py", *ESCAPING, "toolz-1.2.0/./late.py"]
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, b"x")
    else:
        write_tar(path, [member(name, b"x") for name in names])
    part = Archive(str(path), MOST)
    assert texts([part]) == {"good.py": b"x", "late.py": b"x"}
    read = entries([part])
    assert len(read) == len(names)
    why = [entry.reason for entry in read if isinstance(entry, Drop)]
    assert why == ["path leads out of the archive"] * len(ESCAPING)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]  # nothing was unpacked


def test_links_and_devices_are_dropped_and_folders_are_no_documents(tmp_path: Path) -> None:
    kinds = {
        "s": tarfile.SYMTYPE,
        "h": tarfile.LNKTYPE,
        "c": tarfile.CHRTYPE,
        "f": tarfile.FIFOTYPE,
        "?": b"Q",
        "S": b"S",
    }
    odd = [member(f"top/{name}", b"", kind, "good.py") for name, kind in kinds.items()]
    members = [member("top/", kind=tarfile.DIRTYPE), *odd, member("top/good.py", b"x")]
    part = Archive(str(write_tar(tmp_path / "top.tar.gz", members)), MOST)
    special = "a special file"
    assert reasons([part]) == {"s": "a link", "h": "a link", "c": special, "f": special, "?": special, "S": special}
    assert texts([part]) == {"good.py": b"x"}


def test_links_in_a_zip_and_unusual_compression_are_dropped(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("top/link")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "top.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
        archive.writestr("top/a.py", b"x" * 500, zipfile.ZIP_DEFLATED)
        archive.writestr("top/b.py", b"x" * 500, zipfile.ZIP_LZMA)
        archive.mkdir("top/folder")
    part = Archive(str(tmp_path / "top.zip"), MOST)
    assert reasons([part]) == {"link": "a link", "b.py": "unusual compression"}
    assert texts([part]) == {"a.py": b"x" * 500}


def test_a_name_that_is_not_utf8_is_dropped(tmp_path: Path) -> None:
    members = [member("top/caf\udce9.py", b"x"), member("top/é.py", b"y")]
    part = Archive(str(write_tar(tmp_path / "top.tar.gz", members, tarfile.GNU_FORMAT)), MOST)
    assert reasons([part]) == {r"caf\xe9.py": "name not UTF-8"}
    assert texts([part]) == {"é.py": b"y"}


def test_a_large_member_is_dropped_in_little_memory(tmp_path: Path) -> None:
    large = b"\0" * 8_000_000
    path = package(tmp_path / "toolz-1.2.0.tar.gz", **{"a.py": b"x" * MOST, "large.py": large, "b.py": b"y"})
    with zipfile.ZipFile(tmp_path / "z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/large.py", large)
    del large
    tracemalloc.start()
    part = Archive(str(path), MOST)
    assert entries([part])[1] == Drop("toolz-1.2.0", "large.py", "read", "over max_bytes", 8_000_000)
    assert list(texts([part])) == ["a.py", "b.py"]
    assert reasons([Archive(str(tmp_path / "z.zip"), MOST)]) == {"top/large.py": "over max_bytes"}
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_bomb_is_left_where_it_shows(tmp_path: Path) -> None:
    path = package(tmp_path / "toolz-1.2.0.tar.gz", **{"a.py": b"x", "bomb": b"\0" * 3_000_000, "b.py": b"y"})
    assert path.stat().st_size < 10_000
    harmless = Archive(str(path), MOST)
    assert list(texts([harmless])) == ["a.py", "b.py"]
    bounded = Archive(str(path), MOST, most_unpacked=1_000_000)
    assert reasons([bounded]) == {"toolz-1.2.0.tar.gz": TOO_MUCH}
    assert list(texts([bounded])) == ["a.py"]


def test_a_zip_is_counted_by_what_comes_out_not_by_what_it_declares(tmp_path: Path) -> None:
    path = tmp_path / "top.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for at in range(20):
            archive.writestr(f"top/{at}.py", bytes([at]) * MOST)
    part = Archive(str(path), MOST, most_unpacked=5 * MOST)
    assert list(texts([part])) == [f"{at}.py" for at in range(5)]
    assert reasons([part]) == {"top.zip": TOO_MUCH}

    declared = (30_000_000).to_bytes(4, "little")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("top/a.py", b"a")
        archive.writestr("top/lie.py", b"\0" * 30_000_000)
    content = path.read_bytes()
    assert content.count(declared) == 2
    path.write_bytes(content.replace(declared, (10).to_bytes(4, "little")))
    tracemalloc.start()
    lying = Archive(str(path), MOST)
    assert texts([lying]) == {"a.py": b"a"}
    assert reasons([lying]) == {"top.zip": "archive is damaged"}
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def raw_header(name: bytes, size: bytes, kind: bytes) -> bytes:
    block = bytearray(name.ljust(124, b"\0") + size.ljust(12, b"\0") + b"0" * 12 + b" " * 8 + kind).ljust(512, b"\0")
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        (raw_header(b"top/b.py", b"-0000000010", b"0"), TOO_MUCH),
        (raw_header(b"top/b.py", b"7777777777777", b"0")[:500], "archive is damaged"),
        (raw_header(b"top/b.py", b"zzz", b"0"), "archive is damaged"),
        (raw_header(b"x", b"%o" % (LONGEST_HEADER + 1), b"x"), TOO_MUCH),
        (raw_header(b"x", b"%o" % 20, b"x") + b"999 path=top/b.py\n".ljust(512, b"\0"), "archive is damaged"),
        (raw_header(b"x", b"%o" % 20, b"x") + b"0 path=top/b.py\n".ljust(512, b"\0"), "archive is damaged"),
        (raw_header(b"x", b"%o" % 11, b"x") + b"11 size=-5\n".ljust(512, b"\0") + raw_header(b"top/b.py", b"1", b"0"), TOO_MUCH),
        (b"not a header".ljust(512, b"\0"), "archive is damaged"),
    ],
    ids=["negative", "short", "no-number", "long-pax", "pax-beyond", "pax-backwards", "pax-negative", "garbage"],
)  # fmt: skip
def test_hostile_headers_cost_the_rest_of_the_archive_and_no_more(tmp_path: Path, headers: bytes, why: str) -> None:
    good = raw_header(b"top/a.py", b"1", b"0") + b"a".ljust(512, b"\0")
    path = tmp_path / "top.tar.gz"
    path.write_bytes(gzip.compress(good + headers + good.replace(b"a.py", b"c.py") + b"\0" * 1024))
    part = Archive(str(path), MOST)
    assert texts([part]) == {"a.py": b"a"}
    assert reasons([part]) == {"top.tar.gz": why}


def test_a_truncated_archive_keeps_what_came_before(tmp_path: Path) -> None:
    rng = random.Random(0)
    files = {f"{at:03}.py": rng.randbytes(900) for at in range(50)}
    path = package(tmp_path / "toolz-1.2.0.tar.gz", **files)
    whole = path.read_bytes()
    kept_before = 51
    for share in (0.99, 0.6, 0.2, 0.0):
        path.write_bytes(whole[: int(len(whole) * share)])
        part = Archive(str(path), MOST)
        kept = texts([part])
        assert reasons([part]) == DAMAGED
        assert kept == dict(list(files.items())[: len(kept)])
        assert len(kept) < kept_before
        kept_before = len(kept)
    assert kept_before == 0


def test_damage_that_only_the_checksum_shows_is_reported(tmp_path: Path) -> None:
    path = package(tmp_path / "toolz-1.2.0.tar.gz", **{"a.py": b"x", "b.py": b"y"})
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    part = Archive(str(path), MOST)
    assert reasons([part]) == DAMAGED
    assert list(texts([part])) == ["a.py", "b.py"]


@pytest.mark.parametrize("content", [b"", b"no archive", gzip.compress(b"", mtime=0), lzma.compress(b"x" * 600)])
def test_what_is_no_archive_is_one_drop(tmp_path: Path, content: bytes) -> None:
    for name in ("a.tar.gz", "a.zip", "a.tar.xz", "a.tar.bz2"):
        (tmp_path / name).write_bytes(content)
        found = reasons([Archive(str(tmp_path / name), MOST)])
        assert set(found.values()) <= {"archive is damaged"}
        assert found


def test_licences_are_found_with_the_folder_they_speak_for(tmp_path: Path) -> None:
    files = {
        "LICENSE": b"top", "src/vendor/COPYING.LESSER": b"lesser", "LICENSES/MIT.txt": b"mit", "docs/licence.rst": b"d\xff",
        "license.py": b"code", "NOTICE": b"n", "src/licenses.json": b"{}", "LICENSE-BIG": b"x" * 2000,
        "toolz.egg-info/PKG-INFO": b"License: GPL-3.0-only\n", "PKG-INFO": METADATA,
    }  # fmt: skip
    part = Archive(str(package(tmp_path / "toolz-1.2.0.tar.gz", **files)), MOST)
    speaking = {"LICENSE", "src/vendor/COPYING.LESSER", "LICENSES/MIT.txt", "docs/licence.rst"}
    metadata = {"PKG-INFO", "toolz.egg-info/PKG-INFO"}
    assert part.licences() == {name: files[name] for name in speaking | metadata}
    assert len(texts([part])) == len(files) - 1  # they are documents as well


def test_more_licence_texts_than_anybody_has_do_not_fill_the_memory(tmp_path: Path) -> None:
    files = {f"{at}/LICENSE": b" " * 1_000_000 for at in range(40)}
    part = Archive(str(package(tmp_path / "toolz-1.2.0.tar.gz", **files)), 1_000_000)
    assert len(part.licences()) == 32
    assert len(list(part.read())) == 40


def test_an_archive_is_walked_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = package(tmp_path / "toolz-1.2.0.tar.gz", **{"LICENSE": b"top", "PKG-INFO": METADATA, "a.py": b"x"})
    opened = []
    unchanged = gzip.GzipFile.__init__

    def counted(*arguments: Any, **options: Any) -> None:
        opened.append(1)
        unchanged(*arguments, **options)

    monkeypatch.setattr(gzip.GzipFile, "__init__", counted)
    part = Archive(str(path), MOST)
    assert (len(part.licences()), len(list(part.read()))) == (2, 3)
    assert len(opened) == 2


def test_a_zip_made_on_windows_is_read_like_any_other(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
        for name in ("top\\folder\\", "top\\a.py", "top\\folder\\b.py", "top\\LICENSE"):
            info = zipfile.ZipInfo("x")
            info.filename = name
            archive.writestr(info, b"" if name.endswith("\\") else b"x")
    part = Archive(str(tmp_path / "w.zip"), MOST)
    assert entries([part]) == [Raw("top", name, b"x") for name in ("a.py", "folder/b.py", "LICENSE")]
    assert part.licences() == {"LICENSE": b"x"}


def test_long_names_and_headers_do_not_add_up_in_memory(tmp_path: Path) -> None:
    def header(record: bytes) -> bytes:
        text = b"%d %s\n" % (900_000, record.ljust(900_000 - 8, b"x"))
        return raw_header(b"x", b"%o" % len(text), b"x") + text + b"\0" * (-len(text) % 512)

    path = tmp_path / "top.tar.gz"
    with gzip.open(path, "wb", 1) as file:
        for at in range(30):
            file.write(header(b"path=%d/" % at) + raw_header(b"a.py", b"0", b"0"))
        for at in range(30):
            file.write(header(b"comment%d=" % at))
        file.write(raw_header(b"last.py", b"0", b"0"))
    part = Archive(str(path), MOST)
    tracemalloc.start()
    assert sum(1 for _ in part.read()) == 31
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()
