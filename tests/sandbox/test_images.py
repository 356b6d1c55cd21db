"""Images by digest, with an engine that keeps its images in a folder; and for real where PODMAN_IMAGE names one."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.sandbox import images
from etude.sandbox.box import Place
from etude.sandbox.container import ContainerSandbox
from etude.sandbox.image import ImageSandbox
from etude.sandbox.local import checked_name, open_sandbox, wrong_name
from tests.sandbox.backends import program

# An image is a file named after its tag; `there` can be pulled.
ENGINE = """echo "$*" >> {log}
case "$1" in
image) tag=$(echo "$5" | tr / _); [ -f {folder}/$tag ] && cat {folder}/$tag || {{ echo "no such image" >&2; exit 1; }} ;;
pull) [ "$3" = docker.io/there ] && echo aa11 > {folder}/docker.io_there || {{ echo "not found" >&2; exit 1; }} ;;
build) while [ "$1" != -t ]; do shift; done; echo bb22 > {folder}/$(echo "$2" | tr / _) ;;
esac"""


@pytest.fixture
def engine(tmp_path: Path) -> tuple[str, Path]:
    images.digest.cache_clear()
    path = program(tmp_path / "bin", "podman", ENGINE.format(folder=tmp_path, log=tmp_path / "log"))
    return path, tmp_path / "log"


def commands(log: Path) -> list[str]:
    return [line.split()[0] for line in log.read_text().splitlines()]


def test_an_image_is_pulled_once_and_known_by_its_digest(engine: tuple[str, Path]) -> None:
    path, log = engine
    assert images.digest(path, "docker.io/there") == "sha256:aa11"
    assert images.digest(path, "docker.io/there") == "sha256:aa11"
    assert commands(log) == ["image", "pull", "image"]
    with pytest.raises(UserError, match=r"has no image docker\.io/absent and cannot pull it: not found"):
        images.digest(path, "docker.io/absent")


def test_a_dockerfile_is_built_once_for_each_content(engine: tuple[str, Path], tmp_path: Path) -> None:
    path, log = engine
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "Dockerfile").write_text("FROM x")
    assert images.digest(path, str(folder)) == images.digest(path, str(folder / "Dockerfile")) == "sha256:bb22"
    assert commands(log).count("build") == 1
    (folder / "more.txt").write_text("copied into it")
    images.digest.cache_clear()
    images.digest(path, str(folder))
    assert commands(log).count("build") == 2
    with pytest.raises(UserError, match="is no Dockerfile"):
        images.digest(path, "./nowhere")
    assert images.digest(path, "docker.io/absent", folder) == "sha256:bb22"  # where it cannot be pulled


def test_names_are_checked_before_anything_runs() -> None:
    for good in ("auto", "namespaces", "podman:x", "docker:sha256:ab"):
        assert wrong_name(good) == ""
    assert "podman needs an image" in wrong_name("podman")
    assert checked_name("podman") == "podman"  # public benchmarks bring images
    with pytest.raises(ValueError, match="there is no sandbox backend 'podmn:x'; did you mean"):
        checked_name("podmn:x")
    with pytest.raises(UserError, match="podman needs an image"):
        images.settled("podman")


@pytest.fixture(scope="session")
def real() -> str:
    """Return an image for real containers, named by PODMAN_IMAGE; it must have python3, git and bash."""
    image = os.environ.get("PODMAN_IMAGE", "")
    if not image or not shutil.which("podman"):
        pytest.skip("podman is not installed, or PODMAN_IMAGE names no image of it")
    return image


def test_fixed_files_stay_in_a_container(real: str, tmp_path: Path) -> None:
    (tmp_path / "layer/deep/er").mkdir(parents=True)
    (tmp_path / "layer/deep/er/test_a.py").write_text("right")
    (tmp_path / "layer/deep/other.py").write_text("old")

    async def tried() -> None:
        box = await open_sandbox(Place((tmp_path / "layer",), fixed=("deep/er/test_a.py",)), f"podman:{real}")
        try:
            assert isinstance(box, ContainerSandbox)
            assert box.backend.startswith("podman:sha256:")
            for way in ("echo wrong > deep/er/test_a.py", "rm -f deep/er/test_a.py", "mv deep/er deep/x", "mv deep x", "mv /tmp/x deep/er/test_a.py",
                        "chmod u+w deep/er/test_a.py", "rm -rf deep/er", "ln -sfn /tmp deep/er"):  # fmt: skip
                done = await box.exec(f"echo wrong > /tmp/x; {way}; cat deep/er/test_a.py")
                assert done.out == b"right", way
            assert (
                await box.exec("echo new > deep/other.py && echo made > deep/er/made && cat deep/other.py")
            ).out == b"new\n"
            assert {each.path for each in await box.diff()} >= {"deep/other.py", "deep/er/made"}
        finally:
            await box.close()

    asyncio.run(tried())


def test_a_container_of_an_image_is_worked_in(real: str, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/in.txt").write_text("in")

    async def tried() -> None:
        async with ImageSandbox.opened("podman", images.digest("podman", real), root="/opt") as box:
            await box.write("folder/a.txt", b"content")
            assert await box.read("folder/a.txt") == b"content"
            assert [each.path for each in await box.list()] == ["folder"]
            assert (await box.exec("pwd; cat; exit 3", stdin=b"given")).out == b"/opt\ngiven"
            assert (await box.exec("sleep 60", timeout=1)).timed_out
            await box.put(tmp_path / "given", "/put/here")
            assert b"in.txt" in await box.get("/put/here")
            assert await box.get("/nowhere") == b""
            await box.exec("nohup sleep 300 > /dev/null 2>&1 &")
            assert (
                await box.exec("cat /proc/[0-9]*/cmdline | grep -a -q sleep")
            ).rc == 0  # a server may be part of a task
            assert (
                await box.exec(["python3", "-c", "import socket; socket.create_connection(('192.0.2.1', 80), 2)"])
            ).rc != 0

    asyncio.run(tried())
