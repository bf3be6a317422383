"""Prepared data: a directory of memory-mapped shards under a manifest.

StoreWriter             writes a version, survives kill -9, publishes in one step (as a sink: penstock.sinks.StoreSink)
open_store              store[i], store.lengths, store.take(rows), store.batches()
append, versions,       versions are manifests over shared shards
  diff, checkout, prune
Lineage, content_key    what it was made of, and the name of exactly that
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy
from penstock.store.versions import versions  # at once: the module has the same name

if TYPE_CHECKING:
    from penstock.store.lineage import Lineage, content_key
    from penstock.store.manifest import FORMAT_VERSION, Manifest, ShardEntry
    from penstock.store.reader import Store, describe, find_store, is_complete, open_store
    from penstock.store.versions import Difference, Pruned, checkout, diff, prune
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

# Imported when they are first used: what is not used costs nothing.
__getattr__ = lazy(
    __name__,
    {
        "Lineage": "penstock.store.lineage",
        "content_key": "penstock.store.lineage",
        "FORMAT_VERSION": "penstock.store.manifest",
        "Manifest": "penstock.store.manifest",
        "ShardEntry": "penstock.store.manifest",
        "Store": "penstock.store.reader",
        "describe": "penstock.store.reader",
        "find_store": "penstock.store.reader",
        "is_complete": "penstock.store.reader",
        "open_store": "penstock.store.reader",
        "Difference": "penstock.store.versions",
        "Pruned": "penstock.store.versions",
        "checkout": "penstock.store.versions",
        "diff": "penstock.store.versions",
        "prune": "penstock.store.versions",
        "StoreWriter": "penstock.store.writer",
        "append": "penstock.store.writer",
    },
)
