"""A YAML or JSON file as plain values: safe types only, each key once; and assignments that change the values."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from penstock._suggest import check_options
from penstock.errors import ConfigError
from penstock.files.listing import split_suffix

_DATA = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".txt")
"""Formats that no document has, and that may be of any size."""

_MAX_SIZE, _MAX_DEPTH = 1 << 20, 100


def read_document(path: Path, *, such_as: str, name: str | None = None) -> dict[str, Any]:
    """The mapping that the file holds; `such_as` is a line that it could have, for the error if it has none.

    Errors call the file `name`: that of a URL, if `path` is its local copy.
    """
    name = name or str(path)
    if split_suffix(path)[0] in _DATA or path.is_dir():
        raise ConfigError(
            f"{name} is {'a directory' if path.is_dir() else 'a file of data'}, and a YAML or JSON file with keys such "
            f"as '{such_as}' is expected here; write one that names the data"
        )
    tree = _parsed(path.read_bytes(), name)
    if tree is None:
        raise ConfigError(f"{name} is empty; it needs at least '{such_as}'")
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} holds a {type(tree).__name__}, expected keys such as '{such_as}'")
    return tree


def set_value(tree: dict[str, Any], assignment: str, *, known: Collection[str]) -> None:
    """Apply one `a.b.0.c=value` in place. The value is YAML, a number is an index into a list.

    A mapping on the way that is missing is made; the first key must be one of `known`.
    """
    path, equals, text = assignment.partition("=")
    if not path.strip() or not equals:
        raise ConfigError(f"--set: expected a.b=value, got {assignment!r}")
    keys = path.strip().split(".")
    check_options(keys[:1], known, "key", where=f"--set {path}")
    node: Any = tree
    for depth, key in enumerate(keys):
        node, place = _place(node, key, f"--set {path}", ".".join(keys[:depth]))
        if depth == len(keys) - 1:
            node[place] = _parsed(text, f"--set {path}")
            return
        if isinstance(node, dict) and node.get(place) is None:
            node[place] = {}
        node = node[place]


def _place(node: Any, key: str, option: str, above: str) -> tuple[Any, str | int]:
    """The container and the key or index in it."""
    if isinstance(node, dict):
        return node, key
    if not isinstance(node, list):
        raise ConfigError(f"{option}: {above} is {node!r}, which has no keys; set {above} as a whole")
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(f"{option}: {above} is a list of {len(node)}, so {key!r} must be a number below {len(node)}")
    return node, int(key)


def _parsed(text: bytes | str, name: str) -> Any:
    loader = None
    try:
        loader = _UniqueKeys(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, name)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{where}: {error.problem or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML: {error}") from error
    except (
        ValueError,
        OverflowError,
        AttributeError,
    ) as error:  # such as a date without such a day, or a number of 5,000 digits
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{name}: a value cannot be read: {error}; put it into quotes if it is text, such as '2024-13-45'"
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


def _check_size(node: yaml.Node, name: str) -> None:
    """Refuse aliases that stand for much more than the file has: a few lines can ask for gigabytes."""
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        if id(node) in sizes:
            found = sizes[id(node)]
            if found is None:
                raise ConfigError(f"{name}: an alias stands for a value that contains it; write the value out")
            return found
        sizes[id(node)] = None
        if isinstance(node, yaml.MappingNode):
            inside = [part for pair in node.value for part in pair]
        else:
            inside = node.value if isinstance(node, yaml.SequenceNode) else []
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 1
        sizes[id(node)] = total = own + sum(map(size, inside))
        return total

    whole = size(node)
    if whole > _MAX_SIZE:
        raise ConfigError(
            f"{name}: with its aliases written out it would have {whole:,} characters and values, at most "
            f"{_MAX_SIZE:,} are read"
        )


class _UniqueKeys(yaml.SafeLoader):
    """`yaml.safe_load`, except that a key given twice is an error and not the last one."""

    def add_indent(self, column: int) -> bool:
        self._check_depth()
        return bool(super().add_indent(column))

    def fetch_flow_collection_start(self, kind: Any) -> None:
        self._check_depth()
        super().fetch_flow_collection_start(kind)

    def _check_depth(self) -> None:
        if self.flow_level + len(self.indents) > _MAX_DEPTH:
            problem = f"more than {_MAX_DEPTH} levels of lists and keys in each other"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in lines:
                problem = f"the key {key.value!r} occurs twice, first in line {lines[key.value]}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node
