"""A call of a function that is to be captured: its arguments, and all that the function reaches beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_is_leaf

from shardwise.comm.recording import RecordingPort
from shardwise.graph.guards.lookups import Lookups
from shardwise.graph.guards.reached import Reached, leaf_names
from shardwise.layout import Mesh
from shardwise.tensor import DTensor


def flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """The leaves of arguments, and how they are nested. Those that are not nested at all, as most, all have one such
    structure, so that no more than its identity need be looked at."""
    if kwargs or not all(map(tree_is_leaf, args)):
        return tree_flatten((args, kwargs))
    return args, _side_by_side(len(args))


@functools.cache
def _side_by_side(num_leaves: int) -> Any:
    return tree_flatten(((None,) * num_leaves, {}))[1]


@dataclass(frozen=True)
class Call:
    """A call; `names` are those of the leaves of its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    spec: Any
    names: Sequence[str]
    reached: Reached
    lookups: Lookups
    """Entered while it is captured."""

    @staticmethod
    def of(
        function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any], spec: Any
    ) -> Call:
        names = leaf_names(function, args, kwargs)
        reached = Reached.by(function, leaves, names)
        return Call(function, args, kwargs, leaves, spec, names, reached, Lookups(reached))

    def with_lookups(self) -> Call:
        """The same, once it is known what the function asks for by names."""
        reached = self.reached
        if not self.lookups.names <= reached.read:
            reached = Reached.by(self.function, self.leaves, self.names, self.lookups.names)
        reached.lacks(self.lookups.absent)
        return replace(self, reached=reached)

    def __call__(self) -> Any:
        """The function itself."""
        return self.function(*self.args, **self.kwargs)

    def meshes(self) -> list[Mesh]:
        """The whole meshes of the DTensors that it is about, in the order in which they are met."""
        tensors = [x.value for x in self.reached.objects if isinstance(x.value, Tensor)]
        tensors += [x for x in self.leaves if isinstance(x, Tensor)]
        return list(dict.fromkeys(x._layout.mesh.root for x in tensors if isinstance(x, DTensor)))

    def is_recorded(self) -> bool:
        """Whether it is about tensors without data."""
        return any(isinstance(mesh.port, RecordingPort) for mesh in self.meshes())
