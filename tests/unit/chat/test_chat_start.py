"""Chats begin without what their path does not need."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.corpus_files import tokenizer_dir

CODE = """
import sys
from penstock.loaders import Recipe, prepare

made = prepare(sys.argv[1], sys.argv[2], Recipe(tokenizer=sys.argv[3], template="chatml"))
print(made.manifest.rows, "pandas" in sys.modules)
"""


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="it cannot be imported anyway")
def test_chats_are_prepared_without_an_import_of_pandas(tmp_path: Path) -> None:
    """pyarrow imports it for arrays that are made of Python's or NumPy's values: 0.25 s on one thread."""
    turns = [
        {"role": role, "content": f"{role} says é 日本 {number}"}
        for number, role in enumerate(["user", "assistant"] * 2)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(50)), encoding="utf-8")
    command = [sys.executable, "-c", CODE, file, tmp_path / "chats.store", tokenizer_dir("qwen3")]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["50", "False"]
