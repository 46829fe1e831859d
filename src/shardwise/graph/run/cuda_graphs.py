"""Programs as CUDA graphs: one launch for all kernels of a step.

A program runs as it is compiled first, so that libraries and communicators have made what they make once. Then its
kernels are recorded into a graph, which is replayed from there on. Tensors that are the same in every run stay where
they are; others are copied to where the graph reads them; what it computes is copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import ProcessGroupPort
from shardwise.graph.nodes import Check, Collective, Seeded, collective_of
from shardwise.graph.program import Facts, FromGroup, FromHost, FromObject, Part

WARM_UP_RUNS = 2
"""Runs before a graph is recorded."""

_pointer = torch._C.TensorBase.data_ptr


def obstacle(part: Part) -> str | None:
    """Why a part cannot be a CUDA graph; None if it can."""
    inputs = [node for node in part.graph.nodes if node.op == "placeholder"]
    for node in part.graph.nodes:
        if isinstance(node.target, Seeded):
            return "it draws random numbers by seeds that the host draws"
        if isinstance(node.target, Check):
            return "it checks indices on the host"
        collective = collective_of(node)
        if collective is not None and not _is_on_the_device(collective):
            return f"{collective} is not made by NCCL"
        facts = node.meta.get("facts")
        if isinstance(facts, Facts) and facts.device.type != "cuda" and (node in inputs or facts.shape):
            return f"a tensor of shape {list(facts.shape)} is on {facts.device}"
    return None if inputs else "it has no inputs"


def _is_on_the_device(collective: Collective) -> bool:
    """By kernels that a graph can hold; a fake group has none."""
    port = collective.mesh.port
    if not isinstance(port, ProcessGroupPort):
        return False
    group = port.group(collective.mesh, collective.axes).process_group
    backend = str(torch.distributed.get_backend(group))
    return "nccl" in backend or backend == "fake"


class Replayed:
    """A compiled part of this rank, as a CUDA graph."""

    def __init__(self, part: Part, run: Callable[[Sequence[Tensor]], Sequence[Any]]) -> None:
        self.run, self.overwritten = run, part.overwritten
        self.fixed = [isinstance(source, FromObject) for source in part.sources]
        self.count = sum(not isinstance(source, (FromHost, FromGroup)) for source in part.sources)
        self.runs = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Tensor] = []
        self.pointers: list[int] = []
        self.outputs: Sequence[Any] = ()

    def __call__(self, given: Sequence[Tensor]) -> Sequence[Any]:
        """`given` are the inputs, numbers last, on the device."""
        self.runs += 1
        if self.runs <= WARM_UP_RUNS:
            return self.run(given)
        if self.graph is None or self._have_moved(given):
            self._record(given)
        for kept, x, fixed in zip(self.inputs, given, self._fixed(given), strict=True):
            if not fixed:
                kept.copy_(x, non_blocking=True)
        assert self.graph is not None
        self.graph.replay()
        return [
            x.clone() if isinstance(x, Tensor) and number not in self.overwritten else x
            for number, x in enumerate(self.outputs)
        ]

    def _fixed(self, given: Sequence[Tensor]) -> list[bool]:
        """Which inputs stay where they are; tensors of numbers, which come last, do not."""
        tensors = [fixed for fixed, _ in zip(self.fixed, range(self.count))]
        return [*tensors, *[False] * (len(given) - len(tensors))]

    def _have_moved(self, given: Sequence[Tensor]) -> bool:
        """Whether a tensor that was to stay has other memory now."""
        fixed = (x for x, stays in zip(given, self._fixed(given), strict=True) if stays)
        return [*map(_pointer, fixed)] != self.pointers

    def _record(self, given: Sequence[Tensor]) -> None:
        fixed = self._fixed(given)
        self.inputs = [x if stays else x.clone() for x, stays in zip(given, fixed, strict=True)]
        self.pointers = [_pointer(x) for x, stays in zip(given, fixed, strict=True) if stays]
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.outputs = self.run(self.inputs)
