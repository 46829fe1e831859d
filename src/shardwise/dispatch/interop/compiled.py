"""`torch.compile` around DTensors: what touches them runs as it is, which gives the right results.

It does not trace tensors whose class has a `__torch_dispatch__` of its own, as DTensor does. The functions through
which its programs come to us are marked as `torch.compiler.disable` marks functions: they are not looked into, and
neither is what they call. Only our own functions are marked, and without the seconds that an import of torch._dynamo
takes.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from shardwise.comm.ranked import Ranked
from shardwise.dispatch.aliasing.copied_views import CopiedView, KeepsStrides, StaleView
from shardwise.dispatch.call import dispatch
from shardwise.tensor import DTensor, distribute_tensor

_eval_frame = torch._C._dynamo.eval_frame
REASON = (
    "it computes with shardwise's DTensors, which torch.compile cannot trace: shardwise.compile captures such programs"
)
"""What torch says where it was told to trace all of a function."""

_SKIP = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def mark_entry_points() -> None:
    """Mark the functions through which programs come to us, when DTensor has all of its own."""
    for cls in (DTensor, CopiedView, KeepsStrides, StaleView, Ranked):
        for member in vars(cls).values():
            run_as_it_is(getattr(member, "__func__", getattr(member, "fget", member)))
    run_as_it_is(dispatch)
    run_as_it_is(distribute_tensor)


def run_as_it_is(function: Any) -> Any:
    """Mark a function: it may be used as a decorator."""
    if isinstance(function, FunctionType):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
        _eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function
