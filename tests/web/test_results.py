"""The pages of a benchmark: the grid, one task, one attempt, its tokens; and what a damaged one says."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.agent.trace import append_trace
from etude.bench.trials import Header, Trial, TrialLog
from etude.files import digest_of
from etude.web.reading import Shelf
from etude.web.site import Site
from tests.web.made import NASTY, head, trace

STAGE = ".work/after-0123456789ab"


def attempt(model: str, task: str, number: int, outcome: str, **more: object) -> Trial:
    given = {"model": model, "task": task, "package": task.partition("-")[0], "category": "bug", "generator": "mutation", "style": "terse", "number": number,
             "outcome": outcome, "tokens": {"written": 12}, "turns": 1, "stop": "finished", "trace": f"traces.jsonl#{model}:{task}:{number}", **more}  # fmt: skip
    return Trial.model_validate(given)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    run = head(tmp_path_factory.mktemp("runs") / "run", ("after", "bench"))
    folder = run / STAGE
    folder.mkdir(parents=True)
    outcomes = {
        ("rl", "texttable-1"): "pass fail",
        ("rl", "uritemplate-2"): "fail invalid",
        ("base", "texttable-1"): "fail fail",
        ("base", "uritemplate-2"): "fail pass",
    }
    with TrialLog(folder, Header(integrity={}, harness="1", tasks=digest_of(1), sampling={})) as log:
        for (model, task), words in outcomes.items():
            for number, outcome in enumerate(words.split()):
                log.add(
                    attempt(
                        model,
                        task,
                        number,
                        outcome,
                        why="sandbox: " + NASTY if outcome == "invalid" else "",
                        passed={"fail_to_pass": 1},
                        expected={"fail_to_pass": 2},
                    )
                )
                if outcome != "invalid":
                    append_trace(
                        folder / "traces.jsonl", trace(f"{model}:{task}:{number}", task, f"{model} tries {task}")
                    )
    return Site(Shelf([run]))


def test_the_grid_has_a_mark_for_each_attempt_and_the_report_its_axes(site: Site) -> None:
    page = site.page("run/run/after/index.html")
    row = page.partition("texttable-1</a></td>")[2].partition("</tr>")[0]
    assert row == "<td>texttable</td><td>✓ ✗</td><td>✗ ✗</td>"
    row = page.partition("uritemplate-2</a></td>")[2].partition("</tr>")[0]
    assert row == "<td>uritemplate</td><td>✗ –</td><td>✗ ✓</td>"
    assert all(
        each in page for each in ("Correctness", "Code quality", "Efficiency", "Interaction", "avg@k", "95% interval")
    )
    assert "after" in site.page("run/run/index.html")  # which reads the same trials for something else
    assert site.page("run/run/after/index.html") == page


def test_a_task_shows_its_attempts_beside_each_other(site: Site) -> None:
    page = site.page("run/run/after/task-1.html")
    assert page.count('<article class="card">') == 4
    assert "uritemplate" in page
    assert "invalid: sandbox: &lt;script&gt;" in page
    assert "1 of 2" in page
    assert "rl tries uritemplate-2" in page
    assert "base tries uritemplate-2" in page
    with pytest.raises(KeyError):
        site.page("run/run/after/task-2.html")


def test_an_attempt_is_shown_whole_down_to_its_tokens(site: Site) -> None:
    page = site.page("run/run/after/trial-7.html")
    assert "✓ pass" in page
    assert "base tries uritemplate-2" in page
    assert '<span class="added">+x = 2  # base tries uritemplate-2\n</span>' in page
    assert '<a href="trial-7-1.html"' in page
    tokens = site.page("run/run/after/trial-7-1.html")
    assert "Nothing is learnt from a benchmark" in tokens
    assert "0: this rollout was not trained on" in tokens
    for missing in ("trial-3", "trial-8", "trial-7-99"):
        with pytest.raises(KeyError):
            site.page(f"run/run/after/{missing}.html")


def test_a_damaged_benchmark_is_named(tmp_path: Path) -> None:
    run = head(tmp_path / "run", ("after", "bench"))
    (run / STAGE).mkdir(parents=True)
    site = Site(Shelf([run]))
    assert "no trial has ended" in site.page("run/run/after/index.html")
    (run / STAGE / "trials.jsonl").write_text("{}\n{}\n")
    assert "is no header" in site.page("run/run/after/index.html")
