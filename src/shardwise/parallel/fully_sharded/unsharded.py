"""Whole parameters as a module uses them, within the graph of their shards.

One autograd node for each use of a group: from the resting shards to the gathered tensors. It gets the gradients of all
of them at once. Where gathered parameters are DTensors, each has two places in the graph: one for uses by ranks that
all compute the same, whose gradient is whole and is cut, and one for uses as varying, whose gradients are terms and are
reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import as_mesh, noters, ranked
from shardwise.comm.cause import handed_on
from shardwise.errors import HookError, InPlaceError, TransformError
from shardwise.layout import Layout, Mesh
from shardwise.parallel.fully_sharded import reduction
from shardwise.parallel.fully_sharded.collectives import Held
from shardwise.parallel.fully_sharded.group import Entry, Group
from shardwise.parallel.fully_sharded.schedule import Schedule
from shardwise.redistribute import Move, Typed, plan_moves, transition
from shardwise.redistribute.backward.deferred_gradients import blocks, is_watched
from shardwise.tensor import wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_size = torch._C.TensorBase.size


class Use:
    """One use of a group's parameters, in a forward pass. Where the batch is a DTensor on a `mesh`, so are they, and
    gradients are terms of a sum; else each rank has a batch of its own, and gradients are averaged.

    The graph refers to it, so it must not refer to what is part of the graph: nobody would find that cycle.
    """

    def __init__(self, group: Group, schedule: Schedule | None, mesh: Mesh | None) -> None:
        self.group, self.mesh = group, mesh
        self.schedule: Any = schedule  # none in a program that is captured
        self.stamp = group.stamp
        self.num_ranks = len(group.data.mesh.held)
        self.trained = [torch.is_grad_enabled() and entry.param.requires_grad for entry in group.entries]

    def tensors(self) -> list[Tensor]:
        """The parameters, whole."""
        entries = self.group.entries
        with _disabled():
            flat = _Unshard.apply(self, *(x for entry in entries for x in entry.held()))
        held = [flat[i : i + self.num_ranks] for i in range(0, len(flat), self.num_ranks)]
        varying = iter(held[len(entries) :])
        terms = [next(varying, None) if trained else None for trained in self.trained]
        return [self._labelled(*facts) for facts in zip(entries, held, terms)]

    def _labelled(self, entry: Entry, held: Held, varying: Held | None) -> Tensor:
        local: Any = held[0] if len(held) == 1 else ranked(held)
        layout = entry.layouts.shown(self.mesh)
        if layout is None:
            return local
        layout = layout.on(as_mesh(layout.mesh))
        made = wrap(local, layout)
        if varying is not None:
            axes = frozenset(layout.mesh.axis(name) for name in self.group.data.mesh.names)
            made.__dict__["_gathered"] = _Varying(entry.layouts.gather, axes, varying)
        return made

    def check_unchanged(self) -> None:
        """Raise if the backward pass would see other parameters than the forward pass did."""
        if self.stamp != self.group.look():
            self.schedule.reset()
            raise InPlaceError(
                "a parameter of a fully sharded module was written to, or replaced, between the forward pass that used "
                "it and the backward pass, which needs it as it was; have the backward pass inside of what replaces "
                "it, or, for torch.func.functional_call, replicate parameters (distribute_module)"
            )


class _Varying:
    """Where a gathered parameter is used as varying (see `redistribute.Gathered`, whose place this takes)."""

    __slots__ = ("axes", "held", "move")

    def __init__(self, move: Move, axes: frozenset[int], held: Held) -> None:
        self.move, self.axes, self.held = move, axes, held

    def serves(self, move: Move, version: int) -> bool:
        return move.kind == "nothing" and self.axes.issubset(move.axes)

    def observe(self) -> None:
        raise HookError(
            "the gradient of a gathered parameter is not to be seen, only that of its shards, once it is reduced: "
            "register hooks on the module's parameters outside of its forward"
        )

    def as_varying(self, whole: Held, move: Move) -> Held:
        others = tuple(axis for axis in move.axes if axis not in self.axes)
        if not others:
            return self.held
        return transition(Move(Typed(move.source.layout, self.axes), move.target, others), self.held)

    def tell(self, whole: Tensor, varying: Held) -> None:
        handed_on(whole, varying, (self.move,))


class _Unshard(torch.autograd.Function):
    """The shards of all parameters of a group → the parameters, whole."""

    @staticmethod
    def forward(ctx: Any, use: Use, *shards: Tensor) -> Any:
        ctx.use = use
        ctx.set_materialize_grads(False)
        entries, trained = use.group.entries, use.trained
        alias = torch.Tensor.detach if noters else _data
        out = [alias(whole) for entry in entries for whole in entry.wholes]
        frozen = [x for x, t in zip(out, _repeated(trained, use.num_ranks), strict=True) if not t]
        ctx.mark_non_differentiable(*frozen)
        if use.mesh is not None:
            out += [alias(whole) for entry, t in zip(entries, trained, strict=True) if t for whole in entry.wholes]
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise TransformError(
                "gradients of a fully sharded module cannot be differentiated again (create_graph=True): its whole "
                "parameters are gone by then. Shard parameters by layouts alone (distribute_module) for that"
            )
        with _disabled():
            found = _Arrival(ctx, grads).shards()
        return None, *(x for held in found for x in held)


def _data(x: Tensor) -> Tensor:
    """The same memory with a version counter of its own: gathering again does not count as a write."""
    return x.data


def _repeated(values: Sequence[bool], times: int) -> list[bool]:
    return [value for value in values for _ in range(times)]


class _Arrival:
    """Gradients of all tensors of a use, on their way to the shards."""

    def __init__(self, ctx: Any, grads: Sequence[Tensor | None]) -> None:
        use: Use = ctx.use
        self.use, self.group = use, use.group
        self.ranks = use.num_ranks
        count = len(self.group.entries) * self.ranks
        self.leaves = [node for node, _ in ctx.next_functions]
        self.whole = self._by_entry(grads[:count])
        trained = iter(self._by_entry(grads[count:]))
        terms = [next(trained, None) if t else None for t in use.trained]
        self.terms = self.whole if use.mesh is None else terms
        self.divisor = self._divisor()

    def _by_entry(self, grads: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        return [list(grads[i : i + self.ranks]) for i in range(0, len(grads), self.ranks)]

    def _divisor(self) -> float:
        factor = self.group.options.divide_factor
        size = self.group.data.mesh.size() if self.use.mesh is None else 1
        return size if factor is None else factor

    def shards(self) -> list[Sequence[Tensor | None]]:
        """What is returned to autograd at once. Of what is under way, nothing: the end of the pass brings it."""
        here = None if noters else self.use.schedule.backward()
        if here is not None:
            here.release(self.use)
        found: list[Any] = [[None] * self.ranks for _ in self.group.entries]
        if self.use.mesh is not None:
            for i, held in enumerate(self.whole):
                if (own := _complete(held, self.group.entries[i].layouts.whole)) is not None:
                    found[i] = self._cut(i, own)
        terms = self._to_reduce(found)
        if terms:
            if here is not None:
                here.make_room()
            started = reduction.start(self.group, terms, self.divisor)
            if here is not None and all(
                self._can_wait(i) for i, entry in enumerate(self.group.entries) if entry in dict(terms)
            ):
                here.add(started)
            else:
                self._wait(started, found)
        return found

    def _cut(self, i: int, grads: Held) -> Sequence[Tensor]:
        """Gradients of a use by ranks that all compute the same."""
        layouts = self.group.entries[i].layouts
        for move in plan_moves(layouts.whole, layouts.resting):
            grads = transition(move, grads)
        return grads

    def _to_reduce(self, found: list[Any]) -> reduction.Gradients:
        """The terms to be reduced now, with those that were kept. What is kept is not among them."""
        terms: reduction.Gradients = []
        for i, entry in enumerate(self.group.entries):
            grads: Any = _complete(self.terms[i], entry.layouts.whole)
            if grads is None and self.group.options.reduce_unused and self.use.trained[i]:
                grads = [x.new_zeros(x.shape) for x in entry.wholes]
            if grads is None:
                continue
            mode = blocks[-1] if blocks else "reduced"
            if mode != "alone":
                grads = self.group.with_kept(entry, grads)
                if mode == "kept" or not self.group.options.sync:
                    self.group.keep(entry, grads, self.divisor, mode == "kept")
                    if mode == "kept" and found[i][0] is None:  # its hooks run in every pass, and it can be reset
                        found[i] = [x.new_zeros(()).expand(_size(x)) for x in entry.held()]
                    continue
            terms.append((entry, grads))
        return terms

    def _can_wait(self, i: int) -> bool:
        """Whether a shard's gradient may come at the end of the pass: not if a hook, or a caller, is to have it."""
        param = self.group.entries[i].param
        if param.grad_fn is not None or is_watched(param):  # computed from others, which get the gradient
            return False
        leaves = self.leaves[i * self.ranks : (i + 1) * self.ranks]
        try:
            return all(map(torch._C._will_engine_execute_node, leaves))
        except RuntimeError:  # it is asked for by autograd.grad
            return False

    def _wait(self, started: Sequence[reduction.Reduction], found: list[Any]) -> None:
        for one in started:
            for entry, grads in one.wait():
                i = self.group.entries.index(entry)
                before = found[i]
                found[i] = grads if before[0] is None else [a + b for a, b in zip(before, grads, strict=True)]


def _complete(held: Sequence[Tensor | None] | None, layout: Layout) -> list[Tensor] | None:
    """Gradients of all ranks held here, if any has one: torch takes those of empty shards for constants."""
    held = [x.to_dense() if x is not None and x.is_sparse else x for x in held or ()]
    some = next((x for x in held if x is not None), None)
    if some is None:
        return None
    return [some.new_zeros(shape) if x is None else x for x, shape in zip(held, layout.held_shapes, strict=True)]
