"""Two stages through the command line: `sft` on demonstrations that it makes itself, and a `release` of what came of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.agent.trace import read_traces
from etude.errors import UserError
from etude.files import sha256_file
from etude.lineage import signing
from etude.lineage.record import load_record
from etude.progress import Reporter
from etude.recipe.recipe import load_recipe
from etude.run.runner import Runner, stage_settings
from etude.run.stages import STAGES, sft
from etude.run.stages.training import TrainingStage
from etude.sandbox import probe
from tests import tiny
from tests.bench import calc_set
from tests.conftest import Etude
from tests.tasks import small

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = """
name = "shown"
base = "{folder}/base"
stages = ["sft", "release"]
[sft]
demos = {{ tasks = "{tasks}", styles = ["told", "shown"], tools = ["edit"] }}
tokens = 4096
length = 2048
batch = 1
heldout = 0.0
evaluations = 0
[release]
name = "Shown 1"
key = "{folder}/key.pem"
"""


def training_set(folder: Path) -> tuple[Path, Path]:
    """Write the set of `calc` for training; return its manifest and the cache."""
    tasks, cache = calc_set.write(folder)
    header, *rows = tasks.read_text().splitlines()
    tasks.write_text("\n".join([json.dumps({**json.loads(header), "split": "train"}), *rows]) + "\n")
    return tasks, cache


def carried_out(recipe: Path, run: Path, cache: Path) -> None:
    Runner(run, cache, Reporter(quiet=True), STAGES).execute(load_recipe([recipe], [], stage_settings()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a key, a training set, and a run of the recipe."""
    small.run(probe.strongest())  # or skip
    folder = tmp_path_factory.mktemp("shown")
    base = tiny.save_model(folder / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    signing.make_key(folder / "key.pem")
    tasks, cache = training_set(folder)
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder, tasks=tasks))
    carried_out(folder / "recipe.toml", folder / "run", cache)
    return folder


def test_the_stage_learns_from_demonstrations_that_it_made(place: Path) -> None:
    sft = place / "run" / "sft"
    traces, _ = read_traces(sft / "demos" / "traces.jsonl")
    made = [trace.made_by["demonstration"] for trace in traces]
    assert [(each["task"], each["style"]) for each in made] == [("calc-1", "shown"), ("calc-2", "told")]
    (use,) = load_record(sft).data
    assert (use.name, use.source) == ("demonstrations of calc.jsonl", "made from file …/calc.jsonl")
    assert use.digest == sha256_file(sft / "demos" / "traces.jsonl")
    assert use.licences == {"MIT": use.bytes - len(traces)}  # without the ends of lines
    learnt = json.loads((sft / "results.json").read_text())
    assert [note.split(",")[0] for note in learnt["notes"] if note.startswith("train")] == ["train: 2 conversations"]


def settings_of(place: Path, **demos: Any) -> Any:
    return STAGES["sft"].settings(demos={"tasks": str(place / "calc.jsonl"), **demos})


def test_demonstrations_are_not_made_again_for_another_length(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def make(_settings: Any, _tokeniser: Any, folder: Path, *_: Any) -> tuple[Path, dict[str, Any]]:
        made.append(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "traces.jsonl").write_text("traces")
        return folder / "traces.jsonl", {}

    learnt: list[str] = []
    for name, value in {
        "make_demos": make,
        "load_tokeniser": lambda _: None,
        "choose_template": lambda *_: None,
    }.items():
        monkeypatch.setattr(sft, name, value)
    monkeypatch.setattr(sft, "tokeniser_digest", lambda _: "digest")
    monkeypatch.setattr(TrainingStage, "run", lambda _self, settings, _job: learnt.extend(settings.traces))
    changes: list[tuple[str, dict[str, Any], int]] = [
        ("a", {}, 0),
        ("b", {"length": 64}, 0),
        ("c", {"each": 2}, 0),
        ("d", {}, 1),
    ]
    for work, change, seed in changes:
        settings = settings_of(place, **{name: value for name, value in change.items() if name == "each"})
        settings = settings.model_copy(update={name: value for name, value in change.items() if name != "each"})
        surroundings = SimpleNamespace(folder=tmp_path / ".work" / work, cache=tmp_path, reporter=Reporter(quiet=True))
        STAGES["sft"].run(settings, SimpleNamespace(model=SimpleNamespace(folder=place), work=surroundings, seed=seed))  # type: ignore[arg-type]
    assert made[0] == made[1]
    assert len({*made}) == 3
    assert learnt == [str(tmp_path / ".work" / work / "demos" / "traces.jsonl") for work, *_ in changes]
    assert all(Path(file).read_text() == "traces" for file in learnt)


def test_demonstrations_count_by_content_and_settings_not_by_path(place: Path, tmp_path: Path) -> None:
    stage = STAGES["sft"]
    before = stage.inputs(settings_of(place), "parent", 0)
    shutil.copy(place / "calc.jsonl", tmp_path / "calc.jsonl")
    assert stage.inputs(settings_of(tmp_path), "parent", 0) == before
    assert stage.inputs(settings_of(place, each=2), "parent", 0) != before
    (tmp_path / "calc.jsonl").write_text((place / "calc.jsonl").read_text() + "\n")
    assert stage.inputs(settings_of(tmp_path), "parent", 0) != before
    plain = stage.inputs(stage.settings(conversations=[str(place / "calc.jsonl")]), "parent", 0)
    assert "demos" not in plain["settings"]  # what was finished before there were any is still what it was


def test_demonstrations_of_a_benchmark_or_of_nothing_are_refused(place: Path, tmp_path: Path) -> None:
    stage = STAGES["sft"]
    stage.check(settings_of(place))
    with pytest.raises(UserError, match=r"sft\.demos\.tasks: .* is not a file"):
        stage.check(settings_of(tmp_path))
    with pytest.raises(UserError, match="has no task whose id begins with 'other'"):
        stage.check(settings_of(place, only="other"))
    text = (place / "calc.jsonl").read_text().replace('"split": "train"', '"split": "bench"')
    (tmp_path / "calc.jsonl").write_text(text)
    with pytest.raises(UserError, match="is a benchmark"):
        stage.check(settings_of(tmp_path))


def test_a_release_verifies_and_its_audit_names_the_base(etude: Etude, place: Path) -> None:
    folder = place / "run" / "release"
    record, out = load_record(folder), folder / "release"
    assert not (folder / "model").exists()
    assert [parent.record for parent in record.parents] == [load_record(place / "run/sft").id]
    summary = record.summary
    assert (summary["name"], summary["base"], summary["licences"]) == ("Shown 1", "base", "unknown text")
    said = etude("verify", out, "--cache", place / "cache")
    assert said.code == 0, said.out
    checks = [line.split()[0] for line in said.out.splitlines()[:-1]]
    left = f", {checks.count('open')} open" if "open" in checks else ""
    assert summary["verified"] == f"{checks.count('ok')} of {len(checks)} checks{left}"
    told = etude("run", place / "recipe.toml", "--out", place / "run", "--cache", place / "cache")
    assert "release: unchanged, kept" in told.err
    for part in (f"Shown 1 in {out}", "derived from: base", f"etude verify {out}", f"etude licences {out}"):
        assert part in told.out


def test_a_release_that_another_run_takes_over_is_whole(etude: Etude, place: Path, tmp_path: Path) -> None:
    said = etude("run", place / "recipe.toml", "--out", tmp_path / "again", "--cache", place / "cache")
    assert "release: reused from" in said.err
    assert etude("verify", tmp_path / "again/release/release", "--cache", place / "cache").code == 0


def test_a_release_made_before_an_interruption_is_not_made_again(place: Path, tmp_path: Path) -> None:
    run = shutil.copytree(place / "run", tmp_path / "run")
    folder = run / "release"
    work = run / ".work" / f"release-{load_record(folder).fingerprint[:12]}"
    folder.rename(work)
    (work / "record.json").unlink()
    signed = (work / "release/model.sig").read_bytes()
    shutil.copytree(place / "cache", tmp_path / "cache", symlinks=True, ignore=shutil.ignore_patterns("stages"))
    carried_out(place / "recipe.toml", run, tmp_path / "cache")
    assert (run / "release/release/model.sig").read_bytes() == signed
    assert load_record(run / "release").sessions == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"product": "nowhere.toml"}, "release.product: 'nowhere.toml' is not a file"),
        ({"licence": "nowhere"}, "release.licence"),
        ({"key": "nowhere.pem"}, "release.key"),
        ({"key": "{here}"}, "is not a private key"),
        ({"product": "{here}"}, "cannot be read as TOML"),
        ({"bases": ["nowhere"]}, "release.bases: 'nowhere' is not a folder"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_done(change: dict[str, Any], told: str) -> None:
    here = {name: __file__ if value == "{here}" else value for name, value in change.items()}
    stage = STAGES["release"]
    with pytest.raises(UserError, match=told):
        stage.check(stage.settings(**here))


def test_data_of_unknown_licence_is_refused_until_it_is_acknowledged(etude: Etude, place: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(4)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = tmp_path / "recipe.toml"
    text = RECIPE.format(folder=place, tasks="")
    recipe.write_text("\n".join(line for line in text.splitlines() if not line.startswith("demos")))
    words = ["run", recipe, "--out", tmp_path / "run", "--cache", place / "cache",
             "--set", f'sft.conversations=["{tmp_path / "chats.jsonl"}"]']  # fmt: skip
    said = etude(*words)
    assert said.code == 2
    assert "release is refused: data of unknown licence went in: chats.jsonl" in " ".join(said.err.split())
    said = etude(*words, "--set", 'release.acknowledge=["unknown-data"]', "--set", 'release.name=""')
    assert said.code == 0, said.err
    assert load_record(tmp_path / "run/release").summary["name"] == "base-sft"
