"""Markup: what is text stays text, whatever it holds."""

from __future__ import annotations

import pytest

from page_reader import parsed
from penstock.html import Html, element, escape, fragment, page, section, shown_number, table, visible

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><script>alert(1)</script>",
    "user\u202egnp.exe",
    "nul \x00 bell \x07 escape \x1b[31m",
    "half \ud800 of a pair",
    "x" * 1_000_000,
    "&lt;b&gt; & ' \"",
    "--></body></html>",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12].encode("ascii", "replace").decode())
def test_hostile_text_is_shown_as_text(text: str) -> None:
    made = page(text, [section(text, element("p", text, title=text), table([[text, 1]], [text, "n"], caption=text))])
    made.encode("utf-8")
    tree = parsed(made)
    assert len(tree.all("script")) == 1
    assert not tree.all("img")
    shown = tree.all("p")[0].text
    assert shown == visible(text)
    assert not set(shown) & set("\x00\x07\x1b\u202e\ud800")
    assert len(made) < 500_000


def test_a_long_text_says_how_much_is_missing() -> None:
    assert visible("a" * 25, 10) == "a" * 10 + " … (15 more characters)"
    assert escape("a" * 25, 10).endswith("(15 more characters)")


def test_control_characters_are_visible_and_lines_stay() -> None:
    assert visible("a\x00\n\tb\u202e\u200b\U000e0041") == "a\\x00\n\tb\\u202e\\u200b\\U000e0041"


def test_markup_is_kept_and_values_are_escaped() -> None:
    made = element(
        "p", Html("<b>x</b>"), " < ", 12345, None, [1, " & "], class_="a", data_key='"', hidden=True, id=None
    )
    assert made == '<p class="a" data-key="&quot;" hidden><b>x</b> &lt; 12,3451 &amp; </p>'


@pytest.mark.parametrize(
    ("name", "attributes"),
    [("p onclick=x", {}), ("p", {"onclick": "x"}), ("a", {"href": " javascript:x"}), ("p", {"a b": "x"})],
)
def test_what_could_run_is_refused(name: str, attributes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        element(name, **attributes)


def test_numbers_have_separators_and_few_digits() -> None:
    assert [shown_number(each) for each in (1234567, 0.123456, 1234.5, 2.0, float("nan"), 1.2e-5)] == [
        *("1,234,567", "0.1235", "1,234", "2", "nan", "1.2e-05"),
    ]


def test_a_page_allows_its_own_script_alone_and_no_request() -> None:
    made = page("t", [section("One", "x"), section("One", "y")], lead="about", script="const a = 1 < 2 && 3;")
    tree = parsed(made)
    policy = next(each.attributes["content"] for each in tree.all("meta", http_equiv="Content-Security-Policy"))
    assert policy is not None
    assert policy.count("'sha256-") == 2
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert tree.all("script")[1].text == "const a = 1 < 2 && 3;"
    assert [each.attributes["id"] for each in tree.all("section")] == ["one", "one-2"]
    assert [each.attributes["href"] for each in tree.all("nav")[0].all("a")] == ["#one", "#one-2"]
    assert "connect-src &#x27;self&#x27;" in page("t", [], connect=True)
    with pytest.raises(ValueError, match="would end there"):
        page("t", [], script="'</script>'")


def test_a_table_has_its_numbers_right_and_says_what_it_leaves_out() -> None:
    tree = parsed(table([["a", 1000, 0.5]] * 5, ["name", "rows", "share"], caption="Rows", most=3))
    assert len(tree.all("tr")) == 4
    assert [cell.text for cell in tree.all("td", class_="number")[:2]] == ["1,000", "0.5"]
    assert "2 more rows are not shown." in tree.text
    assert tree.all("div")[0].attributes["aria-label"] == "Rows"


def test_a_fragment_has_its_style_and_no_script() -> None:
    tree = parsed(fragment(element("p", "<x>")))
    assert tree.all("p")[0].text == "<x>"
    assert tree.all("style")
    assert not tree.all("script")
