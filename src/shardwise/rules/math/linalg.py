"""Linear algebra: batches are free, and so are the columns of a right-hand side. Matrices are not sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.layout import Layout
from shardwise.layout.sizes import broadcast_shape
from shardwise.rules.kit.empty import unless_empty
from shardwise.rules.kit.indices import axes_of
from shardwise.rules.kit.notation import Factor, Factors, factor_rule
from shardwise.rules.kit.registry import register
from shardwise.rules.kit.types import AxisPlacement, Call, Collectives, Local, Rule, Strategy, replicated
from shardwise.rules.math.pointwise import broadcast
from shardwise.rules.math.reductions import PROGRAM_COST

Cores = tuple[str, ...]

_MATRICES: dict[str, str] = {
    "cholesky": "NN->NN",
    "linalg_cholesky_ex": "NN->NN,",
    "linalg_inv_ex": "NN->NN,",
    "linalg_matrix_exp": "NN->NN",
    "linalg_pinv": "MN,,->NM",
    "_linalg_det": "NN->,NN,N",
    "_linalg_slogdet": "NN->,,NN,N",
    "_linalg_eigh": "NN->N,NN",
    "_linalg_eigvals": "NN->N",
    "linalg_eig": "NN->N,NN",
    "_linalg_svd": "MN->MM,K,NN",
    "linalg_qr": "MN->MK,KN",
    "linalg_lu": "MN->MM,MK,KN",
    "linalg_lu_factor_ex": "MN->MN,K,",
}
"""The dims that follow the batch in each input and output. Capital letters must not be sharded. Where an output is not
asked for (the vectors of `svdvals`), torch gives an empty one without a batch."""

_SOLVES: dict[str, str] = {
    "_linalg_solve_ex": "NN,Nk->Nk,NN,N,",
    "linalg_solve_triangular": "NN,Nk->Nk",
    "cholesky_solve": "Nk,NN->Nk",
}
"""Each column of the right-hand side is solved for on its own. With `left=False` these are rows."""

_RAISING = frozenset({"cholesky", "linalg_pinv", "linalg_eig", "_linalg_eigvals", "_linalg_eigh", "_linalg_svd"})
"""Ops that raise for some data, and so on some ranks only, unless these agree."""


def _cores(call: Call) -> tuple[Cores, Cores]:
    """What follows the batch in each input and each output of a call."""
    if call.name in _MATRICES:
        left, right = _MATRICES[call.name].split("->")
        return tuple(left.split(","))[: len(call.inputs)], tuple(right.split(","))
    notation = _SOLVES[call.name]
    if call.bound.get("left") is False:
        notation = notation.replace("Nk", "kN").replace("Mk", "kM")
    if call.name == "_linalg_solve_ex" and _is_vector(*call.inputs):
        notation = "NN,N->N,NN,N,"
    left, right = notation.split("->")
    return tuple(left.split(",")), tuple(right.split(","))


def _is_vector(a: Any, b: Any) -> bool:
    """Whether torch takes the right-hand side of a solve as (a batch of) vectors."""
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])


def _factors(shape: tuple[int, ...], core: str, batch: tuple[int, ...]) -> tuple[Factor, ...]:
    """One factor per batch dim, as it broadcasts, and those of the core; nothing for an output that is not there."""
    num_batch = len(shape) - len(core)
    if num_batch < 0:
        return (None,) * len(shape)
    return (*broadcast(shape[:num_batch], batch), *(letter if letter.islower() else None for letter in core))


def _batch(call: Call, cores: Cores) -> tuple[int, ...]:
    shapes = (x.shape[: x.ndim - len(core)] for x, core in zip(call.inputs, cores, strict=True))
    return tuple(broadcast_shape(*shapes))


def _batched(call: Call) -> list[Strategy]:
    """An output that does not depend on the sharded factor (the LU of a solve) is the same on every rank. None of those
    is differentiable, so no gradient is counted twice."""
    in_cores, out_cores = _cores(call)
    batch = _batch(call, in_cores)
    ins = [_factors(x.shape, core, batch) for x, core in zip(call.inputs, in_cores, strict=True)]
    outs = [
        (None,) * x.ndim if x.ndim < len(core) or (x.shape == (0,) and core) else _factors(x.shape, core, batch)
        for x, core in zip(call.outputs, out_cores, strict=True)
    ]
    cost = PROGRAM_COST if _may_raise(call) else 0.0
    found = [replicated(call)]
    for factor in dict.fromkeys(f for dims in ins for f in dims if f is not None):
        found.append(Strategy(_along(factor, ins), _along(factor, outs), cost))
    return found


def _along(factor: Factor, tensors: Sequence[Sequence[Factor]]) -> tuple[AxisPlacement, ...]:
    return tuple(dims.index(factor) if factor in dims else None for dims in tensors)


# Errors that depend on the data are raised on all ranks alike


def _may_raise(call: Call) -> bool:
    return call.name in _RAISING or bool(call.bound.get("check_errors"))


def _batched_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    axes = axes_of(ins)
    if not _may_raise(call) or not axes:
        return None
    return Local(_agreeing, [call.op, len(call.outputs), *call.args], call.kwargs, groups=(axes,))


def _agreeing(group: Collectives, op: Any, num_outputs: int, *args: Any, **kwargs: Any) -> Any:
    """An op that may fail at some ranks' data: then all of them raise."""
    failed, *out = group.map(_attempt, op, num_outputs, args, kwargs)
    failed = group.reduce(failed, "max")
    if not failed.is_meta and bool(failed):
        raise torch.linalg.LinAlgError(f"{op._schema.name}: the algorithm failed for some matrices of the batch")
    return out[0] if num_outputs == 1 else tuple(out)


def _attempt(op: Any, num_outputs: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Whether an op fails, and its results, if any."""
    like = next(x for x in args if isinstance(x, Tensor))
    try:
        out = op(*args, **kwargs)
    except RuntimeError:
        return [like.new_ones((), dtype=torch.int32), *(like.new_empty(0) for _ in range(num_outputs))]
    return [like.new_zeros((), dtype=torch.int32), *([out] if isinstance(out, Tensor) else out)]


register(*_MATRICES, *_SOLVES, rule=Rule(_batched, _batched_local))
register("_linalg_check_errors", rule=Rule(lambda call: [replicated(call)], sees_all=True))


def _det_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """Of no matrices some versions of torch have no gradient, in which every rank takes part. (The determinant of an
    empty matrix is one.)"""
    return unless_empty(call, outs) if call.inputs[0].numel else None


register("_linalg_det", rule=Rule(_batched, _det_local))


# The cross product is element-wise in all dims but one


def _cross(call: Call) -> Factors:
    shape = call.outputs[0].shape
    dim = call["dim"] % len(shape)
    ins = [tuple(None if d == dim else d for d in broadcast(x.shape, shape)) for x in call.inputs]
    out = tuple(None if d == dim else d for d in range(len(shape)))
    return Factors(ins, [out], linear=[frozenset({0}), frozenset({1})])


def _cross_local(call: Call, ins: Sequence[Layout], outs: Sequence[Layout]) -> Local | None:
    """`torch.cross` looks for a dim of size three; a shard may have other dims of that size."""
    return Local(call.op, call.args, {**call.kwargs, "dim": call["dim"]}) if any(outs[0].splits) else None


register("linalg_cross", rule=factor_rule(_cross, _cross_local))
