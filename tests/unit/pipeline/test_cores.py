"""The number of cores follows affinity and the limits of containers; libraries in worker processes get one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.pipeline import cores
from penstock.pipeline.cores import available_cores, single_thread_environment


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def container(home: Path, groups: str, files: dict[str, str]) -> dict[str, Path]:
    proc, cgroup = home / "proc", home / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    for name, content in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return {"proc": proc, "cgroup": cgroup}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "6400000 100000\n"}, 16),
        ("0::/a\n", {"a/cpu.max": "nonsense\n"}, 16),
        ("0::/a\n", {"a/cpu.max": "100000 0\n"}, 16),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 3),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 16),
    ],
)
@pytest.mark.usefixtures("sixteen")
def test_a_limit_of_cpu_time_is_a_number_of_cores(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    assert available_cores(**container(tmp_path, groups, files)) == expected


def test_cores_are_those_that_the_process_is_bound_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert available_cores(proc=tmp_path, cgroup=tmp_path) == 2
    monkeypatch.delattr(cores.os, "sched_getaffinity")
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 12)
    assert available_cores(proc=tmp_path, cgroup=tmp_path) == 12


def test_libraries_get_one_thread_unless_the_caller_has_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    made = single_thread_environment()
    assert (made["OMP_NUM_THREADS"], made["RAYON_NUM_THREADS"]) == ("3", "1")
    assert made["PATH"] == os.environ["PATH"]
    assert "RAYON_NUM_THREADS" not in os.environ


def test_no_module_but_one_asks_for_the_number_of_cores() -> None:
    root = Path(cores.__file__).parent.parent
    asking = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if any(name in path.read_text("utf-8") for name in ("sched_getaffinity", "cpu_count()"))
    ]
    assert asking == ["pipeline/cores.py"]


def test_importing_penstock_sets_no_variable() -> None:
    code = "import os; before = dict(os.environ); import penstock, penstock.pipeline; assert dict(os.environ) == before"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_process_that_shares_a_machine_has_no_more_than_its_share(
    sixteen: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cores, "_share", None)
    for name in cores.SINGLE_THREAD:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    cores.share_machine(2)
    assert available_cores(**container(tmp_path, "", {})) == 2
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"]) == ("2", "false")
    assert os.environ["RAYON_NUM_THREADS"] == "7"
    cores.share_machine(0)
    assert available_cores() == 1


@pytest.mark.parametrize(
    ("environment", "bound", "expected"),
    [
        ({}, 16, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 16, 8),
        ({"LOCAL_WORLD_SIZE": "8"}, 4, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 16, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, 16, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"}, 2, 1),  # bound to cores of its own
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8, 4),  # bound to a socket that four share
        ({"LOCAL_WORLD_SIZE": "", "MPI_LOCALNRANKS": "x"}, 16, 1),
    ],
)
def test_ranks_that_share_the_cores_of_a_machine(
    environment: dict[str, str], bound: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", *cores._LOCAL_SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(bound)), raising=False)
    assert cores.ranks_on_machine() == expected
