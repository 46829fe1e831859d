"""Autocast, for functions that do not run as one call on the shards.

Autocast works inside C++, on functions as they are called: `cross_entropy` of half precision is computed in single
precision. A function that runs as itself on the shards gets that for free. One that was traced does not: its steps are
ops that autocast does not know. So its arguments are converted here, as torch would, and it runs outside autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.dispatch.plan import Plan
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.rules.kit.treatments import treat, treatment_of
from shardwise.tensor import DTensor

_autocasting = torch._C._is_any_autocast_enabled

AS_THEY_ARE = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "addr", "prelu", "einsum"),
        *("chain_matmul", "linalg_multi_dot", "linalg_vecdot", "scaled_dot_product_attention", "dot", "vdot"),
        *("tensordot", "acos", "asin", "cosh", "sinh", "tan", "erfinv", "exp", "expm1", "log", "log10", "log1p"),
        *("log2", "pow", "sum", "reciprocal", "rsqrt", "softplus", "addcdiv", "addcmul", "atan2", "bilinear", "cross"),
        *("cat", "stack", "grid_sampler", "index_put", "index_copy", "scatter_add", "view_as_complex", "polar"),
        *("gru_cell", "lstm_cell", "rnn_tanh_cell", "rnn_relu_cell", "mkldnn_rnn_layer", "cross_entropy"),
    }
)
"""What autocast knows and runs as one call, or takes to the widest dtype of its arguments, which a trace sees; or what
computes in single precision anyway, with no copy of its arguments there."""

NAMES = {"cross_entropy_loss": "cross_entropy", "grid_sampler_2d": "grid_sample"}
"""Ops whose function in Python has another name."""


def _known(device: str) -> set[str]:
    """The ops that autocast changes on a device, by their names in Python."""
    has, key = torch._C._dispatch_has_kernel_for_dispatch_key, f"Autocast{device.upper()}"
    ops = (
        name.removeprefix("aten::").split(".")[0] for name in torch._C._dispatch_get_all_op_names() if has(name, key)
    )
    return {NAMES.get(op, op) for op in ops if not op.startswith(("_", "cudnn"))} - AS_THEY_ARE


KNOWN = {device: _known(device) for device in ("cpu", "cuda")}
BANNED = {"cuda": {"binary_cross_entropy"}}
"""What torch refuses, and says so."""


def _functions(name: str) -> Iterator[Any]:
    for family, home in (("linalg_", torch.linalg), ("fft_", torch.fft)):
        if name.startswith(family):
            yield getattr(home, name.removeprefix(family), None)
    for anywhere in (torch, Tensor, F):
        yield getattr(anywhere, name, None)


class Autocast:
    """A plan of a traced function that runs as autocast would run it on one device."""

    __slots__ = ("func", "plan")

    def __init__(self, plan: Plan, func: Callable) -> None:
        self.plan, self.func = plan, func

    def __call__(self, args: tuple, kwargs: dict[str, Any] | None) -> Any:
        wanted = autocast_dtype(self.func, args, kwargs or {})
        if wanted is None:
            return self.plan(args, kwargs)

        def converted(x: Tensor) -> Tensor:
            return x.to(wanted) if x.is_floating_point() and x.dtype != torch.float64 else x

        with torch.autocast(_device(args, kwargs or {}), enabled=False):
            return self.func(*map_tensors(args, converted), **map_tensors(kwargs or {}, converted))


def autocast_dtype(func: Callable, args: tuple, kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that autocast gives the arguments of a function, if it does."""
    name = treatment_of(func).autocast if _autocasting() else None
    if name is None:
        return None
    device = _device(args, kwargs)
    known = name in KNOWN.get(device, ()) and name not in BANNED.get(device, ())
    if not known or not torch.is_autocast_enabled(device) or kwargs.get("dtype") or "out" in kwargs:
        return None
    return torch.get_autocast_dtype(device) if name.startswith("conv") else torch.float32


def _device(args: tuple, kwargs: dict[str, Any]) -> str:
    return next((x.device.type for x in flat_tensors((args, kwargs)) if isinstance(x, DTensor)), "")


for _name in sorted(set().union(*KNOWN.values())):
    treat(*{function for function in _functions(_name) if function is not None}, autocast=_name)
