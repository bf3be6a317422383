"""Tests leave nothing in the caches of whoever runs them."""

from __future__ import annotations

import os
import tempfile

_CACHE = tempfile.TemporaryDirectory(prefix="penstock-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
