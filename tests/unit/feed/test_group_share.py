"""Batches that one rank of a group fetches for all: real processes with torch.distributed (gloo)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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

address, meet, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
asked, stream = [], FeedConnection.stream
FeedConnection.stream = lambda self, request: (asked.append(request["verb"]), stream(self, request))[1]
found = {"ids": [], "states": []}
loader = RemoteLoader(address, rank=0, world_size=2, batch_size=2, share=dist.group.WORLD, retry_seconds=0.2)
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


def test_one_rank_of_a_group_fetches_batches_for_all(tmp_path: Path) -> None:
    rows = make_rows(40, LENGTH)
    store = make_store(tmp_path / "chat", rows, make_masks(rows))

    def local(**place: int) -> ConversationDataLoader:
        return ConversationDataLoader(store, None, LENGTH, packing="best_fit", backend="numpy", **place)

    with local() as base, FeedServer(base) as server:
        command = [sys.executable, "-c", PROGRAM, server.address, str(tmp_path / "meet")]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        running = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(2)
        ]
        outputs = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in running]
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first["asked"] == 3
    assert second["asked"] == 0, "it asks for positions, not for batches"
    assert "penstock serve" in first["error"]
    assert "penstock serve" in second["error"]
    for name in ("ids", "states", "single"):
        assert first[name] == second[name]
    with local(rank=0, world_size=2, batch_size=2) as loader:
        for ids, state in zip(first["ids"], first["states"], strict=True):
            batch = loader.get_batch()
            assert ids == [batch.input_ids.tolist(), batch.labels.tolist(), batch.metadata["row"].tolist()]
            assert state == loader.state_dict()
        assert first["single"] == loader.get_batch().input_ids.tolist()


def test_a_group_without_torch_distributed_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "text", make_rows(20, LENGTH), make_masks(make_rows(20, LENGTH)))
    with ConversationDataLoader(store, None, LENGTH, packing=None, backend="numpy") as base, FeedServer(base) as server:
        with pytest.raises(ConfigError, match="init_process_group"):
            RemoteLoader(server.address, backend="numpy", share=Position(()))
        with pytest.raises(ConfigError, match="prefetch=2"):
            RemoteLoader(server.address, backend="numpy", share=Position(()), prefetch=2)
