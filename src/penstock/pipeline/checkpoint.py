"""Runs that survive kill -9: the sink's durable token and the pipeline's position, replaced together in one rename."""

from __future__ import annotations

import base64
import hashlib
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from penstock.errors import ConfigError, ResumeError
from penstock.files.checkpoint_file import BucketCheckpointFile, LocalCheckpointFile, checkpoint_file
from penstock.files.compression import inflate
from penstock.files.filesystems import output_place, shown
from penstock.files.listing import PathLike
from penstock.files.objects import bucket_has
from penstock.files.states import StateFormat, parse_json, to_json
from penstock.pipeline.chain import stage_name
from penstock.pipeline.delivery import Delivery
from penstock.pipeline.report import Report
from penstock.pipeline.stages import Committing, Durable, Remembering, Sink, Source, State, Stateful, Transform

STATE = StateFormat(
    "pipeline",
    "a pipeline",
    fields={
        "transforms": (dict,),
        "schemas": (dict,),
        "skip_rows": (int,),
        "bad_rows": (dict, None),
        "source": (dict,),
    },
)
_CHECKPOINT = StateFormat(
    "checkpoint",
    "run(checkpoint=...)",
    fields={
        **dict.fromkeys(("state", "sink", "bad_rows", "dropped", "changed"), (dict,)),
        **dict.fromkeys(("rows_in", "rows_out"), (int,)),
        "target": (str,),
        "report": (dict, None),
    },
)
Place = LocalCheckpointFile | BucketCheckpointFile


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


def load_checkpoint(path: PathLike) -> State | None:
    """The last durable state in a directory or below a URL, or None before the first."""
    return _load(checkpoint_file(path))


def _load(place: Place) -> State | None:
    data = place.read()
    if data is None:
        return None
    try:
        return _CHECKPOINT.read(parse_json(data))
    except ResumeError as error:
        raise ResumeError(f"{place.file}: {error}; delete the file to start again from the beginning") from error
    except ValueError as error:
        raise ResumeError(f"{place.file} is damaged ({error}); delete it to start again from the beginning") from error


def schema_to_text(schema: pa.Schema) -> str:
    """An Arrow schema as text, exactly."""
    return base64.b64encode(zlib.compress(schema.serialize())).decode()


def schema_from_text(text: str) -> pa.Schema:
    """The schema that `schema_to_text` wrote into a state."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(inflate(base64.b64decode(text))))
    except (TypeError, ValueError, OSError, pa.ArrowException) as error:
        raise ResumeError(f"the state is damaged: no schema ({error}); start without the state") from error


class Checkpoint:
    """Keeps the progress of one run in a directory, or below a URL of an object store.

    Each save makes the sink durable first and then replaces the checkpoint, which names what the sink made durable.
    A crash between the two leaves the older checkpoint, and the sink goes back to that one when it is restored. A sink
    that commits rows for good (`Committing`) keeps the checkpoint beside them, and the run goes on at that one.

    One run at a time: the place is locked until `close`.
    """

    def __init__(
        self, path: PathLike, source: Source, transforms: Sequence[Transform], sink: Sink, every_seconds: float
    ) -> None:
        if not isinstance(source, Stateful):
            raise ConfigError(f"run(checkpoint=...) needs a source with a state_dict; {stage_name(source)} has none")
        if (reason := getattr(source, "not_resumable", None)) is not None:
            raise ConfigError(f"run(checkpoint=...) needs a source that can be resumed, and {reason}")
        if not isinstance(sink, Durable):
            raise ConfigError(
                f"run(checkpoint=...) needs a sink that survives a crash; {stage_name(sink)} does not: write to a file"
            )
        self._remembering = [transform for transform in transforms if isinstance(transform, Remembering)]
        for transform in self._remembering:
            if not transform.resumable:
                raise ConfigError(
                    f"run(checkpoint=...) cannot resume {stage_name(cast(Transform, transform))}, which keeps what it "
                    "has seen in memory; give it a directory="
                )
        self._place = checkpoint_file(path)
        self._sink = cast(Durable, sink)
        self._every = every_seconds
        self._saved_at = time.monotonic()
        self._place.open()
        try:
            self.saved = _load(self._place)
            self._check_target(stage_name(sink), getattr(sink, "path", None))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another run use the place. Idempotent."""
        self._place.close()

    def _check_target(self, name: str, path: PathLike | None) -> None:
        if self.saved is None:
            return
        if self.saved["target"] != name:
            raise ResumeError(
                f"the checkpoint in {self._place.shown} belongs to a run into {self.saved['target']}, this one goes "
                f"into {name}; use another checkpoint directory"
            )
        if self.saved["report"] and path is not None and not is_there(path):
            raise ResumeError(
                f"the run in {self._place.shown} is complete, but its output {shown(path)} is gone; "
                "delete the checkpoint to make it again"
            )

    def catch_up(self) -> None:
        """Take the position that the sink has committed after the last save, if the process was killed in between.

        The rows after the save need not come again in the same order, so they must not come again at all.
        """
        if self.saved is None or self.saved["report"] or not isinstance(self._sink, Committing):
            return
        text = self._sink.committed_text(self.saved["sink"])
        if text is not None:
            self.saved = _CHECKPOINT.read(parse_json(text.encode()))

    def give_up(self) -> None:
        """Let go of the output too, before anything was written."""
        self._sink.abort()
        self.close()

    @property
    def state(self) -> State | None:
        """The pipeline's state at the last save, or None for a run that begins."""
        return self.saved["state"] if self.saved is not None else None

    @property
    def report(self) -> Report | None:
        """The report of a run that came to its end."""
        return Report(**self.saved["report"]) if self.saved is not None and self.saved["report"] else None

    def restore(self, delivery: Delivery) -> None:
        """Take the sink, the quarantine file and the counters back to the last save."""
        if self._place.holder() is not None:  # before the sink deletes what the checkpoint of a stale run would name
            if self.saved is None:
                self._place.begin()
            else:
                self._write(self.saved)
        claim = getattr(self._sink, "claim", None)
        if callable(claim):
            claim()  # before `restore`, which takes an output over from a sink that this process has abandoned
        if self.saved is None:
            self._sink.restore({})
            delivery.bad_rows.restore({"bytes": 0, "counts": {}})
            return
        try:
            self._sink.restore(self.saved["sink"])
            delivery.bad_rows.restore(self.saved["bad_rows"])
            delivery.rows_read, delivery.rows_out = self.saved["rows_in"], self.saved["rows_out"]
            delivery.dropped, delivery.changed = Counter(self.saved["dropped"]), Counter(self.saved["changed"])
        except KeyError as error:
            raise ResumeError(
                f"the checkpoint in {self._place.shown} lacks {error}; delete it to start again"
            ) from error

    def is_at_end(self, delivery: Delivery) -> bool:
        """True if the last save was that of a run at its end and no row came since: its rows may be published."""
        saved = self.saved
        return saved is not None and bool(saved["sink"].get("finishing")) and saved["rows_out"] == delivery.rows_out

    def due(self) -> bool:
        return time.monotonic() - self._saved_at >= self._every

    def save(self, delivery: Delivery, state: State, *, finishing: bool = False, report: Report | None = None) -> None:
        """Make everything delivered so far durable."""
        for transform in self._remembering:
            transform.sync()
        saved = {
            "target": stage_name(self._sink),
            "state": state,
            "sink": {},
            "bad_rows": delivery.bad_rows.sync(),
            "rows_in": delivery.rows_read,
            "rows_out": delivery.rows_out,
            "dropped": dict(delivery.dropped),
            "changed": dict(delivery.changed),
            "report": report.to_dict() if report is not None else None,
        }
        if report is None:
            token = self._make_durable(saved)
        else:  # `flush` has published everything
            token = self.saved["sink"] if self.saved else {}
        self.saved = saved | {"sink": token | {"finishing": finishing or self.is_at_end(delivery)}}
        self._write(self.saved)
        self._saved_at = time.monotonic()

    def _make_durable(self, saved: State) -> State:
        sink = self._sink
        if not isinstance(sink, Committing):
            return sink.checkpoint()
        sink.checkpoint_text = lambda token: to_json(_CHECKPOINT.write(saved | {"sink": token})).decode()
        try:
            return sink.checkpoint()
        finally:
            sink.checkpoint_text = None  # it holds the whole state, and cannot be pickled

    def _write(self, state: State) -> None:
        if (holder := self._place.holder()) is not None:
            state = state | {"holder": holder}
        self._place.write(to_json(_CHECKPOINT.write(state), indent=True))


def is_there(path: PathLike) -> bool:
    """True if an output exists."""
    place = output_place(path, "the output")
    return place.exists() if isinstance(place, Path) else bucket_has(place)
