"""Attention masks for packed rows, for kernels that do not know documents by themselves."""

from __future__ import annotations

from penstock.batching.backends.base import Array
from penstock.batching.backends.lookup import backend_of
from penstock.errors import ConfigError

__all__ = ["block_diagonal_mask"]


def block_diagonal_mask(
    document_ids: Array, causal: bool = True, *, padding: int | None = 0, dtype: str = "bool"
) -> Array:
    """Which position may attend to which, (rows, 1, tokens, tokens): only within one document of the row.

    `document_ids` is (rows, tokens) of any framework, and so is the mask, on the same device. With `causal`, a
    position sees itself and what stands before it. Positions whose id is `padding` see themselves and nothing else sees
    them: no row of the mask is empty, which would make NaN of it in a softmax. `padding=None`: every id is a document.

    The mask is bool, True where attention is allowed: what torch's `scaled_dot_product_attention`, MLX's and
    `jax.nn.dot_product_attention` take. With a `dtype` such as "float32" or "bfloat16" it is to be added to the scores:
    0 and the lowest number there is.

    It has rows x tokens x tokens entries: 2 GiB of bool for 8 rows of 16,384. FlashAttention with `cu_seqlens`, or
    FlexAttention, needs none of that.
    """
    if len(document_ids.shape) != 2:
        raise ConfigError(f"document_ids must be of shape (rows, tokens), got {tuple(document_ids.shape)}")
    backend = backend_of(document_ids)
    at = backend.arange(int(document_ids.shape[1]), like=document_ids)
    allowed = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if causal:
        allowed = allowed & (at[:, None] >= at[None, :])
    if padding is not None:
        allowed = (allowed & (document_ids != padding)[:, None, None, :]) | (at[:, None] == at[None, :])
    return allowed if dtype == "bool" else backend.additive(allowed, dtype)
