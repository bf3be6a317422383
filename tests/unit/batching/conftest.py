"""Each backend whose framework is installed."""

from __future__ import annotations

import pytest

from penstock.batching.backends import BACKENDS, Backend, get_backend

MODULES = {"numpy": "numpy", "torch": "torch", "mlx": "mlx.core", "jax": "jax"}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    pytest.importorskip(MODULES[request.param])
    return get_backend(request.param)
