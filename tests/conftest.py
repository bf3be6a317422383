"""Tests leave nothing in the caches and registries of whoever runs them.

`HYPOTHESIS_PROFILE=fixed` draws the same examples every time, so that what passed passes again: for deciding whether a
change may land. Without it every run looks at others, which is how new failures are found.
"""

from __future__ import annotations

import os
import tempfile

from hypothesis import settings

settings.register_profile("fixed", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

_CACHE = tempfile.TemporaryDirectory(prefix="penstock-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ["XDG_DATA_HOME"] = f"{_CACHE.name}/data"
