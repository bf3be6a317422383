"""Share of a group: ranks that train on the same batches, of which one fetches them for all.

The first rank passes every message on through torch.distributed, in the thread that uses the batches, so that all ranks
of the group take part in the same order. A message goes as its notes and its arrays, not as Python objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends import get_backend
from penstock.distributed.ranks import Rank, running_torch
from penstock.errors import ConfigError
from penstock.feed.protocol import Message, array_table, failure_notes, read_failure, sized_view
from penstock.files.states import parse_json, to_json

_ALIGNMENT = 64


class GroupShare:
    """Ranks of a tensor- or context-parallel group that get their batches from its first rank."""

    def __init__(self, group: Any) -> None:
        module = running_torch()
        if module is None:
            raise ConfigError("share= needs torch.distributed; call torch.distributed.init_process_group() first")
        found = group.get_group() if hasattr(group, "get_group") else group
        if not callable(getattr(found, "size", None)):
            raise ConfigError(f"share must be a process group or a mesh of one dimension, got {group!r}")
        if "gloo" not in str(module.get_backend_config(found)):
            raise ConfigError(
                f"share= passes batches on in main memory, and the group's backend is {module.get_backend(found)!r}; "
                "make it with gloo: torch.distributed.new_group(ranks, backend='gloo')"
            )
        self._module, self._group = module, found
        self._source = module.get_global_rank(found, 0)
        self.is_first = bool(module.get_rank(found) == 0)

    def check(self, rank: Rank, digest: int) -> None:
        """Refuse a group whose ranks would not train on the same batches. All of its ranks call it, and all raise."""
        size, world = self._module.get_world_size(self._group), self._module.get_world_size()
        found = np.zeros((size, 3), np.int64)
        own = np.array([rank.rank, rank.world_size, digest], np.int64)
        convert = get_backend("torch").from_numpy
        self._module.all_gather([convert(row) for row in found], convert(own), group=self._group)
        places = [f"{number} of {total}" for number, total in np.unique(found[:, :2], axis=0).tolist()]
        if len(places) > 1:
            raise ConfigError(
                f"the ranks of share= train on the same batches, and here they are the data ranks {', '.join(places)}; "
                'pass group=mesh["dp"] or shard=Shard.from_mesh(mesh) for the data ranks, with share=mesh["tp"], the '
                "ranks that have the same data rank"
            )
        if len(np.unique(found[:, 2])) > 1:
            raise ConfigError(
                "the ranks of share= read different feeds, or with different options; serve the same config at all "
                "addresses, and pass the same options on all ranks"
            )
        if world % (rank.world_size * size):
            raise ConfigError(
                f"{rank.world_size} data ranks with share= of {size} are {rank.world_size * size} processes, and "
                f'torch.distributed has {world}; pass group=mesh["dp"] or shard=Shard.from_mesh(mesh) for the data '
                "ranks (rank= and world_size= count those, not processes), or leave out share="
            )

    def send(self, message: Message) -> None:
        """Pass a message on to the others."""
        head = to_json({**message.notes, "arrays": array_table(message.arrays)})
        sizes = [len(head), *(array.nbytes for array in message.arrays.values())]
        payload = np.zeros(sum(map(_padded, sizes)), np.uint8)
        places = _places(sizes)
        payload[: len(head)] = np.frombuffer(head, np.uint8)
        for place, array in zip(places[1:], message.arrays.values()):
            payload[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._broadcast(np.array([len(head), payload.nbytes], np.int64))
        self._broadcast(payload)

    def end(self) -> None:
        self.send(Message({"type": "end"}, {}))

    def fail(self, error: BaseException) -> None:
        """Have the others raise the error of this rank."""
        self.send(Message(failure_notes(error), {}))

    def received(self) -> Iterator[Message]:
        """Messages of the first rank, until it says that they end."""
        while True:
            notes_bytes, nbytes = self._broadcast(np.zeros(2, np.int64)).tolist()
            payload = self._broadcast(np.zeros(nbytes, np.uint8))
            notes = parse_json(payload[:notes_bytes].tobytes())
            if notes["type"] == "end":
                return
            if notes["type"] == "error":
                raise read_failure(notes, "the first rank of the group")
            arrays: dict[str, npt.NDArray[Any]] = {}
            place = _padded(notes_bytes)
            for name, facts in notes["arrays"].items():
                arrays[name] = sized_view(payload[place:], name, *facts)
                place += _padded(arrays[name].nbytes)
            yield Message(notes, arrays)

    def _broadcast(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self._module.broadcast(get_backend("torch").from_numpy(array), src=self._source, group=self._group)
        return array

    def __getstate__(self) -> Any:
        raise ConfigError("a loader with share= cannot be copied to worker processes; use num_workers=0")


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _places(sizes: list[int]) -> list[int]:
    """Start of each part, aligned."""
    return list(accumulate(map(_padded, sizes[:-1]), initial=0))
