"""The pipeline: the engine that moves rows. All concurrency lives here.

    source thread -> read -> lanes of the workers -> settled -> ready -> sink thread, or your loop

`stages` says what the parts are, `pipeline` describes and drives a run, `runner` owns the threads, `buffers` the four
buffers between them, `chain` applies transforms and finds bad rows, `context` picks batch sizes and worker counts.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
