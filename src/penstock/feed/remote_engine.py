"""Engine of a remote loader: positions, states and batches come from the servers of a feed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from penstock.batching.backends import get_backend
from penstock.batching.batch import TrainingBatch
from penstock.batching.collate import BatchLayout
from penstock.batching.options import Options
from penstock.distributed.ranks import Rank, running_torch
from penstock.distributed.synchronization import find_rendezvous, meeting, reaching
from penstock.errors import ConfigError
from penstock.feed.batch_groups import BatchReader, FeedPosition
from penstock.feed.connection import FeedConnection, LostServerError, differences
from penstock.feed.protocol import MalformedMessageError, Message
from penstock.feed.remote_plan import RemotePlan
from penstock.feed.share import GroupShare
from penstock.files.states import parse_json, to_json
from penstock.loaders.plan_engine import check_edited
from penstock.loaders.preferences.engine import no_slices
from penstock.memory.views import keep_freed
from penstock.order.edits import edit_from_json
from penstock.order.plan import Plan
from penstock.order.states import plain_state, read_position

_KEPT_BYTES = 24 << 20
Received = tuple[TrainingBatch, FeedPosition]


class RemoteEngine:
    """Batches of one rank, made by a server. Whichever server makes a batch, it is the same."""

    def __init__(
        self,
        connection: FeedConnection,
        hello: Mapping[str, Any],
        options: Options,
        share: GroupShare | None = None,
        *,
        facts: Mapping[str, Any],
    ) -> None:
        """`facts` are those that have to be the same on all ranks."""
        self.options, self.rank, self._share = options, options.find_rank(), share
        self._connection, self._hello = connection, hello
        if options.context is not None and hello["layout"]["kind"] == "preference":
            raise no_slices(options.context)
        known = BatchLayout.__dataclass_fields__
        given_layout = {name: value for name, value in hello["layout"].items() if name in known}
        backend = get_backend(options.backend)
        given = frozenset(given_layout["fields"])
        if not options.wanted_fields <= given and options.fields is not None:
            missing = sorted(options.wanted_fields - given)
            raise ConfigError(f"the config of the server has no fields {missing}; add them to its `fields`")
        wanted = given & options.wanted_fields
        layout = BatchLayout(**{**given_layout, "fields": wanted}, integer=backend.integer)
        self.batch_size = 1 if layout.split else options.batch_size
        edits = [edit_from_json(edit) for edit in hello["edits"]]
        self.plan: Plan = RemotePlan.of(hello["plan"], self.batch_size * self.rank.world_size, edits, self._ask)
        self._facts: Mapping[str, Any] | None = {**facts, "batch_size": self.batch_size}
        """None once the ranks have compared them."""
        self._integer = np.dtype(backend.integer).name
        self._reader = BatchReader(hello["layout"]["kind"], layout, backend, self.plan.names)
        self._next: tuple[FeedPosition, Generator[Received, None, None]] | None = None
        """Stream of single batches, with the position of its next one."""
        keep_freed(_KEPT_BYTES)

    @property
    def names(self) -> str:
        return ", ".join(self.plan.names)

    def start(self) -> FeedPosition:
        return FeedPosition.of(self.plan.start())

    def seek(self, step: int) -> FeedPosition:
        return FeedPosition.of(self.plan.seek(step))

    def seek_epoch(self, epoch: int, position: FeedPosition) -> FeedPosition:
        return FeedPosition.of(self.plan.seek_epoch(epoch))

    def one(self, position: FeedPosition, batch_size: int | None) -> Received:
        if batch_size not in (None, self.batch_size):
            return self._single("one", position=position.facts, size=batch_size)
        if self._next is None or self._next[0] != position:
            self._forget_next()
            self._next = position, self.batches(position)
        _, stream = self._next
        self._next = None
        for batch, following in stream:
            self._next = following, stream
            return batch, following
        return self._single("one", position=position.facts, size=batch_size)  # the end, or the next epoch

    def item(self, epoch: int, number: int) -> TrainingBatch:
        return self._single("item", epoch=epoch, number=number)[0]

    def position_of(self, epoch: int, number: int) -> FeedPosition:
        found = self._ask("position_of", self.plan, epoch=epoch, number=number).notes["answer"]
        return FeedPosition.of(read_position(found))

    def number_of(self, position: FeedPosition) -> int:
        return bisect_left(self.plan.delivered_steps(position.epoch), position.step)

    def count(self, epoch: int) -> int:
        return len(self.plan.delivered_steps(epoch))

    def batches(self, position: FeedPosition) -> Generator[Received, None, None]:
        """Batches of the rest of an epoch; after a server is lost, the next one goes on after the last batch."""
        self._check_ranks()
        share = self._share
        if share is not None and not share.is_first:
            for message in share.received():
                yield from self._received(message)
            return
        try:
            yield from self._fetched(position)
        except Exception as error:
            if share is not None:
                share.fail(error)
            raise
        if share is not None:
            share.end()

    def _fetched(self, position: FeedPosition) -> Generator[Received, None, None]:
        epoch: int | None = None
        while epoch is None or position.epoch == epoch:
            try:
                for message in self._connection.stream(self._request("batches", self.plan, position=position.facts)):
                    received = self._received(message)
                    if self._share is not None:
                        self._share.send(message)
                    for batch, following in received:
                        epoch, position = batch.metadata["epoch"], following
                        yield batch, following
                        del batch
                return
            except LostServerError as error:
                self._connection.recover(error)

    def to_state(self, position: FeedPosition) -> dict[str, Any]:
        """State of a position. That of thousands of sources is written by the server, which knows their rows."""
        state = plain_state(self.plan, position.position())
        if state is None:
            state = dict(self._ask("save", self.plan, position=position.facts).notes["answer"])
        return state

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> FeedPosition:
        """Position of a state; the plan takes over the state's edits."""
        answer = self._ask("load", self.plan, state=state, new_batch_size=new_batch_size).notes["answer"]
        edits = tuple(edit_from_json(edit) for edit in answer["edits"])
        if edits != self.plan.edits:
            self._forget_next()  # its batches are those of the plan before
            self.plan = replace(self.plan, edits=edits)
        return FeedPosition.of(read_position(answer["position"]))

    def edit(self, plan: Plan, position: FeedPosition) -> FeedPosition:
        """Continue with an edited plan; steps before a position cannot change. Returns the next position."""
        check_edited(self.plan, plan, position.step)
        self._forget_next()  # its batches are those of the plan before
        self.plan = plan
        return FeedPosition.of(plan.next_delivered(position.position()))

    def close(self) -> None:
        self._forget_next()
        self._connection.close()

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, which connect themselves."""
        return self.__dict__ | {"_next": None, "_facts": None}

    def _check_ranks(self) -> None:
        facts, self._facts = self._facts, None
        if facts is not None:
            check_ranks(self._connection, self.rank, facts, self._share)

    def _single(self, verb: str, **given: Any) -> Received:
        self._check_ranks()

        def attempt() -> Received:
            (found,) = self._received(self._connection.ask(self._request(verb, self.plan, **given)))
            return found

        return self._connection.retrying(attempt)

    def _ask(self, verb: str, plan: Plan, **given: Any) -> Message:
        return self._connection.retrying(lambda: self._connection.ask(self._request(verb, plan, **given)))

    def _request(self, verb: str, plan: Plan, **given: Any) -> dict[str, Any]:
        return {
            "verb": verb,
            "plan": plan.fingerprint,
            "layout": self._hello["layout"],
            "rank": self.rank.rank,
            "world_size": self.rank.world_size,
            "batch_size": self.options.batch_size,
            "integer": self._integer,
            "edits": [edit.to_json() for edit in plan.edits],
            **given,
        }

    def _received(self, message: Message) -> list[Received]:
        try:
            return self._reader.read(message)
        except MalformedMessageError as error:
            raise LostServerError(f"{self._connection.address} sent {error}") from error

    def _forget_next(self) -> None:
        following, self._next = self._next, None
        if following is not None:
            following[1].close()


def check_ranks(
    connection: FeedConnection, rank: Rank, facts: Mapping[str, Any], share: GroupShare | None = None
) -> None:
    """Refuse ranks of torch.distributed whose facts of the feed differ.

    The ranks of a share compare theirs at once. The others compare with the rank that came first, through the store of
    torch.distributed, so that none waits for a rank that reads later or not at all. Loaders are told apart by their
    addresses, whose order may differ, and by how many of them a rank has used.
    """
    if share is not None:  # first: all of its ranks go on, or none
        share.check(rank, xxhash.xxh3_64_intdigest(to_json(facts)) >> 1)
    module = running_torch()
    if module is None or module.get_world_size() == 1:
        return
    store: Any = find_rendezvous()
    name = f"feed {xxhash.xxh3_64_hexdigest(' '.join(sorted(connection.addresses)).encode())}"
    key = "{}/{}".format(*meeting(store, rank, name))
    note = to_json({"rank": module.get_rank(), "address": connection.address, "facts": facts}).decode()
    with reaching(store, rank, "comparing the feed with that of other ranks"):
        first = parse_json(bytes(store.compare_set(key, "", note)))
    found = differences(parse_json(to_json(facts)), first["facts"], "{} here")
    if found:
        raise ConfigError(
            f"process {first['rank']} found another feed at {first['address']} than this one, process "
            f"{module.get_rank()}, at {connection.address}: {found}; serve the same config at all addresses, and pass "
            "the same options on all ranks"
        )
