"""Kills of nodes and drivers at random: `python tests/e2e/ray_chaos.py 120`. Every job has to end with local bytes."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e.test_ray_jobs import make_input, output, run_job, run_local
from tests.ray_cluster import RayCluster


def chaos(seconds: float) -> None:
    """Kill nodes and drivers at random; the output has to be that of a local run, job after job."""
    draw, until = random.Random(), time.monotonic() + seconds
    jobs = nodes = drivers = 0
    with tempfile.TemporaryDirectory() as place, RayCluster() as cluster:
        while time.monotonic() < until:
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
                    if driver.process.returncode == 0:
                        break
                    if driver.process.returncode != -9:
                        driver.result()
            assert output(folder, "job") == output(folder, "local-store"), folder
            jobs += 1
            print(f"{jobs} jobs, {nodes} nodes and {drivers} drivers killed: all bytes as in local runs", flush=True)


if __name__ == "__main__":
    chaos(float(sys.argv[1]))
