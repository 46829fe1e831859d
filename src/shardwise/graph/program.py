"""A program: what was captured of a function, as it runs on the ranks held here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, optim

from shardwise.graph.numbers import Condition
from shardwise.layout import Layout


@dataclass(frozen=True, slots=True)
class FromArgument:
    """A shard of a tensor that a call is given: the number of the leaf among its arguments, and of the shard."""

    leaf: int
    shard: int


@dataclass(frozen=True, slots=True)
class FromObject:
    """A tensor that the program reached: the same one in every run."""

    tensor: Tensor


Place = FromArgument | FromObject
"""Where a shard is found."""


@dataclass(frozen=True, slots=True)
class FromGradient:
    """The gradient of a shard, as it is when the program begins."""

    of: Place


@dataclass(frozen=True, slots=True)
class FromGroup:
    """A number of a group of an optimizer's."""

    optimizer: optim.Optimizer
    index: int
    name: str


Source = FromArgument | FromGradient | FromObject | FromGroup
"""Where an input comes from."""


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that the program gives: the numbers of its shards among the outputs, and its layout if it is a DTensor."""

    shards: tuple[int, ...]
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Given:
    """A result that is a tensor which the program was given: that object itself."""

    place: Place


@dataclass(frozen=True, slots=True)
class Gradient:
    """What becomes of the gradient of a leaf's shard: an output, or None."""

    of: Place
    output: int | None


@dataclass(frozen=True)
class Program:
    """The graph, where its inputs come from, and what becomes of its outputs."""

    graph: fx.Graph
    sources: tuple[Source, ...]
    results: Any
    """What the function returned, with a `Result` or `Given` in the place of each tensor."""
    gradients: tuple[Gradient, ...]
    conditions: tuple[Condition, ...] = field(default=())
