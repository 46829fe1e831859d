"""Errors that cannot be torch's, each with the one operator and condition it is excused for, and the reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shardwise.proof.bad_calls import Bad

PENDING = r"lies as \[.*\] .*P\(sum\).*"
OVERLAP = "RuntimeError: unsupported operation: some elements of the input tensor and the written-to tensor refer to.*"
NO_TERM = rf"InPlaceError: \w+ cannot write to out= that {PENDING}: a result is no term of a sum.* instead of "
NOT_RESIZED = r"InPlaceError: \w+ cannot write a result .*: a DTensor cannot be resized.* instead of "


@dataclass(frozen=True, slots=True)
class Excuse:
    """Expressions that match the whole of an operator's name and of what happened, and a test of the call."""

    operators: str
    kind: str
    detail: str
    reason: str
    holds: Callable[[Bad], bool] = lambda bad: True


def _has_a_negative_offset(bad: Bad) -> bool:
    offsets = bad.sample.kwargs.get("offsets")
    return isinstance(offsets, Tensor) and bool((offsets < 0).any())


EXCUSES: tuple[Excuse, ...] = (
    Excuse(
        "cat|gather|kthvalue|take",
        "words",
        f"({NO_TERM}|{NOT_RESIZED}){OVERLAP}",
        "out= overlaps an input, and is also pending or of another size, which is refused first",
    ),
    Excuse(
        "masked_select",
        "words",
        rf"({NO_TERM}|(\{{.*\}} before )?{NOT_RESIZED}){OVERLAP}",
        "out= overlaps an input, and is also pending or, as is known when all have looked at the mask, of another size",
    ),
    Excuse(
        "cat",
        "silent",
        f"no error instead of {OVERLAP}",
        "out= that overlaps an input: results are complete before they are written",
    ),
    Excuse(
        "aminmax|complex|gather|multinomial",
        "words",
        f"{NO_TERM}RuntimeError: (Expected o.*type|multinomial expects Long tensor out,).* got.*",
        "out= of another dtype is also pending, which is refused first",
    ),
    Excuse(
        "uniform",
        "words",
        rf"InPlaceError: aten\.uniform_ cannot write to a tensor that {PENDING} instead of RuntimeError: uniform_ .*",
        "the tensor to fill is also pending, which is refused first",
    ),
    Excuse(
        "data: embedding max_norm",
        "type",
        r"InPlaceError: aten\.embedding_renorm_ cannot write to a tensor .* instead of IndexError: select\(\).*",
        "the table, which it writes to, is also pending, and that is refused first",
    ),
    Excuse(
        "nn.functional.embedding_bag",
        "silent",
        "no error instead of IndexError: index out of range in self",
        "bags that begin before the first index: torch reads elsewhere, and mostly finds no index there",
        _has_a_negative_offset,
    ),
    Excuse(
        "masked_fill",
        "words",
        "RuntimeError: could not convert to type <class 'int'> without overflow instead of "
        "RuntimeError: value cannot be converted to type int64_t without overflow",
        "a number in a tensor, which torch reads later",
    ),
    *(
        Excuse(name, "told", f".* before {error}.*", "the sample multiplies matrices before it calls the operator")
        for name, error in (
            ("svd_lowrank", "RuntimeError: Trying to create tensor with negative dimension"),
            ("pca_lowrank", r"ValueError: q\(=-?\d+\) must be non-negative integer"),
        )
    ),
    *(
        Excuse(
            name, "told", f".* before {error}.*", "a function in Python, of several calls, of which a later one is bad"
        )
        for name, error in (
            ("__rdiv__", "RuntimeError: The size of tensor a"),
            (r"masked\.norm", "IndexError: Dimension out of range"),
            (
                r"nn\.functional\.linear_cross_entropy\.chunked(_none)?",
                "RuntimeError: expected m1 and m2 to have the same",
            ),
            (r"nn\.functional\.linear_cross_entropy\.chunked(_none)?", "RuntimeError: Index tensor must have the same"),
        )
    ),
    Excuse(
        "_unsafe_masked_index_put_accumulate",
        "told",
        ".* before (RuntimeError|IndexError): shape mismatch: .*",
        "internal to torch: it has no rule, and its kernel for meta tensors does not look",
    ),
    Excuse(
        "_foreach_zero",
        "apart",
        r"(RuntimeError: a (view of a )?leaf Variable that requires grad is being used in an in-place op\w+\.(; )?)+",
        "the simulator takes an alias of rank 0's shard, and torch tells leaves from aliases of them",
    ),
    Excuse(
        "data: histc",
        "words",
        r"(RuntimeError: torch\.histc: range of) \[nan, nan\] is not finite instead of \1 \[-nan, -nan\] is not finite",
        "the sign of a NaN",
    ),
    Excuse(
        "data: linalg.eigvalsh|data: linalg.eigh",
        "words",
        r"(_LinAlgError: .*) \(error code: \d+\)\. instead of \1 \(error code: \d+\)\.",
        "LAPACK's error code for NaNs depends on where they lie in memory",
    ),
)


def reason_for(name: str, bad: Bad, kind: str, detail: str) -> str | None:
    """Why something that became of a bad call is excused, if it is."""
    for excuse in EXCUSES:
        if excuse.kind == kind and re.fullmatch(excuse.operators, name) and re.fullmatch(excuse.detail, detail):
            if excuse.holds(bad):
                return excuse.reason
    return None
