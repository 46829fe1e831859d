"""Fourier transforms: the transformed dims whole, all others free. They are linear, so pending sums pass through."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.notation import Factor, Factors, dims_of, factor_rule
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.treatments import traced_form, treat
from shardwise.rules.kit.types import Call, HeldValues, Local


def _transform(call: Call) -> Factors:
    whole = call.dims() if call["dim"] else ()
    names = [None if d in whole else name for d, name in enumerate(dims_of(call.inputs[0].ndim))]
    return Factors([names], [names], linear=[frozenset({0})])


def _transform_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    shapes = outs[0].held_shapes
    if all(map(math.prod, shapes)):
        return None
    return Local(_transform_or_empty, [call.op, HeldValues(shapes), call.outputs[0].dtype, *call.args], call.kwargs)


def _transform_or_empty(
    op: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Libraries refuse to transform nothing; what they would give is empty, and part of the graph."""
    if x.numel():
        return op(x, *args, **kwargs)
    nothing = x.sum() if dtype.is_complex or not x.is_complex() else x.sum().real
    return (torch.zeros(shape, dtype=dtype, device=x.device) + nothing).to(dtype)


register("_fft_c2c", "_fft_r2c", "_fft_c2r", rule=factor_rule(_transform, _transform_local))


# Over several dims: one dim after the other. Where one of them is sharded, the others come first, and then it is made
# whole by an all-to-all that shards another. Real numbers begin, or end, with the last dim; so does the order of all.

aten = torch.ops.aten


def _by_dims(x: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    for d in reversed(dim):
        x = aten._fft_c2c(x, [d], normalization, forward)
    return x


def _by_dims_from_real(x: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    return _by_dims(aten._fft_r2c(x, dim[-1:], normalization, onesided), dim[:-1], normalization, True)


def _by_dims_to_real(x: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    x = _by_dims(x, dim[-2::-1], normalization, False)
    return aten._fft_c2r(x, dim[-1:], normalization, last_dim_size)


def _lying_as(whole: Tensor, x: Tensor) -> Tensor:
    """The same numbers in the order in memory that the whole transform leaves them in."""
    if x.stride() == whole.stride():
        return x
    outermost_first = sorted(range(x.dim()), key=whole.stride, reverse=True)
    places = [outermost_first.index(d) for d in range(x.dim())]
    return x.permute(outermost_first).clone(memory_format=torch.contiguous_format).permute(places)


def _in_parts(by_dims: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def parts(whole: Tensor, x: Tensor, dim: Sequence[int], *rest: Any) -> Tensor | None:
        return _lying_as(whole, by_dims(x, dim, *rest)) if len(dim) > 1 else None

    return parts


treat(aten._fft_c2c.default, parts=_in_parts(_by_dims))
treat(aten._fft_r2c.default, parts=_in_parts(_by_dims_from_real))
treat(aten._fft_c2r.default, parts=_in_parts(_by_dims_to_real))


# Short-time transforms and their inverses: signals are free


def _short_time(call: Call) -> Factors:
    batched = call["input"].ndim == (2 if call.name == "stft" else 3)
    signals: list[Factor] = ["signal"] if batched else []
    x, out = ([*signals, *[None] * (value.ndim - len(signals))] for value in (call["input"], call.outputs[0]))
    window: list[Factor] = [None]
    return Factors([x, *[window] * (len(call.inputs) - 1)], [out], linear=[frozenset({0})])


def _short_time_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local:
    function = torch.stft if call.name == "stft" else torch.istft
    return Local(_signals_or_none, [function, *call.args], call.kwargs)


def _signals_or_none(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Where there is no signal, none of a signal of zeros: so a window is checked, and has a gradient, on all ranks."""
    if x.numel():
        return function(x, *args, **kwargs)
    out = function(x.new_zeros((1, *x.shape[1:])), *args, **kwargs)[:0]
    return out + (x.sum() if out.is_complex() or not x.is_complex() else x.sum().real)


def _istft_meta(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """What `istft` gives; torch has it for real data only."""
    frequencies = n_fft // 2 + 1 if (not return_complex if onesided is None else onesided) else n_fft
    if x.ndim > 1 and x.shape[-2] != frequencies:  # torch refuses
        zeros = torch.zeros((), dtype=x.dtype).expand(x.shape)
        torch.istft(zeros, n_fft, hop_length, win_length, None, center, normalized, onesided, length, return_complex)
    whole = n_fft + (hop_length or n_fft // 4) * (x.shape[-1] - 1)
    kept = length if length is not None else whole - n_fft // 2 * 2 if center else whole
    return x.new_empty((*x.shape[:-2], kept), dtype=x.dtype if return_complex else x.dtype.to_real())


_RULE = factor_rule(_short_time, _short_time_local)
_SIGNAL = "Tensor input, int n_fft, int? hop_length=None, int? win_length=None, Tensor? window=None, bool center=True, "
register_function(
    torch.stft,
    f"{_SIGNAL} str pad_mode='reflect', bool normalized=False, bool? onesided=None, bool? return_complex=None, "
    f"bool? align_to_window=None",
    rule=_RULE,
)
register_function(
    torch.istft,
    f"{_SIGNAL} bool normalized=False, bool? onesided=None, int? length=None, bool return_complex=False",
    rule=_RULE,
    meta=_istft_meta,
)
treat(Tensor.stft, traced_as=traced_form(torch.stft))
treat(Tensor.istft, traced_as=traced_form(torch.istft))
