"""Capturing: a function runs once on tensors without data, and what reaches torch's dispatcher becomes a program."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from shardwise.comm import noters, running_mesh, shards_of
from shardwise.comm.cause import watchers
from shardwise.comm.faked import is_faked
from shardwise.comm.record import listeners
from shardwise.errors import CaptureError
from shardwise.graph.capture.borrowed import Borrowed
from shardwise.graph.capture.differentiate import Backward, differentiate, terms_of
from shardwise.graph.capture.numbers import SYMBOLIC, in_python
from shardwise.graph.capture.optimizers import Groups
from shardwise.graph.capture.parts import Copying, Split, conditions_part, host_nodes, host_part, without_unused
from shardwise.graph.capture.recorder import Recorder
from shardwise.graph.nodes import Collective
from shardwise.graph.program import (
    Differentiable,
    FromArgument,
    FromGradient,
    FromGroup,
    FromHost,
    FromObject,
    FromTangent,
    Given,
    Gradient,
    Leaf,
    Output,
    Part,
    Place,
    Program,
    Result,
    Source,
)
from shardwise.layout import Layout
from shardwise.redistribute import reduced_apart


def capture(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """The program that a function is, for arguments like these. Nothing is computed or communicated, and nothing that
    the function writes to is changed."""
    return capture_varying((), function, *args, **kwargs)


def capture_varying(varying: Collection[str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """The same, with settings of optimizers as inputs that have such names, as learning rates always are."""
    leaves, spec = tree_flatten((args, kwargs))
    return _Capture(leaves, varying).run(lambda: _called(function, leaves, spec))


def _called(function: Callable[..., Any], leaves: list[Any], spec: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, spec)
    returned = function(*args, **kwargs)
    now, how = tree_flatten((args, kwargs))
    if how != spec or any(x is not before for x, before in zip(now, leaves, strict=True)):
        raise CaptureError(
            "the program changes a list or a dict that it is handed, which only Python would do in every run: change a "
            "copy of it, dict(batch) say, and return what is new"
        )
    return returned


@contextmanager
def _ending_at(leaves: Sequence[Any]) -> Iterator[None]:
    """A backward pass of the program's own ends at its arguments: what these were computed from, it is no program for,
    and would be given gradients without data."""

    def refuse(_: Any) -> None:
        raise CaptureError(
            "a backward pass of the program would go on to what an argument was computed from, outside of it: hand in "
            "x.detach().requires_grad_(), or return the loss and go back from that outside"
        )

    with torch._C.DisableTorchFunction():
        nodes = [x.grad_fn for leaf in leaves if isinstance(leaf, Tensor) for x in shards_of(leaf)]
        handles = [node.register_prehook(refuse) for node in nodes if node is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What a tensor, or a number, that the program gives is made by: the nodes of its shards."""

    nodes: tuple[fx.Node, ...]
    layout: Any


class _Capture:
    """One run of a function."""

    def __init__(self, leaves: list[Any], varying: Collection[str]) -> None:
        self.leaves = leaves
        self.borrowed = Borrowed()
        self.groups = Groups(varying)
        self.recorder = Recorder(self.groups, self.borrowed)
        self.backward: Backward | None = None
        self.places: dict[int, Place] = {}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                for rank, shard in enumerate(shards_of(leaf)):
                    self.places.setdefault(id(shard), FromArgument(number, rank))
                    self.recorder.arguments.add(id(shard))

    def run(self, call: Callable[[], Any]) -> Program:
        with self._around():
            with self.borrowed, _listening(self.recorder), self.recorder.fakes, self.recorder:
                for leaf in self.leaves:
                    if isinstance(leaf, Tensor):
                        self.borrowed.meet(leaf)
                with _ending_at(self.leaves):
                    returned = call()
                if not self.borrowed.gradients():
                    self.backward = differentiate(self.recorder, returned)
            self.groups.put_back()
            return self._program(returned)

    @contextmanager
    def _around(self) -> Iterator[None]:
        """What the program must leave as it was."""
        with ExitStack() as stack:
            stack.enter_context(reduced_apart())
            stack.callback(self.borrowed.give_back)
            stack.callback(self.groups.put_back)
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(_unseeded())
            stack.enter_context(in_python())
            noters.append(self.recorder)
            stack.callback(noters.remove, self.recorder)
            stack.enter_context(saved_tensors_hooks(_itself, _itself))  # nobody outside hears of what is saved here
            yield

    def _program(self, returned: Any) -> Program:
        results = tree_map(self._recorded, returned)
        gradients = [
            (self._place(shard), None if grad is None else self.recorder.node_of(grad))
            for lent, grads in self.borrowed.gradients()
            for shard, grad, before in zip(lent.shards, grads, lent.grads, strict=True)
            if grad is not before
        ]
        return _Arranged(self).program(results, gradients, tuple(self._entry_gradients(gradients)))

    def layout_of(self, shard: Tensor) -> Layout | None:
        """That of the DTensor which a shard is of, if it is of one."""
        owner, _ = self._owners.get(id(shard), (shard, 0))
        layout: Layout | None = owner.__dict__.get("_layout")
        return layout

    def _entry_gradients(self, changed: Sequence[tuple[Place, Any]]) -> Iterator[tuple[Place, bool]]:
        """Gradients that the program began with, if it read them, or relied on there being none."""
        written = {of for of, _ in changed}
        for lent in self.borrowed.lent.values():
            for shard, grad in zip(lent.shards, lent.grads, strict=True):
                if grad is not None and id(grad) in self.recorder.inputs:
                    yield self._place(shard), False
                elif grad is None and not lent.is_reset and self._place(shard) in written:
                    yield self._place(shard), True

    def _place(self, shard: Tensor) -> Place:
        if id(shard) not in self.places:
            self.places[id(shard)] = FromObject(shard, *self._owners.get(id(shard), (shard, 0)))
        return self.places[id(shard)]

    @cached_property
    def _owners(self) -> dict[int, tuple[Tensor, int]]:
        """By its id, which tensor a shard is of, and which of its shards."""
        met = sorted(self.borrowed.lent.values(), key=lambda lent: len(lent.shards))  # shards may be met by themselves
        return {id(shard): (lent.tensor, rank) for lent in met for rank, shard in enumerate(lent.shards)}

    def sources(self) -> dict[fx.Node, Source]:
        recorder = self.recorder
        gradient_of = {
            id(grad): shard
            for lent in self.borrowed.lent.values()
            for shard, grad in zip(lent.shards, lent.grads, strict=True)
            if grad is not None
        }
        found: dict[fx.Node, Source] = {}
        for key, (x, node) in recorder.inputs.items():
            found[node] = FromGradient(self._place(gradient_of[key])) if key in gradient_of else self._place(x)
        found |= {node: FromObject(x, x, 0) for x, node in recorder.constants}
        found |= {node: FromTangent(number) for number, node in enumerate(recorder.tangents)}
        return found | {node: FromGroup(*which) for node, which in self.groups.sources.items()}

    def ranks(self) -> dict[fx.Node, int | None]:
        """Which of the ranks held here has what an input is a shard of."""
        number_of: dict[int, int] = {}
        for lent in self.borrowed.lent.values():
            for rank, (shard, grad) in enumerate(zip(lent.shards, lent.grads, strict=True)):
                if len(lent.shards) > 1:
                    number_of[id(shard)] = rank
                    number_of[id(grad)] = rank
        found = {node: number_of.get(key) for key, (_, node) in self.recorder.inputs.items()}
        return found | dict(zip(self.recorder.tangents, self.backward.ranks if self.backward is not None else ()))

    def _recorded(self, x: Any) -> Any:
        if isinstance(x, SYMBOLIC):
            return _Recorded((x.node.node,), None)
        if not isinstance(x, Tensor):
            return _returnable(x)
        if not is_faked(x):
            return Given(self._place(x))
        layout = x.__dict__.get("_layout")
        nodes = tuple(self.recorder.node_of(shard) for shard in shards_of(x))
        return _Recorded(nodes, layout and layout.on(running_mesh(layout.mesh)))


class _Arranged:
    """What was recorded, in parts."""

    def __init__(self, captured: _Capture) -> None:
        recorder = captured.recorder
        self.captured, self.graph, self.conditions = captured, recorder.graph, recorder.conditions
        self.sources, self.ranks = captured.sources(), captured.ranks()
        backward = captured.backward
        self.leaves = [] if backward is None else self._leaves(backward)
        meshes = [node.target.mesh for node in self.graph.nodes if isinstance(node.target, Collective)]
        self.count = max((len(mesh.held) for mesh in meshes), default=1)
        self.count = max(self.count, *(1 if rank is None else rank + 1 for rank in self.ranks.values()), 1)

    def _leaves(self, backward: Backward) -> list[tuple[Place, fx.Node | None, tuple[int, ...]]]:
        layout_of = self.captured.layout_of
        terms = terms_of(self.graph, [(gradient, layout_of(x)) for x, gradient in backward.leaves])
        return [(self.captured._place(x), *term) for (x, _), term in zip(backward.leaves, terms, strict=True)]

    def program(
        self,
        results: Any,
        gradients: list[tuple[Place, fx.Node | None]],
        entry_gradients: tuple[tuple[Place, bool], ...],
    ) -> Program:
        host = host_nodes(self.graph, self.conditions)
        returned = {node for x in tree_leaves(results) if isinstance(x, _Recorded) for node in x.nodes}
        first, used = host_part(self.graph, host, self.sources, returned)
        given = {node: number for number, node in enumerate(used)}
        split = Split(self.graph, host, self.sources, self.ranks, self.count)
        is_joint = not split.is_possible()
        self.outputs: list[list[fx.Node]] = [[] for _ in range(1 if is_joint else self.count)]
        self.numbers: dict[fx.Node, int] = {}
        self.rank_of = {} if is_joint else split.ranks
        arranged = tree_map(self._result, results)
        kept = tuple(Gradient(of, None if node is None else self._output(node)) for of, node in gradients)
        differentiable = self._differentiable()
        if is_joint:
            ranks = [self._joint(host, given)]
        else:
            ranks = [split.part(rank, given, outputs) for rank, outputs in enumerate(self.outputs)]
        written = [gradient.output for gradient in kept if gradient.output is not None]
        parts = tuple(
            replace(part, overwritten=frozenset(output.number for output in written if output.rank == rank))
            for rank, part in enumerate(ranks)
        )
        wanted = tuple(self.conditions)
        checked = conditions_part(self.graph, host, self.sources, wanted)
        expected = tuple(self.conditions.values())
        numbers = tuple(FromGroup(*which) for which in self.captured.groups.sources.values())
        return Program(
            first, parts, is_joint, arranged, kept, entry_gradients, checked, expected, numbers, differentiable
        )

    def _differentiable(self) -> Differentiable | None:
        """Gradients come behind all that the function returned."""
        if self.captured.backward is None:
            return None
        tangents = tuple(self._output(node) for node in self.captured.backward.results)
        counts = tuple(map(len, self.outputs))
        leaves = tuple(Leaf(of, None if term is None else self._output(term), axes) for of, term, axes in self.leaves)
        return Differentiable(leaves, tangents, counts)

    def _output(self, node: fx.Node) -> Output:
        rank = self.rank_of.get(node) or 0
        if node not in self.numbers:
            self.numbers[node] = len(self.outputs[rank])
            self.outputs[rank].append(node)
        return Output(rank, self.numbers[node])

    def _result(self, x: Any) -> Any:
        if not isinstance(x, _Recorded):
            return x
        return Result(tuple(self._output(node) for node in x.nodes), x.layout)

    def _joint(self, host: set[fx.Node], given: dict[fx.Node, int]) -> Part:
        made = Copying()
        for node in self.graph.nodes:
            if node in given:
                made.input(node, FromHost(given[node]))
            elif node.op == "placeholder":
                made.input(node, self.sources[node])
            elif node not in host:
                made.copy(node)
        return without_unused(made.done(self.outputs[0]))


def _returnable(x: Any) -> Any:
    """Something beside tensors that is the same in every run."""
    held = [*getattr(x, "__dict__", {}).values()] if not isinstance(x, nn.Module) else []
    is_under_way = hasattr(x, "__next__") or hasattr(x, "__await__")
    if is_under_way or any(isinstance(y, Tensor) and is_faked(y) for y in tree_leaves(held)):
        raise CaptureError(
            f"the program returns a {type(x).__name__}, in which there are tensors that every run makes anew: return "
            f"the tensors themselves, in lists, tuples or dicts"
        )
    return x


def _itself(x: Tensor) -> Tensor:
    return x


@contextmanager
def _unseeded() -> Iterator[None]:
    """A run draws from torch's generator as it finds it, so a program that seeds it would do so in none."""
    mark = secrets.randbits(62)
    torch.default_generator.manual_seed(mark)
    yield
    if torch.default_generator.initial_seed() != mark:
        raise CaptureError(
            "the program seeds torch's generator, which only Python would do in every run: seed it outside"
        )


@contextmanager
def _listening(recorder: Recorder) -> Iterator[None]:
    """Collectives are recorded with what they are for, and by nobody else: there are none before the program runs."""
    watchers.append(recorder)
    others = listeners[:]
    listeners[:] = [recorder.comms]
    try:
        yield
    finally:
        watchers[:] = [x for x in watchers if x is not recorder]
        listeners[:] = others
