"""Prometheus: a small server on the loopback that answers with the last readings of this process.

Loaders and pipelines of one process share the server of a port. A process that finds its port taken, such as the second
rank of a machine, takes the next free one and says so in the log.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from penstock._optional import require
from penstock.metrics.readings import labels_of, name_of
from penstock.metrics.registry import Instrument, instrument_of
from penstock.metrics.watch import Reading, RunEnd, RunFacts

log = logging.getLogger(__name__)
_MOST_PORTS = 64
"""Ports that are tried from the given one on."""


class PrometheusServer:
    """Exporter whose readings Prometheus scrapes; labels `rank`, `pid`, `run` and `job` keep processes apart."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._board: _Board | None = None
        self.reading: Mapping[str, float] = {}
        self.labels: dict[str, str] = {}

    def begin(self, run: RunFacts) -> None:
        with _lock:  # or the last run before this one ends the server in between
            self._board = _board_of(self.host, self.port)
            self.labels = {**run.labels, "run": self._board.join(self, run.name)}

    def write(self, reading: Reading) -> None:
        self.reading = reading.metrics

    def end(self, end: RunEnd) -> None:
        if self._board is not None:
            self._board.leave(self)

    def __str__(self) -> str:
        return f"prometheus://{self.host}:{self.port}"


class _Board:
    """Server of this process, and the exporters whose readings it shows."""

    def __init__(self, host: str, port: int) -> None:
        client: Any = require("prometheus_client", "metrics")
        self._core: Any = require("prometheus_client.core", "metrics")
        self.key, self.process = (host, port), os.getpid()
        self._exporters: list[PrometheusServer] = []
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        for number in range(port, port + (_MOST_PORTS if port else 1)):
            try:
                self._server, self._thread = client.start_http_server(number, addr=host, registry=registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                break
        else:
            raise OSError(f"the ports {port} to {port + _MOST_PORTS - 1} of {host} are taken")
        self.port = int(self._server.server_port)
        taken = f", since port {port} is taken" if port and self.port != port else ""
        log.info("metrics for Prometheus are at http://%s:%d/metrics%s", host, self.port, taken)

    def join(self, exporter: PrometheusServer, name: str) -> str:
        """Add an exporter; returns its name, numbered if another has it."""
        with _lock:
            names = {each.labels.get("run") for each in self._exporters}
            number, given = 1, name
            while given in names:
                number += 1
                given = f"{name} {number}"
            self._exporters.append(exporter)
            return given

    def leave(self, exporter: PrometheusServer) -> None:
        """Remove an exporter; the server ends with the last one."""
        with _lock:
            if exporter in self._exporters:
                self._exporters.remove(exporter)
            if self._exporters or _boards.pop(self.key, None) is None:
                return
            self._server.shutdown()  # under the lock: the next run of this process finds the port free
            self._server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Metric families for a scrape; called by the server."""
        families: dict[str, _Family] = {}
        for exporter in list(self._exporters):
            for key, value in exporter.reading.items():
                name = name_of(key)
                instrument = instrument_of(name)
                if instrument is not None:
                    family = families.setdefault(instrument.name, _Family(instrument))
                    family.samples.append((name, {**labels_of(key), **exporter.labels}, value))
        for family in families.values():
            yield family.to_client(self._core)


class _Family:
    """Samples of one metric."""

    def __init__(self, instrument: Instrument) -> None:
        self.instrument = instrument
        self.samples: list[tuple[str, dict[str, str], float]] = []

    def to_client(self, core: Any) -> Any:
        known = self.instrument
        kind = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}.get(
            known.kind, core.HistogramMetricFamily
        )
        family = kind(known.name, f"{known.help} ({known.unit})")
        for name, labels, value in self.samples:
            family.add_sample(name, labels, float(value))
        return family


def _board_of(host: str, port: int) -> _Board:
    with _lock:
        board = _boards.get((host, port))
        if board is None or board.process != os.getpid():
            board = _boards[host, port] = _Board(host, port)
        return board


_boards: dict[tuple[str, int], _Board] = {}
_lock = threading.RLock()
