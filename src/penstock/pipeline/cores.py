"""Cores that this process may use, and the threads that libraries may start beside ours.

penstock decides how many threads work at once; a thread pool of a library beside each of them would only compete.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from penstock.memory.cgroups import CGROUP, PROC, groups_v1, groups_v2, lines

SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Variables that NumPy, numba, Rust and tokenizer libraries read when they are loaded."""


_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")
_FIRST_NUMBER = re.compile(r"\d+")
_share: int | None = None
"""Cores of this process, if it is one of several workers on a machine."""


def share_machine(cores: int) -> None:
    """Have this process, and libraries that it loads from now on, use no more than some of the machine's cores."""
    global _share
    _share = max(1, cores)
    for name, value in SINGLE_THREAD.items():
        os.environ.setdefault(name, str(_share) if value == "1" else value)


def available_cores(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Cores this process may use: those it is bound to, or fewer if a container or its share of the machine is less."""
    try:
        bound = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows have no affinity mask to ask
        bound = os.cpu_count() or 1
    shares = [bound] if _share is None else [bound, _share]
    return max(1, min([*shares, *(math.ceil(quota) for quota in _quotas(proc, cgroup))]))


def ranks_on_machine() -> int:
    """Ranks that share the cores of this process, as its launcher tells: those bound to other cores do not count."""
    if (given := os.environ.get("LOCAL_WORLD_SIZE", "")).isdecimal():
        return max(1, int(given))
    # Slurm writes `8(x2),4`: eight tasks on each of two machines, then four.
    found = _FIRST_NUMBER.match(next(filter(None, map(os.environ.get, _LOCAL_SIZES)), ""))
    machine = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    return max(1, math.ceil(int(found[0]) * bound / machine)) if found else 1


def single_thread_environment() -> dict[str, str]:
    """Environment for one of several worker processes: this one's, with one thread for each library.

    A variable that is set already stays as it is.
    """
    return {**SINGLE_THREAD, **os.environ}


def _quotas(proc: Path, cgroup: Path) -> Iterator[float]:
    """Limits of CPU time, in cores."""
    for group in groups_v2(proc, cgroup):
        yield from _cores(" ".join(lines(group / "cpu.max")[:1]))
    for group in groups_v1("cpu", proc, cgroup):
        yield from _cores(" ".join([*lines(group / "cpu.cfs_quota_us")[:1], *lines(group / "cpu.cfs_period_us")[:1]]))


def _cores(text: str) -> Iterator[float]:
    """`200000 100000` is two cores; without a limit v2 says `max` and v1 -1."""
    quota, _, period = text.partition(" ")
    if quota.isascii() and quota.isdigit() and period.isascii() and period.isdigit() and int(period):
        yield int(quota) / int(period)
