"""Backends: batches as arrays of NumPy, torch, MLX or JAX. Importing this imports none of them but NumPy.

backend = get_backend("torch")          # here torch is imported
tensor = backend.from_numpy(array)      # shares memory with the array
"""

from penstock.batching.backends.attention import block_diagonal_mask
from penstock.batching.backends.base import Backend, aligned_empty, batch_dtype
from penstock.batching.backends.lookup import BACKENDS, backend_of, get_backend

__all__ = [
    "BACKENDS",
    "Backend",
    "aligned_empty",
    "backend_of",
    "batch_dtype",
    "block_diagonal_mask",
    "get_backend",
]
