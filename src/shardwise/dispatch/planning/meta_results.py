"""Results of ops on meta tensors, of which a trace needs nothing but shapes and dtypes.

Most of torch's kernels for meta tensors are written in Python: an addition takes a third of a millisecond, resampling
an image a tenth of a second. Where the shape is plain to see we do without them. Whatever is unusual, and all
complaints, are left to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout.sizes import broadcast_shape

aten = torch.ops.aten

Shape = tuple[int, ...]


def run_on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, an aten op on meta tensors."""
    if func in SHAPES:
        shape = SHAPES[func](*args) if not kwargs and args[0].is_meta else None
        if shape is not None:
            return args[0].new_empty(shape)
    elif func is aten._grouped_mm.default:
        shape = _grouped(*args, **kwargs)
        if shape is not None:
            return args[0].new_empty(shape)
    elif _is_elementwise(func):
        out = _elementwise(func, args, kwargs)
        if out is not None:
            return out
    return func(*args, **kwargs)


# Resampling


def _resampled(x: Tensor, size: Sequence[int], *_: Any) -> Shape | None:
    good = x.is_floating_point() and x.dim() == len(size) + 2 and min(*x.shape[1:], *size) > 0
    return (*x.shape[:2], *size) if good else None


def _sampled(x: Tensor, grid: Tensor, interpolation: int, padding: int, *_: Any) -> Shape | None:
    good = x.dim() == grid.dim() == 4 and x.shape[0] == grid.shape[0] and grid.shape[-1] == 2 and x.dtype == grid.dtype
    good = good and x.is_floating_point() and min(*x.shape[2:]) > 0 and 0 <= interpolation <= 2 and 0 <= padding <= 2
    return (*x.shape[:2], *grid.shape[1:3]) if good else None


# Grouped products


def _grouped(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Shape | None:
    """The kernel for meta tensors takes one dtype only, and looks at strides, which are not those of the data."""
    good = a.is_meta and a.dtype == b.dtype and a.dtype in GROUPED and bias is None and out_dtype is None
    good = good and a.dim() in (2, 3) and b.dim() in (2, 3) and a.shape[-1] == b.shape[-2]
    if not good or (a.dim() == b.dim() == 3) != (offs is None):
        return None
    if offs is None:
        return (*a.shape[:2], b.shape[2]) if a.shape[0] == b.shape[0] else None
    if offs.dim() != 1 or offs.dtype != torch.int32 or any(x.dim() == 3 and len(x) != len(offs) for x in (a, b)):
        return None
    return (len(offs), len(a), b.shape[1]) if a.dim() == b.dim() else (a.shape[-2], b.shape[-1])


GROUPED = frozenset({torch.float32, torch.float16, torch.bfloat16})


# Losses


def _margins(x: Tensor, *_: Any) -> None:
    """The kernels for meta tensors give the loss of a single row a dim."""
    if x.dim() < 2:
        raise NotImplementedError("the loss of a single row is gathered")


# Masks


def _by_bytes(x: Tensor, indices: Sequence[Tensor | None]) -> None:
    """Masks of bytes are refused by the kernel for meta tensors, which takes signed ones for them. No others are."""
    if any(index is not None and index.dtype == torch.uint8 for index in indices):
        raise NotImplementedError("how many places a mask names depends on its data")


# Norms


def _normed(x: Tensor, order: float = 2, dims: Sequence[int] | None = None, keepdim: bool = False) -> Shape | None:
    """Torch 2.11's kernel for meta tensors keeps dims of one index that are counted from the end."""
    gone = {dim % x.dim() for dim in dims or () if -x.dim() <= dim < x.dim()}
    plain = x.is_floating_point() and (bool(x.numel()) or 0 <= order < math.inf)  # others may have no norm of nothing
    if keepdim or not gone or len(gone) != len(dims or ()) or not plain:
        return None
    return tuple(size for dim, size in enumerate(x.shape) if dim not in gone)


SHAPES: dict[Any, Callable[..., Shape | None]] = {
    aten.upsample_linear1d.default: _resampled,
    aten.upsample_bilinear2d.default: _resampled,
    aten.upsample_bicubic2d.default: _resampled,
    aten.upsample_trilinear3d.default: _resampled,
    aten.grid_sampler_2d.default: _sampled,
    aten.index.Tensor: _by_bytes,
    aten.linalg_vector_norm.default: _normed,
    aten.multi_margin_loss.default: _margins,
    aten.multilabel_margin_loss_forward.default: _margins,
}
"""The shape of the result, or None where there may be something to complain about."""


# Element-wise ops

_elementwise_ops: dict[Any, bool] = {}


def _is_elementwise(func: Any) -> bool:
    found = _elementwise_ops.get(func)
    if found is None:
        schema, tags = func._schema, func.tags
        found = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        found = found and func.namespace == "aten" and func.overloadpacket.__name__ not in UNLIKE
        found = found and not any(entry.alias_info for entry in (*schema.arguments, *schema.returns))
        _elementwise_ops[func] = found
    return found


UNLIKE = frozenset({"copy", "fill"})
"""Ops that are tagged as element-wise, but whose result has the shape of the first argument, whatever the others'."""

_PLACING = frozenset({"memory_format", "device", "layout", "pin_memory"})
"""Options that say where a result is made."""


def _elementwise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An element-wise op on contiguous tensors gives contiguous ones of their common shape; of which dtype, the op
    itself says on no elements at all. None if it is not as simple as that."""
    shapes: list[Shape] = []
    simple = not any(name in _PLACING or isinstance(arg, Tensor) for name, arg in kwargs.items())
    empties = []
    for arg in args:
        if isinstance(arg, Tensor):
            simple = simple and arg.is_meta and arg.is_contiguous()
            shapes.append(tuple(arg.shape))
            arg = torch.empty((0,) if shapes[-1] else (), dtype=arg.dtype)
        elif isinstance(arg, (list, tuple)):
            return None
        empties.append(arg)
    if not simple or not any(shapes):
        return None
    try:
        shape = broadcast_shape(*shapes)
        found = func(*empties, **kwargs)
    except Exception:  # it is for the kernels of meta tensors to complain, if they do
        return None
    results = [found] if isinstance(found, Tensor) else found
    if not isinstance(results, (list, tuple)) or any(tuple(x.shape) != (0,) for x in results):
        return None
    made = [torch.empty(shape, dtype=x.dtype, device="meta") for x in results]
    return made[0] if isinstance(found, Tensor) else tuple(made)
