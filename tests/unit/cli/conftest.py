from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; what a run adds to sys.path is forgotten after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def corpus(here: Path) -> Path:
    """Twenty rows: `text` has as many words as the row's number, `age` ten times that."""
    path = here / "corpus.jsonl"
    rows = [{"id": i, "text": " ".join(["Word"] * i), "age": 10 * i} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def penstock() -> Callable[..., Any]:
    """`penstock` with these arguments, in this process."""

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments), prog_name="penstock")

    return call


@pytest.fixture
def module(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a module beside the YAML files; it is forgotten after the test."""

    def write(name: str, code: str) -> None:
        (here / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write
