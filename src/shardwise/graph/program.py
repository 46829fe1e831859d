"""A program: what was captured of a function. Its parts are graphs; around them, what comes in and goes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, optim

from shardwise.comm.faked import device_of
from shardwise.layout import Layout

_disabled = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a tensor in a program: on this rank, what it is a shard of not counted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]

    @staticmethod
    def of(x: Tensor) -> Facts:
        with _disabled():
            return Facts(tuple(x.size()), x.dtype, device_of(x), tuple(x.stride()))

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Line:
    """Where in the user's program a node comes from, and whether it is part of the backward pass of what is there."""

    file: str
    number: int
    backward: bool


def at(line: Line | None) -> str:
    """A line, as errors say it behind what is there."""
    return f" ({line.file}, line {line.number})" if line is not None and line.file else ""


# Where inputs come from


@dataclass(frozen=True, slots=True)
class FromArgument:
    """A shard of a tensor that a call is given: the number of the leaf among its arguments, and of the shard."""

    leaf: int
    shard: int


@dataclass(frozen=True, slots=True, eq=False)
class FromObject:
    """A tensor that the program reached, the same in every run; in the simulator, the shard of a rank of `owner`."""

    tensor: Tensor
    owner: Tensor
    shard: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FromObject) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


Place = FromArgument | FromObject
"""Where a shard is found."""


@dataclass(frozen=True, slots=True)
class FromGradient:
    """The gradient of a shard, as it is when the program begins."""

    of: Place


@dataclass(frozen=True, slots=True)
class FromGroup:
    """A number of a group of an optimizer's; of a tuple of numbers (`betas`) the one at a position."""

    optimizer: optim.Optimizer
    index: int
    name: str
    position: int | None = None

    def read(self) -> Any:
        found = self.optimizer.param_groups[self.index][self.name]
        return found if self.position is None else found[self.position]


@dataclass(frozen=True, slots=True)
class FromHost:
    """A value that the host's part of the program computes, by its number."""

    number: int


@dataclass(frozen=True, slots=True)
class FromTangent:
    """The gradient of an output, by its number among those that have one, on this rank."""

    number: int


@dataclass(frozen=True, slots=True)
class FromSaved:
    """A value that the forward pass has saved, by its number."""

    number: int


Source = FromArgument | FromGradient | FromObject | FromGroup | FromHost | FromTangent | FromSaved


# What becomes of outputs


@dataclass(frozen=True, slots=True)
class Output:
    """An output of a part: by its number, of the part of the rank held here that has this number."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that the program gives, or a number: its shards, and its layout if it is a DTensor."""

    shards: tuple[Output, ...]
    layout: Layout | None


@dataclass(frozen=True, slots=True)
class Given:
    """A result that is a tensor which the program was given: that object itself."""

    place: Place


@dataclass(frozen=True, slots=True)
class Gradient:
    """What becomes of the gradient of a leaf's shard: an output, or None."""

    of: Place
    output: Output | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """A shard that the program gives a gradient: an output of the parts that run forward and backward in one go, or
    None. If `reduced` names axes, that is one term of it, to be summed along these."""

    of: Place
    gradient: Output | None
    reduced: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Differentiable:
    """What a program needs to be one node of a larger graph."""

    leaves: tuple[Leaf, ...]
    tangents: tuple[Output, ...]
    """Outputs that have a gradient, in the order of their numbers."""
    counts: tuple[int, ...]
    """How many outputs of each part are of the forward pass: the first ones."""


# The program


@dataclass(frozen=True)
class Part:
    """A graph that runs in one go, and where its placeholders come from, in their order."""

    graph: fx.Graph
    sources: tuple[Source, ...]
    overwritten: frozenset[int] = frozenset()
    """Outputs that may be the same memory in every run: gradients, which the next run replaces."""


@dataclass(frozen=True)
class Program:
    """What runs: first the host's part, then that of each rank held here.

    `ranks` are programs of one rank each, that meet in their collectives; or, where the ranks held here have more in
    common than that, one program of all of them (`is_joint`).
    """

    host: Part
    ranks: tuple[Part, ...]
    is_joint: bool
    results: Any
    """What the function returned, with a `Result` or `Given` in the place of each tensor."""
    gradients: tuple[Gradient, ...]
    entry_gradients: tuple[tuple[Place, bool], ...]
    """Leaves whose gradient when the program begins matters, and whether that is None."""
    conditions: Part
    """What computes the numbers that conditions are about, and writes to nothing."""
    expected: tuple[Any, ...]
    """The values that they must have."""
    given: tuple[FromGroup, ...]
    """Numbers of optimizers that may be others in every run, if the program reads them or not."""
    differentiable: Differentiable | None
    """If it is a node of a larger graph: then `ranks` run forward and backward in one go, and are to be cut."""
    reports: tuple[Any, ...] = ()
    """What passes did to `ranks`: a `PassReport` of each, in their order."""
