"""Prepared data: a directory of memory-mapped shards under a manifest.

StoreWriter             writes a version, survives kill -9, publishes in one step (as a sink: penstock.sinks.StoreSink)
open_store              store[i], store.lengths, store.take(rows), store.batches()
append, versions,       versions are manifests over shared shards
  diff, checkout, prune
Lineage, content_key    what it was made of, and the name of exactly that
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
