"""Loaders with `streaming=True`: engine, reader, streams, windows of rows, and the catalog of blocks."""
