"""A program that is one node of a larger graph: its backward pass is a program, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction, once_differentiable

from shardwise.comm import shards_of
from shardwise.dispatch.plan import Mover, mover_for
from shardwise.graph.capture.differentiate import cut
from shardwise.graph.cost.comms import Told
from shardwise.graph.program import Facts, FromArgument, FromTangent, Leaf, Part, Place, Program
from shardwise.graph.run.run import Leaves, Make, Run, Slots, returned, shard_at
from shardwise.layout import Layout
from shardwise.redistribute import Move, Typed

_disabled = torch._C.DisableTorchFunctionSubclass


class DifferentiableRun(Run):
    """A program with gradients that is ready to run."""

    def __init__(self, program: Program, make: Make, state: Slots | None = None) -> None:
        assert program.differentiable is not None
        self.facts = program.differentiable
        pairs = zip(program.ranks, self.facts.counts, strict=True)
        self._passes = [cut(part, count) for part, count in pairs]
        super().__init__(program, make, state)
        self.back = [back for _, back in self._passes]
        self.run_back = Told(make(self.back, program.is_joint), self.back, program.is_joint)
        self.expected = [_tangents(part) for part in self.back]
        self._slots = [_slots(self.parts, leaf.of) for leaf in self.facts.leaves]
        self._movers: dict[tuple[Layout, tuple[int, ...]], Mover] = {}

    def _forward(self) -> Sequence[Part]:
        return [forward for forward, _ in self._passes]

    def __call__(self, leaves: Leaves) -> Any:
        with _disabled():
            values = self.host(leaves)
            inputs = [read(leaves, values) for read in self.inputs]
            given = [self._given(leaf, leaves) for leaf in self.facts.leaves]
            for slots, x in zip(self._slots, given, strict=True):
                for rank, number in slots:
                    inputs[rank][number] = x
            found = iter(_apply(self, inputs, *given))
            outputs = [[next(found) for _ in range(count)] for count in self.facts.counts]
            return returned(self.program.results, outputs, leaves)

    def _given(self, leaf: Leaf, leaves: Leaves) -> Tensor:
        """A shard as the node takes it: as varying, if the gradient that it gives is one term of a sum."""
        if not leaf.reduced:
            return shard_at(leaf.of, leaves)
        owner: Any = leaves[leaf.of.leaf] if isinstance(leaf.of, FromArgument) else leaf.of.owner
        return shards_of(self._mover(owner._layout, leaf.reduced)(owner))[leaf.of.shard]

    def _mover(self, layout: Layout, axes: tuple[int, ...]) -> Mover:
        mover = self._movers.get((layout, axes))
        if mover is None:
            varying = Move(Typed(layout), Typed(layout, frozenset(axes)), axes)
            mover = self._movers[layout, axes] = mover_for((varying,))
        return mover


def _slots(parts: Sequence[Part], place: Place) -> list[tuple[int, int]]:
    """Which inputs, of which parts, a shard is."""
    return [
        (rank, number)
        for rank, part in enumerate(parts)
        for number, source in enumerate(part.sources)
        if source == place
    ]


def _tangents(part: Part) -> dict[int, Facts]:
    """How the gradients that a backward pass begins with lie in memory."""
    inputs = [node for node in part.graph.nodes if node.op == "placeholder"]
    pairs = zip(inputs, part.sources, strict=True)
    return {source.number: node.meta["facts"] for node, source in pairs if isinstance(source, FromTangent)}


class _Node(torch.autograd.Function):
    """The node of a program. What it saves is what autograd saves of the function that was captured."""

    @staticmethod
    def forward(ctx: Any, run: DifferentiableRun, inputs: Sequence[Sequence[Any]], *given: Tensor) -> Any:
        found = run.runner(inputs)
        counts = run.facts.counts
        saved = [own[count:] for own, count in zip(found, counts, strict=True)]
        ctx.run, ctx.saved = run, [[None if isinstance(x, Tensor) else x for x in own] for own in saved]
        ctx.save_for_backward(*(x for own in saved for x in own if isinstance(x, Tensor)))
        outputs = [list(own[:count]) for own, count in zip(found, counts, strict=True)]
        differentiable = {(output.rank, output.number) for output in run.facts.tangents}
        results = [x for own in outputs for x in own]
        numbers = [(rank, number) for rank, own in enumerate(outputs) for number in range(len(own))]
        rest = [x for x, at in zip(results, numbers, strict=True) if at not in differentiable and isinstance(x, Tensor)]
        ctx.mark_non_differentiable(*rest)
        ctx.numbers = {at: position for position, at in enumerate(numbers)}
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        run: DifferentiableRun = ctx.run
        tensors = iter(ctx.saved_tensors)
        saved = [[next(tensors) if x is None else x for x in own] for own in ctx.saved]
        tangents = [grads[ctx.numbers[output.rank, output.number]] for output in run.facts.tangents]
        with _disabled(), torch.no_grad():
            inputs = [
                [_input(source, run.expected[rank], own, tangents) for source in part.sources]
                for rank, (part, own) in enumerate(zip(run.back, saved, strict=True))
            ]
            outputs = run.run_back(inputs)
        counts = run.facts.counts
        found = [leaf.gradient for leaf in run.facts.leaves]
        return None, None, *(None if at is None else outputs[at.rank][at.number - counts[at.rank]] for at in found)


_apply = super(_SingleLevelFunction, _Node).apply


def _input(source: Any, expected: dict[int, Facts], saved: Sequence[Any], tangents: Sequence[Tensor]) -> Any:
    if not isinstance(source, FromTangent):
        return saved[source.number]
    grad, facts = tangents[source.number], expected[source.number]
    if tuple(grad.stride()) == facts.strides:
        return grad
    return torch.empty_strided(facts.shape, facts.strides, dtype=grad.dtype, device=grad.device).copy_(grad)
