"""Making a program that fails small: parts are left out and leaves made plainer, as long as it still fails alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwise.layout import Replicate, Shard
from shardwise.proof.fuzz.program import Leaf, Line, Program

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, *, most: int = 2000) -> Program:
    """The smallest program found that still fails, after at most so many tries."""
    tries = iter(range(most))
    while True:
        smaller = _first(program, fails, tries)
        if smaller is None:
            return program
        program = smaller


def _first(program: Program, fails: Fails, tries: Iterator[int]) -> Program | None:
    for candidate in _smaller(program):
        if next(tries, None) is None:
            return None
        if fails(candidate):
            return candidate
    return None


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are a step smaller, those first that are the most so."""
    size = len(program.parts) // 2
    while size:
        for start in range(0, len(program.parts), size):
            yield _without(program, start, start + size)
        size //= 2
    yield from _fewer_ranks(program)
    for index, part in enumerate(program.parts):
        if isinstance(part, Leaf):
            yield from (program.with_part(index, leaf) for leaf in _plainer(part))
        else:
            yield from (program.with_part(index, line) for line in _shorter(part))


def _without(program: Program, start: int, stop: int) -> Program:
    for index in reversed(range(start, min(stop, len(program.parts)))):
        if index < len(program.parts):
            program = program.without(index)
    return program


def _fewer_ranks(program: Program) -> Iterator[Program]:
    """On one axis of a mesh of several, and on two ranks."""
    if len(program.mesh) > 1:
        for axis in range(len(program.mesh)):
            leaves = [
                replace(p, placements=(p.placements[axis],), sizes=None) if isinstance(p, Leaf) else p
                for p in program.parts
            ]
            yield Program((program.mesh[axis],), tuple(leaves))
    elif program.mesh[0] > 2:
        leaves = [replace(p, sizes=None) if isinstance(p, Leaf) else p for p in program.parts]
        yield Program((2,), tuple(leaves))


def _plainer(leaf: Leaf) -> Iterator[Leaf]:
    """Leaves that are a step plainer."""
    if leaf.sizes is not None:
        yield replace(leaf, sizes=None)
    if leaf.local:
        yield replace(leaf, local=False)
    if leaf.grad:
        yield replace(leaf, grad=False)
    for axis, placement in enumerate(leaf.placements):
        if placement != Replicate():
            placements = (*leaf.placements[:axis], Replicate(), *leaf.placements[axis + 1 :])
            yield replace(leaf, placements=placements, sizes=None)
    for dim, size in enumerate(leaf.shape):
        if size > 1:
            for less in dict.fromkeys((1, size // 2, size - 1)):
                yield replace(leaf, shape=(*leaf.shape[:dim], less, *leaf.shape[dim + 1 :]), sizes=None)
    if leaf.shape and math.prod(leaf.shape) == 1 and not any(isinstance(p, Shard) for p in leaf.placements):
        yield replace(leaf, shape=leaf.shape[1:])


def _shorter(line: Line) -> Iterator[Line]:
    """Lines with one of several statements, or one of several terms, left out."""
    statements = line.text.split("; ")
    for index in range(len(statements)):
        if len(statements) > 1:
            yield replace(line, text="; ".join(statements[:index] + statements[index + 1 :]))
    if line.text.startswith("(") and line.text.endswith(").backward()"):
        terms = line.text[1 : -len(").backward()")].split(" + ")
        for index in range(len(terms)):
            if len(terms) > 1:
                yield replace(line, text=f"({' + '.join(terms[:index] + terms[index + 1 :])}).backward()")
