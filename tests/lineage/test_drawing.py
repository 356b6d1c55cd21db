from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from etude.lineage.tree import BOX, GAP, SIDE, _arrange, _nodes, _way, draw_png, draw_svg
from tests.lineage.families import base, family, flops, merged, stage
from tests.lineage.records import full_record, three_generations

if TYPE_CHECKING:
    from pathlib import Path

    from etude.lineage.record import Lineage
    from etude.lineage.tree import Node


def long_run() -> Lineage:
    """Return eight stages in a row, of which the last was judged by the first."""
    records = [base("one", flops(1e20))]
    for number in range(7):
        records.append(stage(f"stage-{number}", flops(1e15), records[-1], data=full_record().data * number))
    judged = stage("last", flops(1e15), records[-1], full_record().parents[0].model_copy(
        update={"role": "judge", "record": records[0].id, "model_digest": records[0].model_digest}
    ))  # fmt: skip
    return family(judged, *records)


TREES = {"merge": merged()[0], "generations": three_generations()[0], "long": long_run()}


def words(svg: str) -> list[str]:
    """Return the words of a drawing, by reading it as XML."""
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def laid_out(lineage: Lineage) -> dict[str, Node]:
    nodes = _nodes(lineage)
    _arrange(list(nodes.values()))
    return nodes


@pytest.mark.parametrize("name", TREES)
def test_every_record_is_drawn_and_named(name: str) -> None:
    told = words(draw_svg(TREES[name], "my model"))
    assert told[0] == "my model"
    for record in TREES[name].records.values():
        assert any(record.id[:12] in line for line in told)
        assert any(line.startswith(record.origin.name if record.origin else record.stage) for line in told)


def test_the_drawing_says_licences_compute_data_and_who_is_a_stranger() -> None:
    told = words(draw_svg(TREES["merge"], "x"))
    assert any("3.00e+24 FLOP (imputed)" in line for line in told)
    for line in ("somebody-7b", "it carries no record", "licence not seen", "no licence file", "MIT", "teacher: teacher-9b",
                 "of it 4.00e+20 FLOP sampling", "on top of Kimi-K2-Base", "no tokens processed"):  # fmt: skip
        assert line in told
    assert "and 2 more" in words(draw_svg(TREES["long"], "x"))  # of six data


@pytest.mark.parametrize("name", TREES)
def test_no_box_lies_on_another_and_no_line_goes_through_one(name: str) -> None:
    nodes = laid_out(TREES[name])
    boxes = {key: (node.left, node.top, node.left + BOX, node.top + node.height) for key, node in nodes.items()}
    for key, node in nodes.items():
        if node.aside:
            start = node.left + BOX + GAP
            boxes[f"{key} aside"] = (start, node.top, start + SIDE, node.top + node.aside_height)
    found = list(boxes.items())
    for place, (_, one) in enumerate(found):
        for _, other in found[place + 1 :]:
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    for child in nodes.values():
        for key, _ in child.parents:
            points = _way(nodes, nodes[key], child)
            for (x, y), (to_x, to_y) in pairwise(points):
                assert x == to_x or y == to_y
                crossed = [
                    name
                    for name, (left, top, right, bottom) in boxes.items()
                    if left < max(x, to_x) and right > min(x, to_x) and top < max(y, to_y) and bottom > min(y, to_y)
                ]
                assert not crossed


def test_parents_stand_above_their_children_and_a_shared_one_stands_once() -> None:
    lineage, records = merged()
    nodes = laid_out(lineage)
    assert len(nodes) == len(records) + 1  # and the stranger
    for child in nodes.values():
        for key, _ in child.parents:
            assert nodes[key].top + nodes[key].height + GAP <= child.top
    assert {name: nodes[record.id].column for name, record in records.items()} == {
        "mtp": 0, "merge": 0, "rl": 0, "cpt": 0, "base": 0, "sft": 1,
    }  # fmt: skip


def test_a_row_leaves_room_for_the_data_beside_it() -> None:
    first = stage("a", flops(1.0), data=full_record().data * 9)
    above, below = sorted(laid_out(family(stage("b", flops(1.0), first), first)).values(), key=lambda node: node.row)
    assert above.aside_height > above.height
    assert above.top + above.aside_height + GAP <= below.top


def test_the_same_tree_is_the_same_file_and_odd_names_do_not_break_it(tmp_path: Path) -> None:
    root = base("<b>&\"'$x$", flops(1e20))
    lineage = family(stage("s$_1^2$<i>", flops(1e15), root), root)
    title = "a & b < c $5 and $6"
    svg = draw_svg(lineage, title)
    assert svg == draw_svg(lineage, title)
    assert words(svg)[0] == title
    assert "<b>&\"'$x$ (base)" in words(svg)
    assert not re.search(r"<script|<image|href=\"http", svg)
    for name in ("a.png", "b.png"):
        draw_png(lineage, title, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
