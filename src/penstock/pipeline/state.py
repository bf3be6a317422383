"""What a checkpoint is: a small versioned JSON file that names the pipeline it belongs to."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.errors import ResumeError
from penstock.files.atomic import write_atomic
from penstock.files.states import StateFormat, parse_json, to_json
from penstock.pipeline.chain import stage_name
from penstock.pipeline.stages import State

__all__ = ["CHECKPOINT_NAME", "STATE", "check_state", "fingerprint", "load_checkpoint", "save_checkpoint"]

STATE = StateFormat("pipeline", "a pipeline")
_CHECKPOINT = StateFormat("checkpoint", "run(checkpoint=...)")
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
    STATE.read(state)
    if state.get("pipeline") != mark:
        raise ResumeError(
            f"the state was saved by another pipeline ({state.get('stages')}), this one is {described}; "
            "build the same pipeline, or start without the state"
        )


def save_checkpoint(directory: Path, state: State) -> None:
    """Replace the checkpoint in one durable step."""
    write_atomic(directory / CHECKPOINT_NAME, to_json(_CHECKPOINT.write(state), indent=True))


def load_checkpoint(directory: Path) -> State | None:
    """The last durable state, or None before the first."""
    path = directory / CHECKPOINT_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return _CHECKPOINT.read(parse_json(data))
    except ResumeError as error:
        raise ResumeError(f"{path}: {error}; delete the file to start again from the beginning") from error
    except ValueError as error:
        raise ResumeError(f"{path} is damaged ({error}); delete it to start again from the beginning") from error


def schema_to_text(schema: pa.Schema) -> str:
    """An Arrow schema as text, exactly."""
    return base64.b64encode(zlib.compress(schema.serialize())).decode()


def schema_from_text(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(zlib.decompress(base64.b64decode(text))))
