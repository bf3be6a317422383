"""Errors of commands name options of the command line, and following them works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"
QUESTIONS = [{"question": f"what is {number}?", "answer": f"it is {number}"} for number in range(4)]
CHATS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * number}]}
    for number in (1, 2, 40)
]
PAIRS = [{"prompt": "a", "chosen": f"good {number}", "rejected": "bad"} for number in range(3)]


def write(here: Path, rows: list[dict[str, Any]]) -> str:
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "rows.jsonl"


@pytest.mark.parametrize(
    ("rows", "options", "advice", "followed"),
    [
        (
            QUESTIONS,
            ["--template", "chatml"],
            "pass --columns user=...,assistant=... to",
            ["--columns", "user=question,assistant=answer"],
        ),
        (
            CHATS,
            ["--template", "chatml", "--max-length", "20"],
            "pass --truncation right, left, split or drop",
            ["--truncation", "drop"],
        ),
        (PAIRS, ["--template", "chatml"], "--preference", ["--preference"]),
        (PAIRS, ["--template", "chatml"], "--no-preference", ["--no-preference"]),
    ],
)
def test_prepare_names_its_options(
    rows: list[dict[str, Any]], options: list[str], advice: str, followed: list[str], here: Path, penstock: Cli
) -> None:
    command = ["prepare", write(here, rows), "--tokenizer", str(TOKENIZER), "--out", "out.store", "-q", *options]
    refused = penstock(*command)
    assert refused.exit_code == 1
    assert advice in refused.stderr
    assert "={" not in refused.stderr
    assert penstock(*command, *followed).exit_code == 0


def test_lint_names_its_options_in_violations(here: Path, penstock: Cli) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    command = ["lint", write(here, [{"messages": turns}]), "--tokenizer", str(TOKENIZER), "--template", "chatml"]
    refused = penstock(*command)
    assert refused.exit_code == 3
    assert "pass --chat allow_lost=calls,arguments to" in refused.stdout
    assert "pass --chat allow_lost=calls,arguments to" in penstock(*command, "--explain", "0").stdout
    assert penstock(*command, "--chat", "allow_lost=calls,arguments").exit_code == 0


def test_loader_commands_name_set(here: Path, penstock: Cli) -> None:
    loader = {"loader": "conversation", "path": write(here, QUESTIONS), "tokenizer": str(TOKENIZER)}
    (here / "loader.json").write_text(json.dumps(loader | {"batch_size": 1, "backend": "numpy", "cache_dir": "cache"}))
    command = ["plan", "loader.json", "--set", "chat_template=chatml"]
    refused = penstock(*command)
    assert refused.exit_code == 1
    assert "pass --set columns.user=... --set columns.assistant=..." in refused.stderr
    done = penstock(*command, "--set", "columns.user=question", "--set", "columns.assistant=answer")
    assert done.exit_code == 0, done.stderr
