"""Bytes that two processes see: they grow, shrink and stay good for whoever still looks at them."""

from __future__ import annotations

import os
import subprocess
import sys

import pyarrow as pa
import pytest

from penstock.pipeline.processes import SharedBytes, batch_bytes

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes on Windows use pipes")


def batch_of(rows: int) -> pa.RecordBatch:
    return pa.record_batch({"n": range(rows), "text": [f"row {number}" for number in range(rows)]})


def read(shared: SharedBytes, nbytes: int) -> pa.RecordBatch:
    return pa.ipc.open_stream(shared.content(nbytes)).read_next_batch()


def test_what_one_side_writes_the_other_reads() -> None:
    mine = SharedBytes()
    theirs = SharedBytes(os.dup(mine.descriptor))
    for rows in (1, 5000, 0, 100_000, 3):
        assert read(theirs, mine.write_batch(batch_of(rows))).equals(batch_of(rows))
    mine.close()
    mine.close()
    theirs.close()


def test_memory_of_something_large_is_given_back() -> None:
    shared = SharedBytes()
    shared.write_batch(pa.record_batch({"x": pa.array(["a" * (1 << 20)] * 40)}))
    assert os.fstat(shared.descriptor).st_size > 40 << 20
    shared.write_batch(batch_of(10))
    assert os.fstat(shared.descriptor).st_size < 1 << 20
    shared.close()


def test_a_slice_takes_only_its_own_rows() -> None:
    assert batch_bytes(batch_of(10_000).slice(5000, 10)) < 2000


def test_a_fresh_process_sees_it_by_its_descriptor() -> None:
    shared = SharedBytes()
    size = shared.write_batch(batch_of(7))
    program = (
        "import sys, pyarrow as pa\n"
        "from penstock.pipeline.processes import SharedBytes\n"
        "content = SharedBytes(int(sys.argv[1])).content(int(sys.argv[2]))\n"
        "print(pa.ipc.open_stream(content).read_next_batch().num_rows)\n"
    )
    command = [sys.executable, "-c", program, str(shared.descriptor), str(size)]
    done = subprocess.run(command, pass_fds=[shared.descriptor], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "7"
    shared.close()
