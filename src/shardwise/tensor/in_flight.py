"""DTensors whose data are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.comm import Handle
from shardwise.layout import Layout
from shardwise.local import on_shards
from shardwise.redistribute import CastBackward, Move, start_path
from shardwise.tensor.dtensor import DTensor, remembering, wrap

_on_shard = torch._C._disabled_torch_function_impl


class InFlight(DTensor):
    """A DTensor whose data are under way. Whoever asks for more of it than its shape or placements waits for them, if
    only for its class, as `dispatch` does first of all; from then on it is a DTensor like others."""

    _landing: Handle[Tensor]

    def __getattribute__(self, name: str) -> Any:
        known = _KNOWN_IN_FLIGHT.get(name)
        if known is not None:
            return known(_dict_of(self)["_layout"])
        _land(self)
        return getattr(self, name)


def _call_when_landed(func: Callable, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
    """What C++ finds as `__torch_function__`: there an error in getting it would pass for a tensor that has none."""
    for x in tree_leaves((args, kwargs)):
        if type(x) is InFlight:
            _land(x)
    return func(*args, **(kwargs or {}))


_KNOWN_IN_FLIGHT: dict[str, Callable[[Layout], Any]] = {
    "__torch_function__": lambda layout: _call_when_landed,
    "shape": lambda layout: layout.size,
    "ndim": lambda layout: len(layout.shape),
    "placements": lambda layout: layout.placements,
    "device_mesh": lambda layout: layout.mesh.origin,
}
_dict_of = vars(Tensor)["__dict__"].__get__
_set_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


def _departed(local: Tensor, moves: tuple[Move, ...], target: Layout, cast: torch.dtype | None) -> DTensor:
    """A tensor on its way to another layout. Its gradient comes back in the dtype `cast`, if any."""
    if cast is None:
        moved, handle = start_path(local, moves)
        made: Any = remembering(wrap(moved, target), local, moves)
    else:
        handle = start_path(local.detach(), moves)[1]
        begun = on_shards(local, lambda shards: CastBackward.apply(moves, cast, True, *shards), moves)
        made = wrap(begun, target)
    if handle is not None:
        made._landing = handle
        made.__class__ = InFlight
    return made


def _land(x: Any) -> None:
    handle = _dict_of(x).get("_landing")
    if handle is not None:
        _on_shard(_set_data, (), (x, handle.wait()))  # type: ignore[call-arg]
        _dict_of(x).pop("_landing", None)
        x.__class__ = DTensor


DTensor._departed = staticmethod(_departed)  # the class cannot know its subclass
