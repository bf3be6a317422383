"""Bad input, a bad disk and bad stages: each has a clear message, and nothing is lost or left half done.

In every case: a run that fails leaves no output behind, not even a hidden file. Where bad rows may be left out, every
good row arrives, and the bad ones are counted and written down with file, row, byte offset and reason.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataError, FailureBudgetError, PenstockError, SchemaError, StageError, StalledError
from penstock.pipeline import Map, Pipeline, PipelineConfig, Report, Source
from penstock.sinks import ArrowSink, CsvSink, JsonlSink, ParquetSink
from penstock.sources import ArrowSource, CsvSource, JsonlSource, JsonSource, ParquetSource, TextSource, open_source
from penstock.testing import RowsSource

MIB = 1 << 20


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the input lies."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the output goes."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def fails(out: Path, source: Any, error: type[BaseException], message: str, transforms: Any = (), **config: Any) -> Any:
    """Run into a plain and a columnar file; each time the message is the same, and nothing is left behind."""
    errors = []
    for sink in (JsonlSink(out / "out.jsonl"), ParquetSink(out / "out.parquet")):
        source.reset()
        pipeline = Pipeline(source, transforms, sink, PipelineConfig(**config))
        with pytest.raises(error, match=message) as caught:
            pipeline.run()
        errors.append(caught.value)
        assert list(out.iterdir()) == []
        assert pipeline.budget.used == 0
    return errors[0]


def passes(
    out: Path, source: Source, transforms: Any = (), **config: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Report]:
    """Run with a quarantine: the rows that arrived, what was written down about the others, and the report."""
    report = Pipeline(
        source, transforms, JsonlSink(out / "out.jsonl"), PipelineConfig(on_error="quarantine", **config)
    ).run()
    book = out / "out.jsonl.quarantine.jsonl"
    bad = [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []
    assert sum(report.quarantined.values()) == len(bad)
    assert report.rows_out == len(lines(out / "out.jsonl"))
    return lines(out / "out.jsonl"), bad, report


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(count)))
    return path


# -- files that are damaged ------------------------------------------------------------------------------------------


def test_a_truncated_gzip_is_damaged_behind_its_last_whole_row(home: Path, out: Path) -> None:
    path = home / "a.jsonl.gz"
    whole = gzip.compress(
        b"".join(json.dumps({"n": i, "x": os.urandom(40).hex()}).encode() + b"\n" for i in range(5000))
    )
    path.write_bytes(whole[: len(whole) // 2])
    readable = zlib.decompressobj(31).decompress(path.read_bytes())
    good, place = readable.count(b"\n"), readable.rindex(b"\n") + 1
    message = rf"a\.jsonl\.gz, row {good}, byte {place}: the compressed stream is damaged or cut short"
    fails(out, JsonlSource(path), DataError, message)
    write_rows(home / "b.jsonl", 3)
    rows, bad, report = passes(out, JsonlSource([path, home / "b.jsonl"]))
    assert [row["n"] for row in rows] == [*range(good), 0, 1, 2]
    assert [(row["file"], row["row"], row["offset"]) for row in bad] == [(str(path), good, place)]
    assert "Truncated compressed stream" in bad[0]["reason"]
    assert report.rows_out == good + 3


def test_a_truncated_parquet_file_is_damaged(home: Path, out: Path) -> None:
    pq.write_table(pa.table({"n": range(1000)}), home / "a.parquet")
    pq.write_table(pa.table({"n": range(1000, 1010)}), home / "b.parquet")
    whole = (home / "a.parquet").read_bytes()
    (home / "a.parquet").write_bytes(whole[: len(whole) // 2])
    message = r"a\.parquet, row 0\b.*Parquet magic bytes not found in footer"
    fails(out, ParquetSource(home), DataError, message)
    fails(out, ParquetSource(home / "a.parquet"), DataError, message)
    rows, bad, _ = passes(out, ParquetSource(home))
    assert [row["n"] for row in rows] == [*range(1000, 1010)]
    assert [(row["file"], row["row"]) for row in bad] == [(str(home / "a.parquet"), 0)]


def test_a_truncated_arrow_stream_is_damaged_behind_its_last_whole_batch(home: Path, out: Path) -> None:
    table = pa.table({"n": range(100)})
    with pa.OSFile(str(home / "a.arrows"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    os.truncate(home / "a.arrows", (home / "a.arrows").stat().st_size - 150)
    fails(out, ArrowSource(home), DataError, r"a\.arrows, row 90: the file is damaged")
    rows, bad, _ = passes(out, ArrowSource(home))
    assert [row["n"] for row in rows] == [*range(90)]
    assert bad[0]["row"] == 90


def test_an_empty_file_says_so(home: Path, out: Path) -> None:
    for name in ("a.jsonl", "a.csv", "a.txt", "a.json", "a.parquet", "a.arrow", "a.jsonl.gz", "a.txt.xz"):
        (home / name).touch()
        fails(out, open_source(home / name), DataError, rf"{name}.*: the file is empty \(0 bytes\); remove it")
    write_rows(home / "b.jsonl", 3)
    rows, bad, _ = passes(out, JsonlSource([home / "a.jsonl", home / "b.jsonl"]))
    assert len(rows) == 3
    assert [(row["file"], row["row"], row["offset"]) for row in bad] == [(str(home / "a.jsonl"), 0, 0)]
    report = Pipeline(JsonlSource(home / "a.jsonl", allow_empty=True), [], JsonlSink(out / "none.jsonl")).run()
    assert report.rows_out == 0


# -- rows that are bad -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before", "bad", "after", "row"),
    [
        ("a.jsonl", b'{"n": 0}\n\n', b'{"n": "\xff"}', b'\n{"n": 2}\n', 2),
        ("a.csv", b"s,n\na,0\n", b"\xff,1", b"\nb,2\n", 1),
        ("a.txt", b"zero\n", b"on\xffe", b"\ntwo\n", 1),
    ],
)
def test_invalid_utf8_is_named_to_the_byte(
    home: Path, out: Path, name: str, before: bytes, bad: bytes, after: bytes, row: int
) -> None:
    path = home / name
    path.write_bytes(before + bad + after)
    position = bad.index(b"\xff")
    message = rf"{name}, row {row}, byte {len(before)}: not valid UTF-8: byte 0xff at position {position}"
    fails(out, open_source(path), DataError, message)
    rows, book, report = passes(out, open_source(path))
    assert len(rows) == 2
    assert [(entry["file"], entry["row"], entry["offset"]) for entry in book] == [(str(path), row, len(before))]
    assert path.read_bytes()[book[0]["offset"] :].startswith(bad)
    assert list(report.quarantined) == [f"{book[0]['stage']}: invalid UTF-8"]


def test_half_a_json_object_is_named_to_the_byte(home: Path, out: Path) -> None:
    path = home / "a.jsonl"
    path.write_text('{"n": 0}\n{"n": 1, "m": {"x"\n{"n": 2}\n{"n": 3, ')
    fails(
        out, JsonlSource(path), DataError, r"a\.jsonl, row 1, byte 9: not valid JSON: .*: b'\{\"n\": 1, \"m\": \{\"x\"'"
    )
    rows, bad, report = passes(out, JsonlSource(path))
    assert [row["n"] for row in rows] == [0, 2]
    assert [(row["row"], row["offset"], row["raw"]) for row in bad] == [
        (1, 9, '{"n": 1, "m": {"x"'),
        (3, 37, '{"n": 3, '),
    ]
    assert report.quarantined == {"reading JSON Lines: invalid JSON": 2}


def test_half_a_json_array_is_named_to_the_byte(home: Path, out: Path) -> None:
    path = home / "a.json"
    path.write_text(json.dumps([{"n": i} for i in range(5)], indent=1)[:-20])
    place = path.read_text().rindex("}") + 1
    fails(out, JsonSource(path), DataError, rf"a\.json, row 3, byte {place}: the file ends inside an object")
    rows, bad, _ = passes(out, JsonSource(path))
    assert [row["n"] for row in rows] == [0, 1, 2]
    assert [(row["row"], row["offset"]) for row in bad] == [(3, place)]


def test_a_column_that_changes_type_is_named_with_the_row(home: Path, out: Path) -> None:
    path = home / "a.jsonl"
    path.write_text('{"n": 0}\n{"n": 1.5}\n{"n": "two"}\n{"n": 3}\n')
    message = r"a\.jsonl, row 2: field 'n' is string here and double before; .*mixed='json'.*schema="
    fails(out, JsonlSource(path), SchemaError, message)
    schema = pa.schema([("n", pa.float64())])
    fails(
        out,
        JsonlSource(path, schema=schema),
        DataError,
        r"a\.jsonl, row 2, byte 20: column 'n' holds 'two', which is not double",
    )
    rows, bad, report = passes(out, JsonlSource(path, schema=schema))
    assert [row["n"] for row in rows] == [0, 1.5, 3]
    assert [(row["row"], row["offset"], row["raw"]) for row in bad] == [(2, 20, '{"n": "two"}')]
    assert report.quarantined == {"reading JSON Lines: does not fit the schema": 1}


def test_a_csv_row_with_too_many_cells_is_named_to_the_byte(home: Path, out: Path) -> None:
    (home / "a.csv").write_text("n,s\n0,a\n1,b,c\n2,d\n")
    fails(out, CsvSource(home), DataError, r"a\.csv, row 1, byte 8: Expected 2 columns, got 3: 1,b,c")
    rows, bad, _ = passes(out, CsvSource(home))
    assert [row["n"] for row in rows] == [0, 2]
    assert (bad[0]["row"], bad[0]["offset"], bad[0]["raw"]) == (1, 8, "1,b,c")


def test_a_line_of_300_megabytes_is_refused_and_the_others_arrive(home: Path, out: Path) -> None:
    path = home / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"n": 0}\n')
        file.seek(300 * MIB, os.SEEK_CUR)  # a hole: nothing but zeros, that take no room on the disk
        file.write(b'\n{"n": 2}\n')
    message = r"a\.jsonl, row 1, byte 9: a record is longer than max_row_bytes=256\.0 MiB; raise max_row_bytes if such"
    schema = pa.schema([("n", pa.int64())])
    with pytest.raises(DataError, match=message):
        Pipeline(JsonlSource(path, schema=schema), [], JsonlSink(out / "out.jsonl")).run()
    assert list(out.iterdir()) == []
    rows, bad, _ = passes(out, JsonlSource(path, schema=schema))
    assert [row["n"] for row in rows] == [0, 2]
    assert [(row["file"], row["row"], row["offset"]) for row in bad] == [(str(path), 1, 9)]


def test_a_line_of_a_gigabyte_fails_fast_and_in_bounded_memory(home: Path, out: Path) -> None:
    path = home / "a.jsonl"
    path.write_bytes(b'{"n": 0}\n')
    os.truncate(path, 1 << 30)
    script = """
import resource, sys, time
from penstock.pipeline import Pipeline
from penstock.sinks import JsonlSink
from penstock.sources import JsonlSource
before, since = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
try:
    Pipeline(JsonlSource(sys.argv[1]), [], JsonlSink(sys.argv[2]), budget="64 MiB").run()
except ValueError as error:
    print(error)
    print(time.monotonic() - since, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, path, out / "out.jsonl"], capture_output=True, text=True, timeout=120, check=True
    )
    message, figures = done.stdout.splitlines()
    assert re.search(r"row 1\b.*byte 9\b.*max_row_bytes", message)
    seconds, mebibytes = map(float, figures.split())
    assert mebibytes < 2 * 256
    assert seconds < 30
    assert list(out.iterdir()) == []


# -- directories and rights ------------------------------------------------------------------------------------------


def test_a_missing_input_says_what_was_looked_for(home: Path, out: Path) -> None:
    fails(out, JsonlSource(home / "nope"), FileNotFoundError, r"no such file or directory: '.*nope' \(looked from")
    fails(out, JsonlSource(str(home / "*.jsonl")), FileNotFoundError, r"no file matches '.*\*\.jsonl'")
    (home / "a.csv").touch()
    fails(out, JsonlSource(home), FileNotFoundError, r"no \.jsonl, \.ndjson file in directory '.*in'; it holds: \.csv")


def test_a_missing_output_directory_is_named_and_not_made(home: Path, out: Path) -> None:
    path = write_rows(home / "a.jsonl", 5)
    for checkpoint in (None, out.parent / "checkpoint"):
        with pytest.raises(FileNotFoundError, match=r"'.*missing'.*out\.jsonl"):
            Pipeline(JsonlSource(path), [], JsonlSink(out / "missing" / "out.jsonl")).run(checkpoint)
    assert list(out.iterdir()) == []


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that other users can reach, which those of pytest are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_permission_denied_names_the_file(open_to_all: Path) -> None:
    write_rows(open_to_all / "secret.jsonl", 3).chmod(0)
    pq.write_table(pa.table({"n": [1]}), open_to_all / "secret.parquet")
    (open_to_all / "secret.parquet").chmod(0)
    write_rows(open_to_all / "open.jsonl", 3)
    script = """
import os, sys
from pathlib import Path
from penstock.pipeline import Pipeline
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import JsonlSource, ParquetSource
here = Path(sys.argv[1])
secret, columns, plain = here / "secret.jsonl", here / "secret.parquet", here / "open.jsonl"
Pipeline(JsonlSource(plain), [], MemorySink()).run()  # imports whatever it needs while it may still be read
if os.getuid() == 0:  # root may do everything: become somebody who may not
    os.setgid(65534)
    os.setuid(65534)
for source in (JsonlSource(secret), ParquetSource(columns), JsonlSource(plain)):
    try:
        Pipeline(source, [], JsonlSink(here / "out.jsonl")).run()
    except PermissionError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, open_to_all], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    first, second, third = done.stdout.splitlines()
    assert first == f"[Errno 13] Permission denied: '{open_to_all}/secret.jsonl'"
    assert "Permission denied" in second
    assert "secret.parquet" in second
    assert third.startswith(f"[Errno 13] Permission denied: '{open_to_all}/")
    assert "out.jsonl" in third
    assert sorted(path.name for path in open_to_all.iterdir()) == ["open.jsonl", "secret.jsonl", "secret.parquet"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


NOISE = [{"n": i, "text": os.urandom(500).hex()} for i in range(4000)]


@pytest.mark.parametrize(
    "make",
    [
        lambda disk: JsonlSink(disk / "out.jsonl"),
        lambda disk: JsonlSink(disk / "out.jsonl.gz"),
        lambda disk: JsonlSink(disk / "out.jsonl.zst"),
        lambda disk: CsvSink(disk / "out.csv"),
        lambda disk: CsvSink(disk / "out.csv.xz"),
        lambda disk: ParquetSink(disk / "out.parquet"),
        lambda disk: ParquetSink(disk / "out.parquet", row_group_bytes="256 KiB"),
        lambda disk: ArrowSink(disk / "out.arrow"),
        lambda disk: ParquetSink(disk / "out", rows_per_file=100),
        lambda disk: JsonlSink(disk / "out", rows_per_file=100),
    ],
)
def test_a_full_disk_is_named_with_the_file_and_is_as_empty_afterwards_as_before(
    small_disk: Path, make: Callable[[Path], Any]
) -> None:
    sink = make(small_disk)
    pipeline = Pipeline(RowsSource(NOISE, batch_rows=50), [], sink)
    with pytest.raises(OSError, match=r"'.*/disk/.*out.*'"):
        pipeline.run()
    assert list(small_disk.iterdir()) == []
    assert pipeline.budget.used == 0


def test_a_disk_that_is_full_of_bad_rows_is_named_with_the_quarantine_file(small_disk: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"".join(b"{" + os.urandom(500).hex().encode() + b"\n" for _ in range(3000)))
    config = PipelineConfig(on_error="quarantine", quarantine=small_disk / "bad.jsonl")
    with pytest.raises(OSError, match=r"No space left on device: '.*/disk/bad\.jsonl'"):
        Pipeline(JsonlSource(source), [], JsonlSink(tmp_path / "out.jsonl"), config).run()


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are any bytes on Linux")
def test_a_file_whose_name_is_no_text_can_have_bad_rows(tmp_path: Path) -> None:
    source = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl")
    Path(source).write_text('{"a": 1}\nbroken\n{"a": 2}\n')
    sink, config = JsonlSink(tmp_path / "out.jsonl"), PipelineConfig(on_error="quarantine")
    report = Pipeline(JsonlSource(source), [], sink, config).run(tmp_path / "checkpoint")
    assert report.rows_out == 2
    (line,) = (tmp_path / "out.jsonl.quarantine.jsonl").read_text().splitlines()
    assert json.loads(line)["file"].endswith("caf\\xe9.jsonl")


@pytest.mark.parametrize(
    "text", ['[{"a": 1} {"a": 2}]', '[{"a": 1},, {"a": 2}]', '[{"a": 1}, {"a": 2},]', '[, {"a": 1}]']
)
def test_commas_that_are_missing_or_too_many_are_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json"):
        list(Pipeline(JsonSource(tmp_path / "a.json")))


def test_a_run_with_a_checkpoint_goes_on_when_there_is_room_again(small_disk: Path, tmp_path: Path) -> None:
    def make() -> Pipeline:
        config = PipelineConfig(checkpoint_seconds=0)
        return Pipeline(RowsSource(NOISE, batch_rows=100), [], JsonlSink(small_disk / "out.jsonl"), config)

    with pytest.raises(OSError, match="No space left on device"):
        make().run(tmp_path / "checkpoint")
    assert [path for path in small_disk.iterdir() if not path.name.startswith(".")] == []
    subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
    report = make().run(tmp_path / "checkpoint")
    assert lines(small_disk / "out.jsonl") == NOISE
    assert report.resumed
    assert report.rows_out == len(NOISE)


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------

ENDLESS = """
import itertools, sys
from pathlib import Path
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import JsonlSink
from penstock.sources import IteratorSource

stop_at = int(sys.argv[3])

def numbers():
    for i in itertools.count():
        if i == 2000:
            print("running", flush=True)
        if i == stop_at:
            return
        yield {"n": i}

checkpoint = sys.argv[2] or None
config = PipelineConfig(batch_rows=50, checkpoint_seconds=0.05)
Pipeline(IteratorSource(numbers), [], JsonlSink(sys.argv[1]), config).run(checkpoint)
"""


def interrupted(target: Path, checkpoint: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ENDLESS, str(target), checkpoint, "-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "running\n"
            child.send_signal(signal.SIGINT)
            output, errors = child.communicate(timeout=170)
        finally:
            child.kill()  # it never ends by itself
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def test_ctrl_c_ends_the_run_and_leaves_nothing(out: Path) -> None:
    done = interrupted(out / "out.jsonl", "")
    assert done.returncode == -signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert list(out.iterdir()) == []


def test_ctrl_c_in_a_run_with_a_checkpoint_loses_and_repeats_nothing(out: Path, tmp_path: Path) -> None:
    done = interrupted(out / "out.jsonl", str(tmp_path / "checkpoint"))
    assert done.returncode == -signal.SIGINT
    assert not (out / "out.jsonl").exists()
    saved = json.loads((tmp_path / "checkpoint" / "checkpoint.json").read_text())
    end = saved["rows_out"] + 1234
    command = [sys.executable, "-c", ENDLESS, str(out / "out.jsonl"), str(tmp_path / "checkpoint"), str(end)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert [row["n"] for row in lines(out / "out.jsonl")] == [*range(end)]
    assert [path.name for path in out.iterdir()] == ["out.jsonl"]


# -- transforms ------------------------------------------------------------------------------------------------------


def fragile(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] % 100 == 57:
        raise LookupError(f"no place for {row['n']}")
    return {"n": row["n"] * 2}


def test_a_transform_that_raises_is_named_with_the_file_and_the_row(home: Path, out: Path) -> None:
    path = write_rows(home / "a.jsonl", 300)
    offset = path.read_bytes().index(b'{"n": 57}')
    message = rf"Map\(fragile\) failed at .*a\.jsonl, row 57, byte {offset}: LookupError: .*no place for 57"
    error = fails(out, JsonlSource(path), StageError, message, [fragile])
    assert isinstance(error.__cause__, LookupError)
    assert (error.stage, error.file, error.row, error.offset) == ("Map(fragile)", str(path), 57, offset)


def test_rows_that_a_transform_cannot_take_are_skipped_or_quarantined(home: Path, out: Path) -> None:
    path = write_rows(home / "a.jsonl", 300)
    good = [{"n": 2 * i} for i in range(300) if i % 100 != 57]
    rows, bad, report = passes(out, JsonlSource(path), [fragile])
    assert rows == good
    content = path.read_bytes()
    assert [(row["file"], row["row"], row["data"]) for row in bad] == [(str(path), n, {"n": n}) for n in (57, 157, 257)]
    for row in bad:
        assert content[row["offset"] :].startswith(json.dumps(row["data"]).encode() + b"\n")
        assert row["stage"] == "Map(fragile)"
        assert row["reason"].startswith("LookupError: ")
    assert report.quarantined == {"Map(fragile): LookupError": 3}
    (out / "out.jsonl").unlink()
    report = Pipeline(JsonlSource(path), [fragile], JsonlSink(out / "out.jsonl"), PipelineConfig(on_error="skip")).run()
    assert lines(out / "out.jsonl") == good
    assert (report.skipped, report.rows_in, report.rows_out) == ({"Map(fragile): LookupError": 3}, 300, 297)


def test_more_bad_rows_than_allowed_stop_the_run_after_all(home: Path, out: Path) -> None:
    path = write_rows(home / "a.jsonl", 300)
    message = r"3 bad rows, more than max_failures=2; the last: .*a\.jsonl, row 257: LookupError"
    fails(out, JsonlSource(path), FailureBudgetError, message, [fragile], on_error="skip", max_failures=2)
    message = r"3 of 300 rows are bad, more than max_failure_ratio=0\.005"
    fails(out, JsonlSource(path), FailureBudgetError, message, [fragile], on_error="skip", max_failure_ratio=0.005)
    rows, _, _ = passes(out, JsonlSource(path), [fragile], max_failures=3, max_failure_ratio=0.01)
    assert len(rows) == 297


def test_a_transform_that_hangs_is_named(home: Path, out: Path) -> None:
    path = write_rows(home / "a.jsonl", 300)
    released = threading.Event()

    def hang(batch: pa.RecordBatch) -> pa.RecordBatch:
        released.wait(60)
        return batch

    since = time.monotonic()
    pipeline = Pipeline(JsonlSource(path), [hang], JsonlSink(out / "out.jsonl"), PipelineConfig(stall_seconds=1))
    try:
        with pytest.raises(StalledError, match=r"a\.jsonl.*row 0\b"):
            pipeline.run()
        assert time.monotonic() - since < 20
        assert list(out.iterdir()) == []
    finally:
        released.set()


def test_a_transform_that_returns_another_schema_is_named(home: Path, out: Path) -> None:
    path = home / "a.jsonl"
    path.write_text("".join(json.dumps({"n": i, "text": "x" * 200}) + "\n" for i in range(20_000)))

    def moody(batch: pa.RecordBatch) -> pa.RecordBatch:
        first = batch["n"][0].as_py()
        return batch if first < 10_000 else batch.set_column(0, "n", batch["n"].cast(pa.string()))

    message = r"Map\(moody\) .*returned another schema than before: 'n' was int64, is string"
    fails(out, JsonlSource(path), PenstockError, message, [moody], batch_rows=1000, workers=1)


@pytest.mark.parametrize(
    ("result", "kind"), [(None, "NoneType"), ([{"n": 1}], "list"), (pa.table({"n": [1]}), "Table")]
)
def test_a_transform_that_returns_something_else_is_named(home: Path, out: Path, result: Any, kind: str) -> None:
    path = write_rows(home / "a.jsonl", 10)

    def wrong(batch: pa.RecordBatch) -> Any:
        return result

    message = rf"Map\(wrong\) .*returned {kind}, expected a pyarrow\.RecordBatch"
    fails(out, JsonlSource(path), PenstockError, message, [Map(wrong, batch=True)])


def test_a_row_function_that_returns_no_dict_is_named_with_the_row(home: Path, out: Path) -> None:
    path = write_rows(home / "a.jsonl", 10)

    def wrong(row: dict[str, Any]) -> Any:
        return row if row["n"] != 4 else "nothing"

    message = r"Map\(wrong\) failed at .*a\.jsonl, row 4.*returned str for a row, expected a dict"
    fails(out, JsonlSource(path), StageError, message, [wrong])


def test_text_without_a_newline_at_all_is_one_row(home: Path, out: Path) -> None:
    (home / "a.txt").write_text("x" * 5_000_000)
    rows, bad, _ = passes(out, TextSource(home))
    assert [len(row["text"]) for row in rows] == [5_000_000]
    assert bad == []
