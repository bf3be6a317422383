"""Targets of metrics: a URL, a path or an object, as an exporter.

pipeline.run(metrics="run.metrics.jsonl")
PretrainDataLoader("corpus.store", metrics=["prometheus://:9464", "tensorboard:runs/data"])
MetricsConfig("otlp://collector:4318", trace_share=0.05, interval_seconds=10)
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from penstock._optional import require
from penstock._suggest import check_options, did_you_mean
from penstock.errors import ConfigError
from penstock.files.filesystems import is_object_url, shown
from penstock.files.listing import PathLike
from penstock.metrics.metrics_file import MetricsFile
from penstock.metrics.readings import Readings
from penstock.metrics.watch import Exporter, MetricsWatch, RunFacts, process_labels

Target = str | PathLike | Exporter
_DEFAULT_PORTS = {"prometheus": 9464, "otlp": 4318, "otlp+http": 4318, "otlp+https": 4318}
_SCHEMES = (*_DEFAULT_PORTS, "jsonl", "tensorboard", "wandb", "mlflow")
_PACKAGES = {
    "prometheus": "prometheus_client",
    **dict.fromkeys(("otlp", "otlp+http", "otlp+https"), "opentelemetry"),
    **{name: name for name in ("tensorboard", "wandb", "mlflow")},
}
"""Optional packages: imported when a run begins, and missed before."""
_EXAMPLES = (
    "prometheus://:9464, otlp://host:4318, otlp+https://host, jsonl:PATH or a path, tensorboard:DIR, wandb:PROJECT, "
    "mlflow:EXPERIMENT"
)


@dataclass(frozen=True)
class MetricsConfig:
    """Metrics of a run: where they go, how often, and what they are called.

    `targets` is a target or several. `trace_share` is the share of batches whose spans go to OpenTelemetry; `job` names
    the job in all series (by default PENSTOCK_JOB, or the job id of Slurm, torchrun or Ray).
    """

    targets: Target | Sequence[Target] = ()
    interval_seconds: float = 1.0
    trace_share: float | None = None
    name: str | None = None
    """Name of the run, in place of the kind of loader or `pipeline`."""
    job: str | None = None
    rank: int | None = None
    """Number of this process in the labels, in place of that of a loader or of RANK."""

    def __post_init__(self) -> None:
        if not 0 < self.interval_seconds < math.inf:
            raise ConfigError(f"interval_seconds must be positive, got {self.interval_seconds!r}")
        if self.trace_share is not None and not 0 <= self.trace_share <= 1:
            raise ConfigError(f"trace_share must be between 0 and 1, got {self.trace_share!r}")
        if self.rank is not None and (type(self.rank) is not int or self.rank < 0):
            raise ConfigError(f"rank must be a number from 0 on, got {self.rank!r}")
        self.exporters()

    @classmethod
    def of(cls, metrics: Any) -> MetricsConfig:
        """The config, or one of a target or several targets."""
        return metrics if isinstance(metrics, MetricsConfig) else cls(metrics)

    def exporters(self) -> list[Exporter]:
        """New exporters of the targets; nothing is opened yet."""
        several = isinstance(self.targets, Sequence) and not isinstance(self.targets, str)
        targets: Sequence[Any] = self.targets if several else [self.targets]  # type: ignore[assignment]
        return [self._exporter(target) for target in targets]

    def _exporter(self, target: Target) -> Exporter:
        exporter = open_exporter(target)
        if self.trace_share is not None and hasattr(exporter, "trace_share"):
            exporter.trace_share = self.trace_share
        return exporter

    def watch(
        self,
        kind: str,
        name: str,
        read: Callable[[], Readings | None],
        *,
        note: Callable[[], str | None] | None = None,
        description: str = "",
        rank: int | None = None,
    ) -> MetricsWatch:
        """A started watch of a run of this process."""
        run = RunFacts(
            kind, self.name or name, description, process_labels(rank if self.rank is None else self.rank, self.job)
        )
        interval = self.interval_seconds
        return MetricsWatch(run, read, self.exporters(), note=note, interval_seconds=interval).start()


Metrics = MetricsConfig | Target | Sequence[Target] | None
"""Value of the option `metrics`: targets, or None for none."""


def open_exporter(target: Target) -> Exporter:
    """Exporter of a target; nothing is connected, started or written before a run begins.

        prometheus://HOST:PORT      server for Prometheus; without a host on the loopback. The next free port is taken
        otlp://HOST:4318            OpenTelemetry over HTTP, metrics and traces; also otlp+http://, otlp+https://
        jsonl:PATH, or a path       metrics file, which `penstock report` and `penstock ui` read
        tensorboard:DIR             event files
        wandb:PROJECT               Weights & Biases; WANDB_MODE=offline writes to disk
        mlflow:EXPERIMENT           MLflow, at MLFLOW_TRACKING_URI

    `otlp://host?traces=0.05` traces that share of the batches (by default 0.01).
    """
    if isinstance(target, os.PathLike):
        return MetricsFile(target)
    if not isinstance(target, str):
        if all(callable(getattr(target, name, None)) for name in ("begin", "write", "end")):
            return target
        raise ConfigError(f"metrics must be a URL, a path or an exporter, got {target!r}; such as {_EXAMPLES}")
    if not target:
        raise ConfigError(f"metrics is an empty string; expected one of {_EXAMPLES}")
    scheme, colon, rest = target.partition(":")
    if is_object_url(target):
        return MetricsFile(target)  # refuses it
    if scheme.lower() == "file" and rest.startswith("/"):
        return MetricsFile(target)
    if not colon or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+", scheme) or Path(target).exists():
        return MetricsFile(target)
    scheme = scheme.lower()
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"metrics={shown(target)!r}: unknown scheme {scheme!r}{did_you_mean(scheme, _SCHEMES)}; expected one of "
            f"{_EXAMPLES}"
        )
    if scheme in _PACKAGES and find_spec(_PACKAGES[scheme]) is None:
        require(_PACKAGES[scheme], "metrics")  # raises, with the extra to install
    if scheme in _DEFAULT_PORTS:
        return _server_exporter(scheme, target, rest)
    if not rest:
        raise ConfigError(f"metrics={shown(target)!r} names no place after {scheme}:; expected one of {_EXAMPLES}")
    if scheme == "jsonl":
        return MetricsFile(rest)
    if scheme == "tensorboard":
        from penstock.metrics.loggers import TensorBoardLogger

        return TensorBoardLogger(rest)
    if scheme == "wandb":
        from penstock.metrics.loggers import WandbLogger

        return WandbLogger(rest)
    from penstock.metrics.loggers import MLflowLogger

    return MLflowLogger(rest)


def _server_exporter(scheme: str, target: str, rest: str) -> Exporter:
    try:
        parts = urlsplit(target)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"metrics={shown(target)!r} is no URL: {error}; expected {scheme}://HOST:PORT") from None
    if not rest.startswith("//"):
        raise ConfigError(f"metrics={shown(target)!r}: expected {scheme}://HOST:PORT")
    given = dict(parse_qsl(parts.query))
    if scheme == "prometheus":
        from penstock.metrics.prometheus import PrometheusServer

        check_options(given, (), where=f"metrics={shown(target)!r}")
        return PrometheusServer(host or "127.0.0.1", _DEFAULT_PORTS[scheme] if port is None else port)
    from penstock.metrics.otlp import OTLPExporter

    check_options(given, ("traces",), where=f"metrics={shown(target)!r}")
    if not host:
        raise ConfigError(f"metrics={shown(target)!r} names no host; expected {scheme}://HOST:4318")
    secure = scheme == "otlp+https"
    place = f"[{host}]" if ":" in host else host
    default = "" if secure else f":{_DEFAULT_PORTS[scheme]}"
    url = f"{'https' if secure else 'http'}://{place}{f':{port}' if port is not None else default}"
    try:
        share = float(given.get("traces", "0.01"))
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"metrics={shown(target)!r}: traces is a share between 0 and 1, such as traces=0.05")
    return OTLPExporter(url + parts.path.rstrip("/"), trace_share=share)
