"""Block-diagonal masks, against a reference that asks position by position, and in the attention they are for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.batching.backends import Backend, block_diagonal_mask
from penstock.errors import ConfigError

shared = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
IDS = hnp.arrays(np.int32, st.sampled_from([(1, 1), (1, 7), (3, 5)]), elements=st.integers(0, 3))


def reference(ids: Any, causal: bool, padding: int | None) -> list[Any]:
    def allowed(row: Any, query: int, key: int) -> bool:
        if query == key:
            return True
        if causal and key > query:
            return False
        return bool(row[query] == row[key]) and row[key] != padding

    places = range(ids.shape[1])
    return [[[[allowed(row, query, key) for key in places] for query in places]] for row in ids]


@shared
@given(ids=IDS, causal=st.booleans(), padding=st.sampled_from([0, None, 2]))
def test_every_position_sees_its_own_document_only(
    backend: Backend, ids: Any, causal: bool, padding: int | None
) -> None:
    mask = backend.to_numpy(block_diagonal_mask(backend.from_numpy(ids), causal, padding=padding))
    assert mask.dtype == np.bool_
    assert mask.tolist() == reference(ids, causal, padding)


def test_an_additive_mask_has_zero_or_the_lowest_number(backend: Backend) -> None:
    ids = np.array([[1, 1, 2, 0]], np.int32)
    given_ids = backend.from_numpy(ids)
    allowed = backend.to_numpy(block_diagonal_mask(given_ids))
    for dtype in ("float32", "float16"):
        added = backend.to_numpy(block_diagonal_mask(given_ids, dtype=dtype))
        assert added.dtype == dtype
        assert np.array_equal(added, np.where(allowed, np.float64(0), np.finfo(dtype).min).astype(dtype))


@pytest.mark.parametrize("backend", ["torch", "mlx", "jax"], indirect=True)
def test_bfloat16_masks_where_there_is_bfloat16(backend: Backend) -> None:
    mask = block_diagonal_mask(backend.from_numpy(np.array([[1, 2]], np.int32)), dtype="bfloat16")
    assert str(mask.dtype).endswith("bfloat16")
    assert float(mask[0, 0, 0, 0]) == 0 > -1e38 > float(mask[0, 0, 1, 0])


def test_ids_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="document_ids"):
        block_diagonal_mask(np.zeros(3, np.int32))


def attention(backend: Backend, values: Any, mask: Any) -> Any:
    """One head of the framework's own attention over (rows, tokens, width), each token its own query and key."""
    if backend.name == "torch":
        torch = pytest.importorskip("torch")
        return torch.nn.functional.scaled_dot_product_attention(*[values[:, None]] * 3, attn_mask=mask)[:, 0]
    if backend.name == "mlx":
        mx = pytest.importorskip("mlx.core")
        return mx.fast.scaled_dot_product_attention(*[values[:, None]] * 3, scale=0.5, mask=mask)[:, 0]
    jax = pytest.importorskip("jax")
    return jax.nn.dot_product_attention(*[values[:, :, None]] * 3, mask=mask)[:, :, 0]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", "bool"), ("torch", "float32"), ("mlx", "bool"), ("mlx", "float32"), ("jax", "bool")],
    indirect=["backend"],
)
def test_the_frameworks_attention_keeps_documents_apart(backend: Backend, dtype: str) -> None:
    ids = np.array([[1, 1, 1, 2, 2, 0, 0, 0]], np.int32)
    mask = block_diagonal_mask(backend.from_numpy(ids), dtype=dtype)
    before = np.random.default_rng(0).standard_normal((1, 8, 4)).astype(np.float32)
    after = before.copy()
    after[:, :2] += 1  # the first document, but for its last token, and the padding
    after[:, 5:] -= 1
    first, second = (backend.to_numpy(attention(backend, backend.from_numpy(x), mask)) for x in (before, after))
    assert np.isfinite(first).all()
    assert np.array_equal(first[:, 3:5], second[:, 3:5])
    assert not np.array_equal(first[:, 2], second[:, 2])
