"""What torch refuses although its kernels for meta tensors let it pass, so that a trace does not find it.

Asked of torch itself, on numbers of the global shapes, before a call is planned: so the error is torch's own, speaks of
whole tensors, comes on all ranks alike, and nothing was moved before. Only calls that look wrong are asked about, and
complex numbers, for which many ops have no kernel: once for each op and kind of arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.rules.kit.treatments import treatment_of

if TYPE_CHECKING:
    from shardwise.rules.kit.types import Call

TOO_MANY = 1 << 25
"""Elements that are not worth making only to hear an error early."""

MANY = 1 << 16
"""Elements that are not worth computing with only to hear whether it can be done."""

_known: set[tuple] = set()


def refuse(call: Call) -> None:
    """Raise what torch raises for such arguments, if it does."""
    op = getattr(call, "op", None)
    if (getattr(op, "namespace", None) != "aten" and treatment_of(op).function is None) or not call.inputs:
        return  # of others it is not known that they do nothing but compute
    suspicious = SUSPICIOUS.get(call.name.rstrip("_"))
    given = sum(value.numel for value in call.inputs)
    if suspicious is not None and suspicious(call) and given <= TOO_MANY:
        _ask(call)
    elif any(value.dtype in (torch.complex64, torch.complex128) for value in call.inputs):
        kind = (call.op, *((value.dtype, value.ndim) for value in call.inputs))
        if kind not in _known and given + sum(value.numel for value in call.outputs) <= MANY:
            _ask(call, only=_of_dtypes)
            _known.add(kind)


def _ask(call: Call, only: Callable[[Exception], bool] = lambda error: True) -> None:
    """Run the op on zeros, and on ones: what is said to both is said of any data, unless both are bad data."""
    said = [_said(call, fill) for fill in (torch.zeros, torch.ones)]
    if said[0] is not None and str(said[0]) == str(said[1]) and only(said[0]):
        raise said[0] from None


def _of_dtypes(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or any(word in str(error) for word in ("type", "complex"))


def _said(call: Call, fill: Callable[..., Tensor]) -> Exception | None:
    values = {id(value) for value in call.inputs}

    def filled(tree: Any) -> Any:
        if id(tree) in values:
            return fill(tree.shape, dtype=tree.dtype)
        return [filled(item) for item in tree] if isinstance(tree, (list, tuple)) else tree

    args, kwargs = filled(call.args), {name: filled(arg) for name, arg in call.kwargs.items()}
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            (treatment_of(call.op).function or call.op)(*args, **kwargs)
    except Exception as error:
        return error.with_traceback(None)
    return None


# What looks wrong. These look at shapes, dtypes and integers: a float that is looked at makes a plan of its own.


def _dtypes_differ(call: Call) -> bool:
    return len({value.dtype for value in call.inputs}) > 1


def _convolution(call: Call) -> bool:
    x, weight, bias, groups = call["input"], call["weight"], call["bias"], call["groups"]
    stride, dilation, padding = call["stride"], call["dilation"], call["padding"]
    if 0 in (*x.shape[2:], *call.outputs[0].shape[2:]):  # some kernels take nothing, or make it, and others do not
        return True
    if weight.ndim != x.ndim or groups < 1 or min(*stride, *dilation) < 1 or min(padding) < 0 or _dtypes_differ(call):
        return True
    if any(len(numbers) not in (1, x.ndim - 2) for numbers in (stride, dilation, padding)) or weight.shape[0] % groups:
        return True
    reads, makes = weight.shape[1] * groups, weight.shape[0]
    if call["transposed"]:
        reads, makes = makes, reads
        if any(more >= max(step, gap) for more, step, gap in zip(call["output_padding"], stride, dilation)):
            return True
    return x.shape[1] != reads or (bias is not None and bias.shape != (makes,))


_PRODUCTS: dict[str, Callable[[Any, Any], tuple[int, ...]]] = {
    "addmm": lambda a, b: (a[0], b[1]),
    "addmv": lambda a, b: (a[0],),
    "addr": lambda a, b: (a[0], b[0]),
    "baddbmm": lambda a, b: (a[0], a[1], b[2]),
    "addbmm": lambda a, b: (a[1], b[2]),
}


def _product(call: Call) -> bool:
    """What a product is added to broadcasts to it, not the other way round."""
    _, a, b = (value.shape for value in call.inputs[:3])
    return _dtypes_differ(call) or call.outputs[0].shape != _PRODUCTS[call.name.rstrip("_")](a, b)


def _linear(call: Call) -> bool:
    return _matmul(call) or call.outputs[0].shape != (*call["input"].shape[:-1], *call["weight"].shape[:-1])


def _matmul(call: Call) -> bool:
    """Not traced further, so that autocast has not made the dtypes one yet."""
    return _dtypes_differ(call) and not torch._C._is_any_autocast_enabled()


def _at_rows(call: Call) -> bool:
    """A 1-d index of rows, and a source that has them."""
    x, index, dim = call["self"], call["index"], call["dim"]
    ndim = max(x.ndim, 1)
    if index.ndim > 1 or index.dtype not in (torch.int32, torch.int64) or not -ndim <= dim < ndim:
        return True
    if not x.ndim and index.numel != 1:
        return True
    if call.bound.get("reduce", "mean") not in ("prod", "mean", "amax", "amin"):
        return True
    if "source" not in call.bound:
        return False
    source = call["source"]
    shape = [index.numel if d == dim % ndim else size for d, size in enumerate(x.shape)]
    return source.dtype != x.dtype or list(source.shape) != shape


def _at_places(call: Call) -> bool:
    """Indices that broadcast, and values that broadcast to what they name."""
    x, values, indices = call["self"], call["values"], call["indices"]
    given = [index for index in indices if index is not None]
    dtypes = {index.dtype for index in given}
    if not given or values.dtype != x.dtype or not dtypes <= {torch.int32, torch.int64, torch.bool, torch.uint8}:
        return True
    if torch.bool in dtypes or torch.uint8 in dtypes:
        return False  # how many they name is not known
    if len(indices) > x.ndim:
        return True
    try:
        named = torch.broadcast_shapes(*(index.shape for index in given))
    except RuntimeError:
        return True
    kept = [size for d, size in enumerate(x.shape) if d >= len(indices) or indices[d] is None]
    first = next(d for d, index in enumerate(indices) if index is not None)
    if any(index is None for index in indices[first : first + len(given)]):
        first = 0
    shape = [*kept[:first], *named, *kept[first:]]
    pairs = zip(reversed(values.shape), reversed(shape), strict=False)
    return values.ndim > len(shape) or any(size not in (1, whole) for size, whole in pairs)


def _in_table(call: Call) -> bool:
    """Rows of a table are named by integers."""
    return call["indices"].dtype not in (torch.int32, torch.int64)


def _put(call: Call) -> bool:
    x, index, source = call["self"], call["index"], call["source"]
    return index.dtype != torch.int64 or source.dtype != x.dtype or index.numel != source.numel


def _multinomial(call: Call) -> bool:
    x, count = call["self"], call["num_samples"]
    if x.ndim not in (1, 2) or not x.dtype.is_floating_point or count <= 0 or x.shape[-1] > 1 << 24:
        return True
    return (not call["replacement"] and count > x.shape[-1]) or any(v.dtype != torch.int64 for v in call.inputs[1:])


def _batch_norm(call: Call) -> bool:
    given = [call.bound.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    channels = call["input"].shape[1:2]
    return any(value is not None and value.shape != channels for value in given)


def _of_floats(call: Call) -> bool:
    return any(value.dtype.is_floating_point for value in call.inputs)


def _pivots(call: Call) -> bool:
    return call["LU_pivots"].shape[-1:] != (min(call["LU_data"].shape[-2:], default=0),)


def _smaller(call: Call) -> bool:
    return torch.broadcast_shapes(call["self"].shape, call["target"].shape) != call["self"].shape


def _of_nothing(call: Call) -> bool:
    """Of a batch that may be empty."""
    return 0 in (*call.inputs[0].shape[1:], *call.outputs[0].shape[1:])


def _of_another_dtype(call: Call) -> bool:
    source = call.bound.get("src")
    return getattr(source, "dtype", call["self"].dtype) != call["self"].dtype


def _gradient(call: Call) -> bool:
    return call["grad_output"].shape != call["output"].shape


SUSPICIOUS: dict[str, Callable[[Call], bool]] = {
    "convolution": _convolution,
    "linear": _linear,
    "matmul": _matmul,
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "complex", "linalg_cross"), _dtypes_differ),
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce", "index_select"), _at_rows),
    **dict.fromkeys(("index_put", "_index_put_impl"), _at_places),
    "embedding": _in_table,
    "put": _put,
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"), _batch_norm),
    "bucketize": lambda call: call["boundaries"].ndim != 1,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _of_another_dtype),
    "masked_scatter": lambda call: call["mask"].dtype != torch.bool,
    "multinomial": _multinomial,
    "soft_margin_loss": _smaller,
    "aminmax": _dtypes_differ,
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), lambda call: call["divisor_override"] == 0),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"), _of_nothing),
    **dict.fromkeys(("upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"), _of_nothing),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _of_nothing),
    "lu_unpack": _pivots,
    **dict.fromkeys(("gcd", "lcm", "bitwise_left_shift", "bitwise_right_shift"), _of_floats),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _gradient),
}
