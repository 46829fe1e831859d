"""What can be asked of programs that were captured: to be shown, what they communicate, what they cost."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

from shardwise.comm.record import Comm
from shardwise.errors import CaptureError
from shardwise.graph.cost.comms import comms_of
from shardwise.graph.cost.price import Price, Speed, price
from shardwise.graph.guards.guards import Guards
from shardwise.graph.program import Place, Program
from shardwise.graph.run.run import Run
from shardwise.graph.save.saving import save
from shardwise.graph.show import show
from shardwise.layout import Layout


class Captured:
    """A function and its programs.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> h = sw.distribute_tensor(torch.randn(4, 8), mesh, [sw.Shard(1)])
    >>> w = sw.distribute_tensor(torch.randn(16, 8), mesh, [sw.Shard(1)])
    >>> whole = sw.compile(lambda h, w: torch.nn.functional.linear(h, w).relu(), backend="fx")
    >>> whole(h, w).placements
    (Replicate(),)
    >>> [(comm.kind, comm.axes, str(comm.source), comm.why) for comm in whole.comms()]
    [('all_reduce', ('tp',), '[4,16] P(sum)@tp', 'pending sum reduced')]
    >>> [ops] = [line for line in str(whole).splitlines() if "%1 " in line and "mm" in line]
    >>> print(ops)  # doctest: +ELLIPSIS
       %1  mm(h f32[4,8] S(1)@tp, w.t f32[8,16] S(0)@tp) -> f32[4,16] P(sum)@tp  # ...
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.runs: list[tuple[Guards, Run]] = []
        """The last one that was captured comes first."""
        self.origin = "captured"
        """Where its programs come from."""
        self.gave_up: str | None = None
        """Why it runs as it is from now on, if it does."""

    @property
    def name(self) -> str:
        bound = getattr(self.function, "__self__", None)
        if isinstance(bound, nn.Module):
            return type(bound).__name__
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    @property
    def programs(self) -> tuple[Program, ...]:
        """In the order in which they were captured."""
        return tuple(run.program for _, run in reversed(self.runs))

    def show(self, file: TextIO | None = None, *, every: bool = False, width: int | None = None) -> None:
        """Print what was captured, and why: every op with layouts and the user's line, the collectives as a table, and
        what the program needs of memory. Views are left out, and repeated layers shown once, unless `every` is true.

        It goes to `file`, or is printed as wide as the terminal, in colours where Rich is installed. `str()` of it is
        the same text.
        """
        out = sys.stdout if file is None else file
        columns = width or shutil.get_terminal_size((120, 24)).columns
        out.write(self._shown(columns, every=every, color=out.isatty()))

    def __str__(self) -> str:
        return self._shown(120)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, programs: {len(self.runs)}>"

    def comms(self, program: int = -1) -> list[Comm]:
        """The collectives of a program, in their order, as `CommDebugMode.comms` has those of eager ones: of the one
        that was captured last, or of `programs[program]`."""
        return comms_of(*self._program(program))

    def price(
        self,
        *,
        flops: float | Mapping[torch.dtype, float] | None = None,
        bandwidth: Speed | None = None,
        latency: Speed = 0.0,
        program: int = -1,
    ) -> Price:
        """What a program costs one rank, by the model in `graph.price`: collectives and their bytes, floating point
        operations, memory; and how long it takes, if it is said what a device does in a second: `flops`, of all dtypes
        or of each, and the bytes that it sends along all axes or along each, with the latency of a message.

        >>> import torch, shardwise as sw
        >>> mesh = sw.recording((128, 8), ("dp", "tp"))
        >>> x = sw.distribute_tensor(torch.empty(2**20, 4096, device="meta"), mesh, [sw.Shard(0), sw.Replicate()])
        >>> w = sw.distribute_tensor(torch.empty(4096, 4096, device="meta"), mesh, [sw.Replicate(), sw.Shard(0)])
        >>> step = sw.compile(lambda x: torch.nn.functional.linear(x, w).sum().full_tensor(), backend="fx")
        >>> step.capture(x)
        >>> price = step.price(flops=1e15, bandwidth={"dp": 50e9, "tp": 400e9}, latency=1e-5)
        >>> sum(price.flops.values()) == 2 * 2**13 * 4096 * 512, price.wire_bytes, f"{price.comm_seconds:.3f}"
        (True, 8, '0.020')
        """
        return price(*self._program(program), flops=flops, bandwidth=bandwidth, latency=latency)

    def save(self, path: str | Path) -> None:
        """Save all programs into a folder: a file for each process. `shardwise.graph.load` binds them to the tensors of
        another one, by the names that these have here. Nothing in them is pickled."""
        self._program(-1)
        save(self.name, self.runs[::-1], Path(path))

    def _program(self, number: int) -> tuple[Program, Callable[[Place], Layout | None]]:
        """A program, and what knows the layouts of what it is given."""
        if not self.runs:
            raise CaptureError(
                f"nothing was captured of {self.name} yet: call it, or capture(…) what a call would run without running"
            )
        if not -len(self.runs) <= number < len(self.runs):
            raise IndexError(f"program {number} of {self.name}, of which {len(self.runs)} were captured")
        guards, run = self.runs[::-1][number]
        return run.program, guards.layout_at

    def _shown(self, width: int, *, every: bool = False, color: bool = False) -> str:
        return show(self, width=width, every=every, color=color)
