"""Reader of pages for tests: the elements of a document, as a parser of HTML sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "link", "meta"}


@dataclass
class Node:
    """Element with its attributes, its own text and everything below it."""

    name: str
    attributes: dict[str, str | None]
    children: list[Node | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(each if isinstance(each, str) else each.text for each in self.children)

    def all(self, name: str, **attributes: str) -> list[Node]:
        """Every element below with this name, and these attributes (`class_`: one of its classes)."""
        found = []
        for each in self.children:
            if isinstance(each, Node):
                if each.name == name and all(each._has(key, value) for key, value in attributes.items()):
                    found.append(each)
                found += each.all(name, **attributes)
        return found

    def _has(self, key: str, value: str) -> bool:
        own = self.attributes.get(key.rstrip("_").replace("_", "-")) or ""
        return value in own.split() if key == "class_" else own == value


class PageReader(HTMLParser):
    """Parser that keeps the tree and what is wrong with it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("document", {})
        self.open = [self.root]
        self.problems: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if self.open[-1].name != tag:
            self.problems.append(f"</{tag}> inside of <{self.open[-1].name}>")
            return
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parsed(markup: str) -> Node:
    """The tree of a page; a tag that is not closed, or closed elsewhere, fails the test."""
    reader = PageReader()
    reader.feed(markup)
    reader.close()
    assert not reader.problems, reader.problems
    assert len(reader.open) == 1, f"not closed: {[node.name for node in reader.open[1:]]}"
    return reader.root
