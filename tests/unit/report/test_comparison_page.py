"""Pages of two plans and two stores: every difference is marked, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from page_reader import Node, parsed
from penstock.errors import ConfigError
from penstock.html import section
from penstock.report import build_report
from penstock.report.comparison import differences, pair_names
from penstock.sinks import StoreSink


def write_store(path: Path, lengths: list[int]) -> Path:
    ids = [list(range(1, length + 1)) for length in lengths]
    sink = StoreSink(path)
    sink.consume(
        pa.RecordBatch.from_pydict({"input_ids": ids}, schema=pa.schema([("input_ids", pa.list_(pa.uint16()))]))
    )
    sink.flush()
    return path


def write_config(path: Path, store: Path, packing: str = "best_fit", **more: object) -> Path:
    lines = {"loader": "pretrain", "path": store, "chunk_size": 64, "packing": packing, "batch_size": 4, **more}
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return path


def marked(page: Node) -> dict[str, list[str]]:
    """Rows of comparisons that are marked as different, by name."""
    rows = [row for row in page.all("tr") if row.all("td") and row.all("td")[0].all("strong")]
    return {row.all("td")[0].text: [cell.text for cell in row.all("td")[1:]] for row in rows}


def test_two_plans_differ_where_their_settings_and_figures_do(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [int(n) for n in np.random.default_rng(1).integers(1, 60, 200)])
    first, second = write_config(tmp_path / "a.yaml", store), write_config(tmp_path / "b.yaml", store, "null")
    page = parsed(build_report(str(first), str(second)))
    found = marked(page)
    assert found["packing"] == ["best_fit", "None", "different"]
    assert {"steps", "padding", "plan"} <= set(found)
    assert not {"global batch", "tokens", "chunk_size", "path"} & set(found)
    steps = [int(value.replace(",", "")) for value in found["steps"][:2]]
    assert found["steps"][2] == f"{steps[1] / steps[0] - 1:+.1%}"
    titles = [heading.text for heading in page.all("h2")]
    assert titles == ["Plans", "Over steps", "Settings"]
    legends = [item.text for item in page.all("ul", class_="legend")[0].all("li")]
    assert legends == ["a.yaml", "b.yaml"]


def test_a_plan_differs_from_itself_in_nothing(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [9] * 50)
    config = write_config(tmp_path / "a.yaml", store)
    page = parsed(build_report(str(config), str(config)))
    assert marked(page) == {}
    assert "The order of samples is the same." in page.text
    assert "Nothing differs." in page.text


def test_two_mixtures_are_compared_source_by_source(tmp_path: Path) -> None:
    stores = {name: write_store(tmp_path / name, [9] * count) for name, count in (("web", 90), ("<i>", 60))}
    for name, weights in (("a", (3, 1)), ("b", (1, 1))):
        sources = "".join(f'  "{source}": {path}\n' for source, path in stores.items())
        given = "".join(f'  "{source}": {weight}\n' for source, weight in zip(stores, weights))
        (tmp_path / f"{name}.yaml").write_text(
            f"loader: mixed\nsources:\n{sources}weights:\n{given}chunk_size: 16\nbatch_size: 2\n"
        )
    page = parsed(build_report(str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")))
    found = marked(page)
    assert found["weights.web"] == ["3", "1", "-66.7%"]
    captions = [caption.text for caption in page.all("figcaption")]
    assert "<i>: share of samples, in percent" in captions
    assert not page.all("i", class_="") or all(each.attributes.get("class") for each in page.all("i"))


def test_two_stores_differ_in_rows_and_lengths(tmp_path: Path) -> None:
    first, second = write_store(tmp_path / "a", [4] * 30), write_store(tmp_path / "b", [4] * 20 + [40] * 10)
    page = parsed(build_report(str(first), str(second)))
    found = marked(page)
    assert found["tokens"] == ["120", "480", "+300.0%"]
    assert "rows" not in found
    rows = [[cell.text for cell in row.all("td")] for row in page.all("tr")]
    assert ["b", "4", "4", "40", "40", "40"] in rows


def test_two_targets_of_different_kinds_are_refused(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [4] * 30)
    with pytest.raises(ConfigError, match="give two of a kind"):
        build_report(str(store), str(write_config(tmp_path / "a.yaml", store)))


def test_a_fact_that_only_one_side_has_says_which() -> None:
    markup = differences(("a", "b"), {"x": 1, "same": "<b>"}, {"y": None, "z": "t", "same": "<b>"}, caption="c")
    page = parsed(section("t", markup).__html__())
    assert marked(page) == {"x": ["1", "-", "only first"], "z": ["-", "t", "only second"]}
    assert "2 of 4 differ." in page.text


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ("/a/x.yaml", "/a/y.yaml", ("x.yaml", "y.yaml")),
        ("/a/x.yaml", "/b/x.yaml", ("a/x.yaml", "b/x.yaml")),
        ("x", "x", ("x (first)", "x (second)")),
    ],
)
def test_names_of_two_sides_are_short_and_differ(first: str, second: str, names: tuple[str, str]) -> None:
    assert pair_names(first, second) == names
