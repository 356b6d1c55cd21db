"""Benchmark tasks in training data: planted ones are found, idioms are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from etude.data.filters.contamination import index_tasks, read_tasks
from etude.errors import UserError
from tests.data.planted import TASK

FILLER = "\n".join(f"def helper_{number}(value):\n    return value * {number}\n" for number in range(30))


def test_a_planted_task_is_found_and_shown() -> None:
    index = index_tasks([("intervals-1", TASK)], 13, 3)
    hit = index.hit(FILLER + TASK + FILLER)
    assert hit is not None
    assert hit.tasks == ["intervals-1"]
    assert hit.words[0].startswith("def merge_intervals(spans): merged = []")


def test_layout_does_not_hide_it() -> None:
    index = index_tasks([("intervals-1", TASK)], 13, 3)
    spread = TASK.replace("    ", "\t\t").replace("\n", "\n\n")
    hit = index.hit(spread)
    assert hit is not None
    assert hit.runs == len(index.runs)  # every run of the task, though none of the white space is the same


def test_idioms_and_clean_code_are_not_hits() -> None:
    task = 'import argparse\n\nif __name__ == "__main__":\n    main()\n' + TASK
    index = index_tasks([("t", task)], 13, 3)
    assert index.hit('import os\n\nif __name__ == "__main__":\n    main()\n' + FILLER) is None
    assert index.hit(FILLER) is None
    assert index.hit("") is None


def test_a_single_shared_run_is_a_hit_only_if_one_is_enough() -> None:
    words = [f"word{number}" for number in range(40)]
    task, document = " ".join(words), " ".join(["a", "b", *words[:13], "c"])
    assert index_tasks([("t", task)], 13, 1).hit(document) is not None
    assert index_tasks([("t", task)], 13, 2).hit(document) is None
    assert index_tasks([("t", task)], 14, 1).hit(document) is None


def test_no_tasks_no_hits() -> None:
    assert index_tasks([], 13, 1).hit(TASK) is None


def test_tasks_are_read_from_jsonl_and_text(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "one", "nested": {"patch": [TASK]}, "n": 3}) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "two.py").write_text(TASK)
    read = read_tasks([tmp_path / "tasks.jsonl", tmp_path / "folder"])
    assert read == [("one", "one"), ("one", TASK), ("two.py", TASK)]


@pytest.mark.parametrize(("name", "content", "says"), [
    ("gone", None, "do not exist"), ("bad.jsonl", b"{no json\n", "bad.jsonl:1 is not JSON"),
    ("bad.txt", b"\xff\xfe\xff", "not UTF-8"), ("empty.jsonl", b"", "hold no text"),
])  # fmt: skip
def test_bad_tasks_are_refused(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_tasks([tmp_path / name])


NOTICE = "# Copyright Somebody\n# " + " ".join(f"clause{number}" for number in range(60)) + "\n"


def test_a_common_notice_is_no_hit() -> None:
    index = index_tasks([("t", NOTICE + TASK)], 13, 3)
    assert index.hit(NOTICE + FILLER) is None
    assert index.hit(NOTICE + FILLER + TASK) is not None


def test_a_task_too_short_for_the_hits_needs_all_it_has() -> None:
    words = [f"word{number}" for number in range(14)]  # two runs of 13
    index = index_tasks([("short", " ".join(words)), ("long", TASK)], 13, 3)
    hit = index.hit(" ".join(["before", *words, "after"]))
    assert hit is not None
    assert hit.tasks == ["short"]
    assert index.hit(" ".join(words[:13])) is None


def test_json_files_are_read_as_json(tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text(json.dumps({"task_id": 7, "code": TASK}, indent=1))
    assert read_tasks([tmp_path / "task.json"]) == [("7", TASK)]


def test_public_benchmarks_are_read_from_their_own_folders(tmp_path: Path) -> None:
    """Solutions and hidden tests are patches: what they add is found without their marks, and Dockerfiles mark nothing."""
    marked = "".join(f"+{line}\n" for line in TASK.splitlines())
    patch = f"diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -0,0 +1,9 @@\n{marked}"
    swebench, harbor, docker = (
        tmp_path / "tasks/org__repo-1",
        tmp_path / "harbor-1",
        "RUN apt-get install -y " + " ".join("abcdefghijklmnop"),
    )
    for path, text in {
        swebench / "task.yaml": "", swebench / "gold.patch": patch, swebench / "Dockerfile": docker,
        swebench / "problem_statement.md": "short", harbor / "task.toml": "", harbor / "solution/solve.py": TASK,
        harbor / "environment/Dockerfile": docker, harbor / "tests/picture.png": "",
    }.items():  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (harbor / "tests/picture.png").write_bytes(b"\xff\xfe\x00")
    texts = read_tasks([tmp_path / "tasks", harbor])
    assert {name for name, _ in texts} == {"org__repo-1", "harbor-1"}
    index = index_tasks(texts[:2], 13, 3)  # the request and the patch of the first
    assert (hit := index.hit(FILLER + TASK)) is not None
    assert hit.tasks == ["org__repo-1"]
    assert index_tasks(texts, 13, 1).hit(docker) is None
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"instance_id": "a", "patch": patch}) + "\n")
    assert index_tasks(read_tasks([rows]), 13, 3).hit(TASK) is not None
