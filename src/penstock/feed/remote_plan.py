"""Plan of a feed at a client: its description and edits are here, the rows are at the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from penstock.errors import ConfigError
from penstock.feed.batch_groups import FeedPosition
from penstock.feed.protocol import STEP_COLUMNS, Message
from penstock.order.edits import Ban, Edit, edit_from_json
from penstock.order.plan import Plan
from penstock.order.positions import Position, RowUse, Step
from penstock.order.samples import Samples
from penstock.order.schedules import Schedule
from penstock.order.states import read_position

Ask = Callable[..., Message]


@dataclass(frozen=True)
class RemotePlan(Plan):
    """Plan whose steps are asked for at a server. `sources` is empty: names, seeds and orders are in `describe()`."""

    described: Mapping[str, Any] = field(default_factory=dict, compare=False)
    ask: Ask = field(default=lambda *given, **more: None, compare=False, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Nothing: the server has checked it."""

    @classmethod
    def of(cls, described: Mapping[str, Any], global_batch: int, edits: Iterable[Edit], ask: Ask) -> RemotePlan:
        """Plan by the description that a server sent."""
        weights = described["weights"]
        return cls(
            (),
            global_batch,
            schedule=None if weights is None else Schedule.from_dict(weights),
            drop_last=described["drop_last"],
            stopping=described["stopping"] or "first_exhausted",
            edits=tuple(edits),
            described=described,
            ask=ask,
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(source["name"] for source in self.described["sources"])

    def describe(self) -> dict[str, Any]:
        return dict(self.described)

    def start(self) -> Position:
        return read_position(self._answer("start"))

    def seek(self, number: int) -> Position:
        return read_position(self._answer("seek", step=number))

    def steps_in(self, epoch: int) -> int:
        return int(self._answer("steps_in", epoch=epoch))

    def next_delivered(self, position: Position, count: int | None = None) -> Position:
        if count is not None and count != self.global_batch:
            raise ConfigError("the plan of a feed has steps of one size; leave out count")
        return read_position(self._answer("next_delivered", position=FeedPosition.of(position).facts))

    def ended(self, position: Position) -> bool:
        limits = [source["max_epochs"] for source in self.described["sources"]]
        return all(most is not None and cursor.epoch >= most for most, cursor in zip(limits, position.cursors))

    def read(self, position: Position, count: int | None = None) -> tuple[Step | None, Position]:
        message = self.ask("read", self, position=FeedPosition.of(position).facts, count=count)
        return self._step(message), read_position(message.notes["answer"]["following"])

    def step(self, number: int) -> Step:
        step = self._step(self.ask("read", self, number=number))
        assert step is not None
        return step

    def _step(self, message: Message) -> Step | None:
        answer = message.notes["answer"]
        if answer["step"] is None:
            return None
        number, epoch, wanted = answer["step"]
        offsets, rows, starts, lengths, sources = (message.arrays[name] for name in STEP_COLUMNS)
        samples = Samples(offsets, rows, starts, lengths, answer["single"])
        return Step(number, epoch, samples, sources, self.names, wanted)

    def read_block(self, position: Position, most: int) -> list[tuple[Step, Position]]:
        step, following = self.read(position)
        return [] if step is None else [(step, self.next_delivered(following))]

    def trace(
        self,
        source: str | int,
        row: int | None = None,
        *,
        epochs: int = 1,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[RowUse]:
        return [RowUse(*use) for use in self._answer("trace", source=source, row=row, epochs=epochs)]

    def ban(self, rows: Mapping[str, Iterable[int]] | Iterable[int], *, step: int = 0) -> Plan:
        if not isinstance(rows, Mapping):
            if len(self.names) > 1:
                raise ConfigError(f"ban needs a source of {list(self.names)} for its rows, such as ban({{'a': [3]}})")
            rows = {self.names[0]: rows}
        plan: Plan = self
        for name, numbers in rows.items():
            plan = plan.edited(Ban(step, name, tuple(sorted({int(number) for number in numbers}))))
        return plan

    def edited(self, *edits: Edit) -> RemotePlan:
        """Plan with further edits, which the server checks."""
        if not edits:
            return self
        banned = {edit.source: list(edit.rows) for edit in edits if isinstance(edit, Ban)}
        known = self._answer("edited", more=[edit.to_json() for edit in edits], rows=banned)
        return replace(self, edits=tuple(edit_from_json(edit) for edit in known))

    def _answer(self, verb: str, **given: Any) -> Any:
        return self.ask(verb, self, **given).notes["answer"]
