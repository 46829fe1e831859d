"""Capturing: a function runs once on tensors without data, and what reaches torch's dispatcher becomes a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardwise.comm import noters, running_mesh, shards_of
from shardwise.comm.cause import watchers
from shardwise.comm.faked import is_faked
from shardwise.comm.record import listeners
from shardwise.graph.borrowed import Borrowed
from shardwise.graph.nodes import has_effects
from shardwise.graph.numbers import SYMBOLIC
from shardwise.graph.optimizers import Groups
from shardwise.graph.program import (
    FromArgument,
    FromGradient,
    FromGroup,
    FromObject,
    Given,
    Gradient,
    Place,
    Program,
    Result,
    Source,
)
from shardwise.graph.recorder import Recorder


def capture(function: Callable[..., Any], args: tuple = (), kwargs: dict[str, Any] | None = None) -> Program:
    """The program that a function is, for arguments like these. Nothing is computed or communicated, and nothing that
    the function writes to is changed."""
    leaves, spec = tree_flatten((args, kwargs or {}))
    return _Capture(leaves).run(lambda: _called(function, leaves, spec))


def _called(function: Callable[..., Any], leaves: list[Any], spec: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, spec)
    return function(*args, **kwargs)


class _Capture:
    """One run of a function."""

    def __init__(self, leaves: list[Any]) -> None:
        self.leaves = leaves
        self.borrowed = Borrowed()
        self.groups = Groups()
        self.recorder = Recorder(self.groups)
        self.outputs: list[fx.Node] = []
        self.places: dict[int, Place] = {}
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                for rank, shard in enumerate(shards_of(leaf)):
                    self.places.setdefault(id(shard), FromArgument(number, rank))

    def run(self, call: Callable[[], Any]) -> Program:
        with self._around():
            with self.borrowed, _listening(self.recorder), self.recorder.fakes, self.recorder:
                for leaf in self.leaves:
                    if isinstance(leaf, Tensor):
                        self.borrowed.meet(leaf)
                returned = call()
            self.groups.put_back()
            return self._program(returned)

    @contextmanager
    def _around(self) -> Iterator[None]:
        """What the program must leave as it was."""
        with ExitStack() as stack:
            stack.callback(self.borrowed.give_back)
            stack.callback(self.groups.put_back)
            stack.enter_context(torch.random.fork_rng(devices=[]))
            noters.append(self.recorder)
            stack.callback(noters.remove, self.recorder)
            yield

    def _program(self, returned: Any) -> Program:
        results = tree_map(self._result, returned)
        gradients = [
            Gradient(self._place(shard), self._output(grad))
            for lent, grads in self.borrowed.gradients()
            for shard, grad, before in zip(shards_of(lent.tensor), grads, lent.grads, strict=True)
            if grad is not before
        ]
        recorder = self.recorder
        recorder.graph.output(tuple(self.outputs))
        conditions = tuple(recorder.conditions)
        _without_unused(recorder.graph, {condition.node for condition in conditions})
        sources = {node: self._source(x) for x, node in recorder.inputs.values()}
        sources |= {node: FromObject(x) for x, node in recorder.constants}
        sources |= {node: FromGroup(*which) for node, which in self.groups.sources.items()}
        inputs = [node for node in recorder.graph.nodes if node.op == "placeholder"]
        return Program(recorder.graph, tuple(sources[node] for node in inputs), results, tuple(gradients), conditions)

    def _place(self, shard: Tensor) -> Place:
        return self.places.get(id(shard)) or FromObject(shard)

    def _source(self, x: Tensor) -> Source:
        for lent in self.borrowed.lent.values():
            for shard, grad in zip(shards_of(lent.tensor), lent.grads, strict=True):
                if grad is x:
                    return FromGradient(self._place(shard))
        return self._place(x)

    def _output(self, x: Tensor | None) -> int | None:
        if x is None:
            return None
        self.outputs.append(self.recorder.node_of(x))
        return len(self.outputs) - 1

    def _result(self, x: Any) -> Any:
        if isinstance(x, SYMBOLIC):
            self.outputs.append(x.node.node)
            return Result((len(self.outputs) - 1,), None)
        if not isinstance(x, Tensor):
            return x
        if not is_faked(x):
            return Given(self._place(x))
        layout = x.__dict__.get("_layout")
        shards = tuple(self._output(shard) for shard in shards_of(x))
        return Result(shards, layout and layout.on(running_mesh(layout.mesh)))


@contextmanager
def _listening(recorder: Recorder) -> Iterator[None]:
    """Collectives are recorded with what they are for."""
    watchers.append(recorder)
    listeners.append(recorder.comms)
    try:
        yield
    finally:
        watchers[:] = [x for x in watchers if x is not recorder]
        listeners[:] = [x for x in listeners if x is not recorder.comms]


def _without_unused(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Leave out what is computed for nothing."""
    for node in reversed(graph.nodes):
        if not node.users and node not in kept and not has_effects(node):
            graph.erase_node(node)
