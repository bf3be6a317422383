"""Files of a run: a metrics file by itself, or what the directory of a run holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from penstock.files.checkpoint_file import CHECKPOINT_NAME
from penstock.pipeline.checkpoint import load_checkpoint

_MOST_FILES = 16
_MOST_LOOKED_AT = 2000


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Files of a run that a page shows."""

    metrics: list[Path] = field(default_factory=list)
    quarantine: list[Path] = field(default_factory=list)
    checkpoint: dict[str, Any] | None = None


def run_files(target: Path) -> RunFiles:
    """The file itself, or the metrics files, the checkpoint and the quarantine files in a directory."""
    if not target.is_dir():
        return RunFiles([target])
    files = sorted(path for path in _entries(target) if path.suffix == ".jsonl" and path.is_file())
    quarantine = [path for path in files if path.name.endswith("quarantine.jsonl")]
    metrics = [path for path in files if path not in quarantine and is_metrics_file(path)]
    return RunFiles(metrics[:_MOST_FILES], quarantine[:_MOST_FILES], load_checkpoint(target))


def is_run_directory(target: Path) -> bool:
    """True if a directory has a checkpoint of a run, or a metrics file."""
    if not target.is_dir():
        return False
    return (target / CHECKPOINT_NAME).is_file() or any(
        path.suffix == ".jsonl" and path.is_file() and is_metrics_file(path) for path in _entries(target)
    )


def is_metrics_file(path: Path) -> bool:
    """True if the first line of a file is the header of a run's metrics."""
    with path.open("rb") as file:
        line = file.readline(1 << 16)
    try:
        facts = orjson.loads(line)
    except ValueError:
        return False
    return isinstance(facts, dict) and "penstock_metrics" in facts


def _entries(directory: Path) -> list[Path]:
    """The first entries of a directory, which may hold the output of the run too."""
    found: list[Path] = []
    for path in directory.iterdir():
        found.append(path)
        if len(found) == _MOST_LOOKED_AT:
            break
    return found
