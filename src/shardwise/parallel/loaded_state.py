"""An optimizer's state that was loaded takes the layouts of the parameters, whatever mesh it was saved on.

torch's `load_state_dict` gives tensors the dtype and the device of their parameter, and has no place for more; but it
makes a new state, so the next step sees that there is something to do.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, optim
from torch.utils._pytree import tree_map_only

from shardwise.layout import Layout
from shardwise.local import spread
from shardwise.tensor import DTensor, as_layout, wrap

_seen: WeakKeyDictionary[optim.Optimizer, Any] = WeakKeyDictionary()


def lay_out_loaded_state(optimizer: optim.Optimizer) -> None:
    """Before a step: state that is new since the last one is brought to where the parameters are."""
    if _seen.get(optimizer) is optimizer.state:
        return
    with torch.no_grad():
        for param, kept in optimizer.state.items():
            if param.__class__ is DTensor and not param._layout.has_pending:
                kept.update(tree_map_only(Tensor, partial(_laid_out, param), kept))
    _seen[optimizer] = optimizer.state


def _laid_out(param: DTensor, value: Tensor) -> Tensor:
    """State of another mesh, or of one device, on the parameter's mesh; as the parameter, if it has its shape."""
    layout = param._layout
    if isinstance(value, DTensor):
        value = value if value._layout.mesh is layout.mesh else value.full_tensor()
    elif not value.dim():
        return value  # counts of steps are plain
    if not isinstance(value, DTensor):
        value = wrap(spread(value.detach(), layout.mesh), Layout(layout.mesh, value.shape))
    return as_layout(value, layout, "state") if value.shape == param.shape else value
