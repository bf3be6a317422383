"""Worker processes end with the process that started them, whatever they do at that moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.waits import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the signal of a closed pipe is one of Linux")

HOLD = """
import os, sys, time
from pathlib import Path
parent = os.getpid()
def hold(row):
    if os.getpid() == parent:
        return row  # the first rows: they tell the columns
    pid = Path({pid!r})
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    10 ** 300_000_000 % 7  # C code that lets no other thread run
    return row
"""
PIPELINE = """
from penstock import Pipeline, PipelineConfig
from penstock.sources import MemorySource
from penstock.transforms import Map
rows = [{"id": i} for i in range(9)]
config = PipelineConfig(workers="process", max_workers=1, batch_rows=1)
for _ in Pipeline(MemorySource(rows), [Map(hold)], config=config): pass
"""
ARRAYS = """
from penstock.pipeline.array_worker import ArrayWorker
class Service:
    def answer(self, request):
        return hold(request)
worker = ArrayWorker(Service())
worker.send([(0, b"")])
worker.receive()
"""


@pytest.mark.parametrize("kind", [PIPELINE, ARRAYS], ids=["pipeline", "arrays"])
def test_a_worker_stuck_in_c_code_ends_with_its_killed_parent(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", HOLD.format(pid=str(place)) + kind])
    try:
        wait_for(lambda: place.exists() or parent.poll() is not None)
        worker = psutil.Process(int(place.read_text()))
    finally:
        parent.kill()
        parent.wait()
    try:
        wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    finally:
        if worker.is_running():
            worker.kill()


def test_a_forked_process_does_not_keep_the_workers_of_its_killed_parent_alive(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    # The fork outlives the parent, with copies of all that the parent had open.
    fork = "import os, time\nif os.fork() == 0: time.sleep(60)\n"
    script = HOLD.format(pid=str(place)) + ARRAYS.replace("worker.receive()", fork + "worker.receive()")
    parent = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        wait_for(lambda: place.exists() or parent.poll() is not None)
        worker = psutil.Process(int(place.read_text()))
        parent.kill()
        parent.wait()
        wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    finally:
        parent.kill()
        parent.wait()
        os.killpg(parent.pid, 9)
