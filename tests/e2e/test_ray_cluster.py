"""The Ray cluster of the tests: what runs in it, what is killed in it, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ray_cluster import DriverError, RayCluster, why_not
from tests.waits import wait_for

pytestmark = pytest.mark.timeout(600)

HOLDER = """
import sys, time
from pathlib import Path
from tests.ray_cluster import RayCluster

cluster = RayCluster(Path(sys.argv[1]), nodes=0).start()
driver = cluster.popen("sleep", "600")
print(driver.pid, cluster.keeper_pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def bare() -> Iterator[RayCluster]:
    """A namespace without nodes."""
    if reason := why_not():
        pytest.skip(reason)
    with RayCluster(nodes=0) as cluster:
        yield cluster


def has_ended(process: psutil.Process) -> bool:
    """Ended, and perhaps not yet known to be: orphans wait for the first process of the machine."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def nodes_of_tasks(greeting: str, numbers: list[int]) -> dict[str, Any]:
    import ray

    def place(number: int) -> list[Any]:
        return [number, greeting, ray.get_runtime_context().get_node_id()]

    ray.init(log_to_driver=False)
    task = ray.remote(num_cpus=0)(place)
    placed = ray.get([task.options(resources={f"node{number}": 1}).remote(number) for number in numbers])
    return {"placed": placed, "alive": sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])}


def wait_on_node(number: int, folder: str) -> str:
    """Where a task ended whose first try waits for a kill."""
    import ray

    def hang() -> str:
        here = ray.get_runtime_context().get_node_id()
        tries = Path(folder) / "tries"
        with tries.open("a") as file:
            file.write(f"{here}\n")
        while len(tries.read_text().split()) == 1:
            time.sleep(0.02)
        return here

    ray.init(log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if f"node{number}" in node["Resources"] and node["Alive"]]
    wanted = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(nodes[0], soft=True)
    return str(ray.get(ray.remote(num_cpus=1, scheduling_strategy=wanted)(hang).remote()))


def fail(word: str) -> None:
    raise ValueError(f"no {word}")


def interfaces() -> list[str]:
    return sorted(psutil.net_if_addrs())


def test_a_driver_runs_tasks_on_three_nodes_and_a_killed_node_is_replaced_for_the_next(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"with cluster\.alone"):
        ray_cluster.kill_node(1)
    with ray_cluster.popen(wait_on_node, 2, tmp_path) as driver:
        wait_for(lambda: (tmp_path / "tries").exists() or driver.process.poll() is not None)
        ray_cluster.kill_node(2)
        with pytest.raises(RuntimeError, match=r"node 2 is not alive; alive are \[0, 1\]"):
            ray_cluster.kill_node(2)
        ended = driver.result()
        first, second = (tmp_path / "tries").read_text().split()
        assert first != second == ended
        assert ray_cluster.add_node() == 2
        ray_cluster.kill_node(1)
    answer = ray_cluster.run(nodes_of_tasks, "hello", [0, 1, 2])
    assert ray_cluster.nodes() == [0, 1, 2]
    assert [placed[:2] for placed in answer["placed"]] == [[0, "hello"], [1, "hello"], [2, "hello"]]
    assert sorted(placed[2] for placed in answer["placed"]) == answer["alive"]


def test_nothing_in_the_namespace_sees_another_interface_than_loopback(bare: RayCluster) -> None:
    assert bare.run(interfaces) == ["lo"]


def test_a_failing_driver_is_an_error_with_what_it_wrote(bare: RayCluster) -> None:
    with pytest.raises(DriverError, match=r"(?s)ended with 1.*ValueError: no luck"):
        bare.run(fail, "luck")
    with pytest.raises(DriverError, match=r"(?s)did not end within 0.1 s"):
        bare.run("sleep", "60", timeout_seconds=0.1)


def test_the_cluster_of_a_killed_process_goes_to_the_next_and_ends_with_the_last(tmp_path: Path) -> None:
    program = "import sys, time; from pathlib import Path; from tests.ray_cluster import RayCluster\n"
    program += "cluster = RayCluster(Path(sys.argv[1]), nodes=0).start()\n"
    program += (
        "driver = cluster.popen('sleep', '600'); print(driver.pid, cluster.keeper_pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as other:
        assert other.stdout is not None
        driver, keeper = map(psutil.Process, map(int, other.stdout.readline().split()))
        with RayCluster(tmp_path, nodes=0) as cluster:
            assert cluster.keeper_pid == keeper.pid
            taken = threading.Thread(target=cluster.take)
            taken.start()
            other.send_signal(signal.SIGKILL)
            taken.join()
            cluster.free()
            wait_for(lambda: has_ended(driver))
            folder = cluster.folder
        wait_for(lambda: has_ended(keeper))
        assert not folder.exists()
        with RayCluster(tmp_path, nodes=0) as cluster:
            assert cluster.folder != folder


def test_a_driver_whose_test_process_died_at_once_does_not_run(bare: RayCluster, tmp_path: Path) -> None:
    orphan = [
        "sh",
        "-c",
        '"$@"; exit "$?"',
        "sh",
        *bare.command("touch", str(tmp_path / "ran")),
    ]  # a child of the shell
    assert subprocess.run(orphan, env=bare.environment(), check=False).returncode == 1
    assert not (tmp_path / "ran").exists()
    assert subprocess.run(orphan[4:], env=bare.environment(), check=False).returncode == 0
    assert (tmp_path / "ran").exists()


def test_a_machine_without_the_programs_is_named_and_an_error_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ray_cluster._PROGRAMS", ("unshare", "no-such-program"))
    monkeypatch.delenv("CI", raising=False)
    assert why_not() == "no no-such-program on the PATH (packages util-linux and iproute2)"
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="CI skips no test of clusters"):
        why_not()
