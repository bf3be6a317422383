"""Filesystem queue: providers write batch files into a directory, trainers read them.

    provider | sink -> publisher -> 000000000042-...arrow -> claiming_reader | ordered_reader -> consumer | source

layout      names in a queue directory, and the state they hold      queue            create, open, purge
lanes       file numbers: who produces which file                    batch_file       one Arrow file of batches
members     options, waiting, joining, heartbeat, leaving            leases           lease rule; releases of the dead
publisher   files into a split, within the backlog                   split_reader     waiting for files of a split
provider    base class of datasets                                   prepare_command  `python prepare.py`
status      backlog, rates and members                               doctor           checks and repairs
"""

from penstock.fsqueue.consumer import DatasetConsumer
from penstock.fsqueue.members import QueueOptions
from penstock.fsqueue.provider import DataProviderBase, ProviderProgress
from penstock.fsqueue.publisher import Limits
from penstock.fsqueue.queue import Queue, purge
from penstock.fsqueue.sink import QueueSink
from penstock.fsqueue.source import QueueSource

__all__ = [
    "DataProviderBase",
    "DatasetConsumer",
    "Limits",
    "ProviderProgress",
    "Queue",
    "QueueOptions",
    "QueueSink",
    "QueueSource",
    "purge",
]
