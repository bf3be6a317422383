"""OpenTelemetry: readings as metrics and sampled batches as traces, over OTLP/HTTP with protobuf.

Messages are built from OpenTelemetry's own definitions and sent by the thread of the watch: no provider is registered,
no further thread is started, and the instrumentation of the trainer is left alone.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from penstock._optional import require
from penstock.metrics.readings import labels_of, name_of
from penstock.metrics.registry import Instrument, instrument_of
from penstock.metrics.spans import StageSpan
from penstock.metrics.watch import Reading, RunEnd, RunFacts

_TIMEOUT_SECONDS = 3.0
_CUMULATIVE = 2
_UNITS = {"seconds": "s", "bytes": "By", "ratio": "1"}
_PROTOS = {
    "metrics": "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2",
    "trace": "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
}


class OTLPExporter:
    """Exporter to an OpenTelemetry collector. `OTEL_EXPORTER_OTLP_HEADERS` has headers, such as a key."""

    def __init__(self, url: str, trace_share: float = 0.01) -> None:
        self._url, self.trace_share = url, trace_share
        self._run: RunFacts | None = None
        self._protos: dict[str, Any] = {}
        self._names: dict[str, Any] = {}

    def begin(self, run: RunFacts) -> None:
        self._protos = {name: require(module, "metrics") for name, module in _PROTOS.items()}
        self._names = {
            "common": require("opentelemetry.proto.common.v1.common_pb2", "metrics"),
            "metrics": require("opentelemetry.proto.metrics.v1.metrics_pb2", "metrics"),
            "trace": require("opentelemetry.proto.trace.v1.trace_pb2", "metrics"),
            "resource": require("opentelemetry.proto.resource.v1.resource_pb2", "metrics"),
        }
        self._run = run

    def write(self, reading: Reading) -> None:
        if reading.metrics:
            self._send("metrics", self._metrics(reading))
        if reading.spans:
            self._send("trace", self._trace(reading.spans))

    def end(self, end: RunEnd) -> None:
        """Nothing: the last reading was sent, and there is nothing to close."""

    def __str__(self) -> str:
        return self._url

    def _metrics(self, reading: Reading) -> Any:
        kinds, at = self._names["metrics"], int(reading.time * 1e9)
        families: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        for key, value in reading.metrics.items():
            instrument = instrument_of(name_of(key))
            if instrument is not None:
                families[instrument.name].append((key, value))
        found = []
        for name, samples in families.items():
            instrument = instrument_of(name)
            assert instrument is not None
            metric = kinds.Metric(name=name, unit=_UNITS.get(instrument.unit, f"{{{instrument.unit}}}"))
            metric.description = instrument.help
            self._add_points(metric, instrument, samples, at)
            found.append(metric)
        scope = kinds.ScopeMetrics(scope=self._names["common"].InstrumentationScope(name="penstock"), metrics=found)
        whole = kinds.ResourceMetrics(resource=self._resource(), scope_metrics=[scope])
        return self._protos["metrics"].ExportMetricsServiceRequest(resource_metrics=[whole])

    def _add_points(self, metric: Any, instrument: Instrument, samples: Sequence[tuple[str, float]], at: int) -> None:
        kinds, run = self._names["metrics"], self._run
        assert run is not None
        began = int(run.started * 1e9)
        if instrument.kind == "histogram":
            metric.histogram.aggregation_temporality = _CUMULATIVE
            metric.histogram.data_points.append(_histogram(kinds, instrument.name, dict(samples), began, at))
            return
        target = metric.gauge
        if instrument.kind == "counter":
            target = metric.sum
            target.aggregation_temporality, target.is_monotonic = _CUMULATIVE, True
        for key, value in samples:
            point = kinds.NumberDataPoint(start_time_unix_nano=began, time_unix_nano=at, as_double=float(value))
            point.attributes.extend(self._attributes(labels_of(key)))
            target.data_points.append(point)

    def _trace(self, spans: Sequence[StageSpan]) -> Any:
        kinds, run = self._names["trace"], self._run
        assert run is not None
        found = []
        for span in spans:
            # One trace for each batch, whichever stages it goes through.
            trace = hashlib.blake2b(f"{run.host}/{run.pid}/{run.started}/{span.trace}".encode(), digest_size=16)
            made = kinds.Span(
                trace_id=trace.digest(),
                span_id=secrets.token_bytes(8),
                name=span.name,
                kind=1,
                start_time_unix_nano=span.end_ns - int(span.seconds * 1e9),
                end_time_unix_nano=span.end_ns,
            )
            made.attributes.extend(self._attributes({f"penstock.{name}": value for name, value in span.facts.items()}))
            found.append(made)
        scope = kinds.ScopeSpans(scope=self._names["common"].InstrumentationScope(name="penstock"), spans=found)
        whole = kinds.ResourceSpans(resource=self._resource(), scope_spans=[scope])
        return self._protos["trace"].ExportTraceServiceRequest(resource_spans=[whole])

    def _resource(self) -> Any:
        run = self._run
        assert run is not None
        facts = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "penstock"),
            "service.instance.id": f"{run.host}:{run.pid}",
            "host.name": run.host,
            "process.pid": run.pid,
            "penstock.kind": run.kind,
            "penstock.run": run.name,
            **{f"penstock.{name}": value for name, value in run.labels.items() if name != "pid"},
        }
        return self._names["resource"].Resource(attributes=self._attributes(facts))

    def _attributes(self, facts: Mapping[str, Any]) -> list[Any]:
        common = self._names["common"]
        return [common.KeyValue(key=name, value=_value(common, value)) for name, value in facts.items()]

    def _send(self, what: str, message: Any) -> None:
        url = f"{self._url}/v1/{'traces' if what == 'trace' else what}"
        headers = {"Content-Type": "application/x-protobuf", **_given_headers()}
        request = urllib.request.Request(url, message.SerializeToString(), headers)  # http and https: see targets
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:
            answer.read()


def _value(common: Any, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return common.AnyValue(int_value=value)
    return common.AnyValue(string_value=str(value).encode("utf-8", "replace").decode())


def _histogram(kinds: Any, name: str, samples: Mapping[str, float], began: int, at: int) -> Any:
    """Data point of a histogram whose buckets are cumulative, as Prometheus has them."""
    buckets = sorted(
        (float(labels_of(key)["le"]), value) for key, value in samples.items() if name_of(key) == f"{name}_bucket"
    )
    counts, before = [], 0.0
    for _, value in buckets:
        counts.append(int(value - before))
        before = value
    return kinds.HistogramDataPoint(
        start_time_unix_nano=began,
        time_unix_nano=at,
        count=int(samples.get(f"{name}_count", 0)),
        sum=float(samples.get(f"{name}_sum", 0.0)),
        explicit_bounds=[bound for bound, _ in buckets[:-1]],
        bucket_counts=counts,
    )


def _given_headers() -> dict[str, str]:
    """Headers of the environment: `key=value,other=value`."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}
