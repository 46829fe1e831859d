"""What ranks call parallelized modules with. Ranks whose batches are not equally long would wait for each other in the
next collective, or take each other's numbers for their own: so they compare shapes first.

What is brought in while a parallelized module runs follows from what it was called with. So that is compared, by one
small reduction. If DTensors differ, that is an error; if plain tensors do, everything that comes in is compared. On the
CPU only: an accelerator would first have to finish all that it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.comm import as_mesh
from shardwise.comm.agreement import digest
from shardwise.comm.told_later import Window, close_window, open_window
from shardwise.dispatch.interop.compiled import run_as_it_is
from shardwise.errors import ShardShapeError
from shardwise.from_local import check_alike
from shardwise.layout import Mesh, Placements
from shardwise.parallel.agreement import first_difference
from shardwise.tensor import DTensor, from_parts
from shardwise.words import short_dtype


@dataclass
class _Running:
    """A call of a parallelized module on a mesh: with which plain tensors, whether the ranks' have different shapes, if
    they have compared them, and the window in which its checks wait."""

    module: nn.Module
    plain: list[tuple] = field(default_factory=list)
    differ: bool | None = None
    window: Window | None = None


_running: WeakKeyDictionary[Mesh, _Running] = WeakKeyDictionary()
"""On which meshes a parallelized module is running."""

_agreed: WeakKeyDictionary[nn.Module, tuple[Mesh, list[tuple], int]] = WeakKeyDictionary()
"""With which DTensors all ranks of a mesh have called a module before, and their digest."""

_in_backward = torch._C._current_graph_task_id
_EQUALLY_LONG = "Batches of a step are equally long on all of them"


def compare_calls(module: nn.Module, mesh: Mesh, *, when_trained: bool = False) -> None:
    """Have the ranks of a mesh compare what they call a module with: always, or if it is a batch to train on."""
    if _is_compared(mesh) and mesh not in (known := getattr(module, "_compares_calls", ())):
        module._compares_calls = (*known, mesh)  # type: ignore[assignment]
        module.register_forward_pre_hook(partial(_begin, mesh, when_trained), prepend=True, with_kwargs=True)
        module.register_forward_hook(partial(_end, mesh), always_call=True)


def _is_compared(mesh: Mesh) -> bool:
    return mesh.device_type == "cpu" and len(mesh.held) < mesh.size()


@run_as_it_is
def _begin(mesh: Mesh, when_trained: bool, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if (mesh in _running and _running[mesh].module is not module) or _recomputes():
        return
    _end(mesh, module, args, None)  # it may call itself
    if not when_trained:
        _running[mesh] = _Running(module, differ=_differ(type(module).__name__, mesh, args, kwargs))
    elif _is_batch(args, kwargs):
        now = _running[mesh] = _Running(module, plain=_plain(_tensors(args, kwargs)))
        _compare_parts(now, mesh, _tensors(args, kwargs))


def _compare_parts(now: _Running, mesh: Mesh, tensors: Sequence[Tensor]) -> None:
    """What is as it was when all ranks agreed on it is likely to be so again: that is told with what comes next."""
    who, placed = type(now.module).__name__, _placed(tensors)
    now.window = open_window(mesh, who)
    if now.window is None:
        if first_difference(mesh, [placed]) == 0:
            raise _unlike(who, mesh, tensors)
        return
    known = _agreed.get(now.module)
    is_known = known is not None and known[:2] == (mesh, placed)
    number = known[2] if known is not None and is_known else digest(placed)
    now.window.have_alike(number, lambda: _unlike(who, mesh, tensors))
    if not is_known:
        now.window.settle()
        _agreed[now.module] = mesh, placed, number


def _is_batch(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether ranks have parts of something, and gradients that they will reduce."""
    parts = (x for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor) and not x._layout.replicated)
    return torch.is_grad_enabled() and any(True for _ in parts)


@run_as_it_is
def _end(mesh: Mesh, module: nn.Module, args: Any, output: Any) -> None:
    now = _running.get(mesh)
    if now is not None and now.module is module:
        del _running[mesh]
        if now.window is not None:
            close_window(now.window)


def _recomputes() -> bool:
    """In a backward pass a checkpoint runs modules again, as they ran before."""
    return _in_backward() != -1


def _differ(who: str, mesh: Mesh, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether plain tensors have other shapes on other ranks."""
    tensors = _tensors(args, kwargs)
    plain = _plain(tensors)
    which = first_difference(mesh, [(_placed(tensors), len(plain)), plain])
    if which == 0:
        raise _unlike(who, mesh, tensors)
    return which == 1


def check_batches(who: str, mesh: Mesh, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise, on all ranks alike, unless they have the same DTensors. Each may have plain tensors of its own, though a
    first argument of another dtype would fail where it is alone."""
    tensors = _tensors(args, kwargs)
    first = [x.dtype for x in args[:1] if isinstance(x, Tensor)]
    if _is_compared(mesh) and first_difference(mesh, [(_placed(tensors), first)]) == 0:
        raise _unlike(who, mesh, tensors)


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def _plain(tensors: Sequence[Tensor]) -> list[tuple]:
    return [(tuple(x.shape), x.dtype) for x in tensors if not isinstance(x, DTensor)]


def _placed(tensors: Sequence[Tensor]) -> list[tuple]:
    return [(x.layout_on_mesh, x.dtype) for x in tensors if isinstance(x, DTensor)]


def _unlike(who: str, mesh: Mesh, tensors: Sequence[Tensor]) -> ShardShapeError:
    layouts = [str(x.layout_on_mesh) if isinstance(x, DTensor) else " plain" for x in tensors]
    here = ", ".join(short_dtype(x.dtype) + layout for x, layout in zip(tensors, layouts, strict=True)) or "none"
    return ShardShapeError(
        f"{who}: the ranks of {mesh} call it with tensors of different shapes, dtypes or placements, this one with "
        f"{here}. {_EQUALLY_LONG}; DTensor.from_local(part, mesh, placements, run_check=True) takes uneven parts"
    )


def plain_tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(tree) if isinstance(x, Tensor) and not isinstance(x, DTensor))


def brought_in(who: str, part: Tensor, mesh: Mesh, placements: Placements, shape: Sequence[int] | None) -> DTensor:
    """The DTensor of the parts that ranks bring to a module. Those of a dim may be uneven."""
    try:
        return from_parts(part, as_mesh(mesh), placements, shape, compare=_may_differ(mesh))
    except ShardShapeError as error:
        raise ShardShapeError(
            f"{who}: what the ranks of {mesh} bring does not fit together: {error}. {_EQUALLY_LONG}"
        ) from None


def _may_differ(mesh: Mesh) -> bool:
    """Whether what comes in may have other shapes on other ranks."""
    now = _running.get(mesh)
    if now is None:
        return not _recomputes()
    if now.differ is None:
        now.differ = first_difference(mesh, [now.plain]) == 0
    return now.differ


def check_replicated(who: str, mesh: Mesh, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise, on all ranks alike, unless plain tensors that are the same on all of them have the same shapes."""
    if len(mesh.held) < mesh.size() and not _differ(who, mesh, args, kwargs):
        return
    for x in plain_tensors((args, kwargs)):
        try:
            check_alike(x, mesh)
        except ShardShapeError as error:
            raise ShardShapeError(
                f"{who}: plain tensors are the same on all ranks of {mesh}, but {error}. {_EQUALLY_LONG}"
            ) from None
