"""Kills of nodes and drivers at random: every job has to end with the bytes of a local run.

A few seconds as a test, or as many as `PENSTOCK_CHAOS_SECONDS` says. CI runs two minutes of it,
mostly waiting for nodes and drivers to start, beside the tests: `python tests/e2e/test_ray_chaos.py`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.test_ray_jobs import make_input, output, run_job, run_local
from tests.ray_cluster import RayCluster, why_not

from penstock.engines.job_directory import PLAN_NAME

TWO_MINUTES = 120.0
SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", 15.0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whoever_is_killed_every_job_ends_with_the_bytes_of_a_local_run() -> None:
    if reason := why_not():
        pytest.skip(reason)
    assert chaos(SECONDS) > 0


def chaos(seconds: float) -> int:
    """Number of nodes and drivers that were killed, at random, in jobs that all gave the bytes of a local run."""
    draw, until = random.Random(), time.monotonic() + seconds
    jobs = nodes = drivers = 0
    with tempfile.TemporaryDirectory() as place, RayCluster() as cluster:
        while time.monotonic() < until or not nodes + drivers:
            folder = Path(place) / str(jobs)
            folder.mkdir()
            make_input(folder, rows=1500, seed=jobs)
            (folder / "calls").mkdir()
            run_local(folder, "store")
            while True:
                with cluster.popen(run_job, folder, "job", "store", draw.randint(2000, 9000), 0.05) as driver:
                    while driver.process.poll() is None:
                        time.sleep(draw.uniform(0.5, 4))
                        if draw.random() < 0.3:
                            driver.kill()
                            drivers += 1
                        elif len(alive := cluster.nodes()) > 1 and draw.random() < 0.6:
                            cluster.kill_node(draw.choice(alive[1:]))
                            nodes += 1
                        elif len(alive) < 3:
                            cluster.add_node()
                    if driver.process.returncode == 0 or ended(folder):
                        break
                    if driver.process.returncode != -9:
                        driver.result()
            assert output(folder, "job") == output(folder, "local-store"), folder
            jobs += 1
            print(f"{jobs} jobs, {nodes} nodes and {drivers} drivers killed: all bytes as in local runs", flush=True)
    return nodes + drivers


def ended(folder: Path) -> bool:
    """True if the store is there and its job is not: what was killed then was a driver on its way out."""
    return (folder / "job.store" / "manifest.json").exists() and not (folder / ".job.store.job" / PLAN_NAME).exists()


if __name__ == "__main__":
    chaos(float(sys.argv[1]) if len(sys.argv) > 1 else TWO_MINUTES)
