"""Bad rows: counted by reason, written down with their place, and never more than the run allows."""

from __future__ import annotations

import base64
import os
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from penstock.errors import FailureBudgetError, ResumeError
from penstock.files.atomic import naming, open_own
from penstock.files.filesystems import beside, shown_place
from penstock.files.locks import FileLock
from penstock.files.object_lock import ObjectLock
from penstock.files.objects import open_bucket
from penstock.files.states import check_fields
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.stages import Rejected, State

_RATIO_FROM_ROW = 1000


class BadRows:
    """Takes rejected rows in order, from the thread that delivers."""

    def __init__(self, config: PipelineConfig, path: Path | str | None) -> None:
        self._config = config
        self._copy = RowsObject(path) if isinstance(path, str) else None
        self.path = self._copy.file if self._copy is not None else path if not isinstance(path, str) else None
        self.shown = self._copy.shown if self._copy is not None else str(path)
        self.counts: Counter[str] = Counter()
        self._last: Rejected | None = None
        self._last_line: bytes | None = None
        self._file: BinaryIO | None = None
        self._lock: FileLock | ObjectLock | None = None
        if self._copy is not None:
            self._lock = self._copy.lock
        elif self.path is not None:
            self._lock = FileLock(self.path.with_name(f".{self.path.name}.penstock-lock"))
        self._length = 0
        self._process = os.getpid()

    def add(self, rejected: tuple[Rejected, ...], rows_read: int) -> None:
        """Count and write them; too many raise `FailureBudgetError` naming the last."""
        for row in rejected:
            self.counts[f"{row.stage}: {row.kind}"] += 1
            self._last = row
            if self.path is not None:
                self._write(row)
            self._check_number(self.counts.total())
        if rejected:
            self._check_ratio(rows_read, rows_read >= _RATIO_FROM_ROW)

    def take(self, lines: Iterable[bytes], counts: Mapping[str, int], rows_read: int) -> None:
        """Rows that another process has written and counted; too many raise as in `add`."""
        number = self.counts.total()
        self.counts.update(counts)
        for line in lines:
            number += 1
            self._last_line = line
            if self.path is not None:
                if self._file is None:
                    self._open(self._length)  # also after `close`
                assert self._file is not None
                with naming(str(self.path)):
                    self._length += self._file.write(line)
            self._check_number(number)
        self._check_number(self.counts.total())
        if counts:
            self._check_ratio(rows_read, rows_read >= _RATIO_FROM_ROW)

    def finish(self, rows_read: int) -> None:
        """The end of the run: the share of bad rows is checked for any number of rows."""
        self._check_ratio(rows_read, True)
        self.sync()

    def mark(self) -> State:
        """Size and counts so far, which `restore` goes back to."""
        return {"bytes": self._length, "counts": dict(self.counts)}

    def flush(self) -> None:
        """Give what was written to the system: it outlives this process, not the machine."""
        if self._file is not None:
            with naming(str(self.path)):
                self._file.flush()

    def sync(self) -> State:
        """Make what was written durable, and mark it."""
        if self._file is not None:
            with naming(str(self.path)):
                self._file.flush()
                os.fsync(self._file.fileno())
            if self._copy is not None:
                self._copy.save(self._length)
        return self.mark()

    def restore(self, token: State) -> None:
        """Go back to a token: rows written after it come again, so they are cut off."""
        check_fields(token, {"bytes": (int,), "counts": (dict,)}, "the state of the bad rows")
        check_fields(token["counts"], dict.fromkeys(token["counts"], (int,)), "the state of the bad rows")
        self.counts = Counter(token["counts"])
        there = self._copy.exists() if self._copy is not None else self.path is not None and self.path.exists()
        if self.path is not None and (token["bytes"] or there):
            self._open(token["bytes"])
        self._length = token["bytes"]

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None and os.getpid() != self._process:
            # A fork has a copy of rows that its parent has yet to write; they go nowhere from here.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), file.fileno())
            file.close()
            return
        try:
            if file is not None:
                with naming(str(self.path)):
                    file.close()
                if self._copy is not None:
                    self._copy.save(self._length)
        finally:
            if self._lock is not None:
                self._lock.release()
            if self._copy is not None:
                self._copy.file.unlink(missing_ok=True)

    def _check_number(self, bad: int) -> None:
        most = self._config.max_failures
        if most is not None and bad > most:
            raise FailureBudgetError(f"{bad} bad rows, more than max_failures={most}; {self._example()}")

    def _check_ratio(self, rows_read: int, look_at_ratio: bool) -> None:
        bad, ratio = self.counts.total(), self._config.max_failure_ratio
        if ratio is not None and look_at_ratio and rows_read and bad > ratio * rows_read:
            raise FailureBudgetError(
                f"{bad} of {rows_read} rows are bad, more than max_failure_ratio={ratio}; {self._example()}"
            )

    def _example(self) -> str:
        row = self._last
        if row is None and self._last_line is not None:
            facts = orjson.loads(self._last_line)
            return f"the last: {facts['file'] or '?'}, row {facts['row']}: {facts['reason']}"
        return f"the last: {row.file or '?'}, row {row.row}: {row.reason}" if row else "none in this run"

    def _write(self, row: Rejected) -> None:
        if self._file is None:
            self._open(self._length)  # also after `close`
        assert self._file is not None
        line: dict[str, Any] = {
            "file": row.file and _text(row.file),
            "row": row.row,
            "offset": row.offset,
            "stage": _text(row.stage),
            "reason": _text(row.reason),
        }
        if isinstance(row.data, bytes):
            try:
                line["raw"] = row.data.decode()
            except UnicodeDecodeError:
                line["raw_base64"] = base64.b64encode(row.data).decode()
        else:
            line["data"] = row.data
        data = orjson.dumps(line, default=_plain, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
        with naming(str(self.path)):
            self._length += self._file.write(data)

    def _open(self, length: int) -> None:
        """Open the file, alone, with as much of it as counts; never one that a link leads to."""
        assert self.path is not None
        assert self._lock is not None
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock.hold(f"the quarantine file {self.shown}", take_over=True)
        if self._copy is not None:
            self._copy.load(length)
        self._file = os.fdopen(open_own(self.path, os.O_WRONLY | os.O_CREAT), "wb")
        self._file.truncate(length)
        self._file.seek(length)


class RowsObject:
    """Rows in an object store: kept in a file of this machine, and written whole wherever a local file is synced."""

    def __init__(self, url: str) -> None:
        self.shown = shown_place(url)
        self._bucket, self._key = open_bucket(url)
        self.lock = ObjectLock(beside(url, ".", ".penstock-lock"))
        self.file = Path(tempfile.gettempdir()) / f"penstock-quarantine-{secrets.token_hex(8)}.jsonl"
        self._saved = -1

    def exists(self) -> bool:
        return self._bucket.info(self._key) is not None

    def load(self, length: int) -> None:
        """The first bytes of the object; those behind come again."""
        with open(self.file, "wb") as file:
            if length:
                self._bucket.download(self._key, file)
        if self.file.stat().st_size < length:
            raise ResumeError(
                f"the checkpoint counts on {length} bytes of {self.shown}, which has fewer; restore it, or delete the "
                "checkpoint to start again"
            )
        self._saved = -1

    def save(self, length: int) -> None:
        """Make the object what the file is; nothing if it has not grown."""
        if length != self._saved:
            self.lock.check(f"the quarantine file {self.shown}")
            with open(self.file, "rb") as file:
                self._bucket.upload(self._key, file)
            self._saved = length


def _text(value: str) -> str:
    """The same text; what is no character (names of files may hold any bytes) as `\\xe9`."""
    return value if value.isascii() else value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _plain(value: object) -> object:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
