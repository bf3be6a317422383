"""Drawings as SVG text: boxes, words and arrows in colours that follow the page.

Colours are CSS variables with values for light and dark. In an `<img>` they follow the reader's system; the site puts
pictures into its pages, where they follow its own switch.
"""

from __future__ import annotations

from html import escape

STYLE = """
.picture{--ink:#24292f;--soft:#59636e;--line:#8c959f;--paper:#ffffff;--a:#0b7285;--a-soft:#c5eaf0;--b:#a34e00;
--b-soft:#ffe3c2;--fill:#eef1f4;font-family:ui-sans-serif,system-ui,sans-serif;font-size:13px}
@media (prefers-color-scheme:dark){.picture{--ink:#e6edf3;--soft:#a4adb8;--line:#7d8590;--paper:#161b22;--a:#66d9e8;
--a-soft:#0b4a56;--b:#ffb86b;--b-soft:#5c3305;--fill:#262c36}}
.picture text{fill:var(--ink)}.picture .soft{fill:var(--soft)}.picture .name{font-family:ui-monospace,monospace;
font-size:12px}.picture .bold{font-weight:600}.picture .a{fill:var(--a-soft);stroke:var(--a)}
.picture .b{fill:var(--b-soft);stroke:var(--b)}.picture .empty{fill:none;stroke:var(--line);stroke-dasharray:3 3}
.picture .plain{fill:var(--fill);stroke:var(--line)}.picture .bar-a{fill:var(--a)}.picture .bar-b{fill:var(--b)}
.picture .bar-soft{fill:var(--line)}.picture .line{fill:none;stroke:var(--line)}.picture .mark{stroke:var(--b);
stroke-width:2}.picture .head{fill:var(--line)}.picture .grid{fill:none;stroke:var(--line);stroke-opacity:0.3}
"""


class Drawing:
    """SVG picture that is put together from boxes, words and arrows."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "plain", tip: str = "") -> None:
        """A rectangle; `tip` is shown when the pointer is on it."""
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        place = f'x="{x:g}" y="{y:g}" width="{max(width, 0):g}" height="{height:g}"'
        self._parts.append(f'<rect class="{kind}" {place} rx="2">{inner}</rect>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Words whose baseline begins, ends or has its middle at a point."""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        """A line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline class="{kind}" points="{path}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """A line through points, with a head at the last."""
        self.line(*points)
        (x0, y0), (x, y) = points[-2:]
        if abs(x - x0) >= abs(y - y0):
            turn = 6 if x < x0 else -6
            corners = [(x, y), (x + turn, y - 4), (x + turn, y + 4)]
        else:
            turn = 6 if y < y0 else -6
            corners = [(x, y), (x - 4, y + turn), (x + 4, y + turn)]
        path = " ".join(f"{left:g},{top:g}" for left, top in corners)
        self._parts.append(f'<polygon class="head" points="{path}"/>')

    def svg(self) -> str:
        """The picture as a file."""
        size = f'viewBox="0 0 {self.width} {self.height}"'
        says = f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
        style = STYLE.strip().replace("\n", "")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" role="img" {size}>'
            f"{says}<style>{style}</style>\n" + "\n".join(self._parts) + "\n</svg>\n"
        )
