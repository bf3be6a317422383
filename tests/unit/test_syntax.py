"""Trees of Python source, where another library parses in a thread of its own."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from penstock._syntax import literal, parse


def test_a_parser_that_is_disturbed_by_another_thread_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = ast.parse, list[str]()

    def disturbed(source: str, *given: Any) -> Any:
        calls.append(source)
        if len(calls) < 4:
            raise SystemError("AST constructor recursion depth mismatch (before=33, after=42)")
        return real(source, *given)

    monkeypatch.setattr(ast, "parse", disturbed)
    assert ast.unparse(parse("x  +  1", mode="eval")) == "x + 1"
    assert len(calls) == 4
    with pytest.raises(SyntaxError):
        parse("x +")
    assert len(calls) == 5
    assert literal("  {'a': [1, -2.5]}") == {"a": [1, -2.5]}
    with pytest.raises(ValueError, match="malformed"):
        literal("open('a')")


def test_a_parser_that_always_fails_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise SystemError("broken")

    monkeypatch.setattr(ast, "parse", broken)
    with pytest.raises(SystemError, match="broken"):
        parse("x")
