"""Many ranks, one stream of batches.

find_rank, worker_rank    which rank, and which worker of it, this process is
Sharding                  which samples of a global batch each rank takes: Contiguous, Strided, Balanced, your own
CanonicalStreams          which stream serves which slot, and which rank reads it, when data is streamed
karmarkar_karp, greedy    parts of equal work; micro_batches: parts that fit a number of tokens
barrier, EndOfEpoch       ranks that wait for each other, with a deadline that names who is missing
gather_states             one state made of those of all ranks
"""

from penstock.distributed.balancing import attention_cost, greedy, karmarkar_karp, micro_batches
from penstock.distributed.ranks import Rank, find_rank, worker_rank
from penstock.distributed.rendezvous import DirectoryRendezvous, Rendezvous, find_rendezvous
from penstock.distributed.sharding import (
    Balanced,
    CanonicalStreams,
    Contiguous,
    Sharding,
    Strided,
    canonical_streams,
    deal,
)
from penstock.distributed.synchronization import EndOfEpoch, barrier, gather_states, merge_states

__all__ = [
    "Balanced",
    "CanonicalStreams",
    "Contiguous",
    "DirectoryRendezvous",
    "EndOfEpoch",
    "Rank",
    "Rendezvous",
    "Sharding",
    "Strided",
    "attention_cost",
    "barrier",
    "canonical_streams",
    "deal",
    "find_rank",
    "find_rendezvous",
    "gather_states",
    "greedy",
    "karmarkar_karp",
    "merge_states",
    "micro_batches",
    "worker_rank",
]
