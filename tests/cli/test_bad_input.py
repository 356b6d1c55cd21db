"""Everything a user can get wrong ends as one clear line and exit code 2, without a traceback."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.numpy import load_file, save_file

from etude.errors import storage_error
from etude.models import bases
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Etude, Said

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK_SETTINGS = {"window": 32, "stride": 16, "state_tasks": 0, "speed_prompt": 8, "speed_steps": 2, "speed_batch": 2}
QUICK = [word for name, value in QUICK_SETTINGS.items() for word in ("--set", f"compare.{name}={value}")]


def refused(said: Said, *parts: str) -> None:
    assert said.code == 2
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1, said.err
    assert said.err.startswith("error: ")
    for part in parts:
        assert part in said.err


def recipe(folder: Path, base: object = "", on: object = "code", more: str = "") -> Path:
    path = folder / "recipe.toml"
    head = f'base = "{base}"\n' if base else ""
    path.write_text(f'name = "test"\n{head}stages = ["compare"]\n[compare]\non = "{on}"\n{more}')
    return path


@pytest.fixture
def cache(tmp_path: Path) -> list[object]:
    return ["--cache", tmp_path / "cache", "--out", tmp_path / "run"]


def test_missing_recipe(etude: Etude) -> None:
    refused(etude("run", "absent.toml"), "recipe 'absent.toml' does not exist")


def test_malformed_recipe(etude: Etude, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("name = 'x'\nstages = [\n")
    refused(etude("run", path), "bad.toml is not valid TOML: Invalid value")


def test_wrong_type(etude: Etude, tmp_path: Path) -> None:
    refused(
        etude("run", recipe(tmp_path, more='window = "wide"')),
        "recipe.toml:5: compare.window: input should be a valid integer, not 'wide'",
    )


def test_settings_that_contradict(etude: Etude, tmp_path: Path) -> None:
    refused(etude("run", recipe(tmp_path, more="window = 64\nstride = 64")), "stride 64 must be smaller than window 64")


def test_unknown_stage(etude: Etude, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('name = "x"\nstages = ["comparre"]\n')
    refused(etude("run", path), "r.toml:2: unknown stage 'comparre'; did you mean 'compare'?")


def test_unknown_base(etude: Etude, tmp_path: Path, cache: list[object]) -> None:
    refused(
        etude("run", recipe(tmp_path, "smollm2-135"), *cache), "unknown base 'smollm2-135'; did you mean 'smollm2-135m'"
    )
    refused(etude("bases", "sprot"), "unknown base 'sprot'; did you mean 'sprout'")
    refused(etude("compare", "sprot", "--on", tmp_path, *cache), "unknown base 'sprot'")


def test_nothing_to_compare(etude: Etude, tmp_path: Path, code_tree: Path, cache: list[object]) -> None:
    refused(etude("run", recipe(tmp_path, on=code_tree), *cache), "nothing to compare")


def test_empty_and_missing_code_folder(etude: Etude, tmp_path: Path, tiny_base: Path, cache: list[object]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/data.bin").write_bytes(b"\0")
    refused(
        etude("compare", tiny_base, "--on", tmp_path / "empty", *cache), "holds no code to read (1 not source code)"
    )
    refused(etude("compare", tiny_base, "--on", tmp_path / "gone", *cache), "does not exist")


def test_folder_without_a_model(etude: Etude, tmp_path: Path, code_tree: Path, cache: list[object]) -> None:
    (tmp_path / "hollow").mkdir()
    refused(etude("compare", tmp_path / "hollow", "--on", code_tree, *cache), "holds no model: config.json is missing")


def test_truncated_safetensors(etude: Etude, tmp_path: Path, code_tree: Path, cache: list[object]) -> None:
    weights = tiny.save_model(tmp_path / "cut") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(
        etude("compare", tmp_path / "cut", "--on", code_tree, *cache), "model.safetensors is cut off", "fetch it again"
    )
    refused(etude("run", recipe(tmp_path, tmp_path / "cut", code_tree), *cache), "model.safetensors is cut off")


def test_window_longer_than_the_context(etude: Etude, tiny_base: Path, code_tree: Path, cache: list[object]) -> None:
    said = etude("compare", tiny_base, "--on", code_tree, *cache, "--set", "window=4096")
    refused(said, "compare.window = 4096 is longer than the context of tiny (1024)")


def test_wheel_with_the_wrong_hash(
    etude: Etude, tmp_path: Path, code_tree: Path, cache: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = bases.known_bases()["smollm2-135m"]
    assert known.wheel is not None
    other = known.model_copy(update={"wheel": known.wheel.model_copy(update={"sha256": "0" * 64})})
    monkeypatch.setattr(bases, "known_bases", lambda: {"smollm2-135m": other})
    said = etude("run", recipe(tmp_path, "smollm2-135m", code_tree), *cache)
    assert said.code == 2
    assert "is not the expected file: SHA-256 bcc81830d10ce7d9…, expected 0000000000000000…" in said.err
    assert "Traceback" not in said.err
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_hub_model_without_a_hub(etude: Etude, tmp_path: Path, code_tree: Path, cache: list[object]) -> None:
    said = etude("compare", "nobody/nothing", "--on", code_tree, *cache)
    assert said.code == 2
    assert said.err.splitlines()[-1].startswith("error: the hub ")
    assert "Traceback" not in said.err


def test_lineage_of_something_else(etude: Etude, tmp_path: Path) -> None:
    refused(etude("lineage", "show", tmp_path), "holds no lineage.json")
    refused(etude("lineage", "show", tmp_path / "gone"), "does not exist")


def test_status_of_something_else(etude: Etude, tmp_path: Path) -> None:
    refused(etude("status", tmp_path), "is not the folder of a run")


def test_changed_weights_fail_the_check(
    etude: Etude, tmp_path: Path, tiny_base: Path, code_tree: Path, cache: list[object]
) -> None:
    assert etude("run", recipe(tmp_path, tiny_base, code_tree), *cache, "--until", "base").code == 0
    model = tmp_path / "run/base/model"
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    weights.unlink()  # a link to the base's own file, which must stay as it is
    content[-1] ^= 1
    weights.write_bytes(content)
    said = etude("lineage", "show", model, "--verify")
    assert said.code == 2
    assert "model.safetensors is not the file that was recorded" in said.err


def test_usage_errors_are_short(etude: Etude) -> None:
    said = etude("compare")
    assert said.code == 2
    assert "Traceback" not in said.err
    assert etude("no-such-command").code == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 64 kB large."""
    place = tmp_path / "disk"
    place.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=False).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_copy_for_which_there_is_no_space_names_where_it_goes(small_disk: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(200_000))
    with pytest.raises(OSError, match="No space") as full:
        shutil.copyfile(tmp_path / "weights", small_disk / "weights")
    assert str(storage_error(full.value)).startswith(f"cannot use {small_disk}/weights: no space left")


def test_no_space_left(etude: Etude, tmp_path: Path, tiny_base: Path, code_tree: Path, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(32_000))
    words = ["run", recipe(tmp_path, tiny_base, code_tree), "--out", small_disk / "run", "--cache", tmp_path / "cache"]
    said = etude(*words, *QUICK)
    assert said.code == 2
    last = said.err.strip().splitlines()[-1]
    assert last.startswith((f"error: cannot use {small_disk}/run", f"error: cannot use in {small_disk}/run"))
    assert "no space left on the device; free some and run the same command again" in last
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert etude(*words, *QUICK).code == 0


def test_read_only_run_folder(etude: Etude, tmp_path: Path, tiny_base: Path, code_tree: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    said = etude(
        "run",
        recipe(tmp_path, tiny_base, code_tree),
        "--out",
        small_disk / "run",
        "--cache",
        tmp_path / "cache",
        *QUICK,
    )
    refused(said, f"cannot use {small_disk}/run", "the file system is read-only; choose another folder with --out")


def test_files_where_folders_are_needed(etude: Etude, tmp_path: Path, tiny_base: Path, code_tree: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    path = recipe(tmp_path, tiny_base, code_tree)
    refused(
        etude("run", path, "--out", file, "--cache", tmp_path / "c", *QUICK),
        f"cannot use {file}",
        "there is a file where a folder",
    )
    refused(etude("run", path / "x"), "a part of this path is a file")
    refused(
        etude("run", path, "--out", tmp_path / ("x" * 300), "--cache", tmp_path / "c", *QUICK), "the name is too long"
    )


def test_a_folder_with_other_things_in_it_is_left_alone(
    etude: Etude, tmp_path: Path, tiny_base: Path, code_tree: Path
) -> None:
    (code_tree / "compare").mkdir()
    said = etude("run", recipe(tmp_path, tiny_base, code_tree), "--out", code_tree, "--cache", tmp_path / "c", *QUICK)
    refused(said, "is not empty and not a run; choose another folder with --out")
    assert sorted(path.name for path in code_tree.iterdir()) == ["compare", "notes.txt", "package_0", "package_1"]


def test_a_kind_that_is_no_word(etude: Etude, tmp_path: Path) -> None:
    refused(etude("run", recipe(tmp_path, more='kind = ["compare"]')), "unknown stage ['compare']")


def test_a_name_that_is_not_utf_8(etude: Etude, tmp_path: Path, tiny_base: Path) -> None:
    tree = tiny.write_tree(tmp_path / os.fsdecode(b"caf\xe9"))
    said = etude("compare", tiny_base, "--on", tree, "--out", tmp_path / "run", "--cache", tmp_path / "c")
    refused(said, "is not valid UTF-8")


def test_a_run_json_of_something_else(etude: Etude, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"name": "x"}')
    refused(etude("status", tmp_path), "was not written by Etude")


def test_weights_that_have_diverged(etude: Etude, tmp_path: Path, code_tree: Path, cache: list[object]) -> None:
    base = tiny.save_model(tmp_path / "diverged")
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    refused(
        etude("run", recipe(tmp_path, on=code_tree, more=f'bases = ["{base}"]'), *cache, *QUICK),
        "diverged: its probabilities are not finite numbers",
    )


def test_without_git_files_are_walked_and_edits_are_made(
    etude: Etude, tmp_path: Path, tiny_base: Path, code_tree: Path, cache: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    edits = [
        word
        for change in ("state_chars=120", "state_diffs=1", "state_tasks=2")
        for word in ("--set", f"compare.{change}")
    ]
    said = etude("run", recipe(tmp_path, tiny_base, code_tree), *cache, *QUICK, *edits)
    assert said.code == 0, said.err
    assert "2 tasks (0 from git history)" in " ".join(said.out.split())


def test_a_server_is_not_asked_before_the_tasks_are_looked_at(etude: Etude) -> None:
    said = etude("bench", "http://127.0.0.1:9", "--tasks", "absent.jsonl")
    refused(said, "--tasks: 'absent.jsonl' is not a file")


def test_serving_what_is_not_there(etude: Etude, tmp_path: Path) -> None:
    refused(etude("serve", "runs/nope", "--port", 0), "folder 'runs/nope' does not exist")
    refused(etude("serve", "sprout", "--port", 0, "--weights", tmp_path / "nope"), "--weights", "is not a folder")


def test_a_place_where_no_folder_can_be(etude: Etude, tmp_path: Path, tiny_base: Path, code_tree: Path) -> None:
    said = etude("run", recipe(tmp_path, tiny_base, code_tree), "--cache", tmp_path / "cache", "--out", "/proc/x")
    refused(said, "no folder can be made at /proc/x; choose another one with --out")


def test_a_server_says_that_it_loads(etude: Etude, tmp_path: Path) -> None:
    said = etude("serve", tmp_path, "--port", "0")
    assert said.code == 2
    assert said.err.splitlines()[0] == f"loading {tmp_path} …"


def test_sources_of_bases_have_no_private_codes() -> None:
    """P and S stood for first-hand and second-hand, and files were named that no user has."""
    told = [each for base in bases.known_bases().values() for each in base.sources.values()]
    assert len(told) > 100
    assert [
        each for each in told if re.search(r"(^|[ (,])[PS]([ ;.,)/]|$)|docs corpus|\.md §|obligations\.json", each)
    ] == []
