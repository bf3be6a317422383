"""Batches of samples of any dataset: schema, columns, datasets, layout, collator and engine of `MLXDataLoader`."""
