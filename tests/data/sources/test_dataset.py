from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from etude.errors import UserError
from tests.data.sources.reading import identity, opened, texts
from tests.data.sources.test_table import line, write_parquet
from tests.lineage.refusals import one_line


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub with one dataset; what it was asked for."""
    calls: list[dict[str, Any]] = []

    def deliver(name: str, *, cache_dir: Path, **options: Any) -> str:
        calls.append({"name": name, **options})
        folder = cache_dir / "datasets--some--rows" / "snapshots" / "c0ffee"
        write_parquet(folder / "top.parquet", {"text": ["top"]})
        write_parquet(folder / "data" / "deep" / "more.parquet", {"text": ["more"]})
        (folder / "data" / "rows.jsonl").write_bytes(line(text="row"))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", deliver)
    return calls


def test_a_dataset_is_its_files_at_a_revision(tmp_path: Path, asked: list[dict[str, Any]]) -> None:
    source = opened(tmp_path, dataset="some/rows@v1")
    assert (source.location, source.revision) == ("dataset some/rows", "c0ffee")
    assert texts(source.parts) == {"data/deep/more.parquet#0": b"more", "top.parquet#0": b"top"}
    patterns = ["**/*.parquet", "*.parquet"]
    assert asked == [{"name": "some/rows", "repo_type": "dataset", "revision": "v1", "allow_patterns": patterns}]
    assert texts(opened(tmp_path, dataset="some/rows@v1", files="data/*.jsonl").parts) == {"data/rows.jsonl#0": b"row"}
    with pytest.raises(UserError, match=one_line("some/rows", "no files that match 'x/*.jsonl'")):
        opened(tmp_path, dataset="some/rows@v1", files="x/*.jsonl")


def test_a_dataset_is_known_by_its_revision_which_must_be_given(tmp_path: Path) -> None:
    assert identity(dataset="some/rows@v1") == {"dataset": "some/rows@v1"}
    for name in ("some/rows", "some/rows@"):
        with pytest.raises(UserError, match=one_line("some/rows@COMMIT")):
            identity(dataset=name)
        with pytest.raises(UserError, match=one_line("some/rows@COMMIT")):
            opened(tmp_path, dataset=name)


class Answer:
    """What a server said."""

    status_code, headers, request, text, url = 404, {}, None, "", ""  # type: ignore[var-annotated]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.GatedRepoError, "accept its terms"),
        (errors.RepositoryNotFoundError, "knows no dataset 'some/rows'"),
        (errors.RevisionNotFoundError, "no revision 'v1'"),
        (errors.HfHubHTTPError, "the server burns"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, words: str
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise error("the server\nburns", response=Answer())

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(UserError, match=one_line("some/rows", words)):
        opened(tmp_path, dataset="some/rows@v1")


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=one_line("some/rows", "hub")):
        opened(tmp_path, dataset="some/rows@v1")


def test_a_line_that_breaks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    with pytest.raises(UserError, match=one_line("some/rows", "hub cannot be reached", "`jsonl`")):
        opened(tmp_path, dataset="some/rows@v1")
