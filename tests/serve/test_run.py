"""Where the server listens, who may come in, and which model is meant."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from etude.errors import UserError
from etude.inference.http import OWN_NAMES, bind, gate_for, is_loopback
from etude.models.bases import locate, resolve
from etude.progress import Reporter
from etude.serve.process import read_token


def test_only_this_machine_unless_told_otherwise() -> None:
    assert gate_for("127.0.0.1", None, allow_open=False).hosts == OWN_NAMES
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(UserError, match=r"can be reached by others; give --token-file, or --allow-open"):
            gate_for(host, None, allow_open=False)
        assert gate_for(host, "t" * 16, allow_open=False).token == b"t" * 16
        assert gate_for(host, None, allow_open=True).hosts is None


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(is_loopback(host) for host in ("", "0.0.0.0", "::", "localhost.example.org", "10.0.0.1"))


def test_a_token_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for wrong in ("", "short", "two words of a long token", "é" * 20, "a\nb" * 10):
        file.write_text(wrong)
        with pytest.raises(UserError, match="one word of at least 16 ASCII characters"):
            read_token(file)
    file.write_text("0123456789abcdef\n")
    assert read_token(file) == "0123456789abcdef"
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path)


def test_an_address_that_is_taken_or_none() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UserError, match="cannot listen on 127"):
            bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UserError, match="cannot listen on 203"):
        bind("203.0.113.5", 0)


def test_which_model_is_meant(tmp_path: Path, tiny_base: Path, quiet: Reporter) -> None:
    assert locate("sprout", tmp_path, quiet)[:2] == ("sprout", resolve("sprout").folder)
    name, folder, origin = locate(str(tiny_base), tmp_path, quiet)
    assert (name, folder) == ("tiny", tiny_base)
    assert origin is not None
    run = tmp_path / "mine"
    shutil.copytree(resolve("sprout").folder, run / "cpt" / "model")
    (run / "run.json").write_text(json.dumps({"stages": [{"name": "base"}, {"name": "cpt"}]}))
    assert locate(str(run), tmp_path, quiet) == ("mine", run / "cpt" / "model", None)
    assert locate(str(run / "cpt"), tmp_path, quiet) == ("cpt", run / "cpt" / "model", None)
    (run / "run.json").write_text("{}")
    with pytest.raises(UserError, match="lineage is unknown"):
        locate(str(run), tmp_path, quiet)
