"""Sources of databases and brokers, by the scheme of a URL."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.files.filesystems import scheme_of
from penstock.files.listing import SERVICES
from penstock.pipeline.stages import Source


def open_service(url: str, **options: Any) -> Source:
    """The source for the URL of a database or a broker (see `is_service`)."""
    source: Source = service_class(url)(url, **options)
    return source


def service_class(url: str) -> type[Any]:
    """The class of the source for a URL."""
    module, name = SERVICES[scheme_of(url)]
    found: type[Any] = getattr(importlib.import_module(f"penstock.sources.{module}"), f"{name}Source")
    return found
