"""Limits: implicit moves that are refused before anything is communicated.

What is refused follows from the plan of a call, its dtypes and which of its arguments are parameters. All ranks know
these, so all refuse alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.comm.cause import users_line
from shardwise.dispatch.modes import limits
from shardwise.errors import StrictModeError
from shardwise.layout import Layout
from shardwise.redistribute import path_bytes

if TYPE_CHECKING:
    from shardwise.dispatch.watch import Label, SeenCall

_disabled = torch._C.DisableTorchFunctionSubclass


def refuse_moves(call: SeenCall, labels: Sequence[Label]) -> None:
    """Raise `StrictModeError` if the limits in force forbid something that a call would move."""
    for label in labels:
        if any(move.communicates for move in label.moves):
            _refuse(call, label)


def _refuse(call: SeenCall, label: Label) -> None:
    limit = limits()
    assert limit is not None
    if limit.check is not None:
        limit.check(call, label)
    x = None if label.argument is None else call.tensors[label.argument]
    sent = path_bytes(label.moves, label.itemsize if x is None else x.dtype.itemsize)
    of_parameter = x is not None and is_parameter(x)
    if of_parameter and limit.parameters:
        what = "which is a parameter"
    elif limit.bytes is not None and sent > limit.bytes:
        what = f"which is more than moves={limit.bytes} allows"
    else:
        return
    raise StrictModeError(_message(call, label, sent, what))


def _message(call: SeenCall, label: Label, sent: float, what: str) -> str:
    source, target = label.moves[0].source.layout, label.moves[-1].target.layout
    kinds = ", ".join(f"{move.kind} over {_axes(move)}" for move in label.moves if move.communicates)
    file, line, _ = users_line()
    at = f" ({file}:{line})" if file else ""
    moving = f"{call.name} would move {_named(call, label)} from {source} to {target}{at}"
    return f"strict mode: {moving}: {kinds}, {round(sent):,} bytes sent by every rank, {what}. {_remedy(label, target)}"


def _axes(move: Any) -> str:
    return " × ".join(move.source.layout.mesh.names[axis] for axis in move.axes)


def _named(call: SeenCall, label: Label) -> str:
    if label.argument is not None:
        return call.argument(label.argument)
    return label.operand if label.op is None and label.at is None else f"a value inside of it ({label.operand})"


def _remedy(label: Label, target: Layout) -> str:
    lay_out = "lay the arguments of the call out so that nothing has to move"
    if label.argument is None:
        return f"Either {lay_out}, or allow more"
    placements = ", ".join(map(repr, target.placements))
    return (
        f"Either move it yourself before the call, which is never refused: .redistribute(placements=[{placements}]); "
        f"or {lay_out}"
    )


def is_parameter(x: Tensor) -> bool:
    """Whether a tensor is a module's parameter, or a view of one."""
    with _disabled():
        return any(isinstance(y, torch.nn.Parameter) for y in (x, x._base) if y is not None)
