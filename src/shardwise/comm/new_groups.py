"""Process groups that their members make, while all other ranks do something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def new_group(members: Sequence[int], backend: str | None = None) -> Any:
    """A group of these ranks, which all of them call this for, and no others.

    torch names such a group by its members and by how many groups a process is in. Members that are in different
    numbers of groups would look for one another under different names, for ever: so those that are in fewer make some
    of themselves alone first.
    """
    if dist.get_backend() != "fake":  # one process, which plays its part of many that there are not
        for _ in range(_most_groups(members) - _num_groups()):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return dist.new_group(list(members), backend=backend, use_local_synchronization=True)


def _most_groups(members: Sequence[int]) -> int:
    """How many groups the member that is in most of them is in. Who asks again does so together with all others, so
    that each time is a turn of its own."""
    store = dist.PrefixStore(f"shardwise/{'-'.join(map(str, members))}", distributed_c10d._get_default_store())
    turn = (store.add("asked", 1) - 1) // len(members)
    store.set(f"{turn}/{dist.get_rank()}", str(_num_groups()))
    return max(int(store.get(f"{turn}/{member}")) for member in members)


def _num_groups() -> int:
    return len(distributed_c10d._world.pg_names)
