"""Remote loader: the batches of a feed server, with the contract of every loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import TIMEOUT_MAX
from typing import Any, Unpack

from penstock._suggest import check_options
from penstock.batching.options import LoaderOptions, Options, Output, Shard, flat_options, option_names
from penstock.distributed.ranks import find_rank
from penstock.errors import ConfigError
from penstock.feed.connection import FeedConnection, config_parts, differences, read_certificates
from penstock.feed.remote_engine import RemoteEngine
from penstock.feed.share import GroupShare
from penstock.files.listing import PathLike
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import SHARDINGS
from penstock.loaders.source import LoaderSource
from penstock.order.plan import Plan

_OWN = frozenset(
    {
        "batch_size",
        "budget",
        "metrics",
        *option_names(Output),
        *(name for name in option_names(Shard) if name != "sharding"),
    }
)
"""Options of a client; all others are decided by the config of the server."""
_PLACES = frozenset(name for name in option_names(Shard) if name not in ("sharding", "context"))

_LOCAL = frozenset({"device", "pin_memory", "prefetch"})
"""Options that may differ between ranks."""


class RemoteLoader(DataLoader, options=(Shard, Output), without=("sharding",)):
    """Loader whose batches are made by `penstock serve CONFIG`, in another process or on other machines.

        loader = RemoteLoader("grpc://feeder:8815")
        loader = RemoteLoader(["grpc+tls://a:8815", "grpc+tls://b:8815"], batch_size=4)

    Batches, order and states are those of the local loader of that config: a run can go from one to the other and back.
    With several addresses, ranks begin with different ones, and a server that is silent for `deadline_seconds` is
    replaced by the next, without a lost or repeated batch. All are tried in turn for `retry_seconds`. Servers of
    different configs are refused. `batch_size` and `fields` are by default those of the config.

    `token` is that of the server, by default the environment variable PENSTOCK_FEED_TOKEN. `tls_root_certs` is a file
    in PEM with the certificates to trust, by default those of the system. Worker processes of torch have to be spawned.

    `share` is a process group, or a mesh of one dimension, whose ranks train on the same batches (tensor or context
    parallelism): its first rank fetches them for all. The group needs gloo, and all its ranks the same calls. Pass
    `group` or `shard` with it, which decide the batches.

    `metrics` is where the metrics of this rank go; see docs/metrics.md. Those of a server are its own.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        token: str | None = None,
        tls_root_certs: PathLike | None = None,
        deadline_seconds: float = 30.0,
        retry_seconds: float = 120.0,
        share: Any = None,
        **options: Unpack[LoaderOptions],
    ) -> None:
        given = flat_options(options)
        _check_own(given)
        _check_seconds(deadline_seconds, retry_seconds)
        connection = FeedConnection(
            address,
            token=token,
            tls_root_certs=None if tls_root_certs is None else read_certificates(tls_root_certs),
            deadline_seconds=deadline_seconds,
            retry_seconds=retry_seconds,
            first=find_rank().rank if given.get("rank") is None else given["rank"],
        )
        try:
            hello = connection.retrying(lambda: connection.ask({"verb": "hello"})).notes["answer"]
            connection.expected = hello
            _check_replicas(connection, hello, given)
            chosen, group = _merged(hello, given), None
            if share is not None:
                if chosen.prefetch:
                    raise ConfigError(
                        f"prefetch={chosen.prefetch} does not work with share=, whose ranks receive batches together; "
                        "leave it out: the server makes batches ahead"
                    )
                chosen, group = replace(chosen, prefetch=0), GroupShare(share)
            connection.budget = chosen.memory
            super().__init__(RemoteEngine(connection, hello, chosen, group, facts=_deciding(hello, given)))
        except BaseException:
            connection.close()
            raise

    @property
    def plan(self) -> Plan:
        """Plan of all steps, which are asked for at the server."""
        return self._remote().plan

    @property
    def sources(self) -> tuple[LoaderSource, ...]:
        raise ConfigError("the rows of a RemoteLoader are at its server; see loader.plan.describe()")

    def edit(self, plan: Plan) -> None:
        self._position = self._remote().edit(plan, self._position)
        self._edits += 1

    def _remote(self) -> RemoteEngine:
        engine = self._ready()
        assert isinstance(engine, RemoteEngine)
        return engine


def _check_own(given: Mapping[str, Any]) -> None:
    check_options(given, option_names(Options))
    others = [name for name in given if name not in _OWN]
    if others:
        raise ConfigError(
            f"{others[0]} is decided by the config of the server; change it there, such as penstock serve CONFIG --set "
            f"{others[0]}=..."
        )


def _check_seconds(deadline: Any, retry: Any) -> None:
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (deadline, retry))
    if not numbers or not 0 < deadline <= TIMEOUT_MAX or not retry >= 0:
        raise ConfigError(
            "expected deadline_seconds above 0 and finite, and retry_seconds of at least 0, got "
            f"{deadline!r} and {retry!r}"
        )


def _check_replicas(connection: FeedConnection, hello: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse servers of different configs: ranks begin with different ones."""
    here = _deciding(hello, given)
    for address, message in connection.ask_others({"verb": "hello"}):
        found = differences(here, _deciding(message.notes["answer"], given), "{} here")
        if found:
            raise ConfigError(
                f"{address} serves another config than {connection.address} ({found}), so that ranks would train on "
                "different runs; serve the same config and data at all addresses"
            )


def _deciding(hello: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a server decides about the batches of a client."""
    defaults = {"batch_size": hello["options"]["batch_size"], **hello["defaults"]}
    left = {name: value for name, value in defaults.items() if name not in given and name not in _LOCAL}
    if given.get("rank") is not None or given.get("group") is not None:
        left = {name: value for name, value in left.items() if name not in _PLACES}
    return {**config_parts(hello), "edits": hello["edits"], "version of plans": hello["plan"]["version"], **left}


def _merged(hello: Mapping[str, Any], given: Mapping[str, Any]) -> Options:
    """Options of the client with those of the server."""
    defaults = dict(hello["defaults"])
    planned = defaults.pop("world_size", None)
    if given.get("rank") is not None or given.get("group") is not None:
        unsaid = "cp" not in given and "context" not in given
        if unsaid and defaults.get("context") is not None and defaults.get("cp", 1) != 1:
            place = "rank= and world_size= say" if given.get("rank") is not None else "group= says"
            raise ConfigError(
                f"the config of the server has context={defaults['context']!r} for cp={defaults['cp']}, and "
                f"{place} nothing of cp, so that it is not known which slice is this one's; pass "
                "shard=Shard.from_mesh(mesh), or cp= with the rank of the process, or context=None for whole sequences"
            )
        for name in _PLACES:  # the place is the caller's, as a whole
            defaults.pop(name, None)
    sharding = SHARDINGS.get(hello["sharding"])
    options = Options(**{**hello["options"], **defaults, **given}, sharding=None if sharding is None else sharding())
    rank = options.find_rank()
    if planned is not None and given.get("rank") is None and rank.world_size != planned:
        raise ConfigError(
            f"the config of the server is planned for world_size={planned}, and this is {rank}; start that many ranks, "
            "change world_size in the config, or pass rank= and world_size="
        )
    return options
