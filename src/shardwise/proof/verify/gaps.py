"""Why some ways that are true are not claimed by any rule: the known reasons."""

from __future__ import annotations

from shardwise.layout import SUM, Partial
from shardwise.proof.verify.oracle import Truth
from shardwise.rules import Call

OPS = {
    "embedding_bag has a rule as a whole": "_embedding_bag _embedding_bag_forward_only",
    "internal to torch: met only when called by name": "_unsafe_masked_index _chunk_cat",
    "it reads memory, not dims, and a shard's memory is not the whole's; stft has its own rule": "as_strided",
    "torch cannot trace it, for want of a kernel for meta tensors; it is rare, and gathered": """
        histogram histogramdd _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors""",
    "true of a mask that is all or nothing: which elements go where depends on data": "masked_scatter",
    "true of this data, and rare: the dim is gathered": "median nanmedian kthvalue mode",
    "rare, and gathered": """
        fractional_max_pool2d fractional_max_pool3d histc take cholesky_inverse geqrf linalg_householder_product ormqr
        triangular_solve linalg_ldl_factor_ex linalg_ldl_solve linalg_lu_solve lu_unpack""",
    "true of this data: no element is found in another rank's part": "isin",
}
"""Ops by reason."""


def reason_for(call: Call, truth: Truth) -> str:
    """The known reason for a gap; empty where the way is simply missing."""
    if "backward" in call.name:
        return "a backward op: gradients are computed on the shards, so it is met only when called by name"
    for reason, names in OPS.items():
        if call.name in names.split():
            return reason
    if call.name.startswith("max_unpool") and truth.outs == (SUM,):
        return "true of distinct indices: where two windows share their maximum it would count twice"
    if call.name == "linalg_solve_triangular" and call["unitriangular"] and call.inputs[0].shape[-1] == 1:
        return "a triangle of one element that counts as one is not read"
    if all(placement is None for placement in truth.outs):
        return "the result does not depend on how this input is cut: it is not read, or this data hides it"
    if any(isinstance(out, Partial) and out.reduce_op in ("max", "min") for out in truth.outs):
        return "a pending maximum or minimum: its value is right, its gradient was not judged"
    return ""
