"""What a checkpoint is: a small versioned JSON file that names the pipeline it belongs to."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from penstock.errors import ResumeError
from penstock.files.atomic import write_atomic
from penstock.pipeline.chain import stage_name
from penstock.pipeline.stages import State

__all__ = ["CHECKPOINT_NAME", "STATE_VERSION", "check_state", "fingerprint", "load_checkpoint", "save_checkpoint"]

STATE_VERSION = 1
CHECKPOINT_NAME = "checkpoint.json"


def fingerprint(source: object, transforms: Sequence[object]) -> str:
    """Names the stages of a pipeline, so that a state is not loaded into another one.

    Made of the names and arguments the stages print, never of pickled code: a function edited under the same name is
    taken to be the same stage.
    """
    text = "\n".join(stage_name(stage) for stage in (source, *transforms))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_state(state: Mapping[str, Any], mark: str, described: str) -> None:
    """Refuse a state that is damaged, newer than this release, or from another pipeline."""
    version = state.get("version")
    if not isinstance(version, int):
        raise ResumeError(f"not a pipeline state: it has no version (keys: {sorted(state)})")
    if version > STATE_VERSION:
        raise ResumeError(f"the state has version {version}, this release reads up to {STATE_VERSION}; update penstock")
    if state.get("pipeline") != mark:
        raise ResumeError(
            f"the state was saved by another pipeline ({state.get('stages')}), this one is {described}; "
            "build the same pipeline, or start without the state"
        )


def save_checkpoint(directory: Path, state: State) -> None:
    """Replace the checkpoint in one durable step."""
    write_atomic(directory / CHECKPOINT_NAME, orjson.dumps(state, option=orjson.OPT_INDENT_2))


def load_checkpoint(directory: Path) -> State | None:
    """The last durable state, or None before the first."""
    path = directory / CHECKPOINT_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        state = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ResumeError(f"{path} is damaged ({error}); delete it to start again from the beginning") from error
    if not isinstance(state, dict):
        raise ResumeError(f"{path} does not hold a checkpoint; delete it to start again from the beginning")
    return state


def schema_to_text(schema: pa.Schema) -> str:
    """An Arrow schema as text, exactly."""
    return base64.b64encode(zlib.compress(schema.serialize())).decode()


def schema_from_text(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(zlib.decompress(base64.b64decode(text))))
