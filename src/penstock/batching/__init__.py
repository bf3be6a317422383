"""Arrays of a step: options, layout, collation, the batch, and the backends that convert it."""
