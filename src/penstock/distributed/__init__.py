"""Many ranks, one stream of batches.

find_rank, worker_rank    which rank, and which worker of it, this process is
Sharding                  which samples of a global batch each rank takes: Contiguous, Strided, Balanced, your own
CanonicalStreams          which stream serves which slot, and which rank reads it, when data is streamed
karmarkar_karp, greedy    parts of equal work; micro_batches: parts that fit a number of tokens
barrier, EndOfEpoch       ranks that wait for each other, with a deadline that names who is missing
gather_states             one state made of those of all ranks
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
