"""Self-contained HTML: escaped markup, the frame of a page, tables, charts, tokens. No data access, no network.

Html, escape, element            markup that is safe; every other string is escaped, control characters are visible
page, fragment                   one document with its style and script; the same for a notebook's cell
section, subsection              titled parts; a page lists its sections
facts, figure, table, note       figures with names, charts with captions, rows, a remark
penstock.html.charts             bar_chart, histogram, line_chart, stacked_areas
penstock.html.tokens             token_view
"""

from penstock.html.document import (
    Section,
    facts,
    figure,
    fragment,
    note,
    page,
    section,
    subsection,
    table,
)
from penstock.html.markup import Html, element, escape, shown_number, visible

__all__ = [
    "Html",
    "Section",
    "element",
    "escape",
    "facts",
    "figure",
    "fragment",
    "note",
    "page",
    "section",
    "shown_number",
    "subsection",
    "table",
    "visible",
]
