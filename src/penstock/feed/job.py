"""Job of a feed: the batches of one rank of a plan, made in blocks that several clients share."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from penstock.feed.batch_groups import Made, encode_batches
from penstock.feed.protocol import EncodedMessage
from penstock.loaders.plan_engine import PlanEngine
from penstock.memory import LRUCache
from penstock.order.positions import Position

BLOCK_STEPS = 64
BLOCK_BYTES = 2 << 20
_MOST_RUNNING = 8
"""Loops over a plan that are kept for clients at different positions."""


class FeedBlock(NamedTuple):
    """Consecutive batches as messages, and the position after them; None if the epoch ends with them."""

    messages: list[EncodedMessage]
    following: Position | None

    @property
    def nbytes(self) -> int:
        return sum(message.nbytes for message in self.messages)


class FeedJob:
    """Batches of one rank, world size, batch size and list of edits.

    A block is made once for all clients that read it at about the same time: while several of them are connected, the
    last blocks stay in `cache`. One that is further behind has its blocks made again.
    """

    def __init__(self, engine: PlanEngine, cache: LRUCache[FeedBlock], lock: threading.Lock) -> None:
        self.engine = engine
        self._cache, self._lock = cache, lock
        self._running: dict[Position, Generator[Made, None, None]] = {}
        """Loops by the position of their next batch, the least recently used first."""
        self._clients = 0
        self._counting = threading.Lock()

    def blocks(self, position: Position) -> Iterator[FeedBlock]:
        """Blocks of the rest of an epoch."""
        with self._counted():
            following: Position | None = position
            while following is not None:
                block = self._block(following)
                yield block
                following = block.following

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._counting:
            self._clients += 1
        try:
            yield
        finally:
            with self._counting:
                self._clients -= 1

    def _block(self, position: Position) -> FeedBlock:
        if self._clients < 2:
            return self._make(position)
        return self._cache.get_or_build((self, position), lambda: self._make(position))

    def _make(self, position: Position) -> FeedBlock:
        with self._lock:
            made = self._running.pop(position, None) or self.engine.batches(position)
            found, epoch, following = self._take(made, block_steps(position.step))
            if found and following is not None and following.epoch == epoch:
                self._running[following] = made
                if len(self._running) > _MOST_RUNNING:
                    self._running.pop(next(iter(self._running))).close()
            else:
                made.close()
                following = None
            return FeedBlock(encode_batches(found), following)

    def _take(self, made: Iterator[Made], most: int) -> tuple[list[Made], int, Position | None]:
        found: list[Made] = []
        nbytes, epoch, following = 0, -1, None
        for batch, following in made:
            found.append((batch, following))
            nbytes, epoch = nbytes + batch.nbytes, batch.metadata["epoch"]
            if len(found) >= most or nbytes >= BLOCK_BYTES or following.epoch != epoch:
                break
        return found, epoch, following

    def close(self) -> None:
        with self._lock:
            for made in self._running.values():
                made.close()
            self._running.clear()


def block_steps(step: int) -> int:
    """Most batches of a block that begins at a step.

    Blocks grow from one batch, so that the first one comes soon, and begin at multiples of their size, so that clients
    that started at different steps come to share them.
    """
    return min(step & -step or 1, BLOCK_STEPS)
