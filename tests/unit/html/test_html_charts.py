"""Charts and tokens: shapes for every value, labels for everybody, whatever the values are."""

from __future__ import annotations

import numpy as np
import pytest

from page_reader import parsed
from penstock.html.charts import (
    Scale,
    bar_chart,
    bin_edges,
    histogram,
    line_chart,
    short_number,
    stacked_areas,
    thinned,
)
from penstock.html.tokens import token_legend, token_view


def test_a_histogram_counts_every_value_once() -> None:
    values = np.random.default_rng(1).integers(0, 5000, 1000)
    for log in (False, True):
        tree = parsed(histogram(values, label="Lengths of rows", unit="tokens", log=log, x_label="tokens"))
        tips = [each.text for each in tree.all("title")]
        assert sum(int(tip.rpartition(": ")[2].replace(",", "")) for tip in tips) == 1000
        assert tree.all("svg")[0].attributes["aria-label"] == "Lengths of rows"


@pytest.mark.parametrize("values", [[0], [7, 7], [0.25, np.nan, np.inf], [1, 10**9], [-3, 4]])
@pytest.mark.parametrize("log", [False, True])
def test_a_histogram_of_few_or_strange_values_is_drawn(values: list[float], log: bool) -> None:
    tree = parsed(histogram(values, label="x", log=log))
    assert tree.all("rect")
    assert "nan" not in tree.all("rect")[0].attributes["x"]  # type: ignore[operator]


def test_bins_of_whole_numbers_are_whole() -> None:
    assert bin_edges(3, 5, 40).tolist() == [3, 4, 5, 6]
    assert bin_edges(1, 100, 4, log=True).tolist() == [1, 3, 10, 32, 101]


def test_charts_without_values_say_so() -> None:
    empty = [
        histogram([], label="x"),
        bar_chart([], label="x"),
        line_chart({}, label="x"),
        stacked_areas([], {}, label="x"),
    ]
    assert all("Nothing to show." in each for each in empty)


def test_bars_have_names_values_and_series() -> None:
    tree = parsed(
        bar_chart([("<b>", [10, 20]), ("c", [0, 5])], label="Two", series=["old", "new"], unit="rows", log=True)
    )
    assert [bar.all("title")[0].text for bar in tree.all("rect")] == [
        *("<b>: 10 rows (old)", "<b>: 20 rows (new)", "c: 0 rows (old)", "c: 5 rows (new)"),
    ]
    assert [each.text for each in tree.all("li")] == ["old", "new"]
    assert "1 more" in bar_chart([("a", 1), ("b", 2)], label="x", most=1)
    shares = parsed(bar_chart([("a", 50.0)], label="x", unit="%", high=100))
    assert shares.all("rect")[0].attributes["width"] == "50.00%"


def test_a_long_line_is_thinned_and_keeps_its_peak() -> None:
    ys = np.ones(100_000)
    ys[54_321] = 9
    xs, kept = thinned(np.arange(100_000.0), ys)
    assert len(xs) < 500
    assert max(kept) == 9
    tree = parsed(line_chart({"": (np.arange(100_000), ys)}, label="x", x_label="step", unit="rows/s"))
    assert len(tree.all("polyline")) == 1
    assert len(tree.all("circle")) <= 60


def test_areas_are_shares_of_the_sum() -> None:
    tree = parsed(stacked_areas([0, 1], {"a": [1, 3], "b": [1, 1]}, label="x", x_label="step", share=True))
    assert [each.text for each in tree.all("title")] == [
        *("a, step 0: 50%", "a, step 1: 75%", "b, step 0: 50%", "b, step 1: 25%"),
    ]


def test_scales_place_values_and_name_round_ones() -> None:
    assert Scale(0, 10)(5) == 0.5
    assert Scale(1, 100, True)(10) == 0.5
    assert Scale(0, 97).ticks() == [0, 20, 40, 60, 80]
    assert Scale(1, 1000, True).ticks() == [1, 10, 100, 1000]
    assert [short_number(each) for each in (12_000, 3.4e6, 0.25, 7)] == ["12k", "3.4M", "0.25", "7"]


def test_tokens_keep_ids_masks_and_parts() -> None:
    pieces, parts = ["<s>", "Hi\n", "", "<b>"], ["template", "content", "content", "thought"]
    tree = parsed(token_view(pieces, [1, 2, 3, 4], [False, True, True, False], parts=parts, label="Row 1"))
    box = tree.all("div", class_="tokens")[0]
    assert box.attributes["data-ids"] == "1 2 3 4"
    assert [each.text for each in box.all("i")] == ["<s>", "Hi\u21b5\n", "\u25ab", "<b>"]
    assert [(run.attributes["data-part"], run.text) for run in box.all("span", class_="trained")] == [
        ("content", "Hi\u21b5\n\u25ab")
    ]
    assert "supervised" in parsed(token_legend()).text
    assert "data-unmasked" not in box.attributes
    plain = parsed(token_view(pieces, [1, 2, 3, 4], label="Row 1"))
    assert "data-unmasked" in plain.all("div", class_="tokens")[0].attributes
    assert "supervised" not in parsed(token_legend(["content"], masked=False)).text


def test_more_tokens_than_fit_are_counted() -> None:
    tree = parsed(token_view(["a"] * 30, list(range(30)), label="Row", most=10, tooltips=True))
    assert len(tree.all("i")) == 10
    assert tree.all("i")[3].attributes["title"] == "id 3"
    assert "20 more tokens" in tree.text
    with pytest.raises(ValueError, match="an id and a mask for each of 2"):
        token_view(["a", "b"], [1], label="x")
