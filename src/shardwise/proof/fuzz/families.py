"""The families of calls that programs are made of, and a program drawn from them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from shardwise.proof.fuzz.calls import (
    elementwise,
    indexing,
    layers,
    lists,
    passes,
    products,
    reductions,
    shapes,
    writes,
)
from shardwise.proof.fuzz.draw import DTYPES, Draw, Maker
from shardwise.proof.fuzz.program import Program

FAMILIES: dict[str, tuple[int, Sequence[Maker]]] = {
    "elementwise": (16, elementwise.CALLS),
    "products": (10, products.CALLS),
    "reductions": (10, reductions.CALLS),
    "views": (16, shapes.VIEWS),
    "joins": (4, shapes.JOINS),
    "moves": (4, (shapes.redistribute,)),
    "indexing": (9, indexing.CALLS),
    "layers": (10, layers.CALLS),
    "foreach": (4, lists.FOREACH),
    "complex": (3, lists.COMPLEX),
    "writes": (11, writes.CALLS),
    "passes": (12, passes.CALLS),
}
"""How likely a family is, and its calls."""

LENGTH = (5, 25)
"""How many calls a program has, at least and at most."""


def draw(seed: int, number: int) -> Program:
    """Program `number` of `seed`: the same one everywhere."""
    d = Draw(seed, number)
    length = d.chance.randint(*LENGTH)
    with warnings.catch_warnings(action="ignore"):
        for _ in range(d.pick(2, 3, 4)):
            d.leaf(d.shape(d.pick(1, 2, 2, 2, 3, 3, 4)), d.pick(*DTYPES))
        added = 0
        for _ in range(6 * length):
            added += d.add(_call(d))
            if added == length:
                break
        any(d.add(passes.final) for _ in range(4))
        if d.likely(0.3):
            d.add(d.pick(passes.optimize, passes.optimize, passes.clipping))
    return d.program()


def _call(d: Draw) -> Maker:
    weights = [weight for weight, _ in FAMILIES.values()]
    _, calls = d.chance.choices(list(FAMILIES.values()), weights)[0]
    return d.pick(*calls)
