"""The filesystem queue: providers put files of batches into a directory, trainers take them out.

    provider -> lanes -> publisher -> 000000000042-...arrow -> shared | strict -> consumer

layout      what the names in a queue directory say          queue       a queue as a whole: make, open, purge
members     who lives: leases by renaming                    caretaking  what the dead had taken is given back
lanes       who makes which file                             cursors     how far the ranks are, in strict order
filing      one file of batches                              waiting     with a deadline and a reason
"""

from penstock.fsqueue.consumer import DatasetConsumer
from penstock.fsqueue.provider import DataProviderBase, Progress
from penstock.fsqueue.queue import Queue, purge

__all__ = ["DataProviderBase", "DatasetConsumer", "Progress", "Queue", "purge"]
