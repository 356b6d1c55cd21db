"""What can be said of the looks without a browser: contrast, size of what is loaded, nothing from elsewhere."""

from __future__ import annotations

import re

import pytest

from etude.web.app import STATIC, static_file

CSS = static_file("web.css").decode()
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part)) for part in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
)
GROUNDS = [f"{way}{step}" for way in ("up", "down") for step in range(1, 5)]
PAIRS = [
    *((ink, ground) for ink in ("ink", "soft", "link") for ground in ("page", "band")), *(("ink", ground) for ground in (*GROUNDS, "flat", "run-ground")),
    ("good", "good-ground"), ("bad", "bad-ground"), ("warn", "warn-ground"), ("warn", "page"), ("focus", "page"), ("link", "run-ground"),
    *((f"c{each}", "page") for each in range(8)), ("cell", "band"),
]  # fmt: skip


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_counted_as_the_guidelines_do() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("ink", "ground"), PAIRS)
def test_every_text_can_be_read_on_its_ground(colours: dict[str, str], ink: str, ground: str) -> None:
    assert contrast(colours[ink], colours[ground]) >= 4.5


def test_every_colour_comes_from_the_list_that_is_checked() -> None:
    assert LIGHT.keys() == DARK.keys()
    rules = re.sub(r":root \{.*?\}", "", CSS, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-f]{3,8}\b", rules) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", rules)) <= LIGHT.keys()


def test_little_is_loaded_and_nothing_from_elsewhere() -> None:
    scripts = sum(len(static_file(name)) for name in STATIC if name.endswith(".js"))
    assert scripts < 150_000
    assert b"Permission is hereby granted" in static_file("uplot.LICENSE.txt")
    for name in STATIC:
        assert not re.search(rb"@import|url\(|(?<!www\.w3\.org/)\bfetch\(['\"]http", static_file(name))
