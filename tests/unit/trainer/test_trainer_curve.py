"""The records of a run, as lines and as a drawing."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.trainer.curve import Curve, draw_page

SVG = "{http://www.w3.org/2000/svg}"


def curve(steps: int) -> Curve:
    made = Curve()
    for step in range(1, steps + 1):
        made.add({"kind": "train", "step": step, "loss": 3.0 / step, "accuracy": 1 - 1 / step})
        if step % 5 == 0:
            made.add({"kind": "val", "step": step, "loss": 3.5 / step, "accuracy": 1 - 1.1 / step})
    return made


def parse(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def lines_of(page: str) -> list[list[tuple[float, float]]]:
    found = parse(page).iter(f"{SVG}polyline")
    return [[tuple(map(float, point.split(","))) for point in each.attrib["points"].split()] for each in found]


@pytest.mark.parametrize("steps", [0, 1, 4, 5, 40])
def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(steps: int) -> None:
    page = draw_page(curve(steps), title="a < b & c", facts={"dataset": "<d>"}, levels={"one of <9>": 0.1})
    assert parse(page).find("head/title").text == "a < b & c"  # type: ignore[union-attr]
    assert not re.search(r"(src|href)=|url\(|@import", page)
    assert len(lines_of(page)) == 2 * ((steps > 0) + (steps >= 5))


def test_points_lie_where_their_numbers_say() -> None:
    train, val, accuracy, _ = lines_of(draw_page(curve(40), title="t", facts={}))
    assert (len(train), len(val)) == (40, 8)
    assert all(left[0] < right[0] and left[1] < right[1] for left, right in pairwise(train))  # y counts down
    assert all(left[1] > right[1] for left, right in pairwise(accuracy))
    for line in (train, val, accuracy):
        assert all(0 <= x <= 860 and 0 <= y <= 300 for x, y in line)
    shared = {round(x, 1) for x, _ in train} & {round(x, 1) for x, _ in val}
    assert len(shared) == 8, "both are drawn over the same steps"


def test_a_long_run_is_drawn_with_few_points_and_keeps_its_shape() -> None:
    train, *_ = lines_of(draw_page(curve(5000), title="t", facts={}))
    assert 400 < len(train) <= 800
    assert train[0][0] < 70
    assert train[-1][0] > 840


def test_every_point_says_its_number_as_the_axis_does() -> None:
    made = Curve()
    for step, kind in ((10, "train"), (20, "train"), (20, "val"), (30, "train")):
        made.add({"kind": kind, "step": step, "loss": 50 / step, "accuracy": step / 64})
    drawings = list(parse(draw_page(made, title="t", facts={})).iter(f"{SVG}svg"))
    told = [[each.text for each in drawing.iter(f"{SVG}title")] for drawing in drawings]
    assert told == [
        ["train, step 10: 5", "train, step 20: 2.5", "train, step 30: 1.667", "val, step 20: 2.5"],
        ["train, step 10: 15.6%", "train, step 20: 31.2%", "train, step 30: 46.9%", "val, step 20: 31.2%"],
    ]
    seen = [each.attrib["fill-opacity"] for each in drawings[0].iter(f"{SVG}g")]
    assert seen == ["0", "1"], "of training the line alone is seen"


def test_numbers_that_cannot_be_drawn_are_left_out() -> None:
    made = curve(3)
    made.add({"kind": "train", "step": 4, "loss": math.nan, "accuracy": None})
    assert len(made.points("train", "loss")) == 3
    parse(draw_page(made, title="t", facts={}))


def test_the_log_grows_line_by_line_and_can_be_put_back(tmp_path: Path) -> None:
    log, made = tmp_path / "log.jsonl", Curve([{"kind": "train", "step": 1, "loss": 2.0}])
    made.write_log(log)
    made.add({"kind": "val", "step": 1, "loss": 1.0}, log)
    assert [json.loads(line) for line in log.read_text().splitlines()] == made.records
    Curve(made.records[:1]).write_log(log)
    assert len(log.read_text().splitlines()) == 1
    assert made.last("val") == {"kind": "val", "step": 1, "loss": 1.0}
    assert made.last("other") is None
