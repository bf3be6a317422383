"""Distributed training: ranks, sharding, balancing and synchronization.

find_rank, worker_rank    rank of this process, and worker of a rank
find_position, read_mesh  position in a mesh of data, context, tensor and pipeline parallelism
Sharding                  samples of a global batch for each rank: Contiguous, Strided, Balanced, your own
CanonicalStreams          streams of a rank, when data is streamed
karmarkar_karp, greedy    parts of equal cost; micro_batches: parts within a number of tokens
barrier, EndOfEpoch       ranks that wait for each other, with a timeout that names the missing ones
gather_states             one state of all ranks
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
