"""The whole build on a planted corpus: what is caught, what stays, and that all of it is accounted for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

import etude
from etude.data import filter_documents
from etude.data.build import Build
from etude.data.loader import Corpus
from etude.data.manifest import Manifest
from etude.data.packing import Shard
from etude.data.settings import DataSettings
from etude.errors import UserError
from etude.jsonl import MetricsLog
from etude.progress import Reporter
from etude.work import Work
from tests import tiny
from tests.data.planted import MIT, TASK, Planted, code, plant

UNSCRUBBED = {"filters": {"scrub": False}}  # the detector takes a second to start
SPROUT = Path(etude.__file__).parent / "models" / "sprout"


@dataclass(frozen=True)
class Built:
    """A finished corpus."""

    folder: Path
    manifest: Manifest

    def documents(self, source: str) -> list[dict[str, Any]]:
        return list(pq.read_table(self.folder / "documents" / f"{source}.parquet").to_pylist())

    def texts(self, source: str) -> dict[tuple[str, ...], str]:
        """Return the text of every document, put together again from the rows of all shards."""
        listed = self.documents(source)
        pieces: dict[int, list[int]] = {}
        for entry in self.manifest.shards:
            if entry.source == source:
                shard = Shard.open(self.folder / "shards", entry.name)
                numbers = np.load(self.folder / "shards" / f"{entry.name}.documents.npy")
                bounds = np.load(self.folder / "shards" / f"{entry.name}.pieces.npy")
                whole = shard.tokens
                for number, begin, end in zip(numbers.tolist(), bounds[:-1], bounds[1:], strict=True):
                    pieces.setdefault(number, []).extend(whole[begin:end].tolist())
        reference = Tokenizer.from_file(str(SPROUT / "tokenizer.json"))
        assert sorted(pieces) == list(range(len(listed)))
        assert all(pieces[number][-1] == self.manifest.separator for number in pieces)
        assert [len(pieces[number]) for number in range(len(listed))] == [row["tokens"] for row in listed]
        decoded = (reference.decode(pieces[number][:-1], skip_special_tokens=False) for number in range(len(listed)))
        return {(row["repository"], *row["paths"]): text for row, text in zip(listed, decoded, strict=True)}


def build(folder: Path, quiet: Reporter, **settings: Any) -> Built:
    with MetricsLog(folder / "metrics.jsonl") as metrics:
        work = Work(folder, metrics, quiet, folder.parent / "cache")
        data = DataSettings.model_validate({"workers": 1, **settings})
        return Built(folder, Build(data, work, seed=3, base=SPROUT).run())


@pytest.fixture(scope="module", autouse=True)
def small_units() -> Iterator[None]:
    """Share the planted corpus out into several units, as a large one would be."""
    before = filter_documents.UNIT_BYTES
    filter_documents.UNIT_BYTES = 40_000
    yield
    filter_documents.UNIT_BYTES = before


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Planted]:
    root = tmp_path_factory.mktemp("planted") / "repositories"
    return root, plant(root)


def planted_settings(root: Path) -> dict[str, Any]:
    tasks = root.parent / "tasks.jsonl"
    tasks.write_text(json.dumps({"id": "intervals", "solution": TASK}) + "\n")
    source = {"name": "planted", "folder": str(root)}
    return {"source": [source], "contamination": {"tasks": [str(tasks)]}, "heldout": 0.2, "samples": 50, "length": 512}


@pytest.fixture(scope="module")
def built(repositories: tuple[Path, Planted], tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("corpus") / "one"
    return build(folder, Reporter(quiet=True), **planted_settings(repositories[0]))


def drops(built: Built) -> dict[str, str]:
    samples = json.loads((built.folder / "samples.json").read_text())
    return {f"{drop['repository']}/{drop['path']}": drop["step"] for drop in samples}


def test_everything_planted_is_caught(built: Built, repositories: tuple[Path, Planted]) -> None:
    found = drops(built)
    assert {path: found.get(path) for path in repositories[1].caught} == repositories[1].caught


def test_clean_look_alikes_stay(built: Built, repositories: tuple[Path, Planted]) -> None:
    kept = {f"{row['repository']}/{path}" for row in built.documents("planted") for path in row["paths"]}
    assert sorted(set(repositories[1].clean) - kept) == []
    assert not kept & set(repositories[1].caught)


def test_secrets_are_gone_and_counted(built: Built, repositories: tuple[Path, Planted]) -> None:
    together = "\n".join(built.texts("planted").values())
    for secret in repositories[1].secrets:
        assert secret not in together
    assert sum(built.manifest.sources[0].scrubbed.values()) == 2
    samples = (built.folder / "samples.json").read_text()
    assert "library.py" in samples
    assert not [secret for secret in repositories[1].secrets if secret in samples]
    assert "someone@example.com" in together
    assert "4f3a9c" * 6 in together


def test_every_file_is_accounted_for(built: Built, repositories: tuple[Path, Planted]) -> None:
    source = built.manifest.sources[0]
    files = [path for path in repositories[0].rglob("*") if path.is_file()]
    assert source.documents_in == len(files)
    assert source.bytes_in == sum(path.stat().st_size for path in files)
    assert source.kept + sum(source.drops.values()) == len(files)
    assert source.kept == len(built.documents("planted"))


def test_the_hits_are_listed(built: Built) -> None:
    hits = [json.loads(line) for line in (built.folder / "contamination.jsonl").read_text().splitlines()]
    assert [(hit["path"], hit["tasks"]) for hit in hits] == [("solution.py", ["intervals"])]
    assert built.manifest.contamination == 1


def test_kept_files_come_back_from_the_tokens_unchanged(built: Built, repositories: tuple[Path, Planted]) -> None:
    for name, text in built.texts("planted").items():
        original = (repositories[0] / "/".join(name)).read_text()
        assert text == original or name[1] == "settings.py"  # which held secrets


def test_no_repository_is_in_both_splits(built: Built) -> None:
    rows = built.documents("planted")
    held = {row["repository"] for row in rows if row["heldout"]}
    assert held
    assert not held & {row["repository"] for row in rows if not row["heldout"]}
    assert sorted(held) == built.manifest.sources[0].heldout_repositories


def test_splits_are_what_the_loader_reads(built: Built) -> None:
    corpus = Corpus.open(built.folder)
    held = sum(int((batch.documents >= 0).sum()) for batch in corpus.heldout("code"))
    assert (
        held
        == built.manifest.sources[0].tokens["heldout"]
        == sum(row["tokens"] for row in built.documents("planted") if row["heldout"])
    )


def same(one: Built, other: Built) -> bool:
    names = ("manifest.json", "samples.json", "contamination.jsonl", "documents/planted.parquet")
    return all((one.folder / name).read_bytes() == (other.folder / name).read_bytes() for name in names)


def test_building_again_with_more_workers_gives_the_same(
    built: Built, repositories: tuple[Path, Planted], tmp_path: Path, quiet: Reporter
) -> None:
    again = build(tmp_path / "two", quiet, **planted_settings(repositories[0]) | {"workers": 2})
    assert again.manifest.digest == built.manifest.digest
    assert same(built, again)


def test_it_goes_on_after_an_interruption(
    built: Built, repositories: tuple[Path, Planted], tmp_path: Path, quiet: Reporter
) -> None:
    folder = tmp_path / "stopped"
    for step in ("filter/", "shape/"):
        with pytest.raises(RuntimeError), MetricsLog(folder / "metrics.jsonl") as metrics:
            work = Work(folder, metrics, StopsAfter(metrics, step), folder.parent / "cache")
            Build(
                DataSettings.model_validate(planted_settings(repositories[0]) | {"workers": 1}), work, 3, SPROUT
            ).run()
    assert same(built, build(folder, quiet, **planted_settings(repositories[0])))


class StopsAfter(Reporter):
    """Ends the work once a row with this key is written."""

    def __init__(self, metrics: MetricsLog, prefix: str) -> None:
        super().__init__(quiet=True)

        def check() -> None:
            if any(True for _ in metrics.rows(prefix)):
                raise RuntimeError

        self.check_stop = check


@pytest.mark.parametrize(("repositories_in_it", "said"), [(1, 'a single repository, never split; add another, with hold_out = "all"'),
                                                      (2, "no repository is as small as 2% of it; raise data.heldout")])  # fmt: skip
def test_why_nothing_is_held_out_is_said_with_what_helps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], repositories_in_it: int, said: str
) -> None:
    for name in ("one", "two")[:repositories_in_it]:
        (tmp_path / "code" / name).mkdir(parents=True)
        text = "".join(f"def {name}_{number}(value):\n    return value + {number}\n" for number in range(9))
        (tmp_path / "code" / name / "a.py").write_text(text)
    source = {"name": "mine", "folder": str(tmp_path / "code"), "licence": "MIT"}
    build(tmp_path / "corpus", Reporter(), source=[source], length=64, **UNSCRUBBED)
    assert f"data: nothing of 'code' is held out: {said}" in " ".join(
        capsys.readouterr().err.replace("it is ", "").split()
    )


def test_a_policy_that_drops_everything_says_why(
    repositories: tuple[Path, Planted], tmp_path: Path, quiet: Reporter
) -> None:
    settings = planted_settings(repositories[0]) | UNSCRUBBED
    settings["source"][0] |= {"licences": ["Zlib"]}
    with pytest.raises(UserError, match=r"source 'planted': not one of its \d+ documents is left \(\d+ licence"):
        build(tmp_path / "none", quiet, **settings)
    assert not (tmp_path / "none" / "manifest.json").exists()
    assert not (tmp_path / "none" / "shards").exists()


def test_repositories_are_joined_and_middles_moved(
    repositories: tuple[Path, Planted], tmp_path: Path, quiet: Reporter
) -> None:
    settings = (
        planted_settings(repositories[0]) | {"repositories": "path", "fim": {"rate": 1.0}, "length": 4096} | UNSCRUBBED
    )
    joined = build(tmp_path / "joined", quiet, **settings)
    rows = joined.documents("planted")
    assert max(len(row["paths"]) for row in rows) > 3
    files = [path for row in rows for path in row["paths"]]
    assert joined.manifest.sources[0].fim == sum(path.endswith(".py") for path in files)
    text = next(text for name, text in joined.texts("planted").items() if name[0] == "apple")
    assert "### core.py\n<|fim_prefix|>" in text
    assert text.count("<|fim_middle|>") == text.count("<|fim_suffix|>") == text.count(".py\n<|fim_prefix|>")


def test_fim_needs_its_tokens(
    tiny_base: Path, repositories: tuple[Path, Planted], tmp_path: Path, quiet: Reporter
) -> None:
    data = DataSettings.model_validate(
        planted_settings(repositories[0]) | {"fim": {"rate": 0.5}, "separator": "<|end|>"}
    )
    with MetricsLog(tmp_path / "m.jsonl") as metrics, pytest.raises(UserError, match=r"has no token '<.fim_prefix.>'"):
        Build(data, Work(tmp_path, metrics, quiet, tmp_path), 0, tiny_base).run()


def test_replay_from_the_base_itself(tmp_path: Path, quiet: Reporter) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "core.py").write_text(code("core"))
    source = {"name": "one", "folder": str(tmp_path / "code"), "licence": "MIT"}
    replay = {"share": 0.25, "source": "self", "tokens": 32, "length": 8, "batch": 2}
    settings = {"source": [source], "replay": replay, **UNSCRUBBED}
    one = build(tmp_path / "one", quiet, **settings)
    entry = one.manifest.sources[-1]
    assert (entry.name, entry.domain) == ("self", "replay")
    assert entry.generated_by is not None
    assert one.manifest.shares["self"] == pytest.approx(0.25)
    assert 0 < sum(entry.tokens.values()) <= 32 + entry.kept
    shutil.rmtree(tmp_path / "one" / "units", ignore_errors=True)
    again = build(tmp_path / "two", quiet, **settings)
    assert again.manifest.digest == one.manifest.digest


def test_a_tokeniser_of_its_own(repositories: tuple[Path, Planted], tmp_path: Path, quiet: Reporter) -> None:
    settings = planted_settings(repositories[0]) | {"tokeniser": {"source": "train", "vocabulary": 600}} | UNSCRUBBED
    made = build(tmp_path / "made", quiet, **settings)
    assert made.manifest.vocabulary == 600
    reference = Tokenizer.from_file(str(made.folder / "tokeniser" / "tokenizer.json"))
    row = next(batch for batch in Corpus.open(made.folder).heldout("code"))
    assert "def " in reference.decode(row.tokens[0].tolist())


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ({"keep": "prose"}, {"README.md"}),
        ({"keep": "code"}, {"core.py", "tools.py", "deep/inner.py"}),
        ({"include": ["*.py"], "exclude": ["deep/*"]}, {"core.py", "tools.py"}),
    ],
)
def test_only_what_is_asked_for_is_kept(
    tmp_path: Path, quiet: Reporter, choice: dict[str, Any], kept: set[str]
) -> None:
    root = tmp_path / "one"
    (root / "deep").mkdir(parents=True)
    for name in ("core", "tools", "deep/inner"):
        (root / f"{name}.py").write_text(code(name))
    (root / "README.md").write_text("# One\n\n" + "A sentence about what this is for and how it is used.\n" * 2)
    source = {"name": "one", "folder": str(root), "licence": "MIT", **choice}
    made = build(tmp_path / "corpus", quiet, source=[source], heldout=0.0, **UNSCRUBBED)
    assert {path for row in made.documents("one") for path in row["paths"]} == kept
    assert made.manifest.sources[0].documents_in == 4


def test_a_repository_held_out_in_one_domain_is_held_out_in_all(tmp_path: Path, quiet: Reporter) -> None:
    for repository in ("apple", "birch", "cedar"):
        folder = tmp_path / "all" / repository
        folder.mkdir(parents=True)
        (folder / "LICENSE").write_text(MIT)
        (folder / "core.py").write_text(code(repository))
        words = " ".join(f"{repository}{number}" for number in range(400 if repository == "apple" else 40))
        (folder / "notes.md").write_text(f"# Notes\n\n{words}\n".replace(" ", "\n", 30))
    sources = [
        {"name": "code", "keep": "code", "folder": str(tmp_path / "all")},
        {"name": "docs", "keep": "prose", "domain": "docs", "folder": str(tmp_path / "all")},
    ]
    made = build(tmp_path / "corpus", quiet, source=sources, heldout=0.3, **UNSCRUBBED)
    held = [{row["repository"] for row in made.documents(name) if row["heldout"]} for name in ("code", "docs")]
    seen = [{row["repository"] for row in made.documents(name) if not row["heldout"]} for name in ("code", "docs")]
    assert held[0] | held[1]
    assert not (held[0] | held[1]) & (seen[0] | seen[1])


def test_a_source_can_be_held_out_whole(tmp_path: Path, quiet: Reporter) -> None:
    for repository in ("apple", "birch", "cedar"):
        folder = tmp_path / ("exam" if repository == "apple" else "all") / repository
        folder.mkdir(parents=True)
        (folder / "LICENSE").write_text(MIT)
        (folder / "core.py").write_text(code(repository))
    sources: list[dict[str, Any]] = [
        {"name": "exam", "hold_out": "all", "folder": str(tmp_path / "exam")},
        {"name": "code", "folder": str(tmp_path / "all")},
    ]
    made = build(tmp_path / "corpus", quiet, source=sources, heldout=0.0, **UNSCRUBBED)
    assert all(row["heldout"] for row in made.documents("exam"))
    assert not any(row["heldout"] for row in made.documents("code"))
    (tmp_path / "more" / "apple").mkdir(parents=True)
    (tmp_path / "more" / "apple" / "LICENSE").write_text(MIT)
    (tmp_path / "more" / "apple" / "other.py").write_text(code("another"))
    sources.append({"name": "again", "hold_out": False, "folder": str(tmp_path / "more")})
    with pytest.raises(UserError, match="is in a source with hold_out = false and in one with"):
        build(tmp_path / "both", quiet, source=sources, heldout=0.0, **UNSCRUBBED)


def test_a_commit_that_adds_a_task_is_contaminated(tmp_path: Path, quiet: Reporter) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    (root / "LICENSE").write_text(MIT)
    tiny.git(root, "init", "-q")
    for name, text in (("clean", code("clean")), ("solution", TASK)):
        (root / f"{name}.py").write_text(text)
        tiny.git(root, "add", "-A")
        tiny.git(root, "commit", "-qm", f"Add {name}")
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "intervals", "solution": TASK}) + "\n")
    source = {"name": "history", "domain": "commits", "git": str(root), "history": 9}
    tasks = {"tasks": [str(tmp_path / "tasks.jsonl")]}
    made = build(tmp_path / "corpus", quiet, source=[source], contamination=tasks, heldout=0.0, **UNSCRUBBED)
    assert made.manifest.contamination == 1
    assert [text.startswith("commit Add clean") for text in made.texts("history").values()] == [True]
