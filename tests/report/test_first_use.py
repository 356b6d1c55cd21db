"""What a first user stumbled over: reports that cannot be told apart, axes that do not compare, Python in the output, help that hides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from etude.progress import counted
from etude.report import benchmark, rl
from etude.report.ending import in_short, write_overview
from tests.bench import fake
from tests.conftest import Etude
from tests.lineage.records import full_record
from tests.report.test_ending import CODE, RL, ended
from tests.rl.runs import write

RULES = fake.HEADER.model_copy(update={"sampling": {"harness": {"turns": 50, "tokens": 65_536}}})


def test_pictures_under_the_same_rules_have_the_same_axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []

    @contextmanager
    def drawing(_: Path, wide: float, high: float, dpi: int = 150) -> Iterator[Figure]:
        figures.append(Figure(figsize=(wide, high)))
        yield figures[-1]

    monkeypatch.setattr(benchmark, "drawing", drawing)
    monkeypatch.setattr(benchmark, "write_page", lambda *_, **__: None)
    axes = []
    for name, skill in (("before", 0.0), ("after", 0.6)):
        figures.clear()
        results = fake.write(tmp_path / name, fake.trials({name: skill}), RULES)
        benchmark.write_report([results], tmp_path / name)
        axes.append([(axis.get_xlim(), axis.get_ylim()) for figure in figures for axis in figure.axes])
    assert axes[0] == axes[1]


def test_a_chart_of_zeros_has_a_plain_axis() -> None:
    for look in ("", "percent", "counts"):
        axis = Figure().subplots()
        axis.plot([1, 2], [0.0, 0.0])
        rl._scale(axis, rl.Panel("nothing", ("nothing",), look))
        assert axis.get_ylim() == (0.0, 1.0)


def test_reports_of_a_run_are_told_apart_and_linked(tmp_path: Path) -> None:
    titles = []
    for stage in ("before", "after"):
        results = fake.write(tmp_path / stage, fake.trials({"model": 0.3}, tasks=1), RULES)
        benchmark.write_report([results], tmp_path / stage, stage=stage)
        page = (tmp_path / stage / "report.html").read_text()
        titles.append(page.split("<title>")[1].split("</title>")[0])
        assert '<a href="../report.html">' in page
    assert titles == [f"{stage}: {benchmark.TITLE}" for stage in ("before", "after")]
    rl.write_report(write(tmp_path / "rl", 3), tmp_path / "rl", "rl")
    assert f"<title>rl: {rl.TITLE}</title>" in (tmp_path / "rl" / "report.html").read_text()
    outputs = full_record().outputs | {"report.html": next(iter(full_record().outputs.values()))}
    stages = [ended("cpt", results={"domains": [CODE]}), ended("rl", RL, outputs=outputs)]
    write_overview(tmp_path, "mine", stages)
    page = (tmp_path / "report.html").read_text()
    assert '<a href="rl/report.html">rl</a>' in page
    assert 'href="cpt/' not in page, "it has no report"
    assert "0.719 → 0.742" in page
    assert "[rl](rl/report.html)" in (tmp_path / "report.md").read_text()


def test_a_stage_in_short_is_what_it_measured_not_its_record() -> None:
    assert in_short(ended("cpt", {"tokens": 120_000}, {"domains": [CODE]})) == (
        "learnt a domain, 120k tokens; code 0.719 → 0.742 +0.023 ±0.003 worse"
    )
    assert in_short(ended("rl", {})) == "", "a record of another version"


@pytest.mark.parametrize(
    ("counts", "words"),
    [({"kept": 3, "too easy": 1200}, "3 kept, 1,200 too easy"), ({}, "none"), ({None: 2}, "2 none"), (1234, "1,234"),
     ({"history": {"kept": 1, "dropped": 2}}, "history (1 kept, 2 dropped)")],
)  # fmt: skip
def test_counts_in_words(counts: object, words: str) -> None:
    assert counted(counts) == words


def test_the_help_of_bench_shows_its_options(etude: Etude) -> None:
    said = etude("bench", "--help").out
    assert all(word in said for word in ("--tasks", "--k", "--concurrency", "compare"))
