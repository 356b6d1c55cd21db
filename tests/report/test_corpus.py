from __future__ import annotations

import base64
import functools
import io
import json
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from etude.data.manifest import Manifest, ShardEntry, SourceEntry
from etude.data.settings import DataSettings
from etude.errors import UserError
from etude.files import write_json
from etude.report import corpus as report
from etude.report.corpus import shown, write_report
from etude.report.page import STYLE, print_parts
from tests.report.parsed import Parsed, parsed_markdown

HOSTILE = (
    "<script>alert(1)</script> | `code` **bold** [link](//x.org) _it_  $x$ &amp; \\| \n# head\r\u202e\x1b[31m\x00 [red]"
)
EXCERPT = "```\n</pre></details><script>alert(2)</script>\n````python\n| a | b |\n~~~\n"


def source(name: str = "toolz", **fields: Any) -> SourceEntry:
    """A source that adds up, whatever drops it is given."""
    drops = fields.pop("drops", {"quality: too short": 3, "duplicates: exact duplicate": 1})
    kept = fields.pop("kept", 6)
    made: dict[str, Any] = {
        "name": name, "domain": "code", "location": f"package {name}==1.0", "revision": "ab12" * 16, "digest": "cd34" * 16,
        "documents_in": kept + sum(drops.values()), "bytes_in": 70_000, "kept": kept, "kept_bytes": 60_000, "drops": drops,
        "dropped_bytes": {reason: 2_500 * count for reason, count in drops.items()}, "scrubbed": {}, "repositories": 4,
        "heldout_repositories": [], "licences": {"BSD-3-Clause": 60_000}, "languages": {"python": 60_000},
        "evidence": {"text-hash": 60_000}, "tokens": {"train": 20_000, "heldout": 0}, "text_bytes": {"train": 50000, "heldout": 10000}, "tokens_in": 23_000, "fim": 0,
    }  # fmt: skip
    return SourceEntry(**(made | fields))


def corpus(*sources: SourceEntry, **fields: Any) -> Manifest:
    settings = DataSettings.model_validate({"source": [{"name": "toolz", "pypi": ["toolz==1.0"]}]})
    made: dict[str, Any] = {
        "etude": "0.1.0", "seed": 0, "length": 2048, "dtype": "uint16", "separator": 0, "vocabulary": 49_152, "tokeniser": "ef56" * 16,
        "exact_fast_tokeniser": True, "shares": {each.name: 1 / len(sources) for each in sources},
        "histogram": {each.domain: [0, 0, 0, 2, 4] for each in sources}, "contamination": 0, "sources": list(sources),
        "shards": [ShardEntry(name="a", source=sources[0].name, domain="code", split="train", rows=10, tokens=20_000, files={"a.npy": "1"})],
        "tools": {"numpy": "2.3.1"}, "settings": settings.model_dump(mode="json"),
    }  # fmt: skip
    return Manifest(**(made | fields))


def realistic() -> Manifest:
    """Forty packages, their documentation, a git history and replay from the base."""
    packages = source(
        "packages", location="package " + ", ".join(f"package{number}=={number}.1" for number in range(40)), kept=18_204,
        drops={"duplicates: near-duplicate": 1_702, "duplicates: exact duplicate": 911, "generated: vendored": 2_210, "language: data file": 4_380,
               "generated: generated": 312, "quality: too short": 1_105, "quality: repeated lines": 61, "licence: licence unknown": 402,
               "licence: licence not allowed: LGPL-2.1-or-later": 377, "decode: binary": 3_120, "decode: empty": 290,
               "read: over 1,000,000 bytes": 44, "read: a link": 9, "contamination: shares code with benchmark tasks": 3},
        bytes_in=412_345_678, kept_bytes=188_000_000, tokens={"train": 51_203_411, "heldout": 1_110_201}, tokens_in=114_000_000,
        licences={"BSD-3-Clause": 90_000_000, "MIT": 51_000_000, "Apache-2.0": 30_000_000, "PSF-2.0": 9_000_000, "Apache-2.0 OR BSD-2-Clause": 6_000_000,
                  "Unlicense": 1_900_000, "0BSD": 100_000},
        evidence={"text-hash": 150_000_000, "classifier": 30_000_000, "metadata": 5_000_000, "spdx-tag": 3_000_000},
        languages={"python": 150_000_000, "c": 20_000_000, "cython": 8_000_000, "markdown": 10_000_000},
        scrubbed={"e-mail": 4_021, "IP address": 77, "secret: github-pat": 2}, repositories=40,
        heldout_repositories=[f"package{number}" for number in range(7, 40, 8)], fim=9_001,
    )  # fmt: skip
    packages.dropped_bytes["language: data file"] = 120_000_000
    packages.dropped_bytes["generated: vendored"] = 40_000_000
    docs = source("handbook", domain="docs", location="folder /srv/handbook", licences={"GPL-2.0-or-later": 4_000_000, "unknown": 100_000},
                  kept=310, kept_bytes=4_100_000, bytes_in=5_000_000, tokens={"train": 1_000_100, "heldout": 50_000}, tokens_in=1_200_000)  # fmt: skip
    commits = source("history", domain="commits", kept=2_000, kept_bytes=9_000_000, bytes_in=9_500_000, drops={"read: no textual changes": 90},
                     licences={"MIT": 9_000_000}, tokens={"train": 2_800_000, "heldout": 100_000}, tokens_in=3_000_000)  # fmt: skip
    replay = source("self", domain="replay", location="sampled from the base, temperature 1.0", revision=None, generated_by="9f" * 32, bytes_in=0,
                    kept=390, kept_bytes=0, drops={}, licences={}, languages={}, evidence={}, tokens={"train": 98_000, "heldout": 2_000}, tokens_in=100_000)  # fmt: skip
    lengths = {"code": [0, 0, 0, 0, 12, 60, 310, 902, 2_200, 4_100, 4_700, 3_300, 1_700, 700, 200, 20], "docs": [0, 0, 0, 0, 0, 4, 20, 60, 90, 80, 56],
               "commits": [0, 0, 0, 0, 10, 200, 500, 600, 400, 200, 90], "replay": [0, 0, 0, 2, 8, 10, 20, 50, 300]}  # fmt: skip
    shares = {"packages": 0.8, "handbook": 0.05, "history": 0.05, "self": 0.1}
    made = corpus(packages, docs, commits, replay, histogram=lengths, shares=shares, contamination=3)
    made.settings["contamination"]["tasks"] = ["tasks.jsonl"]
    return made


def many(count: int = 23) -> Manifest:
    """More sources, licences and domains than fit, with long names and all but one small."""
    made = [
        source(f"a-rather-long-name-of-a-source-number-{number:03d}", domain=f"domain-with-a-long-name-{number % 12}",
               licences={f"LicenseRef-somebody-wrote-their-own-{number}": 60_000 * (number + 1)}, kept_bytes=60_000 * (number + 1),
               drops={f"{step}: reason {number}": 2 for step in report.STEPS}, bytes_in=200_000 * (number + 1),
               tokens={"train": 20_000 + 3_123_456 * (number == 3), "heldout": 1_000})
        for number in range(count)
    ]  # fmt: skip
    return corpus(*made, histogram={each.domain: [0, *(number * 7 for number in range(20))] for each in made})


def hostile() -> Manifest:
    return corpus(
        source(HOSTILE, domain=f"d {HOSTILE}", location=HOSTILE * 3, revision=HOSTILE, digest=HOSTILE, drops={f"quality: {HOSTILE}": 2, HOSTILE: 1, "": 1},
               scrubbed={HOSTILE: 1}, licences={HOSTILE: 50_000, "\u8a31\u53ef": 9_000, "$\\frac$": 1_000}, languages={HOSTILE: 60_000}, evidence={HOSTILE: 60_000}, heldout_repositories=[HOSTILE]),
        tools={HOSTILE: HOSTILE}, contamination=1, settings={"contamination": {"tasks": [HOSTILE]}, "x": EXCERPT},
    )  # fmt: skip


def sample(step: str = "quality", reason: str = "too short", **fields: Any) -> dict[str, Any]:
    return {
        "repository": "toolz-1.0",
        "path": "a.py",
        "step": step,
        "reason": reason,
        "size": 1_234,
        "excerpt": "x = 1\n",
    } | fields


def save(
    folder: Path,
    manifest: Manifest,
    samples: list[dict[str, Any]] | None = None,
    hits: list[dict[str, Any]] | None = None,
) -> Path:
    folder.mkdir(exist_ok=True)
    write_json(folder / "manifest.json", manifest.model_dump(mode="json"))
    (folder / "samples.json").write_text(json.dumps(samples or []))
    (folder / "contamination.jsonl").write_text("".join(json.dumps(hit) + "\n" for hit in hits or []))
    return folder


def both(folder: Path, *of: Any) -> tuple[str, str, Parsed, Parsed]:
    write_report(save(folder, *of), folder / "out")
    text, page = ((folder / "out" / name).read_text(encoding="utf-8") for name in ("report.md", "report.html"))
    return text, page, parsed_markdown(text)[0], Parsed(page)


HIT = {
    "repository": "toolz-1.0",
    "path": "b.py",
    "tasks": ["HumanEval/7"],
    "runs": 12,
    "words": ["def f ( x ) :", "return x"],
}
CASES = {
    "realistic": (realistic(), [sample(), sample(path="b.py"), sample("decode", "binary", excerpt="")], [HIT] * 20),
    "tiny": (corpus(source(drops={}, kept=1)), [], []),
    "many": (many(), [], []),
    "hostile": (hostile(), [sample(reason=HOSTILE, path=HOSTILE, excerpt=EXCERPT + HOSTILE)], [HIT | {"path": HOSTILE, "tasks": [HOSTILE], "words": [HOSTILE]}]),
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, str, Parsed, Parsed, Path]]:
    """Give the report of a case, written once: drawing takes seconds."""

    @functools.cache
    def report_of(case: str) -> tuple[str, str, Parsed, Parsed, Path]:
        folder = tmp_path_factory.mktemp(case)
        return *both(folder, *CASES[case]), folder / "out"

    return report_of


Written = Callable[[str], tuple[str, str, Parsed, Parsed, Path]]


@pytest.mark.parametrize("case", CASES)
def test_both_forms_hold_the_same_tables_and_excerpts(case: str, written: Written) -> None:
    text, _, from_markdown, from_html, _ = written(case)
    assert from_markdown.tables == [[[cell.strip() for cell in row] for row in table] for table in from_html.tables]
    assert from_markdown.code == [code.removeprefix("\n") + "\n" for code in from_html.code]
    assert all(len({len(row) for row in table}) == 1 for table in from_html.tables)
    headings = re.findall("^## (.*)", text, re.MULTILINE)
    assert len(headings) == 13
    assert from_html.tags["h2"] == 13
    assert all(heading in from_html.text for heading in headings)


@pytest.mark.parametrize("case", CASES)
def test_the_page_is_closed_off_from_the_world(case: str, written: Written) -> None:
    _, page, from_markdown, from_html, out = written(case)
    allowed = set(
        re.findall(
            r"\w+",
            "html head meta title style body main h1 h2 p div table thead tbody tr th td figure img details summary pre",
        )
    )
    assert set(from_html.tags) <= allowed
    assert set(from_markdown.tags) <= allowed | {"h3", "code"}
    assert {name for name, _ in from_html.attributes} <= {
        "lang",
        "charset",
        "name",
        "content",
        "class",
        "tabindex",
        "alt",
        "src",
    }
    assert {name for name, _ in from_markdown.attributes} <= {"style"}  # markdown-it aligns by it
    (picture,) = (value for name, value in from_html.attributes if name == "src")
    assert picture is not None
    assert base64.b64decode(picture.removeprefix("data:image/png;base64,")) == (out / "report.png").read_bytes()
    assert "\u202e" not in page
    assert not re.search(r"https?://|@import|url\(", page)


def test_names_are_shown_as_they_are(written: Written) -> None:
    _, _, from_markdown, from_html, _ = written("hostile")
    spelt = (
        HOSTILE.replace("\n", "\\n")
        .replace("\r", "\\r")
        .replace("\u202e", "\\u202e")
        .replace("\x1b", "\\x1b")
        .replace("\x00", "\\x00")
    )
    cells = [cell for table in from_markdown.tables for row in table for cell in row]
    assert cells.count(spelt) >= 10
    assert cells.count(f"toolz-1.0/{spelt}"[:119] + "…") + cells.count(f"toolz-1.0/{spelt}") == 1
    assert EXCERPT.rstrip("\n") in from_html.code[0]


def test_a_name_that_is_not_unicode_can_be_written(tmp_path: Path) -> None:
    text, _, _, _ = both(tmp_path, corpus(source()), [sample(path="\udcff.py", excerpt="\ud800")])
    assert "toolz-1.0/\\\\udcff.py" in text


def test_the_numbers_are_those_of_the_manifest(written: Written) -> None:
    text, page, _, parsed, _ = written("realistic")
    rows = {tuple(row) for table in parsed.tables for row in table}
    drops = 1_702 + 911 + 2_210 + 4_380 + 312 + 1_105 + 61 + 402 + 377 + 3_120 + 290 + 44 + 9 + 3 + 4 + 90
    kept = 18_204 + 310 + 2_000 + 390
    assert ("documents", f"{drops + kept:,}", f"{kept:,}", f"{drops:,}") in rows
    assert f"{kept:,} documents kept + {drops:,} left out = {drops + kept:,}, all that came in." in page
    assert ("tokens", "about 118,300,000", "56,363,712", "") in rows
    assert ("packages", "33,130", "18,204", "188.00", "51,203,411", "1,110,201", "80.0%") in rows
    assert (
        "self",
        "replay",
        "sampled from the base, temperature 1.0",
        "–",
        "cd34cd34cd34",
        "model 9f9f9f9f9f9f",
    ) in rows
    assert ("MIT", "60.00", "29.8%", "packages, history", "copies keep the notices and the licence text") in rows
    assert ("Unlicense", "1.90", "0.9%", "packages", "none") in rows
    assert ("32 to 63", "60", "4", "200", "10") in rows
    assert ("language", "data file", "4,380", "120.00") in rows
    assert ("packages", "near-duplicate", "1,702", "5.1%", "4.25") in rows
    assert ("toolz-1.0/b.py", "HumanEval/7", "12", "def f ( x ) : … return x") in rows
    assert ("packages", "40", "1,110,201", "2.1%", "package7, package15, package23, package31, package39") in rows
    assert ("handbook", "4", "50,000", "4.8%", "single documents, by a hash of their names") in rows
    assert ("e-mail", "4,021") in rows
    assert "### quality: too short\n\ntoolz-1.0/a.py, 1,234 bytes\n\n```\nx = 1\n\n```" in text


def test_counts_that_do_not_add_up_are_not_hidden(tmp_path: Path) -> None:
    text, _, _, _ = both(tmp_path, corpus(source(documents_in=11)))
    assert "6 documents kept + 4 left out = 10, but 11 came in: THE COUNTS ARE WRONG." in text


def test_what_is_too_much_for_a_page_is_added_up(tmp_path: Path) -> None:
    licences = {f"licence not allowed: X-{number:02d}": number + 1 for number in range(30)}
    manifest = corpus(source(drops={f"licence: {name}": count for name, count in licences.items()}))
    samples = [
        sample("licence", f"licence not allowed: X-{number:02d}", path=str(n)) for number in range(30) for n in range(5)
    ]
    text, _, _, parsed = both(tmp_path, manifest, samples)
    rows = [row for table in parsed.tables for row in table if row[0] == "licence" and row[1] != "MB"]
    assert len(rows) == 21
    assert rows[0] == ["licence", "licence not allowed: X-29", "30", "0.07"]
    assert rows[-1] == ["licence", "10 others", "55", "0.14"]
    assert text.count("### licence: ") == 20
    assert text.count("toolz-1.0/") == 20 * 3


def test_the_same_corpus_gives_the_same_files(tmp_path: Path, written: Written) -> None:
    both(tmp_path, *CASES["realistic"])
    one, other = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (tmp_path / "out", written("realistic")[4])
    )
    assert one == other
    assert sorted(one) == ["report.html", "report.md", "report.png"]


@pytest.mark.parametrize("case", CASES)
def test_the_picture_is_a_plain_png(case: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    report.draw(CASES[case][0], tmp_path / "it.png")
    content = (tmp_path / "it.png").read_bytes()
    kinds, place = [], 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        kinds.append(content[place + 4 : place + 8])
        place += length + 12
    assert set(kinds) == {b"IHDR", b"pHYs", b"IDAT", b"IEND"}, "neither date nor software"
    assert struct.unpack(">II", content[16:24])[0] == 1800
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("manifest", [*(case[0] for case in CASES.values()), many(15), many(1)])
def test_nothing_in_the_picture_overlaps(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []

    @contextmanager
    def drawing(_: Path, wide: float, high: float) -> Iterator[Figure]:
        with mpl.rc_context(STYLE):
            figures.append(Figure(figsize=(wide, high), layout="constrained"))
            yield figures[0]

    monkeypatch.setattr("etude.report.page.drawing", drawing)
    report.draw(manifest, Path("nowhere"))
    (figure,) = figures
    with mpl.rc_context(STYLE):
        FigureCanvasAgg(figure).draw()
        words = [text for text in figure.findobj(mpl.text.Text) if text.get_text() and text.get_visible()]
        boxes = [(text.get_text(), text.get_window_extent()) for text in words]
        boxes = [(text, box) for text, box in boxes if box.x1 > 0 or box.y1 > 0]
    for (one, here), (other, there) in combinations(boxes, 2):
        wide, high = min(here.x1, there.x1) - max(here.x0, there.x0), min(here.y1, there.y1) - max(here.y0, there.y0)
        assert min(wide, high) < 1, f"{one!r} lies over {other!r}"
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for _, box in boxes)


def test_the_funnel_begins_with_all_bytes_and_ends_with_those_kept() -> None:
    left, gone = report._funnel(corpus(source()))
    assert list(left) == ["quality", "duplicates", "kept"]
    assert left == {"quality": 62_500, "duplicates": 60_000, "kept": 60_000}
    assert gone == {"quality": 7_500, "duplicates": 2_500, "kept": 0}


def test_steps_stand_in_their_order_and_nothing_is_lost() -> None:
    drops = {"duplicates: a": 9, "mystery: b": 2, "read: c: d": 1, "licence: e": 5, "licence: f": 7}
    found = report.dropped(corpus(source(drops=drops), source("other", drops=drops)), "drops")
    assert found == {"read": {"c: d": 2}, "licence": {"f": 14, "e": 10}, "duplicates": {"a": 18}, "mystery": {"b": 4}}
    assert list(found) == ["read", "licence", "duplicates", "mystery"]


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 99)), st.integers(1, 5))
def test_adding_up_the_rest_keeps_the_sum(counts: dict[str, int], most: int) -> None:
    found = report.largest(counts, most)
    assert sum(found.values()) == sum(counts.values())
    assert len(found) == min(len(counts), most + 1)


@pytest.mark.parametrize(
    ("licence", "words"),
    [("MIT", "copies keep"), ("CC0-1.0", "none"), ("0BSD OR GPL-3.0-only", "none"), ("CC0-1.0 AND MIT", "copies keep"), ("MIT AND GPL-3.0-or-later", "copies, and what is made"),
     ("MPL-2.0 OR MIT", "copies keep"), ("unknown", "not known"), ("LicenseRef-proprietary", "none that we know"), ("no ( licence", "none that we know")],
)  # fmt: skip
def test_duties(licence: str, words: str) -> None:
    assert report.duty(licence).startswith(words)


def test_without_tasks_the_page_says_that_nothing_was_looked_for(tmp_path: Path) -> None:
    text, _, _, _ = both(tmp_path, corpus(source()))
    assert "The recipe names no tasks, so none were looked for." in text


def test_long_lists_of_held_out_repositories_are_cut() -> None:
    names = [f"r{number:03d}" for number in range(100)]
    assert report._held_names(source(heldout_repositories=names)).endswith("r018, r019 and 80 more, see manifest.json")
    assert report._held_names(source(heldout_repositories=names[:21])).endswith("r019 and 1 more, see manifest.json")
    assert report._held_names(source(heldout_repositories=names[:20])).endswith("r018, r019")
    assert report._held_names(source()) == "nothing"


def test_the_terminal_shows_each_source(tmp_path: Path) -> None:
    out = io.StringIO()
    print_parts(Console(file=out, width=100), shown(save(tmp_path, realistic()), tmp_path))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "packages 33,130 → 18,204 188.00 51,203,411 80.0% 4,380 language: data file" in lines
    assert "+ 1,110,201 3,120 decode: binary" in lines
    assert "self 390 → 390 0.00 98,000 10.0% nothing" in lines
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"


def test_the_terminal_is_not_steered_by_names(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=400, force_terminal=True, color_system=None)
    print_parts(console, shown(save(tmp_path, hostile()), tmp_path))
    assert HOSTILE.split("\n", maxsplit=1)[0] in out.getvalue()
    assert "[red]" in out.getvalue()
    assert not {"\x1b", "\u202e", "\r", "\x00"} & set(re.sub("\x1b\\[[0-9;]*m", "", out.getvalue()))


@pytest.mark.parametrize("name", ["manifest.json", "samples.json", "contamination.jsonl"])
def test_a_corpus_with_a_file_missing_or_broken_is_refused(name: str, tmp_path: Path) -> None:
    save(tmp_path, realistic())
    for fault in (lambda: (tmp_path / name).write_text("{"), (tmp_path / name).unlink):
        fault()
        with pytest.raises(UserError) as error:
            write_report(tmp_path, tmp_path / "out")
        assert "\n" not in str(error.value)
        assert str(tmp_path) in str(error.value)
    assert not (tmp_path / "out").exists()
