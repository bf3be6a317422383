"""Real processes in meshes of torch: their batches, their slices, and a loss with keys gathered from all ranks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.context_model import weights, whole_loss
from tests.forked_programs import run_ranks

from penstock import PretrainDataLoader
from token_stores import make_rows, make_store

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

WORLD, STEPS, LENGTH, GLOBAL = 4, 2, 30, 4
DEADLINE_SECONDS = 150
MESHES = {
    "data and context": {"dp": 2, "cp": 2},
    "context first": {"cp": 2, "dp": 2},
    "pipeline, data, tensor": {"pp": 2, "dp": 2, "tp": 1},
    "two data dimensions": {"dp_replicate": 2, "dp_shard": 2},
    "context alone": {"cp": 4},
}
SLICINGS = ("contiguous", "zigzag", "zigzag_documents")

PROGRAM = """
import datetime, json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from penstock import PretrainDataLoader
from penstock.loaders import Shard
from tests.context_model import projections, summed_loss, weights

place, here, world, facts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
minute = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=here, world_size=world, timeout=minute)
model, found = weights(), {}

def gather(arrays, group):
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, arrays, group=group)
    return everyone

for name, sizes in facts["meshes"].items():
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    shard = Shard.from_mesh(mesh)
    at = shard.find_position()
    options = {"chunk_size": facts["length"], "packing": "best_fit", "batch_size": facts["global"] // at.dp.world_size}
    with PretrainDataLoader(place + "/data", shard=shard, **options) as loader:
        batches = [loader.get_batch() for _ in range(facts["steps"])]
        own = {"rank": loader.rank.rank, "world": loader.rank.world_size, "cp": at.cp.rank}
        own |= {"ids": [batch.input_ids.tolist() for batch in batches], "state": loader.state_dict()}
    for slicing in facts["slicings"] if "cp" in sizes else ():
        group = mesh["cp"].get_group()
        with PretrainDataLoader(place + "/data", shard=Shard.from_mesh(mesh, context=slicing), **options) as loader:
            losses = []
            for _ in range(facts["steps"]):
                part = loader.get_batch()
                mine = projections(model, part)
                total = summed_loss(model, mine, gather(mine, group), part.shift_labels)
                dist.all_reduce(total)  # over context and data ranks
                losses.append(float(total) / part.num_items_in_batch)
            own[slicing] = losses
            assert loader.state_dict() == own["state"]
    found[name] = own
with open(f"{place}/{here}.json", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("meshes")
    make_store(home / "data", [[token % 127 for token in row] for row in make_rows(40, LENGTH)])
    return home


@pytest.fixture(scope="module")
def found(home: Path) -> list[Any]:
    """What each of the processes found out."""
    script = home / "program.py"
    script.write_text(PROGRAM)
    facts = {"meshes": MESHES, "steps": STEPS, "length": LENGTH, "global": GLOBAL, "slicings": SLICINGS}
    arguments = [[str(home), str(rank), str(WORLD), json.dumps(facts)] for rank in range(WORLD)]
    return run_ranks(script, arguments, [{}] * WORLD, timeout=DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def whole(home: Path) -> list[Any]:
    """Global batches."""
    with PretrainDataLoader(
        home / "data", chunk_size=LENGTH, packing="best_fit", batch_size=GLOBAL, rank=0, world_size=1
    ) as loader:
        return [loader.get_batch() for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "ranks", "cp"),
    [
        ("data and context", [0, 0, 1, 1], [0, 1, 0, 1]),
        ("context first", [0, 1, 0, 1], [0, 0, 1, 1]),
        ("pipeline, data, tensor", [0, 1, 0, 1], [0] * 4),
        ("two data dimensions", [0, 1, 2, 3], [0] * 4),
        ("context alone", [0] * 4, [0, 1, 2, 3]),
    ],
)
def test_processes_of_a_mesh_get_the_batches_of_their_data_rank(
    name: str, ranks: list[int], cp: list[int], found: list[Any], whole: list[Any]
) -> None:
    assert [one[name]["rank"] for one in found] == ranks
    assert [one[name]["cp"] for one in found] == cp
    world = max(ranks) + 1
    each = GLOBAL // world
    for one, rank in zip(found, ranks):
        rows = [batch.input_ids[rank * each : (rank + 1) * each].tolist() for batch in whole]
        assert one[name]["ids"] == rows
        assert one[name]["state"] == found[0]["data and context"]["state"]


@pytest.mark.parametrize("slicing", SLICINGS)
@pytest.mark.parametrize("name", ["data and context", "context first", "context alone"])
def test_the_loss_of_all_ranks_is_that_of_the_global_batch(
    name: str, slicing: str, found: list[Any], whole: list[Any]
) -> None:
    wanted = [float(whole_loss(weights(), batch)) for batch in whole]
    for one in found:
        assert one[name][slicing] == pytest.approx(wanted, rel=1e-12)
