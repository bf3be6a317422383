"""Engines: splits of its input as tasks of an engine, with the bytes of a local run."""
