"""Which memory the tensors of a part lie in, and which nodes read and write it: what may not change places.

Views share memory with what they are views of. Of what comes in from outside it is known only of tensors that the
program reached by itself. A call may be given other arguments later, so all of them count as one memory, and who writes
to anything from outside may have written to it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.graph.nodes import (
    Check,
    Draw,
    collective_of,
    draws,
    is_composite,
    is_op,
    may_be_view,
    op_of,
    wait,
    written,
)
from shardwise.graph.program import FromArgument, FromGradient, FromObject, Part, Place, Source

_aten = torch.ops.aten
_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]

Storage = int
"""A number for some memory."""

_ARGUMENTS, _GENERATOR = -1, -2
"""The memory of all arguments; the state of random numbers."""

_REPLACES_MEMORY = frozenset({"set_", "resize_", "resize_as_", "resize_storage_bytes_", "as_strided_"})
"""Ops after which a tensor lies elsewhere, or is another part of its memory."""


class Storages:
    """The memory of every node of a part, and who uses it in which order."""

    def __init__(self, part: Part) -> None:
        self._of: dict[fx.Node, tuple[Storage, ...]] = {}
        self.position: dict[fx.Node, int] = {}
        self.outside: set[Storage] = set()
        self.escaping: set[Storage] = set()
        """What the program gives back."""
        self._writes: dict[Storage, list[int]] = {}
        self._count = 0
        self._numbers: dict[Any, Storage] = {}
        self._sources = iter(part.sources)
        for position, node in enumerate(part.graph.nodes):
            self.position[node] = position
            self._of[node] = self._found(node)
            for storage in self.written_by(node):
                self._writes.setdefault(storage, []).append(position)

    def of(self, node: fx.Node) -> tuple[Storage, ...]:
        """The memory that a node's result may lie in; none if it is no tensor."""
        return self._of[node]

    def _found(self, node: fx.Node) -> tuple[Storage, ...]:
        if node.op == "placeholder":
            return self._input(next(self._sources)) if "facts" in node.meta else ()
        if node.op == "output":
            self.escaping.update(storage for given in node.all_input_nodes for storage in self._of[given])
            return ()
        if node.target in (operator.getitem, wait):
            return self._of[node.args[0]]  # type: ignore[index]
        if "number" in node.meta or isinstance(node.target, (Check, Draw)):
            return ()
        if may_be_view(node):
            return self._memory_of(node.all_input_nodes)
        rewritten = self._memory_of(overwritten(node))
        return (*rewritten, self._new()) if makes_memory(node) else rewritten

    def _memory_of(self, nodes: Iterable[fx.Node]) -> tuple[Storage, ...]:
        return tuple({storage: None for node in nodes for storage in self._of[node]})

    def _new(self) -> Storage:
        self._count += 1
        return self._count

    def _input(self, source: Source) -> tuple[Storage, ...]:
        found = self._numbered(source)
        self.outside.add(found)
        return (found,)

    def _numbered(self, source: Source) -> Storage:
        if isinstance(source, FromArgument) or (isinstance(source, FromGradient) and _is_argument(source.of)):
            return _ARGUMENTS
        key = _memory(source)
        if key not in self._numbers:
            self._numbers[key] = self._new()
        return self._numbers[key]

    # Who uses it

    def written_by(self, node: fx.Node) -> tuple[Storage, ...]:
        """The memory that a node writes to. A draw changes the generator."""
        found = self._memory_of(overwritten(node))
        if not self.outside.isdisjoint(found):
            found += tuple(self.outside) if _ARGUMENTS in found else (_ARGUMENTS,)
        return (*found, _GENERATOR) if isinstance(node.target, Draw) or draws(node) else found

    def writes_to_arguments(self) -> bool:
        """Whether any node may write to an argument, or to its gradient."""
        return any(_ARGUMENTS in self._memory_of(overwritten(node)) for node in self.position)

    def read_by(self, node: fx.Node) -> tuple[Storage, ...]:
        """The memory that a node reads."""
        return self._memory_of(node.all_input_nodes)

    def is_written(self, node: fx.Node) -> bool:
        """Whether any node writes to the memory of this one."""
        return any(storage in self._writes for storage in self._of[node])

    def is_written_between(self, node: fx.Node, first: int, last: float = math.inf) -> bool:
        """Whether a node's memory is written to after one position and before another."""
        writes = (at for storage in self._of[node] for at in self._writes.get(storage, ()))
        return any(first < at < last for at in writes)

    def last_read(self, node: fx.Node) -> float:
        """The position of the last node that reads a tensor, or a view of it."""
        if self.escapes(node):
            return math.inf
        last: float = self.position[node]
        for user in node.users:
            is_same = may_be_view(user) or user.target is operator.getitem
            last = max(last, self.last_read(user) if is_same else self.position[user])
        return last

    def is_from_outside(self, node: fx.Node) -> bool:
        return not self.outside.isdisjoint(self._of[node])

    def escapes(self, node: fx.Node) -> bool:
        """Whether the program gives back a tensor in the memory of this one."""
        return not self.escaping.isdisjoint(self._of[node])


def overwritten(node: fx.Node) -> Sequence[fx.Node]:
    """The tensors that a node writes to. A reduce-scatter may use the memory of chunks that are joined already, an
    all-reduce that of a tensor of its own."""
    collective = collective_of(node)
    if collective is None:
        return written(node)
    brought = node.args[0]
    is_own = collective.owned or collective.kind == "reduce_scatter"
    return (brought,) if is_own and isinstance(brought, fx.Node) else ()


def makes_memory(node: fx.Node) -> bool:
    """Whether a node, which gives no view, gives tensors in memory of their own."""
    collective = collective_of(node)
    if collective is not None:
        return not collective.owned
    op = op_of(node)
    return not is_op(op) or _op_makes_memory(op)


@lru_cache(maxsize=4096)
def _op_makes_memory(op: Any) -> bool:
    return any(result.alias_info is None for result in op._schema.returns)


_RESHAPES = frozenset({_aten.view.default, _aten._unsafe_view.default, _aten.expand.default})


def is_alias(node: fx.Node) -> bool:
    """Whether a node gives just the tensor that it is given."""
    if node.target in _RESHAPES:
        source: Any = node.args[0]
        return bool(node.meta["facts"] == source.meta["facts"])
    return node.target in (_aten.detach.default, _aten.alias.default)


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument, and never a copy."""
    return may_be_view(node) and not is_composite(node.target)


def replaces_memory(graph: fx.Graph) -> bool:
    """Whether some node has a tensor lie elsewhere: then nothing here holds."""
    ops = (op_of(node) for node in graph.nodes if node.op == "call_function")
    return any(is_op(op) and op._schema.name.split("::")[-1] in _REPLACES_MEMORY for op in ops)


def writes_to_arguments(part: Part) -> bool:
    """Whether a part may write to one of its arguments."""
    return replaces_memory(part.graph) or Storages(part).writes_to_arguments()


def _is_argument(place: Place) -> bool:
    return isinstance(place, FromArgument)


def _memory(source: Source) -> Any:
    """What two inputs have in common that lie in the same memory."""
    if isinstance(source, FromObject):
        return _storage(source.tensor)
    if isinstance(source, FromGradient) and isinstance(source.of, FromObject):
        with _disabled():
            grad = _get_grad(source.of.tensor)
        return source if grad is None else _storage(grad)
    return source


def _storage(x: Tensor) -> Any:
    with _disabled():
        return x.untyped_storage()._cdata
