"""Checkpoint files of a run.

    out_dir/last.pt     the latest checkpoint, from which a run resumes
    out_dir/best.pt     the checkpoint with the lowest loss on "val"

They hold tensors and plain values and are read with `weights_only=True`: a file from elsewhere can run no code.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ResumeError
from penstock.files.atomic import write_atomic
from penstock.fsqueue.queue import differences

__all__ = ["BEST", "LAST", "changed_settings", "load", "refuse_misfit", "save"]

LAST, BEST = "last.pt", "best.pt"
_VERSION = 3
_FIXED = ("dataset", "batch_size", "seed")
"""Settings that a run cannot change; it may change the others, and prints them."""
_IRRELEVANT = ("out_dir", "resume", "eval_interval", "eval_iters", "log_interval", "checkpoint_interval")
"""Settings that the weights do not depend on."""


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint at a path, on the CPU; None if there is none."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch writes checksums and does not compare them
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {damaged} differs")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        return None
    except Exception as error:  # torch raises many kinds for a damaged file
        raise ResumeError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error!s:.200}); delete it, or start a "
            "new run with --resume=False"
        ) from error
    if state.get("version") != _VERSION:
        raise ResumeError(f"{path} has version {state.get('version')}, expected {_VERSION}; use --resume=False")
    return state


def save(out_dir: Path, state: Mapping[str, Any], *, best: bool) -> None:
    """Write `last.pt`, and `best.pt` before it, each by an atomic rename."""
    data = io.BytesIO()  # a full disk is an OSError of `write_atomic`, torch would raise an obscure error
    torch.save({**state, "version": _VERSION}, data)
    for name in (BEST, LAST) if best else (LAST,):
        write_atomic(out_dir / name, data.getbuffer())


def refuse_misfit(state: Mapping[str, Any], sizes: Mapping[str, Any], settings: Mapping[str, Any], meta: Any) -> None:
    """Raise ResumeError, naming both values, if a checkpoint is of another model, dataset or vocabulary."""
    fixed = [{name: each[name] for name in _FIXED} for each in (state["settings"], settings)]
    found = [*differences(state["sizes"], sizes), *differences(*fixed)]
    found += [f"meta {each}" for each in differences(state["meta"], meta)]
    if found:
        raise ResumeError(
            f"the checkpoint does not fit: {'; '.join(found[:5])}{' ...' * (len(found) > 5)}; restore its settings, "
            "choose another out_dir, or start a new run with --resume=False"
        )


def changed_settings(state: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Changed settings that the weights depend on: `learning_rate was 0.01, is 0.02`."""
    return differences(
        *(
            {name: value for name, value in each.items() if name not in _IRRELEVANT}
            for each in (state["settings"], settings)
        )
    )
