"""Many ranks, one stream of batches.

find_rank, worker_rank    which rank, and which worker of it, this process is
Sharding                  which samples of a global batch each rank takes: Contiguous, Strided, Balanced, your own
CanonicalStreams          which stream serves which slot, and which rank reads it, when data is streamed
karmarkar_karp, greedy    parts of equal work; micro_batches: parts that fit a number of tokens
barrier, EndOfEpoch       ranks that wait for each other, with a deadline that names who is missing
gather_states             one state made of those of all ranks
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
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

# Imported when they are first used: what is not used costs nothing.
__getattr__ = lazy(
    __name__,
    {
        "attention_cost": "penstock.distributed.balancing",
        "greedy": "penstock.distributed.balancing",
        "karmarkar_karp": "penstock.distributed.balancing",
        "micro_batches": "penstock.distributed.balancing",
        "Rank": "penstock.distributed.ranks",
        "find_rank": "penstock.distributed.ranks",
        "worker_rank": "penstock.distributed.ranks",
        "DirectoryRendezvous": "penstock.distributed.rendezvous",
        "Rendezvous": "penstock.distributed.rendezvous",
        "find_rendezvous": "penstock.distributed.rendezvous",
        "Balanced": "penstock.distributed.sharding",
        "CanonicalStreams": "penstock.distributed.sharding",
        "Contiguous": "penstock.distributed.sharding",
        "Sharding": "penstock.distributed.sharding",
        "Strided": "penstock.distributed.sharding",
        "canonical_streams": "penstock.distributed.sharding",
        "deal": "penstock.distributed.sharding",
        "EndOfEpoch": "penstock.distributed.synchronization",
        "barrier": "penstock.distributed.synchronization",
        "gather_states": "penstock.distributed.synchronization",
        "merge_states": "penstock.distributed.synchronization",
    },
)
