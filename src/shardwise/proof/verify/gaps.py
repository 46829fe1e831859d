"""Why some ways that are true are not claimed by any rule: the known reasons."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.layout import Partial
from shardwise.proof.verify.oracle import Truth
from shardwise.rules import Call

Test = Callable[[Call, Truth], bool]


def _named(*names: str) -> Test:
    return lambda call, truth: call.name in names


def _is_backward(call: Call, truth: Truth) -> bool:
    return "backward" in call.name


def _whole(call: Call, truth: Truth) -> bool:
    return all(placement is None for placement in truth.outs)


def _extremum(call: Call, truth: Truth) -> bool:
    return any(isinstance(out, Partial) and out.reduce_op in ("max", "min") for out in truth.outs)


def _unread(call: Call, truth: Truth) -> bool:
    triangle = call.name == "linalg_solve_triangular" and call["unitriangular"]
    return bool(triangle) and call.inputs[0].shape[-1] == 1


def _is_histogram(call: Call, truth: Truth) -> bool:
    return call.name.startswith(("histogram", "_histogramdd"))


def _is_unpooling(call: Call, truth: Truth) -> bool:
    return call.name.startswith("max_unpool") and truth.outs == (Partial("sum"),)


RARE = (
    *("fractional_max_pool2d", "fractional_max_pool3d", "histc", "take"),
    *("cholesky_inverse", "geqrf", "linalg_householder_product", "ormqr", "triangular_solve"),
    *("linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lu_solve", "lu_unpack"),
)

REASONS: tuple[tuple[Test, str], ...] = (
    (_is_backward, "a backward op: gradients are computed on the shards, so it is met only when called by name"),
    (_named("_embedding_bag", "_embedding_bag_forward_only"), "embedding_bag has a rule as a whole"),
    (_named("_unsafe_masked_index", "_chunk_cat"), "internal to torch: met only when called by name"),
    (_named("as_strided"), "it reads memory, not dims, and a shard's memory is not the whole's; stft has its own rule"),
    (_is_histogram, "torch cannot trace it, for want of a kernel for meta tensors; it is rare, and gathered"),
    (_named("masked_scatter"), "true of a mask that is all or nothing: which elements go where depends on data"),
    (_named("median", "nanmedian", "kthvalue", "mode"), "true of this data, and rare: the dim is gathered"),
    (_is_unpooling, "true of distinct indices: where two windows share their maximum it would count twice"),
    (_named(*RARE), "rare, and gathered"),
    (_named("isin"), "true of this data: no element is found in another rank's part"),
    (_unread, "a triangle of one element that counts as one is not read"),
    (_whole, "the result does not depend on how this input is cut: it is not read, or this data hides it"),
    (_extremum, "a pending maximum or minimum: its value is right, its gradient was not judged"),
)
"""Tests of a gap, and the reason if one holds; the first counts."""


def reason_for(call: Call, truth: Truth) -> str:
    """The known reason for a gap; empty where the way is simply missing."""
    return next((reason for holds, reason in REASONS if holds(call, truth)), "")
