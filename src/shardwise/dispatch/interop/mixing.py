"""Plain tensors among DTensors, DTensors of several meshes, and DTensors where only plain tensors belong: what is said
about them, the call and the argument by their names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import resolve_name

from shardwise.dispatch.interop.transforms import refusal
from shardwise.dispatch.modes import replicates_implicitly
from shardwise.dispatch.planning.fallback import shown
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.dispatch.positional import argument_names
from shardwise.errors import MeshError, MixedTensorError, ShardwiseError
from shardwise.layout import Mesh
from shardwise.rules.kit.treatments import treat, treatment_of
from shardwise.tensor import DTensor

treat(  # torch's modules make the states that recurrent layers start from, and the lengths of packed sequences
    *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    *(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
    *(torch._pack_padded_sequence, torch._pad_packed_sequence),
    takes_replicated=True,
)


def takes_replicated(func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> bool:
    """Whether the plain tensors of a call may be taken as replicated, unasked; a plain parameter is a mistake."""
    if not treatment_of(func).takes_replicated or replicates_implicitly():
        return False
    return not any(x.requires_grad for x in flat_tensors((args, kwargs)) if not isinstance(x, DTensor))


def mixed(func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> ShardwiseError:
    """Names the first plain tensor of a call, and the two ways to make it a DTensor."""
    for x in flat_tensors((args, kwargs)):
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return refusal("vmap" if torch._C._functorch.is_batchedtensor(x) else "grad")
    named = _named(func, args, kwargs)
    plain = next((path for name, value in named for path in _plain(name, value)), "?")
    return MixedTensorError(
        f"{_call(func, named, kinds=True)}: argument '{plain}' is a plain torch.Tensor, and its layout on the mesh is "
        f"unknown. Make it a DTensor with shardwise.distribute_tensor(tensor, mesh, placements), or, if every rank "
        f"holds the same values, run the call inside shardwise.experimental.implicit_replication()"
    )


def apart(func: Callable, args: tuple, kwargs: dict[str, Any] | None, one: Mesh, other: Mesh) -> MeshError:
    """Names a call of tensors on two meshes, and what brings them to one."""
    call = f"{_call(func, _named(func, args, kwargs))} mixes tensors on {one} and on {other}"
    if one.root is not other.root:
        if str(one) == str(other) and str(one.root) != str(other.root):
            call += f", the one of {one.root}, the other of {other.root}"
        return MeshError(f"{call}; bring them to one mesh first (full_tensor() and distribute_tensor)")
    return MeshError(
        f"{call}, which are parts of one mesh. Put the whole module on {one.root}: distribute_module(model, mesh), "
        f"also after parallelize_module, replicates parameters along the axes that they are not on yet, and module "
        f"styles get use_local_output=False, since a plain tensor is a part along a style's own axis alone. (A single "
        f"tensor gets there by full_tensor() and distribute_tensor)"
    )


def _named(func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> list[tuple[str, Any]]:
    return [*zip(argument_names(func, args), args, strict=True), *_given(func, kwargs or {})]


def _call(func: Callable, named: Sequence[tuple[str, Any]], *, kinds: bool = False) -> str:
    return f"{_name(func)}({', '.join(f'{name}: {shown(value, kinds=kinds)}' for name, value in named)})"


def _given(func: Callable, kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """What the user is likely to have written: torch's functions in Python pass their defaults on as well."""
    inner = inspect.unwrap(func)
    known = inspect.signature(inner).parameters if inspect.isfunction(inner) else {}
    return [(name, x) for name, x in kwargs.items() if name not in known or not _same(x, known[name].default)]


def _same(x: Any, default: Any) -> bool:
    return type(x) is type(default) and x == default


def _name(func: Callable) -> str:
    return resolve_name(func) or getattr(func, "__name__", str(func))


def _plain(path: str, value: Any) -> Iterator[str]:
    """Where in an argument there are plain tensors that have dims."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.dim():
        yield path
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _plain(f"{path}[{i}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _plain(f"{path}[{key!r}]", item)


# torch.distributed


def refuse_collective(*_: Any, **__: Any) -> Any:
    raise MixedTensorError(
        "torch.distributed knows nothing of layouts, and would change or send this rank's shard of a DTensor; use "
        "redistribute() or full_tensor(), or to_local() where the shard is what you mean. A mesh axis over which "
        "parameters are replicated and the batch is sharded takes the place of DistributedDataParallel"
    )


COLLECTIVES = {
    "torch.distributed.distributed_c10d",
    *(f"torch._ops.{name}" for name in ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")),
}
"""The modules of torch.distributed's functions and ops."""


def refusing_collectives(original: Callable) -> Callable:
    """A function of torch.distributed that asks nobody, and refuses DTensors, in lists too."""

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            given = arg if isinstance(arg, (list, tuple)) else (arg,)
            if any(isinstance(x, DTensor) for x in given) and torch._C._is_torch_function_enabled():
                refuse_collective()
        return original(*args, **kwargs)

    return guarded


def refusing_parameters(original: Callable) -> Callable:
    """What torch's `fully_shard` asks of each parameter, before it cuts the first."""

    @functools.wraps(original)
    def guarded(name: str, param: Tensor) -> None:
        if isinstance(param, DTensor):
            raise MixedTensorError(
                f"torch's fully_shard knows no DTensors of shardwise, and would train wrong values of {name}: call "
                f"shardwise.parallel.fully_shard, which takes the same arguments"
            )
        original(name, param)

    return guarded
