"""The arrays of a step: layout, collation, the batch, and the backends that convert it."""
