"""The files of a run: everything it needs to go on as if nothing had happened, and why a file does not fit.

    out_dir/last.pt     the latest checkpoint, the one a run goes on from
    out_dir/best.pt     the one with the least loss on "val"

Tensors and plain values only: they are read with `weights_only=True`, so a file from elsewhere can run no code. Each
is written beside its place and renamed, so that a kill leaves the one before.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson
import torch
import xxhash

from penstock.errors import ConfigError, ResumeError
from penstock.files.atomic import write_atomic
from penstock.fsqueue.queue import differences

__all__ = ["BEST", "LAST", "Checkpoint", "Checkpoints", "meta_fingerprint", "plain"]

LAST, BEST = "last.pt", "best.pt"
_VERSION = 2
_TOLD = 5
_FIXED = ("dataset", "batch_size", "seed")
"""Settings a run cannot change halfway; the others it may, and says so."""
_SILENT = ("out_dir", "resume", "eval_interval", "eval_iters", "log_interval", "checkpoint_interval")
"""Settings that change nothing of what is learned."""


@dataclass
class Checkpoint:
    """A run after `step` steps."""

    step: int
    world_size: int
    sizes: dict[str, Any]
    """Of the model: what the shapes of its weights depend on."""
    settings: dict[str, Any]
    meta: dict[str, Any]
    queue: dict[str, Any]
    """Where the queue was: the next batch of every split."""
    model: dict[str, Any] = field(repr=False)
    optimizer: dict[str, Any] = field(repr=False)
    random: list[torch.Tensor] = field(repr=False)
    """The generator of every rank."""
    curve: list[dict[str, Any]] = field(repr=False)
    window: dict[str, float]
    """Sums since the last line of the log."""
    best_loss: float | None
    sample: dict[str, torch.Tensor] | None = field(repr=False)
    """Some rows of the last evaluation, and what was made of them."""
    fingerprint: str
    """Of the metadata."""
    version: int = _VERSION

    def refuse_others(self, *, sizes: Mapping[str, Any], settings: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """An error that names both sides, if this checkpoint is of another model, vocabulary or data."""
        fixed = [{name: each.get(name) for name in _FIXED} for each in (self.settings, settings)]
        found = [*differences(self.sizes, sizes), *differences(*fixed)]
        if self.fingerprint != meta_fingerprint(meta):
            found += [f"meta {each}" for each in differences(self.meta, plain(meta))]
        if found:
            more = [f"and {len(found) - _TOLD} more"] if len(found) > _TOLD else []
            raise ResumeError(
                f"the checkpoint does not fit: {'; '.join(found[:_TOLD] + more)}; go back to its settings, "
                f"choose another out_dir, or start anew with --resume=False (which replaces it)"
            )

    def changed(self, settings: Mapping[str, Any]) -> list[str]:
        """Settings that are others now, and that what is learned depends on."""
        relevant = [{k: v for k, v in each.items() if k not in _SILENT} for each in (self.settings, settings)]
        return differences(*relevant)


class Checkpoints:
    """The checkpoints in `out_dir`."""

    def __init__(self, out_dir: Path) -> None:
        self.out_dir = out_dir

    def load(self, name: str = LAST) -> Checkpoint | None:
        """The checkpoint, on the CPU; None if there is none."""
        path = self.out_dir / name
        try:
            _check_records(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ConfigError(f"out_dir={str(self.out_dir)!r} is a file; name a directory") from None
        except Exception as error:  # torch raises whatever its parts do when a file is damaged
            raise ResumeError(
                f"{path} cannot be read as a checkpoint ({type(error).__name__}: {error!s:.200}); delete it, "
                f"or start anew with --resume=False"
            ) from error
        known = {each.name for each in fields(Checkpoint)}
        if not isinstance(state, dict) or state.get("version") != _VERSION or set(state) != known:
            found = state.get("version") if isinstance(state, dict) else None
            raise ResumeError(f"{path} is a checkpoint of version {found}, this trainer reads {_VERSION}; start anew")
        return Checkpoint(**state)

    def save(self, checkpoint: Checkpoint, *, best: bool) -> None:
        """`best` first: a kill between the two leaves a best that the next run makes again."""
        self.out_dir.mkdir(parents=True, exist_ok=True)
        state = {each.name: getattr(checkpoint, each.name) for each in fields(Checkpoint)}
        # Into memory first: of a full disk torch makes an error of its own, which says nothing of disks.
        data = io.BytesIO()
        torch.save(state, data)
        for name in (BEST, LAST) if best else (LAST,):
            write_atomic(self.out_dir / name, data.getbuffer())

    def tidy(self) -> None:
        """Removes what a killed run had not finished writing."""
        for name in (LAST, BEST):
            for left in self.out_dir.glob(f".{name}.*.tmp"):
                left.unlink(missing_ok=True)


def _check_records(path: Path) -> None:
    """Compare the checksums of what is in the file, which torch writes and does not compare: about a second a GB."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} is not what was written: its checksum differs")


def plain(value: Any) -> Any:
    """Dicts, lists, numbers and strings, whatever kind of mapping or sequence they came as."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value)


def meta_fingerprint(meta: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(orjson.dumps(plain(meta), option=orjson.OPT_SORT_KEYS)).hexdigest()
