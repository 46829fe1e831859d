"""What a program costs, by a model that fits on a page.

A rank computes the floating point operations of its products of matrices, convolutions and attention, at the speed
that is given; everything else is free. A collective sends what the ring model says (`comm.ring`) along its axes, in
n - 1 messages one after the other among n ranks, twice that for an all-reduce: `messages × latency + bytes ÷
bandwidth`, where of several axes the slowest counts. Memory is that of the program run node by node (`graph.memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwise.comm.record import Comm
from shardwise.debug.table import Table, draw
from shardwise.graph.cost.comms import comms_of
from shardwise.graph.cost.flops import dtype_of, flops_of
from shardwise.graph.cost.memory import Memory, memory_of
from shardwise.graph.program import Place, Program
from shardwise.layout import Layout
from shardwise.words import dtype_name, size

Speed = float | Mapping[str, float]
"""A number, or one for each axis of the mesh."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank sends in collectives of one kind along some axes, and how long that takes if speeds are known."""

    kind: str
    axes: tuple[str, ...]
    ranks: int
    count: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Price:
    """What a program costs one rank. Seconds are None where no speed was given."""

    traffic: tuple[Traffic, ...]
    flops: Mapping[torch.dtype, int]
    """Floating point operations, by the dtype that they are done in."""
    compute_seconds: float | None
    memory: Memory

    @cached_property
    def collectives(self) -> int:
        return sum(own.count for own in self.traffic)

    @cached_property
    def wire_bytes(self) -> int:
        """What the rank sends."""
        return sum(own.bytes for own in self.traffic)

    @cached_property
    def comm_seconds(self) -> float | None:
        return _sum([own.seconds for own in self.traffic])

    @property
    def seconds(self) -> float | None:
        """If nothing overlaps."""
        return _sum([self.compute_seconds, self.comm_seconds])

    @property
    def overlapped_seconds(self) -> float | None:
        """If all communication goes on while something is computed, and the other way round."""
        if self.compute_seconds is None or self.comm_seconds is None:
            return None
        return max(self.compute_seconds, self.comm_seconds)

    @property
    def peak_bytes(self) -> int:
        """The most memory that is needed at a time, what the program is given with it."""
        return self.memory.peak

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            (f"{own.kind} {'×'.join(own.axes)}={own.ranks}", str(own.count), size(own.bytes), seconds(own.seconds))
            for own in self.traffic
        ]
        rows += [(f"compute {dtype_name(dtype)}", "", number(flops), "") for dtype, flops in self.flops.items()]
        rows += [
            ("all collectives", str(self.collectives), size(self.wire_bytes), seconds(self.comm_seconds)),
            ("all computation", "", number(sum(self.flops.values())), seconds(self.compute_seconds)),
            ("one after the other", "", "", seconds(self.seconds)),
            ("all overlapped", "", "", seconds(self.overlapped_seconds)),
            ("memory, at most", "", size(self.peak_bytes), ""),
        ]
        return draw([Table("What a rank does", ("", "×", "bytes, flops", "time"), rows, 1)], 100)


def price(
    program: Program,
    layout_at: Callable[[Place], Layout | None],
    *,
    flops: float | Mapping[torch.dtype, float] | None = None,
    bandwidth: Speed | None = None,
    latency: Speed = 0.0,
) -> Price:
    """The price of the part of the first rank held here. `flops` is what one device does in a second, of all dtypes or
    of each; `bandwidth` the bytes that a rank sends in a second and `latency` the seconds that a message takes, along
    all axes or along each."""
    part = program.ranks[0]
    alike: dict[tuple[str, tuple[str, ...], int], list[Comm]] = {}
    for comm in comms_of(program, layout_at):
        alike.setdefault((comm.kind, comm.axes, comm.ranks), []).append(comm)
    traffic = []
    for (kind, axes, ranks), comms in alike.items():
        sent = sum(comm.wire_bytes for comm in comms)
        time = _time(kind, axes, ranks, len(comms), sent, bandwidth, latency)
        traffic.append(Traffic(kind, axes, ranks, len(comms), sent, time))
    done: dict[torch.dtype, int] = {}
    for node in part.graph.nodes:
        dtype = dtype_of(node) if node.op == "call_function" else None
        if dtype is not None and (own := flops_of(node)):
            done[dtype] = done.get(dtype, 0) + own
    return Price(tuple(traffic), done, _computing(done, flops), memory_of(part.graph))


def _time(
    kind: str, axes: Sequence[str], ranks: int, count: int, sent: int, bandwidth: Speed | None, latency: Speed
) -> float | None:
    if bandwidth is None:
        return None
    messages = count * (ranks - 1) * (2 if kind == "all_reduce" else 1)
    slowest = min(_along(axis, bandwidth, "bandwidth") for axis in axes)
    return messages * max(_along(axis, latency, "latency") for axis in axes) + sent / slowest


def _along(axis: str, speed: Speed, what: str) -> float:
    if not isinstance(speed, Mapping):
        return speed
    if axis not in speed:
        raise ValueError(
            f"{what} has the axes {', '.join(map(repr, speed))}, and the program communicates along {axis!r}"
        )
    return speed[axis]


def _computing(done: Mapping[torch.dtype, int], flops: float | Mapping[torch.dtype, float] | None) -> float | None:
    if flops is None:
        return None
    if not isinstance(flops, Mapping):
        return sum(done.values()) / flops
    missing = [dtype for dtype in done if dtype not in flops]
    if missing:
        raise ValueError(f"flops has no speed for {missing[0]}, in which the program computes")
    return sum(own / flops[dtype] for dtype, own in done.items())


def _sum(seconds: Sequence[float | None]) -> float | None:
    found = 0.0
    for own in seconds:
        if own is None:
            return None
        found += own
    return found


def number(count: int) -> str:
    """Floating point operations as people read them.

    >>> number(12), number(4_190_000_000)
    ('12', '4.2 GFLOP')
    """
    for unit, power in (("PFLOP", 15), ("TFLOP", 12), ("GFLOP", 9), ("MFLOP", 6)):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return str(count)


def seconds(time: float | None) -> str:
    """
    >>> seconds(0.0021), seconds(3.2), seconds(None)
    ('2.10 ms', '3.20 s', '')
    """
    if time is None:
        return ""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if time >= scale:
            return f"{time / scale:.2f} {unit}"
    return f"{time:.2g} s"
