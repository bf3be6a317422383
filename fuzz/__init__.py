"""Fuzz targets: each reads bytes that nobody here wrote, and may return or raise a PenstockError, nothing else.

`make fuzz` runs them under atheris, which looks for bytes that reach new code; `tests/unit/test_fuzz_corpus.py` replays
the seeds in `corpus/` and some mutations of them. A finding becomes a seed when it is mended.
"""
