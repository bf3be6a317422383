"""Agreement of ranks: before its first batch, each finds out that the others read the same feed in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from penstock.distributed.ranks import Rank, running_torch
from penstock.distributed.synchronization import find_rendezvous, meeting, reaching
from penstock.errors import ConfigError
from penstock.feed.connection import FeedConnection, differences
from penstock.feed.share import GroupShare
from penstock.files.states import parse_json, to_json


def check_ranks(
    connection: FeedConnection, rank: Rank, facts: Mapping[str, Any], share: GroupShare | None = None
) -> None:
    """Refuse ranks of torch.distributed whose facts of the feed differ.

    The ranks of a share compare theirs at once. The others compare with the rank that came first, through the store of
    torch.distributed, so that none waits for a rank that reads later or not at all. Loaders are told apart by their
    addresses, whose order may differ, and by how many of them a rank has used.
    """
    if share is not None:  # first: all of its ranks go on, or none
        share.check(rank, xxhash.xxh3_64_intdigest(to_json(facts)) >> 1)
    module = running_torch()
    if module is None or module.get_world_size() == 1:
        return
    store: Any = find_rendezvous()
    name = f"feed {xxhash.xxh3_64_hexdigest(' '.join(sorted(connection.addresses)).encode())}"
    key = "{}/{}".format(*meeting(store, rank, name))
    note = to_json({"rank": module.get_rank(), "address": connection.address, "facts": facts}).decode()
    with reaching(store, rank, "comparing the feed with that of other ranks"):
        first = parse_json(bytes(store.compare_set(key, "", note)))
    found = differences(parse_json(to_json(facts)), first["facts"], "{} here")
    if found:
        raise ConfigError(
            f"process {first['rank']} found another feed at {first['address']} than this one, process "
            f"{module.get_rank()}, at {connection.address}: {found}; serve the same config at all addresses, and pass "
            "the same options on all ranks"
        )
