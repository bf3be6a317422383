"""Prepared data: a directory of memory-mapped shards under a manifest.

StoreWriter             writes a version, survives kill -9, publishes in one step (as a sink: penstock.sinks.StoreSink)
open_store              store[i], store.lengths, store.take(rows), store.batches()
append, versions,       versions are manifests over shared shards
  diff, checkout, prune
Lineage, content_key    what it was made of, and the name of exactly that
"""

from penstock.store.lineage import Lineage, content_key
from penstock.store.manifest import FORMAT_VERSION, Manifest, ShardEntry
from penstock.store.reader import Store, describe, find_store, is_complete, open_store
from penstock.store.versions import Difference, Pruned, checkout, diff, prune, versions
from penstock.store.writer import StoreWriter, append

__all__ = [
    "FORMAT_VERSION",
    "Difference",
    "Lineage",
    "Manifest",
    "Pruned",
    "ShardEntry",
    "Store",
    "StoreWriter",
    "append",
    "checkout",
    "content_key",
    "describe",
    "diff",
    "find_store",
    "is_complete",
    "open_store",
    "prune",
    "versions",
]
