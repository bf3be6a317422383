"""Every framework that is installed, as a way to make its arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.batching.backends import torch as torch_backend

MODULES = {"numpy": "numpy", "torch": "torch", "torch-native": "torch", "jax": "jax.numpy", "mlx": "mlx.core"}

Make = Callable[..., Any]


@pytest.fixture(params=MODULES)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    """float32 arrays of one framework. `torch-native` computes on the CPU as on any other device of torch."""
    module: Any = pytest.importorskip(MODULES[request.param])
    if request.param == "torch-native":
        backend = torch_backend.TorchBackend()
        monkeypatch.setattr(
            torch_backend,
            "HostTorchOperations",
            lambda torch: torch_backend.TorchOperations(backend, torch, torch.device("cpu"), check=True),
        )

    def array(values: Any, dtype: str = "float32") -> Any:
        host = np.asarray(values, dtype)
        return getattr(module, {"torch": "from_numpy", "numpy": "asarray"}.get(module.__name__, "array"))(host)

    array.kind = type(array([0.0]))  # type: ignore[attr-defined]
    return array
