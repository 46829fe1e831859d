"""Tensors that torch's own code makes beside the DTensors it was given.

A distribution draws from `torch.rand(shape)`, `nn.init.sparse_` picks rows by `torch.randperm`, pruning draws channels.
What torch makes of nothing but numbers is the same on every rank, and so is what it draws while the ranks are in step:
inside such code, where DTensors are at hand, it is made on their mesh, replicated. Which code that is is read off
torch: functions and methods of `torch.distributions` that name a factory.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, distributions, nn
from torch.distributions.utils import lazy_property
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from shardwise.dispatch.randomness import check_in_step
from shardwise.dispatch.special import handles, shards_of
from shardwise.layout import Mesh
from shardwise.tensor import DTensor, distribute_tensor

_disabled = torch._C.DisableTorchFunctionSubclass
_enabled = torch._C._is_torch_function_enabled

DRAWING = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm})
MAKING = DRAWING | {torch.arange, torch.zeros, torch.ones, torch.empty, torch.eye, torch.full, torch.tril_indices}


class _OnMesh(TorchFunctionMode):
    """Inside, what torch's own code makes lies on a mesh. What others make, our own code say, is left alone."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in MAKING or not sys._getframe(1).f_globals.get("__name__", "").startswith(HOMES):
            return func(*args, **kwargs)
        if func in DRAWING:
            check_in_step(self.mesh)
        return distribute_tensor(func(*args, **kwargs), self.mesh, src_data_rank=None)


HOMES = ("torch.distributions", "torch.nn.init", "torch.nn.utils.prune")


def _on_mesh(function: Callable) -> Callable:
    """A function that makes tensors, as one that makes them on the mesh of its arguments."""

    @functools.wraps(function)
    def made_on_mesh(*args: Any, **kwargs: Any) -> Any:
        mesh = _mesh_of((*args, *kwargs.values()))
        if mesh is None or not _enabled():
            return function(*args, **kwargs)
        with _OnMesh(mesh):
            return function(*args, **kwargs)

    made_on_mesh._torchdynamo_inline = function  # type: ignore[attr-defined]  # torch.compile goes straight there
    return made_on_mesh


def _mesh_of(values: Iterable[Any]) -> Mesh | None:
    """The mesh of the first DTensor among some values, or among the parameters of a distribution."""
    for value in values:
        if isinstance(value, DTensor):
            return value._layout.mesh
        if isinstance(value, distributions.Distribution):
            found = _mesh_of(vars(value).values())
            if found is not None:
                return found
    return None


# Of the distributions


def _modules() -> Iterator[ModuleType]:
    yield from (module for name, module in list(sys.modules.items()) if name.startswith(distributions.__name__ + "."))


def _names_some(function: Any, names: set[str]) -> bool:
    return isinstance(function, FunctionType) and not names.isdisjoint(inspect.unwrap(function).__code__.co_names)


def _makers() -> set[str]:
    """The names of factories, and of functions of the distributions' that name one."""
    names = {function.__name__ for function in MAKING}
    own = [
        function
        for module in _modules()
        for function in vars(module).values()
        if isinstance(function, FunctionType) and function.__module__ == module.__name__
    ]
    while more := {function.__name__ for function in own if _names_some(function, names)} - names:
        names |= more
    return names


def _watch_distributions() -> None:
    names = _makers()
    for module in _modules():
        for cls in [
            cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__
        ]:
            for name, member in list(vars(cls).items()):
                if _names_some(member, names):
                    setattr(cls, name, _on_mesh(member))
                elif isinstance(member, property) and member.fget and _names_some(member.fget, names):
                    setattr(cls, name, property(_on_mesh(member.fget), member.fset, member.fdel, member.__doc__))
                elif isinstance(member, lazy_property) and _names_some(member.wrapped, names):
                    member.wrapped = _on_mesh(member.wrapped)


_watch_distributions()
nn.init.sparse_ = _on_mesh(nn.init.sparse_)
prune.RandomStructured.compute_mask = _on_mesh(prune.RandomStructured.compute_mask)  # type: ignore[method-assign]


# Methods that make tensors from nothing but numbers


@handles(Tensor.new, torch._C.TensorBase.new)
def _new(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Numbers are sizes, and so is a `torch.Size`; other sequences are data. A tensor is itself, outside the graph."""
    x, *given = args
    if "size" in kwargs:
        given = [torch.Size(kwargs["size"])]
    if not given or isinstance(given[0], (int, torch.Size)):
        return x.new_empty(given[0] if given and isinstance(given[0], torch.Size) else given or (0,))
    return given[0].detach() if isinstance(given[0], DTensor) else x.new_tensor(given[0])


@handles(Tensor.new_tensor, torch._C.TensorBase.new_tensor)
def _new_tensor(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Of the tensor only its dtype and device matter, none of its numbers."""
    if len(args) != 2 or not isinstance(args[0], DTensor) or isinstance(args[1], Tensor):
        return NotImplemented
    with _disabled():
        made = args[0].new_tensor(args[1], **kwargs)
    return distribute_tensor(made, args[0]._layout.mesh, src_data_rank=None)


# What is done to every shard


@handles(Tensor.share_memory_)
def _share_memory(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    with _disabled():
        for shard in shards_of(args[0]):
            func(shard)
    return args[0]
