from __future__ import annotations

import pytest

from penstock.corpus.dedup.kernel_calls import KERNELS
from penstock.files.machine_code import Functions


@pytest.fixture(scope="session")
def compiled() -> Functions:
    """Machine code of exact deduplication, compiled by the first test that needs it."""
    pytest.importorskip("numba")
    found = KERNELS.wait()
    assert found is not None
    return found
