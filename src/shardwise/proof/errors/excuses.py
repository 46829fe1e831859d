"""Errors that cannot be torch's, each with the one operator and condition it is excused for, and the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Excuse:
    """Expressions that match the whole of an operator's name and of what happened."""

    operators: str
    kind: str
    detail: str
    reason: str


EXCUSES: tuple[Excuse, ...] = (
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


def reason_for(name: str, kind: str, detail: str) -> str | None:
    """Why something that became of a bad call is excused, if it is."""
    for excuse in EXCUSES:
        if excuse.kind == kind and re.fullmatch(excuse.operators, name) and re.fullmatch(excuse.detail, detail):
            return excuse.reason
    return None
