"""Nodes of the graph, as users see them.

Each rank has a graph of its own, of its shards: so it is under torchrun, and so it must look in the simulator, where
one process holds the graphs of all ranks. There `grad_fn` stands for the nodes of all of them, and a hook on it runs on
each, with that rank's shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from shardwise.comm import shards_of
from shardwise.dispatch.functions.handlers import handles
from shardwise.redistribute import is_ours, tied
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass
_Function = torch._C._FunctionBase
_get_grad_fn = Tensor.grad_fn.__get__  # type: ignore[union-attr]


@handles(_get_grad_fn)
def _grad_fn(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Node | Nodes | None:
    return _as_one(nodes_of(shards_of(args[0])))


def nodes_of(shards: Sequence[Tensor]) -> list[Node]:
    """The nodes that some shards come from."""
    with _disabled():
        return [node for shard in shards if (node := _get_grad_fn(shard)) is not None]


def _as_one(nodes: Iterable[Node | None]) -> Node | Nodes | None:
    found = list(dict.fromkeys(_behind_aliases(node) for node in nodes if node is not None))
    return Nodes(found) if len(found) > 1 else next(iter(found), None)


def _behind_aliases(node: Node) -> Node:
    """The simulator hands on shards by aliases, and gives what was moved, or comes out of a checkpoint, nodes of its
    own: nothing to users."""
    while (following := next((found for found, _ in node.next_functions), None)) is not None:
        name = node.name()
        if not (name == "AliasBackward0" or (name == "OwnNodeBackward" and isinstance(following, _Function))):
            break
        node = following
    return node


@Node.register
class Nodes:
    """The nodes of several ranks as one: what it is asked, the first of them says. Equal if the nodes are, so that who
    walks through a graph knows what it has seen."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = tuple(nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nodes[0], name)

    def __repr__(self) -> str:
        return repr(self._nodes[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nodes) and self._nodes == other._nodes

    def __hash__(self) -> int:
        return hash(self._nodes)

    @property
    def next_functions(self) -> tuple[tuple[Node | Nodes | None, int], ...]:
        following = zip(*(node.next_functions for node in self._nodes), strict=False)
        return tuple((_as_one(node for node, _ in edges), edges[0][1]) for edges in following)

    def register_hook(self, fn: Callable[..., Any]) -> Any:
        return Handles([node.register_hook(fn) for node in self._nodes])

    def register_prehook(self, fn: Callable[..., Any]) -> Any:
        return Handles([node.register_prehook(fn) for node in self._nodes])


class Handles:
    """Several hook handles as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> Handles:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()


# Gradients that are None. A node of several results, or a function of the user's, may give no gradient at all to what
# it was computed from. Torch's own nodes pass that on, and a leaf's gradient stays None; a function in Python is given
# zeros, which ours must not turn into gradients. Ranks agree in this: they all run the same program.


PASSES_NONE = "shardwise.passes_none"
"""Under this name a node knows that it passes None on, as do those before it."""


def pass_none_on(tensors: Iterable[DTensor]) -> None:
    """Let the graph that some tensors come from pass on gradients that are None."""
    todo: list[Any] = [*nodes_of([shard for x in tensors for shard in shards_of(x)])]
    while todo:
        node = todo.pop()
        if PASSES_NONE not in node.metadata:
            node.metadata[PASSES_NONE] = True
            if is_ours(node) and node._forward_cls.__module__ != tied.__module__:  # which is there to give zeros
                node.register_hook(_none_of_none)
            todo += [following for following, _ in node.next_functions if following is not None]


def _none_of_none(gave: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> Any:
    return None if any(grad is not None for grad in got) else (None,) * len(gave)
