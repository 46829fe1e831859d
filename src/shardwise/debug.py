"""Seeing what was communicated."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardwise.comm import record
from shardwise.comm.record import Comm


class CommDebugMode:
    """Counts the collectives of everything run inside it, backward passes included, and the calls without a sharding
    rule, which gather their inputs.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> x = sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0)])
    >>> with CommDebugMode() as comm:
    ...     _ = x.full_tensor()
    >>> comm.get_comm_counts()
    {'all_gather': 1}
    """

    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self.fallbacks: list[str] = []

    def __enter__(self) -> CommDebugMode:
        self.comms.clear()
        self.fallbacks.clear()
        record.listeners.append(self.comms)
        record.fallbacks.append(self.fallbacks)
        return self

    def __exit__(self, *exception: Any) -> None:
        record.listeners[:] = [listener for listener in record.listeners if listener is not self.comms]
        record.fallbacks[:] = [listener for listener in record.fallbacks if listener is not self.fallbacks]

    def get_comm_counts(self) -> dict[str, int]:
        """How many collectives of each kind ran."""
        return dict(Counter(comm.kind for comm in self.comms))

    def get_fallback_counts(self) -> dict[str, int]:
        """How many calls of each function had no sharding rule and were gathered."""
        return dict(Counter(self.fallbacks))

    def get_total_counts(self) -> int:
        """How many collectives ran."""
        return len(self.comms)
