"""Hashes of a provider's code: an edited provider makes other batches.

Hashed are the class, its bases outside of penstock, the functions, classes and values of the same file that they name,
and whole files that they import from their own directory (`from .helpers import ...`). Comments, docstrings and
formatting do not count.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import logging
from abc import ABC
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, Generic

import xxhash

from penstock._syntax import parse

logger = logging.getLogger(__name__)

# Fields of the syntax tree without meaning, or not present in every version of Python.
_IGNORED = frozenset({"ctx", "kind", "type_comment", "type_ignores"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def code_of(provider: type) -> dict[str, str]:
    """Hash of each class, function, value and file by name; logs a class without source."""
    found: dict[str, str] = {}
    for kind in provider.__mro__:
        if kind in (object, ABC, Generic) or kind.__module__.partition(".")[0] == "penstock":
            continue
        parts = dict(_parts_of(kind))
        if not parts:
            _warn_unreadable(f"{kind.__module__}.{kind.__qualname__}")
        found |= parts
    return dict(sorted(found.items()))


def _parts_of(kind: type) -> Iterator[tuple[str, str]]:
    """Names and hashes of a class and of what it refers to."""
    for file in sorted({code.co_filename for code in _codes(kind)}):
        tree = _tree(file)
        if tree is None:
            continue
        lines = [code.co_firstlineno for code in _codes(kind) if code.co_filename == file]
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind.__name__]
        within = [node for node in classes if any(node.lineno <= line <= (node.end_lineno or 0) for line in lines)]
        nodes: list[ast.AST] = [*within[:1]]
        if not within:  # made by a call of `type`
            nodes = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS) and _first_line(node) in lines]
        if nodes:
            yield kind.__qualname__, _hash(nodes)
            yield from _referred(nodes, tree, Path(file).parent)


def _referred(nodes: list[ast.AST], tree: ast.Module, home: Path) -> Iterator[tuple[str, str]]:
    """Names and hashes of what the nodes refer to in their own file, transitively."""
    defined: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _names_defined(statement):
            defined.setdefault(name, []).append(statement)
    seen: set[str] = set()
    pending = [name for node in nodes for name in _names_used(node)]
    while pending:
        name = pending.pop()
        if name in seen or name not in defined:
            continue
        seen.add(name)
        for statement in defined[name]:
            if isinstance(statement, ast.ImportFrom) and statement.level:
                yield from _neighbours(statement, home, set())
            elif not isinstance(statement, (ast.Import, ast.ImportFrom)) and statement not in nodes:
                pending += _names_used(statement)
        own = [each for each in defined[name] if not isinstance(each, (ast.Import, ast.ImportFrom))]
        if own and not any(each in nodes for each in own):
            yield name, _hash(own)


def _neighbours(statement: ast.ImportFrom, home: Path, seen: set[Path]) -> Iterator[tuple[str, str]]:
    """Names and hashes of the files of a relative import, transitively."""
    folder = home.joinpath(*[".."] * (statement.level - 1), *(statement.module or "").split("."))
    files = [folder.with_suffix(".py")] if statement.module else []
    files += [folder / f"{alias.name}.py" for alias in statement.names]
    for file in files:
        if file in seen or not file.is_file() or (tree := _tree(str(file))) is None:
            continue
        seen.add(file)
        yield file.name, _hash([tree])
        for inner in ast.walk(tree):
            if isinstance(inner, ast.ImportFrom) and inner.level:
                yield from _neighbours(inner, file.parent, seen)


def _names_defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    return [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _names_used(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)]


def _codes(kind: type) -> list[CodeType]:
    """Code of the functions that a class defines, including properties and static methods."""
    found = []
    for value in vars(kind).values():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        if isinstance(code, CodeType):
            found.append(code)
    return found


def _first_line(node: Any) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([int(node.lineno), *(each.lineno for each in decorators)])


def _tree(file: str) -> ast.Module | None:
    linecache.checkcache(file)  # the file may have been edited
    text = "".join(linecache.getlines(file))
    try:
        return parse(text) if text else None
    except SyntaxError:
        return None


def _hash(nodes: list[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(repr([_plain(node) for node in nodes]).encode("utf-8", "surrogatepass"))


def _plain(value: Any) -> Any:
    """Syntax tree as lists, without docstrings: the same in every version of Python and at every position."""
    if isinstance(value, ast.Constant):
        return [type(value.value).__name__, repr(value.value)]
    if isinstance(value, ast.AST):
        fields = {name: getattr(value, name, None) for name in value._fields if name not in _IGNORED}
        body = fields.get("body")
        if isinstance(value, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                fields["body"] = body[1:]
        return [
            type(value).__name__,
            *([name, _plain(field)] for name, field in fields.items() if field not in (None, [])),
        ]
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


@lru_cache(maxsize=256)
def _warn_unreadable(name: str) -> None:
    """Warn once per process and class."""
    logger.warning("the source code of %s cannot be read, so edits of it are not noticed", name)
