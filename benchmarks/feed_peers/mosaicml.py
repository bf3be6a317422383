"""MosaicML Streaming: MDS shards in the torch DataLoader."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader

from feed_peers import BATCH, SEQUENCE
from feed_peers.inputs import open_tokens
from feed_peers.timing import Batches, Epochs

try:
    import torchvision  # noqa: F401
except ImportError:
    # The package imports it for its vision datasets, which are not used here.
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        stub: Any = ModuleType(name)
        stub.__spec__ = ModuleSpec(name, None)
        stub.VisionDataset = stub.CIFAR10 = stub.to_tensor = object
        sys.modules[name] = stub

from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


def write(data: Path, out: Path) -> None:
    with MDSWriter(out=str(out), columns={"tokens": f"ndarray:uint16:{SEQUENCE}"}) as writer:
        for row in open_tokens(data):
            writer.write({"tokens": row})


class _Tokens(StreamingDataset):  # type: ignore[misc]
    def __getitem__(self, at: Any) -> torch.Tensor:
        return torch.from_numpy(super().__getitem__(at)["tokens"].astype("int64"))


def documented(data: Path) -> Epochs:
    clean_stale_shared_memory()
    dataset = _Tokens(local=str(data / "mds"), shuffle=True, batch_size=BATCH)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH)

    def epoch(number: int) -> Batches:
        for ids in loader:
            yield ids, ids.clone()

    return epoch
