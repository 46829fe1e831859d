"""Calls of ops that have a rule but that none of torch's own samples makes, or none of the first ones: a few of each,
so that these rules are judged as well.

Sizes are odd, or smaller than the number of ranks, so that shards come out uneven and empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.proof.verify.calls import record
from shardwise.proof.verify.case import Case
from shardwise.rules.losses.class_losses import cross_entropy
from shardwise.rules.losses.linear_cross_entropy import linear_cross_entropy


def x(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers of both signs, the same for the same shape, none of them twice."""
    generator = torch.Generator().manual_seed(sum(size * 31**d for d, size in enumerate(shape)))
    return torch.randn(shape, dtype=dtype, generator=generator)


def f(*shape: int) -> Tensor:
    """For kernels that know single precision only."""
    return x(*shape, dtype=torch.float32)


def z(*shape: int) -> Tensor:
    return x(*shape, dtype=torch.complex128)


def at(*places: int) -> Tensor:
    return torch.tensor(places)


def ends(*places: int) -> Tensor:
    return torch.tensor(places, dtype=torch.int32)


def layer(gates: int) -> tuple[Any, ...]:
    """The state of a recurrent layer, its weights, and its options but for the last: whether the batch comes first."""
    weights = [x(3 * gates, 2), x(3 * gates, 3), x(3 * gates), x(3 * gates).flip(0)]
    state = (x(1, 5, 3), x(1, 5, 3).flip(1)) if gates == 4 else x(1, 5, 3)
    return state, weights, True, 1, 0.0, False, False


CALLS = """
aten._batch_norm_no_update(x(5, 3, 4), x(3), x(3), x(3), x(3).abs(), 0.1, 1e-5)
aten._conj_physical(z(5, 4, 3))
aten._ctc_loss(x(6, 3, 4).log_softmax(2), at(1, 2, 3, 1, 2, 2).view(3, 2), [6, 6, 6], [2, 2, 2])
aten._ctc_loss(x(6, 3, 4).log_softmax(2), at(1, 2, 3, 1, 2, 2), [6, 6, 6], [2, 2, 2])
aten._euclidean_dist(x(5, 4), x(3, 4))
aten._grid_sampler_2d_cpu_fallback(f(3, 2, 4, 5), f(3, 5, 4, 2) / 2, 0, 0, False)
aten._grouped_mm(f(9, 16), f(3, 16, 8), offs=ends(2, 2, 9))
aten._grouped_mm(f(3, 5, 16), f(16, 8), offs=ends(0, 5, 8))
aten._grouped_mm(f(5, 8), f(8, 12), offs=ends(3, 6, 8))
aten._grouped_mm(f(3, 5, 16), f(3, 16, 8))
aten._index_put_impl(x(5, 4), [at(4, 0, 3)], x(3, 4))
aten._index_put_impl(x(5, 4), [None, at(1, 1)], x(5, 2), True)
aten._is_all_true(x(5, 4) > 0)
aten._is_all_true(x(5, 4) < 99)
aten._is_any_true(x(5, 4) > 0)
aten._is_any_true(x(5, 4) > 99)
aten._linalg_eigvals(x(3, 4, 4))
aten._native_batch_norm_legit_no_training(x(5, 3, 4), x(3), x(3), x(3), x(3).abs(), 0.1, 1e-5)
aten._prelu_kernel_backward(x(5, 4), x(4, 5).t(), x(5, 4).flip(0))
aten._reshape_alias(x(4, 6), [4, 2, 3], [6, 3, 1])
aten._reshape_copy(x(4, 6), [4, 2, 3])
aten._reshape_copy(x(4, 6), [8, 3])
aten._scaled_dot_product_flash_attention_for_cpu(x(3, 2, 5, 4), x(3, 2, 6, 4), x(3, 2, 6, 4))
aten._scaled_dot_product_flash_attention_for_cpu(x(3, 2, 5, 4), x(3, 2, 6, 4), x(3, 2, 6, 4), attn_mask=x(5, 6))
aten._standard_gamma(x(5, 4).abs())
aten._unsafe_index(x(5, 4), [at(4, 0, 3)])
aten._unsafe_index_put(x(5, 4), [at(4, 0, 3)], x(3, 4), True)
aten._upsample_bicubic2d_aa(x(3, 2, 5, 4), [3, 6], False)
aten._upsample_lanczos2d_aa(x(3, 2, 5, 4), [3, 6], False)
aten._weight_norm_interface(x(5, 4), x(5, 1), 0)
aten._weight_norm_interface(x(5, 4, 3), x(1, 1, 3), 2)
aten.affine_grid_generator(x(5, 2, 3), [5, 2, 3, 4], False)
aten.affine_grid_generator(x(3, 3, 4), [3, 2, 3, 2, 2], True)
aten.cauchy(x(5, 4))
aten.col2im(x(3, 8, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1])
aten.copy(x(5, 4), x(4))
aten.copy(x(5, 4), x(5, 4).flip(0))
aten.detach_copy(x(5, 4))
aten.elu_backward(x(5, 4), 1.5, 1.0, 1.0, False, x(4, 5).t())
aten.embedding_renorm_(x(5, 4), at(1, 4, 1), 0.5, 2.0)
aten.exponential(x(5, 4))
aten.geometric(x(5, 4), 0.5)
aten.hardshrink_backward(x(5, 4), x(4, 5).t(), 0.5)
aten.hardsigmoid_backward(x(5, 4), x(4, 5).t())
aten.hardswish_backward(x(5, 4), x(4, 5).t())
aten.hardtanh_backward(x(5, 4), x(4, 5).t(), -0.5, 0.5)
aten.index(x(5, 4), [at(4, 0, 3)])
aten.index(x(5, 4), [None, at(3, 0, 0)])
aten.index(x(5, 4, 3), [at(4, 0, 3), None, at(0, 2, 1)])
aten.leaky_relu_backward(x(5, 4), x(4, 5).t(), 0.1, False)
aten.lift_fresh_copy(x(5, 4))
aten.log_normal(x(5, 4))
aten.native_dropout(x(5, 4), 0.5, True)
aten.nll_loss2d_forward: F.nll_loss(x(3, 4, 2, 5).log_softmax(1), at(*range(30)).view(3, 2, 5) % 4, reduction="mean")
aten.nll_loss2d_forward: F.nll_loss(x(3, 4, 2, 5).log_softmax(1), at(*range(30)).view(3, 2, 5) % 4, reduction="sum")
aten.nll_loss2d_forward: F.nll_loss(x(3, 4, 2, 5).log_softmax(1), at(*range(30)).view(3, 2, 5) % 4, reduction="none")
aten.normal_functional(x(5, 4))
aten.poisson(x(5, 4).abs())
aten.rand_like(x(5, 4), pin_memory=False)
aten.random(x(5, 4), 10)
aten.reflection_pad3d(x(3, 2, 4, 5, 4), [1, 2, 0, 1, 2, 1])
aten.replication_pad3d(x(3, 2, 4, 5, 4), [1, 2, 0, 1, 2, 1])
aten.select_copy(x(5, 4), 0, 3)
aten.select_copy(x(5, 4), 1, -4)
aten.slice_copy(x(5, 4), 0, 1, 5, 2)
aten.slice_copy(x(5, 4), 1, 0, 3)
aten.softplus_backward(x(5, 4), x(4, 5).t(), 1.5, 20.0)
aten.softshrink_backward(x(5, 4), x(4, 5).t(), 0.5)
aten.split_copy(x(5, 4), 2, 0)
aten.uniform(x(5, 4))
aten.unsafe_split_with_sizes(x(5, 4), [1, 3, 1], 0)
aten.view_as_complex_copy(x(5, 4, 2))
aten.view_as_real_copy(z(5, 4))
aten.zero(x(5, 4))
shardwise.cross_entropy: cross_entropy(x(5, 4), at(1, 3, 0, 2, 1), z_loss=0.2)
shardwise.cross_entropy: cross_entropy(x(5, 3), at(1, 2, 0, 2, 1), x(3).abs(), ignore_index=1, z_loss=0.2)
shardwise.linear_cross_entropy: head_loss(x(5, 3), x(7, 3), at(0, 6, 3, 1, 3), chunk_size=2)
shardwise.linear_cross_entropy: head_loss(x(5, 3), x(4, 3), at(0, 3, 3, 1, 3), ignore_index=1, reduction="sum")
shardwise.linear_cross_entropy: head_loss(x(3, 2), x(4, 2), at(0, 3, 1), **options)
shardwise.lstm: torch.lstm(x(4, 5, 2), *layer(4), False)
shardwise.lstm: torch.lstm(x(5, 4, 2), *layer(4), True)
shardwise.gru: torch.gru(x(4, 5, 2), *layer(3), False)
shardwise.gru: torch.gru(x(5, 4, 2), *layer(3), True)
shardwise.rnn_tanh: torch.rnn_tanh(x(4, 5, 2), *layer(1), False)
shardwise.rnn_tanh: torch.rnn_tanh(x(5, 4, 2), *layer(1), True)
shardwise.rnn_relu: torch.rnn_relu(x(4, 5, 2), *layer(1), False)
shardwise.rnn_relu: torch.rnn_relu(x(5, 4, 2), *layer(1), True)
"""
"""Calls of ops; in front, if it is not called by its name, the op that is to be judged."""

OPTIONS = {"linear_bias": x(4), "weight": x(4).abs(), "label_smoothing": 0.1, "z_loss": 0.2, "chunk_size": 2}
NAMES = {
    **{"torch": torch, "aten": torch.ops.aten, "F": F, "x": x, "f": f, "z": z, "at": at, "ends": ends, "layer": layer},
    **{"cross_entropy": cross_entropy, "head_loss": linear_cross_entropy, "options": OPTIONS},
}


def exists(name: str) -> bool:
    """Whether this torch has an op: some that have a rule are newer than the oldest torch that will do."""
    namespace, op = name.split("::")
    return hasattr(getattr(torch.ops, namespace), op)


def _calls() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in CALLS.strip().splitlines():
        op, _, call = line.partition(": ") if ": " in line else (line.partition("(")[0], "", line)
        found.setdefault(op.replace(".", "::"), []).append(call)
    return {name: calls for name, calls in found.items() if exists(name)}


EXTRA = _calls()
"""By op: calls of it, whatever else they call."""


def extra_calls(name: str) -> list[Case]:
    """The calls of one op that are to be judged besides those of torch's samples."""
    made = [case for call in EXTRA[name] for case in record(lambda call=call: eval(call, NAMES), (), {}, "extra")]
    return [case for case in made if case.op == name]
