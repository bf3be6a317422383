"""Replicas of a feed server as Ray actors, wherever the cluster has room."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock._optional import require
from penstock.engines.ray_connection import connect
from penstock.errors import ConfigError
from penstock.feed.server import FeedServer, TLSFiles
from penstock.loaders.loader_file import LoaderConfig
from penstock.metrics.targets import Metrics, MetricsConfig

_START_SECONDS = 300.0


class FeedReplicas:
    """Servers of one config, each an actor of Ray with a processor of its own; clients get all their addresses.

        with FeedReplicas(load_config("train.yaml"), 4) as replicas:
            print(replicas.addresses)           # for RemoteLoader

    A server listens on the address of its node, which needs a `token` unless the cluster is this machine. Replica `i`
    has the port `port + i`, and comes back there after a crash; with `port=0` ports are free ones, and a replica that
    crashed is gone. Every node needs the data, at the same path. `metrics` is where metrics of the servers go; the
    number of a replica is its rank there.
    """

    def __init__(
        self,
        config: LoaderConfig,
        count: int,
        *,
        engine: str = "ray",
        port: int = 0,
        token: str | None = None,
        tls: TLSFiles | None = None,
        budget: int | str = "1 GiB",
        metrics: Metrics = None,
    ) -> None:
        if count < 1:
            raise ConfigError(f"expected at least one replica, got {count}")
        self._connected = connect(None if engine == "ray" else engine, None, 10.0)
        self._ray: Any = require("ray", "ray")
        actor = self._ray.remote(_Replica).options(num_cpus=1, max_restarts=-1 if port else 0)
        watched = None if metrics is None else MetricsConfig.of(metrics)  # refused here, not by an actor
        given = {"token": token, "tls": tls, "budget": budget, "metrics": watched}
        where = str(Path.cwd())
        self._actors = [actor.remote(config, where, port + n if port else 0, given, n) for n in range(count)]
        try:
            found = self._ray.get([each.address.remote() for each in self._actors], timeout=_START_SECONDS)
        except Exception as error:  # noqa: BLE001 - the error of the actor is raised
            self.close()
            cause = getattr(error, "cause", None)  # what the actor raised
            raise (cause if isinstance(cause, Exception) else error) from None
        self.addresses: list[str] = list(found)

    def close(self) -> None:
        """End the servers, and the connection to the cluster if it was made here."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._connected:
            self._connected = False
            self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _Replica:
    """Actor that holds a server."""

    def __init__(self, config: LoaderConfig, directory: str, port: int, given: dict[str, Any], number: int) -> None:
        if Path(directory).is_dir():
            os.chdir(directory)  # paths of a loader file are relative to it
        if given["metrics"] is not None:
            given = given | {"metrics": replace(given["metrics"], rank=number)}
        host = require("ray.util", "ray").get_node_ip_address()
        self._error: Exception | None = None
        try:
            self._server = FeedServer.of_config(config, host=host, port=port, **given)
        except Exception as error:  # noqa: BLE001 - raised by `address`: Ray wraps errors of constructors in its own
            self._error = error

    def address(self) -> str:
        if self._error is not None:
            raise self._error
        return self._server.address
