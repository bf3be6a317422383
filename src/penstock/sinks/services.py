"""Sinks of databases and brokers, by the scheme of a URL."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.files.filesystems import scheme_of
from penstock.files.listing import SERVICES
from penstock.pipeline.stages import Sink


def open_service(url: str, **options: Any) -> Sink:
    """The sink for the URL of a database or a broker (see `is_service`)."""
    sink: Sink = service_class(url)(url, **options)
    return sink


def service_class(url: str) -> type[Any]:
    """The class of the sink for a URL."""
    module, name = SERVICES[scheme_of(url)]
    found: type[Any] = getattr(importlib.import_module(f"penstock.sinks.{module}"), f"{name}Sink")
    return found
