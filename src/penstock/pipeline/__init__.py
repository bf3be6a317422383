"""The pipeline engine: rows from a source through transforms to a sink. All concurrency lives here.

    source thread -> read -> lanes of the workers -> settled -> ready -> sink thread, or your loop

`stages` has the protocols, `pipeline` describes and drives a run, `runner` owns the threads, `buffers` has the four
buffers between them, `chain` applies transforms and finds bad rows, `context` tunes batch sizes and worker counts.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
