"""Pipelines as jobs: splits of the input are tasks of an engine, and the output has the bytes of a local run."""
