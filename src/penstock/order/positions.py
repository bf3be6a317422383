"""Where a plan is, and what it finds there: sources, steps, and the places between samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.order.mixing import Drawn
from penstock.order.sample_orders import Order, OrderPosition
from penstock.order.samples import Samples

__all__ = [
    "PlanSource",
    "Position",
    "RowUse",
    "Step",
    "behind_of",
    "ended",
    "left_of",
    "nothing_to_deliver",
    "pass_by",
    "take",
]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlanSource:
    """One source of a plan: its samples in order, and what they are made of."""

    name: str
    order: Order
    identity: str = ""
    """Names the content of the rows; another content is another plan."""
    max_epochs: int | None = None
    """How often its rows may be used at most; None: as often as the mixture asks for."""


class Step:
    """What one global batch is made of. `sources` says which feed each part is from; rows count within the feed.

    `wanted` is the number of samples of a full batch; the last of an epoch may have fewer.
    """

    __slots__ = ("epoch", "names", "number", "samples", "sources", "wanted")

    def __init__(
        self, number: int, epoch: int, samples: Samples, sources: Ints, names: tuple[str, ...], wanted: int
    ) -> None:
        self.number, self.epoch, self.samples = number, epoch, samples
        self.sources, self.names, self.wanted = sources, names, wanted

    @property
    def rows(self) -> list[tuple[str, int]]:
        """(source, row) of every part, in order."""
        return [(self.names[source], row) for source, row in zip(self.sources.tolist(), self.samples.rows.tolist())]

    def __len__(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True)
class RowUse:
    """One time that a row is used."""

    step: int
    epoch: int
    """Of its source: how often the row was due before."""
    sample: int
    """Which sample of the global batch."""
    skipped: bool = False
    """Whether the step is skipped, or the row banned by then, so that it is not delivered."""


class Position(NamedTuple):
    """Between two steps: all that is needed to go on."""

    places: tuple[OrderPosition, ...]
    step: int = 0
    epoch: int = 0
    samples: int = 0
    """Of this epoch, so far."""
    drawn: Drawn | None = None
    marks: tuple[OrderPosition, ...] = ()
    """The place of each source when this epoch began."""

    @property
    def at_start(self) -> bool:
        """Whether an epoch begins here."""
        return self.samples == 0


def take(order: Order, place: OrderPosition, count: int, *, stay: bool) -> tuple[Samples, OrderPosition]:
    """The next samples of a source and the place behind them; with `stay` no further than the end of the epoch."""
    found: list[Samples] = []
    left, epoch = count, place.epoch
    passes = 0
    while left:
        if place.window >= order.windows:
            place = OrderPosition(place.epoch + 1)
        if place.epoch > epoch and stay:
            break
        some = order.some(place, left)
        if len(some):
            found.append(some)
            passes = 0
        left -= len(some)
        place = behind_of(order, place, place.index + len(some), order.size_of(place.epoch, place.window))
        if place.window == 0 and place.index == 0:
            passes += 1
            if passes > 1 and not found:
                raise ConfigError("no row is left after truncation='drop'; pass a larger length")
    return (found[0] if len(found) == 1 else Samples.concat(found)), place


def pass_by(order: Order, place: OrderPosition, count: int) -> OrderPosition:
    """The place behind the next samples of a source, as `take` has it."""
    plain = order.plain_counts()
    if plain is not None:
        total = order.count(0)
        number = order.number_of(place) + count
        return order.place_of(place.epoch + number // total, number % total)
    return take(order, place, count, stay=False)[1]


def behind_of(order: Order, place: OrderPosition, index: int, size: int) -> OrderPosition:
    """A place with that index, in the next window or epoch if this one ends there."""
    if index < size:
        return OrderPosition(place.epoch, place.window, index)
    if place.window + 1 < order.windows:
        return OrderPosition(place.epoch, place.window + 1)
    return OrderPosition(place.epoch + 1)


def left_of(order: Order, place: OrderPosition, epochs: int, enough: int) -> int | None:
    """Samples of a source before the end of its last epoch, None if there are more than enough."""
    left = 0
    while place.epoch < epochs:
        size = order.size_of(place.epoch, place.window)
        left += size - place.index
        if left > enough:
            return None
        place = behind_of(order, place, size, size)
    return left


def ended(feeds: Sequence[PlanSource], position: Position) -> bool:
    """Whether every source was used as often as it may be."""
    return all(
        feed.max_epochs is not None and place.epoch >= feed.max_epochs
        for feed, place in zip(feeds, position.places, strict=True)
    )


def nothing_to_deliver(samples: int, size: int) -> ConfigError:
    """What is wrong with an epoch that has no batch."""
    return ConfigError(
        f"an epoch has {samples} samples, fewer than a global batch of {size}, and drop_last=True drops what does not "
        "fill a batch, so nothing would be delivered; use a smaller batch, or drop_last=False"
    )
