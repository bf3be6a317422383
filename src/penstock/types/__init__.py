"""Types of columns: one `Schema`, the same for files, queues and training batches."""

from penstock.types.schema import (
    Field,
    Schema,
    from_numpy,
    from_rows,
    ragged,
    sparse_from_dense,
    sparse_from_pairs,
    sparse_to_dense,
    to_numpy,
    to_rows,
)

__all__ = [
    "Field",
    "Schema",
    "from_numpy",
    "from_rows",
    "ragged",
    "sparse_from_dense",
    "sparse_from_pairs",
    "sparse_to_dense",
    "to_numpy",
    "to_rows",
]
