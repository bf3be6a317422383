"""Real processes that meet through torch.distributed (gloo)."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.forked_programs import run_ranks
from tests.servers import free_ports

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

DEADLINE_SECONDS = 150

PROGRAM = """
import datetime, json, os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from penstock.distributed import *
from penstock.errors import StalledError

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
found, here, world = {}, dist.get_rank(), dist.get_world_size()
os.environ["RANK"] = "0"  # torch.distributed knows better

found["rank"] = str(find_rank())
found["halves"] = str(find_rank(model_parallel_size=2))
mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
found["dp"], found["tp"] = str(find_rank(group=mesh["dp"])), str(find_rank(group=mesh["tp"].get_group()))
found["mesh"] = str(find_rank(group=mesh))

rank, store = find_rank(), find_rendezvous()
for _ in range(3):
    barrier(store, rank, "start", 60)

# Rank r has data for 3 * r steps; every step ends in a collective of all ranks.
found["steps"] = []
for epoch in range(2):
    end, step, one = EndOfEpoch(store, rank, epoch, 60), 0, torch.ones(1)
    while True:
        end.passed(step) if step < 3 * here else end.ended(3 * here)
        if not end.more(step):
            break
        dist.all_reduce(one)
        step += 1
    found["steps"].append(step)

found["states"] = [gather_states({"step": step, "streams": {str(here): step}}, timeout_seconds=30) for step in range(2)]
# Two processes for each data rank, which read the same streams.
data = mesh["dp"]
found["shared"] = gather_states({"streams": {str(find_rank(group=data).rank): 1}}, group=data, timeout_seconds=30)

if here != world - 1:
    try:
        barrier(store, rank, "late", 0.3)
    except StalledError as error:
        found["late"] = str(error)

# The store lives in rank 0, which goes as soon as it may.
barrier(store, rank, "bye", 60)
with open(sys.argv[1] + f"/{here}.json", "w") as file:
    json.dump(found, file)
if here == 0:
    os._exit(0)
try:
    barrier(store, rank, "gone", 60)
except StalledError as error:
    with open(sys.argv[1] + f"/{here}.gone", "w") as file:
        file.write(str(error))
os._exit(0)
"""

WORKERS = """
import torch.utils.data as data
from penstock.distributed import Rank, worker_rank

class Numbers(data.IterableDataset):
    def __iter__(self):
        yield worker_rank()

if __name__ == "__main__":
    assert list(Numbers()) == [Rank(0, 1)]
    loader = data.DataLoader(Numbers(), batch_size=None, num_workers=2, timeout=60)
    assert list(loader) == [Rank(0, 2), Rank(1, 2)], list(loader)
"""


def run_world(world: int, directory: Path) -> list[Any]:
    """Runs the program once for each rank, and returns what each found out."""
    script = directory / "program.py"
    script.write_text(PROGRAM)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": str(world)}
    environments = [{**shared, "RANK": str(rank)} for rank in range(world)]
    return run_ranks(script, [[str(directory)]] * world, environments, timeout=DEADLINE_SECONDS)


@pytest.mark.parametrize("world", [2, 4])
def test_processes_meet_through_torch_distributed(world: int, tmp_path: Path) -> None:
    found = run_world(world, tmp_path)
    half = world // 2
    assert [one["rank"] for one in found] == [f"rank {rank} of {world}" for rank in range(world)]
    assert [one["mesh"] for one in found] == [f"rank {rank} of {world}" for rank in range(world)]
    for name in ("halves", "dp"):
        assert [one[name] for one in found] == [f"rank {rank // 2} of {half}" for rank in range(world)]
    assert [one["tp"] for one in found] == [f"rank {rank % 2} of 2" for rank in range(world)]
    assert [one["steps"] for one in found] == [[3 * (world - 1)] * 2] * world
    states = [{"step": step, "streams": {str(rank): step for rank in range(world)}} for step in range(2)]
    assert [one["states"] for one in found] == [states] * world
    assert [one["shared"] for one in found] == [{"streams": {str(rank): 1 for rank in range(half)}}] * world
    for rank, one in enumerate(found[:-1]):
        late = f"rank {rank} of {world} waited 0.3 s at 'barrier late' for rank {world - 1}, which did not arrive"
        assert one["late"].startswith(late)
    for rank in range(1, world):
        gone = (tmp_path / f"{rank}.gone").read_text()
        assert re.search(rf"rank {rank} of {world}\b.*'barrier gone'", gone)


def test_workers_of_a_torch_loader_know_their_number(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(WORKERS)
    subprocess.run([sys.executable, str(script)], check=True, timeout=DEADLINE_SECONDS)
