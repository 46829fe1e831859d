"""Compiles the Triton programs for a GPU that need not be there: `python compiled_rows.py`. What an interpreter takes,
the compiler may refuse."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwise.rules.rows import triton_numbers as numbers
from shardwise.rules.rows import triton_rows as rows
from shardwise.rules.rows import triton_softmax as softmax

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(("x", "kept", "out", "known"), "*bf16"),
    **dict.fromkeys(("target",), "*i64"),
    **dict.fromkeys(
        ("sums", "parts", "top", "largest", "weights", "of_classes", "found", "numbers", "grad", "factor"), "*fp32"
    ),
    **dict.fromkeys(("value", "whole"), "*fp32"),
    **dict.fromkeys(("less", "weight", "total"), "*fp32"),
}
FLOATS = frozenset({"part", "smoothing", "z_loss"})
TILE = {"ROWS": 1, "CLASSES": 4096, "step": 1}
LANES = {"ROWS": 1, "LANES": 1024, "step": 1}
SIDE_BY_SIDE = {"ROWS": 32, "CLASSES": 64}
FULL = ("MASS", "SMOOTHED", "WEIGHT")
VARIANTS: list[tuple[Any, dict[str, Any], dict[str, str]]] = [
    *(
        (rows._sums, {**tile, "TARGET": True, "SMOOTHED": full, "WEIGHT": full, "NUM_SUMS": sums, "SHARED": full}, {})
        for full, sums in ((False, 3), (True, 5))
        for tile in (LANES, {"ROWS": 32, "LANES": 64})
    ),
    (rows._joined, {"TARGET": True, "SMOOTHED": True, "NUM_SUMS": 5, "ROWS": 128}, {}),
    *(
        (rows._gradient, {**tile, "OF_LOGITS": not full, "TOTAL": full, **dict.fromkeys(FULL, full)}, {})
        for full in (False, True)
        for tile in ({**TILE, "out_step": 1}, SIDE_BY_SIDE)
    ),
    (rows._scaled, {"BLOCK": 8192}, {}),
    *((softmax._softmax, {**TILE, "out_step": 1, "LOG": log}, {}) for log in (False, True)),
    *((softmax._products, {**TILE, "known_step": 1, "LOG": log}, {"grad": "*bf16"}) for log in (False, True)),
    *(
        (softmax._softmax_gradient, {**TILE, "known_step": 1, "out_step": 1, "LOG": log}, {"grad": "*bf16"})
        for log in (False, True)
    ),
    *((numbers._terms, {"SMOOTHED": smoothed, "BLOCK": 128}, {}) for smoothed in (False, True)),
    *(
        (
            numbers._losses,
            {
                **{"TOP": top, "LARGEST": full, "WEIGHTED": full, "SMOOTHED": full, "Z_LOSS": full},
                **{"NUMBERS": kept, "NUM_SUMS": 5 if full else 3},
                **({"ONE": True, "MEAN": full, "BLOCK": 2048} if one else {"ONE": False, "MEAN": False, "BLOCK": 128}),
            },
            {"value": "*bf16"},
        )
        for one in (False, True)
        for full, kept, top in ((False, 0, True), (False, 3, False), (True, 5, True), (True, 5, False))
    ),
]


def compiled(program: Any, constants: dict[str, Any], types: dict[str, str]) -> Any:
    names = program.function.arg_names
    known = {**POINTERS, **types}
    signature = {n: "constexpr" if n in constants else known.get(n, "fp32" if n in FLOATS else "i64") for n in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(fn=program.function, signature=signature, constexprs=values), target=HOPPER)


if __name__ == "__main__":
    for program, constants, types in VARIANTS:
        assert compiled(program, constants, types).asm["cubin"], program.name
        print(program.name, constants)
