"""Calls that may stand inside others, where nothing but their result is seen."""

from __future__ import annotations

from shardwise.proof.fuzz.calls import elementwise, layers, products, reductions, shapes
from shardwise.proof.fuzz.draw import Maker

INSIDE: tuple[Maker, ...] = (
    *(elementwise.unary, elementwise.unary, elementwise.binary, elementwise.kinked, products.matmul, products.linear),
    *(reductions.reduction, reductions.extremum, shapes.view, shapes.slices, layers.normalised, products.gram),
)
