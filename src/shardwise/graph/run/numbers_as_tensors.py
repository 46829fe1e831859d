"""Ops with numbers of the host, on tensors of one number: compiled kernels then serve any number.

A number is a tensor in double precision. What is computed with it is computed in the precision in which torch's kernels
compute with Python's numbers: that of the tensor, but at least single.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.errors import CaptureError
from shardwise.graph.program import at

_aten = torch.ops.aten


def on_tensors(node: fx.Node, numbers: set[fx.Node], args: tuple, kwargs: dict[str, Any]) -> Any:
    """What an op gives some of whose arguments are numbers."""
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    name = packet.__name__
    if name.startswith("_foreach_"):
        return _each(name, node, args, kwargs)
    if name == "scalar_tensor":
        return args[0].to(kwargs.get("dtype") or torch.get_default_dtype())
    in_place = name.endswith("_")
    form = _FORMS.get(name.rstrip("_"))
    if form is None:
        raise _not_compiled(node)
    x = args[0]
    found = form(*args, **kwargs)
    return x.copy_(found) if in_place else found


def computed(node: fx.Node, args: tuple) -> Tensor:
    """A number that a program reads out of a tensor, or computes of one."""
    target: Any = node.target
    if target is _aten._local_scalar_dense.default:
        return args[0].to(torch.float64)
    return _OF_NUMBERS.get(target, target)(*args)


_OF_NUMBERS: dict[Any, Callable[..., Tensor]] = {
    float: lambda x: x,
    math.sqrt: torch.sqrt,
    math.floor: torch.floor,
    math.ceil: torch.ceil,
    round: lambda x, digits=0: torch.round(x, decimals=digits),
    max: lambda a, b: torch.where(b > a, b, a),
    min: lambda a, b: torch.where(b < a, b, a),
}
"""Functions of numbers that tensors have another function for."""


def _not_compiled(node: fx.Node) -> CaptureError:
    return CaptureError(
        f"{node.target} is given a number that changes from run to run{at(node.meta.get('line'))}, and has no compiled "
        f'form that takes one: use backend="fx", or keep the number in a tensor'
    )


def _each(name: str, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A list op, tensor by tensor."""
    in_place = name.endswith("_")
    form = _FORMS.get(name.removeprefix("_foreach_").rstrip("_"))
    if form is None:
        raise _not_compiled(node)
    found = []
    for i, x in enumerate(args[0]):
        own = [arg[i] if isinstance(arg, (list, tuple)) else arg for arg in args]
        named = {key: arg[i] if isinstance(arg, (list, tuple)) else arg for key, arg in kwargs.items()}
        if "scalars" in named:
            own.append(named.pop("scalars"))
        made = form(*own, **named)
        found.append(x.copy_(made) if in_place else made)
    return found


def _wide(x: Any) -> Any:
    """A tensor in the precision in which kernels compute with it; a number likewise."""
    return x


def _scaled(x: Tensor, number: Any) -> Tensor:
    """`x` times a number, in the precision of kernels."""
    if not isinstance(number, Tensor):
        return x * number
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.to(wide) * number.to(wide)


def _mul(x: Any, y: Any) -> Tensor:
    x, y = (y, x) if not x.dim() else (x, y)
    return _scaled(x, y).to(x.dtype)


def _div(x: Tensor, y: Any, *, rounding_mode: str | None = None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.div(x.to(wide), y.to(wide), rounding_mode=rounding_mode).to(x.dtype)


def _add(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = y.to(wide)
    return (x.to(wide) + (y if isinstance(alpha, int) and alpha == 1 else _scaled(y, alpha))).to(x.dtype)


def _sub(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) - _scaled(y.to(wide), alpha)).to(x.dtype)


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, scalar: Any = None, *, value: Any = 1) -> Tensor:
    number, wide = value if scalar is None else scalar, torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + _scaled(a.to(wide), number) / b.to(wide)).to(x.dtype)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, scalar: Any = None, *, value: Any = 1) -> Tensor:
    number, wide = value if scalar is None else scalar, torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) + _scaled(a.to(wide), number) * b.to(wide)).to(x.dtype)


def _lerp(x: Tensor, end: Tensor, weight: Any) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.lerp(x.to(wide), end.to(wide), weight.to(wide)).to(x.dtype)


def _pow(x: Any, y: Any) -> Tensor:
    return torch.pow(x, y.to(x.dtype) if isinstance(y, Tensor) and isinstance(x, Tensor) else y)


def _full(size: Sequence[int], number: Tensor, *, dtype: Any = None, **options: Any) -> Tensor:
    options.pop("pin_memory", None)
    options.pop("layout", None)
    return torch.empty(size, dtype=dtype or torch.get_default_dtype(), **options).copy_(number.expand(size))


def _fill(x: Tensor, number: Tensor) -> Tensor:
    return number.to(x.dtype).expand(x.shape)


_FORMS: dict[str, Callable[..., Tensor]] = {
    "mul": _mul,
    "div": _div,
    "add": _add,
    "sub": _sub,
    "addcdiv": _addcdiv,
    "addcmul": _addcmul,
    "lerp": _lerp,
    "pow": _pow,
    "full": _full,
    "fill": _fill,
}
