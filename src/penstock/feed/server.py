"""Feed server: batches of a plan for any rank, over Arrow Flight.

A batch is a function of the plan and the position, so the server keeps nothing that a client depends on: it can be
killed, started again or replaced by another one of the same config at any time.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from ipaddress import ip_address
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from penstock import __version__
from penstock.batching.options import Output, Shard, option_names
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, PenstockError
from penstock.feed.batch_groups import (
    columns_of,
    described_sharding,
    encode_batches,
    layout_facts,
    position_of,
)
from penstock.feed.job import FeedBlock, FeedJob
from penstock.feed.protocol import (
    HEARTBEAT_SECONDS,
    PROTOCOL,
    STEP_COLUMNS,
    TOKEN_HEADER,
    EncodedMessage,
    encode,
    ending,
    failure,
    heartbeat,
    schema_of,
)
from penstock.files.states import parse_json
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig
from penstock.loaders.plan_engine import PlanEngine
from penstock.loaders.preferences.engine import PreferenceEngine
from penstock.memory import LRUCache, MemoryBudget
from penstock.metrics.readings import Readings
from penstock.metrics.targets import Metrics, MetricsConfig
from penstock.metrics.watch import MetricsWatch
from penstock.order.edits import edit_from_json
from penstock.order.plan import Plan
from penstock.order.positions import Position, Step
from penstock.order.states import check_position, from_state, position_facts
from penstock.pipeline.prefetch import ReadAhead

log = logging.getLogger(__name__)
_LOOK_AHEAD_BLOCKS = 2
_MOST_JOBS = 4096
_GRACE_SECONDS = 3.0
"""Longest wait of `close` for clients that read what was sent to them."""
_POLL_SECONDS = 0.2
_unfinished: list[Any] = []
"""Servers that a client keeps from ending: their memory must stay."""
_OPTIONS = (
    *("batch_size", "max_tokens", "seed", "drop_last", "padding_free", "pad_to_multiple_of", "padding_side", "pad_id"),
    "fields",
)
"""Options of the server's loader that its clients' loaders have too."""
_CLIENT_OPTIONS = set(option_names(Shard) + option_names(Output)) - {"rank", "group", "sharding", "fields"}
"""Options of a loader file that the clients follow."""
_INTEGERS = {"int32": np.int32, "int64": np.int64}


class TLSFiles(NamedTuple):
    """Certificate chain and private key of a server, in PEM."""

    certificate: bytes
    key: bytes


class FeedServer:
    """Server of the batches of a loader with a plan, for `RemoteLoader`. It runs as soon as it is made.

        with PretrainDataLoader("corpus.store", batch_size=8, backend="numpy") as loader, FeedServer(loader) as server:
            print(server.address)          # grpc://127.0.0.1:41234
            server.wait()

    Batches are made ahead for every connected client, in at most `budget` bytes, half of which hold batches that
    several clients read. A client that is slow delays no other. `defaults` are options of the clients' loaders
    (`backend`, `world_size` and others) that they may override. An address other than the loopback needs a `token`.
    `metrics` is where metrics go; see docs/metrics.md.
    """

    def __init__(
        self,
        loader: DataLoader,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: TLSFiles | None = None,
        budget: MemoryBudget | int | str = "1 GiB",
        defaults: Mapping[str, Any] | None = None,
        metrics: Metrics = None,
    ) -> None:
        watched = None if metrics is None else MetricsConfig.of(metrics)
        self._service = _Service(loader, MemoryBudget.of(budget), defaults or {})
        if not is_loopback(host) and not token:
            raise ConfigError(
                f"host={host!r} lets other machines read the data; pass a token (PENSTOCK_FEED_TOKEN, or --token-file) "
                "that clients have to show, or leave out host= to serve this machine alone"
            )
        if not is_loopback(host) and tls is None:
            log.warning("%s: token and data go over the network in clear; pass a certificate (--tls-cert)", host)
        self._scheme, self._host = "grpc" if tls is None else "grpc+tls", host
        place = f"{self._scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        try:
            self._flight = _FlightServer(
                place,
                tls_certificates=None if tls is None else [tuple(tls)],
                middleware={} if not token else {"token": _TokenCheck(token)},
            )
        except (pa.ArrowException, OSError, ValueError) as error:
            keys = "" if tls is None else ", or `tls` not a certificate and its private key in PEM"
            raise OSError(
                f"cannot serve at {place}: {str(error).split('. Detail')[0]}; the port may be taken (0 finds a free "
                f"one), or the host not an address of this machine{keys}"
            ) from None
        self._flight.service = self._service
        self._stopped = threading.Event()
        self._owned: DataLoader | None = None
        self._watch: MetricsWatch | None = None
        if watched is not None:
            self._watch = watched.watch("feed", "FeedServer", self._service.readings, description=self.address)

    @classmethod
    def of_config(cls, config: LoaderConfig, **given: Any) -> Self:
        """Server of a loader file, which closes the loader with itself. `given` are the keywords of the constructor."""
        arguments = config.arguments
        if arguments.get("streaming"):
            raise ConfigError(
                f"{config.name}: a stream has no plan, and its position is in the process that reads it, so that no "
                "other server could go on; prepare the data first, or pass --set streaming=false"
            )
        if arguments.get("metrics") is not None:
            log.warning(
                "%s: metrics is for loaders of this file; pass --metrics for those of the server, and metrics= to "
                "RemoteLoader for those of the ranks",
                config.name,
            )
        own = {each.name: each.default for each in fields(Shard) if each.name != "sharding"}
        own |= {"rank": 0, "world_size": 1, "backend": "numpy", "device": None, "pin_memory": False, "prefetch": 0}
        loader = config.open(**own)
        try:
            server = cls(loader, defaults={name: arguments.get(name) for name in _CLIENT_OPTIONS}, **given)
        except BaseException:
            loader.close()
            raise
        server._owned = loader
        return server

    @property
    def port(self) -> int:
        return int(self._flight.port)

    @property
    def address(self) -> str:
        """Address for `RemoteLoader`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{self.port}"

    def facts(self) -> dict[str, Any]:
        """Plan and sources of the feed, as plain values."""
        plan = self._service.plan
        return {"plan": plan.fingerprint, "sources": list(plan.names), "version": __version__}

    def metrics(self) -> dict[str, float]:
        """Metrics of the server under the names that exporters use: clients, requests, messages, bytes, budget."""
        return self._service.readings()

    def wait(self) -> None:
        """Serve until `close` is called, by another thread or a signal handler."""
        while not self._stopped.wait(1.0):  # in pieces, since a signal interrupts no endless wait on Windows
            pass

    def stop(self) -> None:
        """Make `wait` return; safe in a signal handler."""
        self._stopped.set()

    def close(self) -> None:
        """End all streams; the clients look for another server, or for this one to come back. The loader stays open."""
        if self._service.closing:
            return
        self.stop()
        if self._watch is not None:
            self._watch.end()
        self._service.closing = True
        ending = threading.Thread(target=self._flight.shutdown, name="penstock-shutdown", daemon=True)
        ending.start()
        ending.join(_GRACE_SECONDS)
        if ending.is_alive():  # a client that does not read what was sent to it: only its end, or ours, frees the call
            _unfinished.append(self._flight)
        self._service.close()
        if self._owned is not None:
            self._owned.close()

    @property
    def finished(self) -> bool:
        """True once all streams have ended after `close`; False if a client that does not read holds one."""
        return self._service.closing and self._flight not in _unfinished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._watch is not None:
            self._watch.end(error=error)
        self.close()

    def __repr__(self) -> str:
        return f"FeedServer({self.address!r})"


def is_loopback(host: str) -> bool:
    """True if only this machine reaches an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False


class _Service:
    """Answers to requests. Each runs in a thread of its own."""

    def __init__(self, loader: DataLoader, budget: MemoryBudget, defaults: Mapping[str, Any]) -> None:
        if not isinstance(loader, DataLoader):
            raise ConfigError(f"a feed serves a loader of penstock, got {loader!r:.80}")
        engine = loader._ready()
        if not isinstance(engine, PlanEngine):
            raise ConfigError(
                f"{type(loader).__name__} has no plan, and a feed needs one, so that any server can go on at any step; "
                "serve a loader of prepared data (streaming=False). Rollouts reach trainers by a RolloutQueue, which "
                "every rank reads itself"
            )
        self._engine, self._budget = engine, budget
        self.kind = "preference" if isinstance(engine, PreferenceEngine) else "compact"
        self._lock = threading.Lock()
        """Held while batches are planned and made: the orders of all jobs are the same objects."""
        self._cache: LRUCache[FeedBlock] = LRUCache(budget.capacity // 2, budget=budget, owner="feed")
        self._jobs: dict[tuple[Any, ...], FeedJob] = {}
        self._edits = [edit.to_json() for edit in engine.plan.edits]
        self._defaults = {name: value for name, value in defaults.items() if value is not None}
        self.closing = False
        self._counting = threading.Lock()
        self._clients = self._requests = self._messages_sent = self._bytes_sent = 0

    def readings(self) -> Readings:
        """Metrics by name."""
        return {
            "penstock_feed_clients": self._clients,
            "penstock_feed_requests_total": self._requests,
            "penstock_feed_messages_total": self._messages_sent,
            "penstock_feed_bytes_total": self._bytes_sent,
            "penstock_feed_budget_used_bytes": self._budget.used,
            "penstock_feed_budget_limit_bytes": self._budget.limit,
        }

    def _count(self, *, clients: int = 0, requests: int = 0, nbytes: int | None = None) -> None:
        with self._counting:
            self._clients += clients
            self._requests += requests
            self._messages_sent += nbytes is not None
            self._bytes_sent += nbytes or 0

    @property
    def plan(self) -> Plan:
        return self._engine.plan

    def answer(self, request: Mapping[str, Any]) -> tuple[tuple[str, ...], Callable[[], Iterator[EncodedMessage]]]:
        """Columns of an answer, and the function that makes its messages."""
        verb = request.get("verb")
        columns = {"batches": columns_of(self.kind), "one": columns_of(self.kind), "item": columns_of(self.kind)}.get(
            str(verb), STEP_COLUMNS if verb == "read" else ()
        )
        return columns, lambda: self._messages(request, columns)

    def _messages(self, request: Mapping[str, Any], columns: tuple[str, ...]) -> Iterator[EncodedMessage]:
        if request.get("protocol") != PROTOCOL:
            raise _RefusedRequestError(
                f"the server speaks protocol {PROTOCOL} of the feed (penstock {__version__}), and the client "
                f"{request.get('protocol')!r} (penstock {request.get('version')}); install the same release on both"
            )
        verb = str(request.get("verb"))
        if verb == "hello":
            yield encode({"type": "answer", "answer": self.hello()}, {}, columns)
            return
        if request.get("plan") != self._engine.plan.fingerprint or request.get("layout") != self._layout:
            raise _RefusedRequestError("the server has another config than the client began with", self.hello())
        job = self._job(request)
        if verb == "batches":
            for block in job.blocks(self._position(job, request["position"])):
                yield from block.messages
        elif verb in ("one", "item"):
            with self._lock:
                yield from encode_batches([self._single(job, verb, request)])
        elif verb == "read":
            with self._lock:
                yield self._read(job, request)
        else:
            asked = _ASKS.get(verb)
            if asked is None:
                raise ConfigError(f"the request {verb!r} is unknown; it is from another release of penstock")
            with self._lock:
                yield encode({"type": "answer", "answer": asked(self, job, request)}, {}, columns)

    @property
    def _layout(self) -> dict[str, Any]:
        """Everything besides the plan that decides samples and arrays of a rank, and that no request brings."""
        engine = self._engine
        facts = {**layout_facts(engine.layout), "kind": self.kind}
        facts["sharding"] = described_sharding(engine.options.sharding_strategy)
        return facts | engine.facts() if isinstance(engine, PreferenceEngine) else facts

    def hello(self) -> dict[str, Any]:
        """Facts of the feed that a client needs."""
        options = self._engine.options
        return {
            "version": __version__,
            "plan": self._engine.plan.describe(),
            "edits": self._edits,
            "layout": self._layout,
            "options": {name: getattr(options, name) for name in _OPTIONS},
            "sharding": type(options.sharding_strategy).__name__.lower(),
            "defaults": self._defaults,
        }

    def _job(self, request: Mapping[str, Any]) -> FeedJob:
        rank = Rank(request["rank"], request["world_size"])
        size, integer, edits = int(request["batch_size"]), str(request["integer"]), request["edits"]
        key = (rank.rank, rank.world_size, size, integer, repr(edits))
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                if size < 1 or integer not in _INTEGERS:
                    raise ConfigError(f"expected a positive batch_size and int32 or int64, got {size} and {integer!r}")
                known = [edit_from_json(edit) for edit in edits]
                engine = self._engine.for_rank(rank, size, integer=_INTEGERS[integer], edits=known)
                job = self._jobs[key] = FeedJob(engine, self._cache, self._lock)
                if len(self._jobs) > _MOST_JOBS:
                    del self._jobs[next(iter(self._jobs))]
        return job

    def _position(self, job: FeedJob, text: str) -> Position:
        position = position_of(text)
        with self._lock:
            check_position(job.engine.plan, position)
        return position

    def _single(self, job: FeedJob, verb: str, request: Mapping[str, Any]) -> Any:
        if verb == "item":
            return job.engine.item(request["epoch"], request["number"]), job.engine.start()
        position = position_of(request["position"])
        check_position(job.engine.plan, position)
        return job.engine.one(position, request["size"])

    def _read(self, job: FeedJob, request: Mapping[str, Any]) -> EncodedMessage:
        plan, answer = job.engine.plan, dict[str, Any]()
        if "number" in request:
            step: Step | None = plan.step(request["number"])
        else:
            position = position_of(request["position"])
            check_position(plan, position)
            step, following = plan.read(position, request["count"])
            answer["following"] = position_facts(following)
        answer["step"] = None
        if step is None:
            return encode({"type": "answer", "answer": answer}, {}, STEP_COLUMNS)
        samples = step.samples
        answer |= {"step": [step.number, step.epoch, step.wanted], "single": samples.single}
        arrays = {name: getattr(samples, name) for name in STEP_COLUMNS if name != "sources"}
        return encode({"type": "answer", "answer": answer}, {**arrays, "sources": step.sources}, STEP_COLUMNS)

    # Answers to small questions, called with the lock held.

    def load(self, job: FeedJob, request: Mapping[str, Any]) -> Any:
        plan, position = from_state(job.engine.plan, request["state"], new_batch_size=request["new_batch_size"])
        return {"edits": [edit.to_json() for edit in plan.edits], "position": position_facts(position)}

    def save(self, job: FeedJob, request: Mapping[str, Any]) -> Any:
        position = position_of(request["position"])
        check_position(job.engine.plan, position)
        return job.engine.to_state(position)

    def edited(self, job: FeedJob, request: Mapping[str, Any]) -> Any:
        plan = job.engine.plan.edited(*map(edit_from_json, request["more"]))
        for source, rows in request.get("rows", {}).items():
            plan.ban({source: rows})  # refuses rows that do not exist
        return [edit.to_json() for edit in plan.edits]

    def next_delivered(self, job: FeedJob, request: Mapping[str, Any]) -> Any:
        position = position_of(request["position"])
        check_position(job.engine.plan, position)
        return position_facts(job.engine.plan.next_delivered(position))

    def trace(self, job: FeedJob, request: Mapping[str, Any]) -> Any:
        uses = job.engine.plan.trace(request["source"], request["row"], epochs=request["epochs"])
        return [[use.step, use.epoch, use.sample, use.skipped] for use in uses]

    def stream(self, request: Mapping[str, Any]) -> flight.GeneratorStream:
        """Answer as Flight sends it: messages with signs of life between them, and an end."""
        columns, make = self.answer(request)
        return flight.GeneratorStream(schema_of(columns), self._alive(make, columns))

    def _alive(self, make: Callable[[], Iterator[EncodedMessage]], columns: tuple[str, ...]) -> Iterator[Any]:
        ahead: ReadAhead[EncodedMessage] = ReadAhead(
            make(), _LOOK_AHEAD_BLOCKS, budget=self._budget, size=lambda message: message.nbytes, always_one=True
        )
        sent = time.monotonic()
        self._count(clients=1, requests=1)
        try:
            while not self.closing:
                if not ahead.wait(_POLL_SECONDS):
                    if time.monotonic() - sent >= HEARTBEAT_SECONDS:
                        yield tuple(heartbeat(columns))
                        sent = time.monotonic()
                    continue
                message = next(ahead, None)
                if message is None:
                    yield tuple(ending(columns))
                    return
                self._count(nbytes=message.nbytes)
                yield tuple(message)
                del message
                sent = time.monotonic()
        except _RefusedRequestError as error:
            yield tuple(failure(error, columns, refused=True, hello=error.hello))
        except Exception as error:
            if not isinstance(error, (PenstockError, EOFError, IndexError, KeyError, TypeError, ValueError, OSError)):
                log.exception("a request failed")
            yield tuple(failure(error, columns))
        finally:
            self._count(clients=-1)
            ahead.stop()

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()
        self._cache.clear()


class _RefusedRequestError(ConfigError):
    """A request of a client that this server is not for; its own facts say why."""

    def __init__(self, message: str, hello: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.hello = hello


_ASKS: dict[str, Callable[[_Service, FeedJob, Mapping[str, Any]], Any]] = {
    "load": _Service.load,
    "save": _Service.save,
    "edited": _Service.edited,
    "next_delivered": _Service.next_delivered,
    "trace": _Service.trace,
    "start": lambda _, job, request: position_facts(job.engine.start()),
    "seek": lambda _, job, request: position_facts(job.engine.seek(request["step"])),
    "position_of": lambda _, job, request: position_facts(job.engine.position_of(request["epoch"], request["number"])),
    "steps_in": lambda _, job, request: job.engine.plan.steps_in(request["epoch"]),
}


class _FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types for it
    service: _Service | None = None

    def do_get(self, context: Any, ticket: Any) -> flight.GeneratorStream:
        if self.service is None:
            raise flight.FlightUnavailableError("the server is starting")
        try:
            request = parse_json(ticket.ticket)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            raise flight.FlightServerError("expected a request of penstock.feed.RemoteLoader")
        return self.service.stream(request)


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Check of the token of every call."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        for name, values in headers.items():
            if name.lower() == TOKEN_HEADER:
                given = values[0] if isinstance(values[0], bytes) else str(values[0]).encode()
                if hmac.compare_digest(given, self._expected):
                    return
        raise flight.FlightUnauthenticatedError("the token is missing or wrong")
