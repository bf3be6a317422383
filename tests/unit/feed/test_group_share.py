"""Batches that one rank of a group fetches for all: real processes with torch.distributed (gloo)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.feed import FeedServer, RemoteLoader
from penstock.loaders.conversation import ConversationDataLoader
from penstock.order.positions import Position
from token_stores import make_masks, make_rows, make_store

pytest.importorskip("torch.distributed")
LENGTH, DEADLINE_SECONDS = 16, 150

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from penstock.feed import RemoteLoader
from penstock.feed.connection import FeedConnection

meet, rank, address = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
asked, stream = [], FeedConnection.stream
FeedConnection.stream = lambda self, request: (asked.append(request["verb"]), stream(self, request))[1]
found = {"ids": [], "states": []}
loader = RemoteLoader(address, rank=0, world_size=1, batch_size=4, share=dist.group.WORLD, retry_seconds=0.2)
for epoch in range(2):
    for number, batch in enumerate(loader):
        found["ids"].append([batch.input_ids.tolist(), batch.labels.tolist(), batch.metadata["row"].tolist()])
        found["states"].append(loader.state_dict())
        if epoch == 0 and number == 4:
            break  # every rank leaves the loop here, and goes on in the next one
found["single"] = loader.get_batch().input_ids.tolist()
found["asked"] = asked.count("batches")
loader._engine._connection.addresses[:] = ["grpc://127.0.0.1:1"]
loader._engine.close()
try:
    next(iter(loader))
except ConnectionError as error:
    found["error"] = str(error)
print(json.dumps(found))
dist.destroy_process_group()
"""


def run_ranks(program: str, meet: Path, *arguments: str) -> list[Any]:
    """What two ranks print at their end."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(meet), str(rank), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in running]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_one_rank_of_a_group_fetches_batches_for_all(tmp_path: Path) -> None:
    rows = make_rows(40, LENGTH)
    store = make_store(tmp_path / "chat", rows, make_masks(rows))

    def local(**place: int) -> ConversationDataLoader:
        return ConversationDataLoader(store, None, LENGTH, packing="best_fit", backend="numpy", **place)

    with local() as base, FeedServer(base) as server:
        first, second = run_ranks(PROGRAM, tmp_path / "meet", server.address)
    assert first["asked"] == 3
    assert second["asked"] == 0, "it asks for positions, not for batches"
    assert "penstock serve" in first["error"]
    assert "penstock serve" in second["error"]
    for name in ("ids", "states", "single"):
        assert first[name] == second[name]
    with local(rank=0, world_size=1, batch_size=4) as loader:
        for ids, state in zip(first["ids"], first["states"], strict=True):
            batch = loader.get_batch()
            assert ids == [batch.input_ids.tolist(), batch.labels.tolist(), batch.metadata["row"].tolist()]
            assert state == loader.state_dict()
        assert first["single"] == loader.get_batch().input_ids.tolist()


MISTAKES = """
import json, sys
import torch, torch.distributed as dist
from penstock.errors import ConfigError
from penstock.feed import RemoteLoader

meet, rank = sys.argv[1], int(sys.argv[2])
same, other = sys.argv[3:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
both, alone = dist.group.WORLD, [dist.new_group([each]) for each in range(2)][rank]
found = {}

def attempt(name, addresses, in_turn=False, **given):
    if in_turn and rank == 1:
        dist.barrier()  # the first rank comes first
    try:
        found[name] = RemoteLoader(addresses, retry_seconds=0.2, **given).get_batch().input_ids.tolist()
    except ConfigError as error:
        found[name] = str(error)
    if not in_turn or rank == 0:
        dist.barrier()

attempt("share alone", same, share=both)
attempt("shared data ranks", same, share=both, rank=rank, world_size=2)
attempt("processes as data ranks", same, share=both, rank=0, world_size=2)
attempt("right", same, share=both, rank=0, world_size=1)
attempt("shared feeds", [same, other][rank], share=both, rank=0, world_size=1)
attempt("own", same, share=alone, batch_size=2)
attempt("agreed", same, True)
attempt("sizes", same, True, batch_size=2 + rank)
attempt("backends", same, True, backend=["torch", "numpy"][rank])
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_ranks_that_do_not_fit_together_are_refused_before_the_first_batch(tmp_path: Path) -> None:
    rows = make_rows(40, LENGTH)
    store = make_store(tmp_path / "chat", rows, make_masks(rows))
    given = {"packing": "best_fit", "backend": "numpy", "batch_size": 2}
    with (
        ConversationDataLoader(store, None, LENGTH, **given) as one,
        ConversationDataLoader(store, None, LENGTH, seed=5, **given) as two,
        FeedServer(one) as same,
        FeedServer(two) as other,
    ):
        first, second = run_ranks(MISTAKES, tmp_path / "meet", same.address, other.address)
    for found in (first, second):
        for name in ("share alone", "shared data ranks"):
            assert "here they are the data ranks 0 of 2, 1 of 2; pass group=mesh" in found[name]
        assert (
            "2 data ranks with share= of 2 are 4 processes, and torch.distributed has 2"
            in found["processes as data ranks"]
        )
        assert "different feeds" in found["shared feeds"]
    assert first["right"] == second["right"]
    assert first["own"] != second["own"]
    assert first["agreed"] != second["agreed"]
    assert isinstance(first["sizes"], list)
    assert "process 0 found another feed" in second["sizes"]
    assert "batch_size is 2 there and 3 here" in second["sizes"]
    assert isinstance(second["backends"], list), "each rank may have its own"


def test_a_group_without_torch_distributed_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "text", make_rows(20, LENGTH), make_masks(make_rows(20, LENGTH)))
    with ConversationDataLoader(store, None, LENGTH, packing=None, backend="numpy") as base, FeedServer(base) as server:
        with pytest.raises(ConfigError, match="init_process_group"):
            RemoteLoader(server.address, backend="numpy", share=Position(()))
        with pytest.raises(ConfigError, match="prefetch=2"):
            RemoteLoader(server.address, backend="numpy", share=Position(()), prefetch=2)
