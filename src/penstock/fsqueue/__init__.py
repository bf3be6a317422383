"""The filesystem queue: providers put files of batches into a directory, trainers take them out.

    provider -> lanes -> publisher -> 000000000042-...arrow -> shared | strict -> consumer

layout      what the names in a queue directory say          queue       a queue as a whole: make, open, purge
members     who lives: leases by renaming                    caretaking  what the dead had taken is given back
lanes       who makes which file                             cursors     how far the ranks are, in strict order
filing      one file of batches                              waiting     with a deadline and a reason
stages      a queue as the source or the sink of a pipeline  inspecting  what waits, and who is at work
finding     the provider of a dataset                        doctoring   what is wrong, and mending it
"""

from penstock.fsqueue.consumer import DatasetConsumer
from penstock.fsqueue.provider import DataProviderBase, ProviderProgress
from penstock.fsqueue.publisher import Limits
from penstock.fsqueue.queue import Queue, purge
from penstock.fsqueue.source import QueueSink, QueueSource

__all__ = [
    "DataProviderBase",
    "DatasetConsumer",
    "Limits",
    "ProviderProgress",
    "Queue",
    "QueueSink",
    "QueueSource",
    "purge",
]
