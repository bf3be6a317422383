"""Words and figures that several pages share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.html import Html, element, figure, table, visible

_MOST_SETTINGS = 200
_MOST_NAME = 60


def short_name(name: str) -> str:
    """Name of a source or a stage for captions and legends; a long one is cut, tables have the whole."""
    return visible(name, _MOST_NAME)


def chart_figure(chart: object, caption: object, *, legend: object = None) -> Html:
    """A chart with its caption. Names in it may break anywhere, so that a narrow window does not scroll."""
    drawn = figure(chart, caption, legend=legend)
    return element("div", drawn, style="overflow-wrap:anywhere;min-width:0")


def settings_table(tree: Mapping[str, Any], *, caption: str) -> Html:
    """Settings as rows of a dotted name and a value."""
    return table(list(flat(tree)), ["setting", "value"], caption=caption, most=_MOST_SETTINGS)


def flat(value: Any, above: str = "") -> Iterator[tuple[str, object]]:
    """`{"a": {"b": 1}}` as (`a.b`, 1); items of lists by their number."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from flat(each, f"{above}.{key}" if above else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield from flat(each, f"{above}[{number}]")
    else:
        yield above, value if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
