"""Replicas of a feed server on a Ray cluster. The function without `test_` is a driver, in the cluster's namespace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.feed import FeedReplicas, RemoteLoader
from penstock.loaders.loader_file import load_config
from token_stores import make_rows, make_store

pytestmark = pytest.mark.timeout(600)  # waiting for the cluster counts

LENGTH = 16


def read_from_replicas(folder: str) -> dict[str, Any]:
    """What a client gets while one of two replicas is killed, and what the local loader gets."""
    import ray

    config = load_config(Path(folder, "feed.json"))
    found: dict[str, Any] = {}
    with FeedReplicas(config, 2, metrics=Path(folder, "feed.jsonl")) as replicas:
        found["addresses"] = replicas.addresses
        with RemoteLoader(replicas.addresses, backend="numpy", retry_seconds=60) as client:
            found["remote"] = [batch.input_ids.tolist() for batch in client]
            ray.kill(replicas._actors[0])
            found["remote"] += [batch.input_ids.tolist() for batch in client]
        found["errors"] = []
        for bad in ({"path": str(Path(folder, "nowhere"))}, {"streaming": True}):
            wrong = Path(folder, "wrong.json")
            wrong.write_text(json.dumps({**config.tree, **bad}))
            try:
                FeedReplicas(load_config(wrong), 1)
            except Exception as error:
                found["errors"].append([type(error).__name__, str(error)])
    with config.open(backend="numpy", rank=0, world_size=1) as local:
        found["local"] = [batch.input_ids.tolist() for _ in range(2) for batch in local]
    return found


def test_replicas_on_ray_serve_the_batches_of_the_local_loader(ray_cluster: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "text", make_rows(40, LENGTH))
    tree = {"loader": "pretrain", "path": str(store), "chunk_size": LENGTH, "batch_size": 4}
    (tmp_path / "feed.json").write_text(json.dumps(tree))
    found = ray_cluster.run(read_from_replicas, tmp_path, timeout_seconds=300)
    assert len(set(found["addresses"])) == 2
    assert found["remote"] == found["local"]
    for name, rank in (("feed.jsonl", "0"), ("feed.rank1.jsonl", "1")):
        header = json.loads((tmp_path / name).read_text().splitlines()[0])
        assert (header["kind"], header["labels"]["rank"]) == ("feed", rank)
    (missing, told), (kind, reason) = found["errors"]
    assert missing == "FileNotFoundError"
    assert "nowhere" in told
    assert kind == "ConfigError"
    assert "streaming=false" in reason


def test_a_number_of_replicas_is_at_least_one(tmp_path: Path) -> None:
    store = make_store(tmp_path / "text", make_rows(4, LENGTH))
    with pytest.raises(ConfigError, match="at least one replica"):
        FeedReplicas(load_config(store), 0)
