"""Compiles the Triton programs for a GPU that need not be there: `python compiled_rows.py`. What an interpreter takes,
the compiler may refuse."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwise.rules.nn import triton_rows as programs

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(("x", "kept", "out", "known", "grad"), "*bf16"),
    **dict.fromkeys(("target",), "*i64"),
    **dict.fromkeys(("verdict",), "*i32"),
    **dict.fromkeys(
        ("sums", "parts", "top", "largest", "weights", "of_classes", "losses", "counts", "numbers"), "*fp32"
    ),
    **dict.fromkeys(("less", "norm", "mass", "weight", "at_target", "total"), "*fp32"),
}
FLOATS = frozenset({"part", "smoothing", "z_loss"})
TILE = {"ROWS": 1, "CLASSES": 4096, "step": 1}
SIDE_BY_SIDE = {"ROWS": 32, "CLASSES": 64}
VARIANTS: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    *(
        (programs._sums, {**tile, "TARGET": True, "SMOOTHED": full, "WEIGHT": full, "NUM_SUMS": 5 if full else 3}, {})
        for full in (False, True)
        for tile in (TILE, SIDE_BY_SIDE)
    ),
    (programs._joined, {"TARGET": True, "SMOOTHED": True, "NUM_SUMS": 5, "ROWS": 512}, {}),
    *(
        (programs._gradient, {**tile, "LESS": True, "MASS": full, "SMOOTHED": full, "WEIGHT": full}, {"grad": "*fp32"})
        for full in (False, True)
        for tile in ({**TILE, "out_step": 1}, SIDE_BY_SIDE)
    ),
    *((programs._softmax, {**TILE, "out_step": 1, "LOG": log}, {}) for log in (False, True)),
    *((programs._products, {**TILE, "known_step": 1, "LOG": log}, {}) for log in (False, True)),
    *((programs._softmax_gradient, {**TILE, "known_step": 1, "out_step": 1, "LOG": log}, {}) for log in (False, True)),
    (programs._ordered, {"BLOCK": 512}, {"x": "*i32", "out": "*i32"}),
    (programs._judged, {"BLOCK": 512}, {}),
    *((programs._terms, {"SMOOTHED": smoothed, "BLOCK": 512}, {}) for smoothed in (False, True)),
    *(
        (
            programs._losses,
            {"LARGEST": full, "WEIGHTED": full, "SMOOTHED": full, "Z_LOSS": full, "NUMBERS": numbers, "BLOCK": 512},
            {},
        )
        for full, numbers in ((False, 0), (False, 2), (True, 4))
    ),
]


def compiled(program: Any, constants: dict[str, Any], types: dict[str, str]) -> Any:
    names = program.arg_names
    known = {**POINTERS, **types}
    signature = {n: "constexpr" if n in constants else known.get(n, "fp32" if n in FLOATS else "i64") for n in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(fn=program, signature=signature, constexprs=values), target=HOPPER)


if __name__ == "__main__":
    for program, constants, types in VARIANTS:
        assert compiled(program, constants, types).asm["cubin"], program.__name__
        print(program.__name__, constants)
