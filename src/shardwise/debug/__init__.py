"""Seeing what is communicated, on which line, and why; and what is silently read as a shard."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections import Counter
from typing import Any

from torch import Tensor

from shardwise.comm import record
from shardwise.comm.cause import watchers
from shardwise.comm.record import Comm
from shardwise.debug.counts import Counts
from shardwise.debug.parameters import ModuleParameters
from shardwise.debug.reads import watch_reads
from shardwise.debug.sharding import visualize_sharding
from shardwise.debug.table import draw, tables

__all__ = ["Comm", "CommDebugMode", "visualize_sharding", "watch_reads"]


class CommDebugMode:
    """Sees every collective of what runs inside, backward passes included: which line and function caused it, which
    argument moved, from which layout to which, and why. Counts calls without a sharding rule, which gather inputs.

    `comms` has one `Comm` for each collective; `print_table()` shows them.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> x = sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0)])
    >>> with CommDebugMode() as comm:
    ...     _ = x.full_tensor()
    >>> comm.get_comm_counts()
    {'all_gather': 1}
    >>> found = comm.comms[0]
    >>> print(found.source, "→", found.target, found.why, comm.get_total_bytes())
    [4,4] S(0)@tp → [4,4] R asked for 32
    """

    def __init__(self) -> None:
        self.comms: list[Comm] = []
        self.fallbacks: list[str] = []
        self._modules = ModuleParameters()

    def __enter__(self) -> CommDebugMode:
        import torch.distributed._functional_collectives  # noqa: F401  # gives torch.ops the names that counts know

        self.comms.clear()
        self.fallbacks.clear()
        watchers.append(self)
        record.listeners.append(self.comms)
        record.fallbacks.append(self.fallbacks)
        self._modules.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._modules.stop()
        lists: list[tuple[list[Any], Any]] = [(watchers, self), (record.listeners, self.comms)]
        for everybody, mine in (*lists, (record.fallbacks, self.fallbacks)):
            everybody[:] = [listener for listener in everybody if listener is not mine]

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    def __str__(self) -> str:
        return self.generate_comm_debug_tracing_table()

    # Numbers

    def get_comm_counts(self) -> Counts:
        """How many collectives of each kind ran, by our names or by torch's ops."""
        return Counts((comm.kind, 1) for comm in self.comms)

    @property
    def comm_counts(self) -> Counts:
        return self.get_comm_counts()

    def get_total_counts(self) -> int:
        """How many collectives ran."""
        return len(self.comms)

    def get_comm_bytes(self) -> Counts:
        """The bytes that each rank sent in collectives of each kind, by the ring model."""
        return Counts((comm.kind, comm.wire_bytes) for comm in self.comms)

    def get_total_bytes(self) -> int:
        """The bytes that each rank sent, by the ring model."""
        return sum(comm.wire_bytes for comm in self.comms)

    def get_fallback_counts(self) -> dict[str, int]:
        """How many calls of each function had no sharding rule and were gathered."""
        return dict(Counter(self.fallbacks))

    def get_parameter_info(self) -> dict[str, dict[str, Tensor]]:
        """The parameters of the modules that ran, by the path of the module (`Net.up`) and their own names."""
        return self._modules.parameters

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """The placements of these parameters, by their paths (`Net.up.weight`)."""
        return self._modules.placements

    # Tables

    def print_table(self, *, width: int | None = None) -> None:
        """Print every collective with its line and its reason, and totals by line, as wide as the terminal."""
        print(self._drawn(width, color=sys.stdout.isatty()), end="")

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The same as text; with `noise_level=0` the totals only."""
        return self._drawn(None, every=noise_level > 0)

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write the table to a file."""
        with open(file_name, "w", encoding="utf-8") as file:
            file.write(self._drawn(200, every=noise_level > 0))

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the collectives to a file, as JSON."""
        with open(file_name, "w", encoding="utf-8") as file:
            json.dump([{**dataclasses.asdict(c), "wire_bytes": c.wire_bytes} for c in self.comms], file, default=str)

    def _drawn(self, width: int | None, *, every: bool = True, color: bool = False) -> str:
        columns = width or shutil.get_terminal_size((120, 24)).columns
        return draw(tables(self.comms, columns, every=every), columns, color=color)
