"""Fourier transforms: all dims but the transformed ones are free. They are linear, so pending sums pass through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.rules.kit.empty import connected_zeros, skipping_empty
from shardwise.rules.kit.notation import Factor, Factors, dims_but, factor_rule
from shardwise.rules.kit.registry import register, register_function
from shardwise.rules.kit.treatments import traced_form, treat
from shardwise.rules.kit.types import Call, Local


def _transform(call: Call) -> Factors:
    transformed = call.dims() if call["dim"] else ()
    names = dims_but(call.inputs[0].ndim, transformed)
    return Factors([names], [names], linear=[frozenset({0})])


register("_fft_c2c", "_fft_r2c", "_fft_c2r", rule=skipping_empty(factor_rule(_transform)))


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
    """An empty shard transforms one signal of zeros and drops it: so a window is checked, and has a gradient, there
    as on all other ranks."""
    if x.numel():
        return function(x, *args, **kwargs)
    out = function(x.new_zeros((1, *x.shape[1:])), *args, **kwargs)[:0]
    return out + connected_zeros(x, out.shape, dtype=out.dtype, saves=False)


def _istft_meta(
    x: Tensor,
    n_fft: int,
    hop_length: Any = None,
    win_length: Any = None,
    window: Any = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """The shape of `istft`, which torch computes for real data only: that of one signal of zeros."""
    ones = torch.ones(win_length or n_fft, dtype=x.dtype.to_real())
    signal = torch.zeros(x.shape[-2:], dtype=x.dtype)
    one = torch.istft(signal, n_fft, hop_length, win_length, ones, *args, **options)
    return x.new_empty((*x.shape[:-2], *one.shape), dtype=one.dtype)


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
