"""Keys of readings: the name of a metric and its labels, in Prometheus notation.

key_of("penstock_stage_rows_in_total", stage="Lower('text')")  ->  penstock_stage_rows_in_total{stage="Lower('text')"}
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Readings = dict[str, float]
"""Readings of a moment: numbers by flat key."""

_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_UNESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_LONGEST_LABEL = 200
"""Characters of a label; a stage may have a long repr, and a server keeps labels for ever."""


def key_of(name: str, /, **labels: object) -> str:
    """Flat key of a metric with labels; long label values are cut."""
    if not labels:
        return name
    inner = ",".join(f'{label}="{_escaped(str(value))}"' for label, value in labels.items())
    return f"{name}{{{inner}}}"


def name_of(key: str) -> str:
    """Name of a metric, without the labels of the key."""
    return key.partition("{")[0]


def labels_of(key: str) -> dict[str, str]:
    """Labels of a key, unescaped."""
    found = _LABEL.findall(key.partition("{")[2])
    return {label: re.sub(r"\\.", lambda hit: _UNESCAPES.get(hit[0], hit[0]), value) for label, value in found}


def logger_names(readings: Mapping[str, float]) -> Readings:
    """Readings under names that loggers take: `penstock_queue_ready_files/train`.

    Loggers know no labels, and MLflow refuses most signs: label values follow the name, in letters, digits and `_.- `.
    Two keys that would get one name are numbered.
    """
    named: Readings = {}
    for key, value in readings.items():
        parts = (re.sub(r"[^A-Za-z0-9_. -]+", "_", label).strip("_ ") or "_" for label in labels_of(key).values())
        name = base = "/".join([name_of(key), *parts])
        number = 1
        while name in named:
            number += 1
            name = f"{base}_{number}"
        named[name] = value
    return named


def _escaped(value: str) -> str:
    if len(value) > _LONGEST_LABEL:
        value = f"{value[: _LONGEST_LABEL - 3]}..."
    value = value.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate of a file name cannot be sent
    return re.sub(r'[\\"\n]', lambda hit: _ESCAPES[hit[0]], value)
