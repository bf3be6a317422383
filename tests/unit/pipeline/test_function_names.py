"""How functions are called in messages, reports and checkpoints."""

from __future__ import annotations

import functools
from typing import Any

from penstock.pipeline.functions import Map


def cut(row: dict[str, Any], *, length: int) -> dict[str, Any]:
    return {"text": row["text"][:length]}


def test_a_partial_function_is_told_from_another_by_its_arguments() -> None:
    assert repr(Map(functools.partial(cut, length=5))) == "Map(cut(length=5))"
    assert repr(Map(functools.partial(cut, length=5))) != repr(Map(functools.partial(cut, length=12)))
