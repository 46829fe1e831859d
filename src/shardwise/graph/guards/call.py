"""A call of a function that is to be captured: its arguments, and all that the function reaches beside them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_is_leaf

from shardwise.comm.recording import RecordingPort
from shardwise.graph.guards.iterators import may_be_taken
from shardwise.graph.guards.lookups import Lookups
from shardwise.graph.guards.reached import Reached
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
            known = {id(x.value) for x in self.reached.iterators}
            for name in (*reached.taken, *(x.name for x in reached.iterators if id(x.value) not in known)):
                raise may_be_taken(name)
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


def leaf_names(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """What a function calls the leaves of its arguments: `batch['tokens']`, or `args[0]` where it has no name for one.

    >>> leaf_names(lambda model, batch: None, (None, {"tokens": 1}), {})
    ['model', "batch['tokens']"]
    """
    bound: Any = getattr(function, "__self__", None)
    function = (
        bound.forward if isinstance(bound, nn.Module) else function
    )  # a module is called by a function of torch's
    named = [name for name, _ in zip(_positional(function), args)]
    roots = [*named, *(f"args[{number}]" for number in range(len(named), len(args)))]
    found = []
    for number, root in enumerate(roots):
        found += [f"{root}{keystr(path)}" for path, _ in tree_flatten_with_path(args[number])[0]]
    for key, value in kwargs.items():
        found += [f"{key}{keystr(path)}" for path, _ in tree_flatten_with_path(value)[0]]
    return found


def _positional(function: Callable[..., Any]) -> list[str]:
    """The names of the parameters of a function that may be given by position."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C++
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]
