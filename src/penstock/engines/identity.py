"""Identity of a job: what must be the same when it is resumed, since the parts that are done are kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import xxhash

from penstock.corpus.raw_rows import describe_transforms
from penstock.engines.job_directory import JobDirectory
from penstock.engines.node_checks import output_versions
from penstock.engines.work import input_mark
from penstock.errors import ResumeError
from penstock.files.filesystems import shown
from penstock.files.states import to_json
from penstock.pipeline.chain import stage_name
from penstock.pipeline.checkpoint import fingerprint, is_there
from penstock.pipeline.pipeline import Pipeline
from penstock.sources.memory import MemorySource
from penstock.sources.splits import input_files

log = logging.getLogger("penstock.engines")

_DIFFERENT = {
    "versions": "other versions of packages",
    "pipeline": "other stages",
    "contents": "other code, arguments or files in its stages",
    "sink": "another sink, or other options of it",
    "on_error": "another on_error",
    "inputs": "other input",
    "fit": "other transforms to fit",
}


class JobIdentity:
    """Facts of a job. They are taken before any stage has learned or counted anything."""

    def __init__(self, pipeline: Pipeline, fit: Sequence[int]) -> None:
        self._pipeline = pipeline
        sink: Any = pipeline.sink
        described, self._unnamed = describe_transforms(pipeline.transforms)
        self._fixed = {
            "pipeline": fingerprint(pipeline.source, pipeline.transforms),
            "contents": [_hash(text.encode()) for text in described],
            "stages": str(pipeline),
            "sink": [stage_name(sink), *(sink.part_facts() if hasattr(sink, "part_facts") else ())],
            "on_error": pipeline.config.on_error,
            "fit": list(fit),
            "versions": output_versions(),
        }
        self._content: str | None = None

    def facts(self) -> dict[str, Any]:
        return self._fixed | {"inputs": self.inputs()}

    def inputs(self) -> list[list[Any]]:
        """Name, size, and time, ETag or content of everything that is read."""
        source: Any = self._pipeline.source
        if hasattr(source, "files"):
            return [input_mark(source, number) for number in range(len(source.files))]
        if self._content is None:
            self._content = _content(source)
        return [[name, size, self._content] for name, size in input_files(source)]

    def mark(self, plan: dict[str, Any]) -> str:
        """Mark of a plan of this job, by which records of another plan or another job are told apart."""
        facts = self.facts()
        return _hash(to_json([plan, *(facts[name] for name in _DIFFERENT)]))

    def check_same(self, saved: dict[str, Any], directory: JobDirectory) -> None:
        """Refuse the directory of another job, and an unfinished one of other versions: output might be a mix."""
        mine = self.facts()
        if saved.get("report") is not None:
            saved = saved | {"versions": mine["versions"]}
        for name in sorted(_DIFFERENT, key=lambda name: name != "inputs"):  # stages also name the files
            if saved.get(name) != mine[name]:
                known = self._difference(name, saved.get(name), mine[name])
                raise ResumeError(
                    f"the job in {directory.shown} has {_DIFFERENT[name]} ({saved.get('stages')})"
                    f"{': ' if known else ''}{known}; run it with the same ones, delete the directory, or choose "
                    "another one"
                )

    def warn_if_unknown(self, directory: JobDirectory) -> None:
        """Say, where a job goes on, that a change of its code would not have been found."""
        if self._unnamed is not None:
            log.warning(
                "the job in %s goes on, perhaps with other code than before: %s", directory.shown, self._unnamed
            )

    def _difference(self, name: str, before: Any, now: Any) -> str:
        """Difference from another job, as far as it is known."""
        if name == "inputs" and before is not None:
            return _input_difference(before, now)
        if name == "contents" and before is not None and len(before) == len(now) == len(self._pipeline.transforms):
            stages = zip(self._pipeline.transforms, before, now)
            return ", ".join(f"now {stage_name(stage)}" for stage, was, here in stages if was != here)
        if name == "versions" and before is not None:
            return ", ".join(
                f"{each} {before.get(each)} then, {now[each]} now" for each in now if now[each] != before.get(each)
            )
        if name == "on_error":
            return f"{before!r} then, {now!r} now"
        return f"now {self._pipeline}" if name == "pipeline" else ""

    def check_output(self, directory: JobDirectory) -> None:
        """Refuse a finished job whose output is gone."""
        path = getattr(self._pipeline.sink, "path", None)
        if path is not None and not is_there(path):
            raise ResumeError(
                f"the job in {directory.shown} is complete, but its output {shown(path)} is gone; delete the directory "
                "to make it again"
            )


def _input_difference(before: list[list[Any]], now: list[list[Any]]) -> str:
    """The first input that differs, and how; files are given as name, size, and time, ETag or content."""
    was, here = ({name: facts for name, *facts in marks} for marks in (before, now))
    differing = [name for name in dict.fromkeys([*was, *here]) if was.get(name) != here.get(name)]
    if not differing:
        return "the same files in another order or number"
    name = differing[0]
    if name not in was:
        how = "is new"
    elif name not in here:
        how = "is missing now"
    elif was[name][0] != here[name][0]:
        how = f"had {was[name][0]:,} bytes, and has {here[name][0]:,} now"
    else:
        how = "has another modification time" if isinstance(here[name][1], int) else "has another content"
    more = f", and {len(differing) - 1:,} more differ" if len(differing) > 1 else ""
    return f"{shown(name)} {how}{more}"


def _content(source: Any) -> str:
    """Mark of the rows of a source without files; of a database, by their number and their last key."""
    if isinstance(source, MemorySource):
        return " ".join(each.xxh3 for each in source.fingerprints())
    sample = getattr(source, "sampled_identity", None)
    return _hash(repr(sample() if callable(sample) else "").encode())


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)
