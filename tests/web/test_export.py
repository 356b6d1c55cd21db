from __future__ import annotations

import posixpath
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from etude.cli.main import app as command
from etude.errors import UserError
from etude.files import files_below
from etude.progress import Reporter
from etude.web.export import export_run


def test_every_link_of_an_export_leads_to_a_file_of_it(runs: Path, tmp_path: Path) -> None:
    written, left = export_run(runs / "friendly", tmp_path / "site", 1000, Reporter(quiet=True))
    files = {str(path.relative_to(tmp_path / "site")) for path in files_below(tmp_path / "site")}
    assert (written, left) == (len(files), 0)
    assert {"run/friendly/rl/rollout-5-1-1.html", "static/uplot.LICENSE.txt", "run/friendly/rl/step-12.html"} <= files
    for name in (each for each in files if each.endswith(".html")):
        text = (tmp_path / "site" / name).read_text()
        for address in re.findall(r'(?:href|src)="([^"#]+)"', text):
            assert (
                address == "data:,"
                or posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(address))) in files
            ), (name, address)


def test_no_more_rollouts_are_written_than_asked_for_and_what_is_left_out_is_said(runs: Path, tmp_path: Path) -> None:
    _, left = export_run(runs / "friendly", tmp_path / "site", 5, Reporter(quiet=True))
    names = [path.name for path in files_below(tmp_path / "site")]
    assert sum(name.startswith("rollout-") for name in names) == 5
    assert left > 100
    assert (
        "rollout-0-0.html" not in (tmp_path / "site/run/friendly/rl/group-0.html").read_text()
        or "rollout-0-0.html" in names
    )


def test_the_command_says_what_it_wrote_and_refuses_a_full_folder(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(["web", "export", str(runs / "hostile"), str(tmp_path / "site"), "--rollouts", "2"], standalone_mode=False)
    assert re.fullmatch(
        r"\d+ files in .*site; open .*index\.html; [\d,]+ pages of rollouts are left out, raise --rollouts\n",
        capsys.readouterr().out,
    )
    with pytest.raises(UserError, match="is not empty; choose a new folder"):
        export_run(runs / "hostile", tmp_path / "site", 2, Reporter(quiet=True))
    with pytest.raises(UserError, match="is not the folder of a run"):
        export_run(tmp_path, tmp_path / "new", 2, Reporter(quiet=True))
    with pytest.raises(UserError, match="is no folder; give that of a run"):
        command(["web", str(tmp_path / "nothing")], standalone_mode=False)
