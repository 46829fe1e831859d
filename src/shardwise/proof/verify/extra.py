"""Calls of ops that have a rule but that none of torch's own samples makes, or none of the first ones: a few of each,
so that these rules are judged as well.

Sizes are odd, or smaller than the number of ranks, so that shards come out uneven and empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.proof.verify.calls import record
from shardwise.proof.verify.case import Case

aten = torch.ops.aten


def _x(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers of both signs, the same for the same shape, none of them twice."""
    generator = torch.Generator().manual_seed(sum(size * 31**d for d, size in enumerate(shape)))
    return torch.randn(shape, dtype=dtype, generator=generator)


def _f(*shape: int) -> Tensor:
    """For kernels that know single precision only."""
    return _x(*shape, dtype=torch.float32)


def _at(*places: int) -> Tensor:
    return torch.tensor(places)


def _ends(*places: int) -> Tensor:
    return torch.tensor(places, dtype=torch.int32)


def _elementwise_gradients() -> dict[str, list[Callable[[], Any]]]:
    """Gradients of activations: of the one that comes in, and the argument, and numbers."""
    g, x = _x(5, 4), _x(4, 5).t()
    numbers: dict[str, tuple[float, ...]] = {
        "hardshrink_backward": (0.5,),
        "hardsigmoid_backward": (),
        "hardswish_backward": (),
        "hardtanh_backward": (-0.5, 0.5),
        "leaky_relu_backward": (0.1, False),
        "softplus_backward": (1.5, 20.0),
        "softshrink_backward": (0.5,),
    }
    found: dict[str, list[Callable[[], Any]]] = {
        f"aten::{name}": [partial(getattr(aten, name), g, x, *given)] for name, given in numbers.items()
    }
    found["aten::elu_backward"] = [lambda: aten.elu_backward(g, 1.5, 1.0, 1.0, False, x)]
    found["aten::_prelu_kernel_backward"] = [lambda: aten._prelu_kernel_backward(g, x, _x(5, 4).flip(0))]
    return found


def _layers() -> dict[str, list[Callable[[], Any]]]:
    """Recurrent layers: input, states and weights of one layer, with time or the batch first."""
    found: dict[str, list[Callable[[], Any]]] = {}
    for function, gates in ((torch.lstm, 4), (torch.gru, 3), (torch.rnn_tanh, 1), (torch.rnn_relu, 1)):
        weights = [_x(3 * gates, 2), _x(3 * gates, 3), _x(3 * gates), _x(3 * gates).flip(0)]
        state: Any = (_x(1, 5, 3), _x(1, 5, 3).flip(1)) if gates == 4 else _x(1, 5, 3)
        rest = (weights, True, 1, 0.0, False, False)
        found[f"shardwise::{function.__name__}"] = [
            partial(function, _x(4, 5, 2), state, *rest, False),
            partial(function, _x(5, 4, 2), state, *rest, True),
        ]
    return found


def exists(name: str) -> bool:
    """Whether this torch has an op: some that have a rule are newer than the oldest torch that will do."""
    namespace, op = name.split("::")
    return hasattr(getattr(torch.ops, namespace), op)


_ALL: dict[str, Sequence[Callable[[], Any]]] = {
    **_elementwise_gradients(),
    **_layers(),
    "aten::_batch_norm_no_update": [
        lambda: aten._batch_norm_no_update(_x(5, 3, 4), _x(3), _x(3), _x(3), _x(3).abs(), 0.1, 1e-5)
    ],
    "aten::_conj_physical": [lambda: aten._conj_physical(_x(5, 4, 3, dtype=torch.complex128))],
    "aten::_ctc_loss": [
        lambda: torch._ctc_loss(_x(6, 3, 4).log_softmax(2), _at(1, 2, 3, 1, 2, 2).view(3, 2), [6, 6, 6], [2, 2, 2]),
        lambda: torch._ctc_loss(_x(6, 3, 4).log_softmax(2), _at(1, 2, 3, 1, 2, 2), [6, 6, 6], [2, 2, 2]),
    ],
    "aten::_euclidean_dist": [lambda: aten._euclidean_dist(_x(5, 4), _x(3, 4))],
    "aten::_grid_sampler_2d_cpu_fallback": [
        lambda: aten._grid_sampler_2d_cpu_fallback(_f(3, 2, 4, 5), _f(3, 5, 4, 2) / 2, 0, 0, False)
    ],
    "aten::_grouped_mm": [
        lambda: torch._grouped_mm(_f(9, 16), _f(3, 16, 8), offs=_ends(2, 2, 9)),
        lambda: torch._grouped_mm(_f(3, 5, 16), _f(16, 8), offs=_ends(0, 5, 8)),
        lambda: torch._grouped_mm(_f(5, 8), _f(8, 12), offs=_ends(3, 6, 8)),
        lambda: torch._grouped_mm(_f(3, 5, 16), _f(3, 16, 8)),
    ],
    "aten::_index_put_impl": [
        lambda: aten._index_put_impl(_x(5, 4), [_at(4, 0, 3)], _x(3, 4)),
        lambda: aten._index_put_impl(_x(5, 4), [None, _at(1, 1)], _x(5, 2), True),
    ],
    "aten::_is_all_true": [lambda: aten._is_all_true(_x(5, 4) > 0), lambda: aten._is_all_true(_x(5, 4) < 99)],
    "aten::_is_any_true": [lambda: aten._is_any_true(_x(5, 4) > 0), lambda: aten._is_any_true(_x(5, 4) > 99)],
    "aten::_linalg_eigvals": [lambda: aten._linalg_eigvals(_x(3, 4, 4))],
    "aten::_native_batch_norm_legit_no_training": [
        lambda: aten._native_batch_norm_legit_no_training(_x(5, 3, 4), _x(3), _x(3), _x(3), _x(3).abs(), 0.1, 1e-5)
    ],
    "aten::_reshape_alias": [lambda: aten._reshape_alias(_x(4, 6), [4, 2, 3], [6, 3, 1])],
    "aten::_reshape_copy": [
        lambda: aten._reshape_copy(_x(4, 6), [4, 2, 3]),
        lambda: aten._reshape_copy(_x(4, 6), [8, 3]),
    ],
    "aten::_scaled_dot_product_flash_attention_for_cpu": [
        lambda: aten._scaled_dot_product_flash_attention_for_cpu(_x(3, 2, 5, 4), _x(3, 2, 6, 4), _x(3, 2, 6, 4)),
        lambda: aten._scaled_dot_product_flash_attention_for_cpu(
            _x(3, 2, 5, 4), _x(3, 2, 6, 4), _x(3, 2, 6, 4), attn_mask=_x(5, 6)
        ),
    ],
    "aten::_standard_gamma": [lambda: aten._standard_gamma(_x(5, 4).abs())],
    "aten::_unsafe_index": [lambda: aten._unsafe_index(_x(5, 4), [_at(4, 0, 3)])],
    "aten::_unsafe_index_put": [lambda: aten._unsafe_index_put(_x(5, 4), [_at(4, 0, 3)], _x(3, 4), True)],
    "aten::_upsample_bicubic2d_aa": [lambda: aten._upsample_bicubic2d_aa(_x(3, 2, 5, 4), [3, 6], False)],
    "aten::_upsample_lanczos2d_aa": [lambda: aten._upsample_lanczos2d_aa(_x(3, 2, 5, 4), [3, 6], False)],
    "aten::_weight_norm_interface": [
        lambda: aten._weight_norm_interface(_x(5, 4), _x(5, 1), 0),
        lambda: aten._weight_norm_interface(_x(5, 4, 3), _x(1, 1, 3), 2),
    ],
    "aten::affine_grid_generator": [
        lambda: aten.affine_grid_generator(_x(5, 2, 3), [5, 2, 3, 4], False),
        lambda: aten.affine_grid_generator(_x(3, 3, 4), [3, 2, 3, 2, 2], True),
    ],
    "aten::col2im": [lambda: aten.col2im(_x(3, 8, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
    "aten::copy": [lambda: aten.copy(_x(5, 4), _x(4)), lambda: aten.copy(_x(5, 4), _x(5, 4).flip(0))],
    "aten::detach_copy": [lambda: torch.detach_copy(_x(5, 4))],
    "aten::embedding_renorm_": [lambda: torch.embedding_renorm_(_x(5, 4), _at(1, 4, 1), 0.5, 2.0)],
    "aten::index": [
        lambda: _x(5, 4)[_at(4, 0, 3)],
        lambda: _x(5, 4)[:, _at(3, 0, 0)],
        lambda: _x(5, 4, 3)[_at(4, 0, 3), :, _at(0, 2, 1)],
    ],
    "aten::lift_fresh_copy": [lambda: aten.lift_fresh_copy(_x(5, 4))],
    "aten::native_dropout": [lambda: torch.native_dropout(_x(5, 4), 0.5, True)],
    "aten::nll_loss2d_forward": [
        partial(F.nll_loss, _x(3, 4, 2, 5).log_softmax(1), _at(*range(30)).view(3, 2, 5) % 4, reduction=reduction)
        for reduction in ("mean", "sum", "none")
    ],
    "aten::normal_functional": [lambda: aten.normal_functional(_x(5, 4))],
    "aten::poisson": [lambda: torch.poisson(_x(5, 4).abs())],
    "aten::rand_like": [lambda: torch.rand_like(_x(5, 4))],
    "aten::random": [lambda: aten.random(_x(5, 4), 10)],
    "aten::reflection_pad3d": [lambda: F.pad(_x(3, 2, 4, 5, 4), (1, 2, 0, 1, 2, 1), mode="reflect")],
    "aten::replication_pad3d": [lambda: F.pad(_x(3, 2, 4, 5, 4), (1, 2, 0, 1, 2, 1), mode="replicate")],
    "aten::select_copy": [lambda: torch.select_copy(_x(5, 4), 0, 3), lambda: torch.select_copy(_x(5, 4), 1, -4)],
    "aten::slice_copy": [lambda: torch.slice_copy(_x(5, 4), 0, 1, 5, 2), lambda: torch.slice_copy(_x(5, 4), 1, 0, 3)],
    "aten::split_copy": [lambda: torch.split_copy(_x(5, 4), 2, 0)],
    "aten::unsafe_split_with_sizes": [lambda: torch.unsafe_split_with_sizes(_x(5, 4), [1, 3, 1], 0)],
    "aten::view_as_complex_copy": [lambda: torch.view_as_complex_copy(_x(5, 4, 2))],
    "aten::view_as_real_copy": [lambda: torch.view_as_real_copy(_x(5, 4, dtype=torch.complex128))],
    "aten::zero": [lambda: aten.zero(_x(5, 4))],
    **{
        f"aten::{name}": [partial(getattr(aten, name), _x(5, 4), *given)]
        for name, given in {
            "cauchy": (),
            "exponential": (),
            "geometric": (0.5,),
            "log_normal": (),
            "uniform": (),
        }.items()
    },
}
EXTRA = {name: functions for name, functions in _ALL.items() if exists(name)}
"""By op: functions that call it, whatever else they call."""


def extra_calls(name: str) -> list[Case]:
    """The calls of one op that are to be judged besides those of torch's samples."""
    return [case for function in EXTRA[name] for case in record(function, (), {}, "extra") if case.op == name]
