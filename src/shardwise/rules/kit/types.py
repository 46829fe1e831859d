"""What a rule is: a call of one aten op on global tensors, and the ways it may run on shards along one mesh axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.layout import SUM as SUM
from shardwise.layout import Layout, Partial


class Pending:
    """Of `PENDING`, its only value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "PENDING"


PENDING = Pending()
"""In a strategy: whatever reduction is pending on the input, for ops that any reduction passes through."""

AxisPlacement = int | Partial | Pending | None
"""Along one axis: the dim that is sharded (an int), a pending reduction (a `Partial`, or any: `PENDING`), or None where
replicated."""

Interval = tuple[int, int]
"""Part of a global dim: (start, stop)."""

Resize = Callable[[tuple[int, ...]], Sequence[tuple[int, ...] | None] | None]


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether numbers are rounded, so that they may have gradients."""
    return dtype.is_floating_point or dtype.is_complex


class Value:
    """A tensor inside a traced call: global shape and dtype. `layout` is that of an argument when the call begins, for
    users' rules that ask; of other tensors it is None, or replicated. `may_need_grad` says that some argument of the
    call needs a gradient, `is_parameter` that it is a parameter, or a view of one."""

    __slots__ = ("dtype", "index", "is_parameter", "layout", "may_need_grad", "ndim", "numel", "shape")

    def __init__(self, index: int, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout | None = None) -> None:
        self.index = index
        self.shape, self.ndim, self.numel = shape, len(shape), math.prod(shape)
        self.dtype = dtype
        self.layout = layout
        self.may_need_grad = False
        self.is_parameter = False

    def __repr__(self) -> str:
        return f"%{self.index}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a call along one axis: the placements that inputs must have and outputs then have.

    `cost` counts bytes-equivalents that a distributed implementation moves inside. `resize` gives the sizes of each
    output's pieces from the input's, where a sharded dim changes its length: None for an output that is to be cut
    evenly, and None for all of them where these sizes do not work.
    """

    ins: tuple[AxisPlacement, ...]
    outs: tuple[AxisPlacement, ...]
    cost: float = 0.0
    resize: Resize | None = field(default=None, compare=False)


PROGRAM_COST = 10_000.0
"""What one small reduction inside a program counts for: so little that a few of them, as in a cross entropy, are less
than any move of the input. What can be computed on the shards is not gathered, whatever its size."""

ANY_PENDING = Strategy((PENDING,), (PENDING,))
"""For ops with one input and one output."""


@dataclass(frozen=True, slots=True)
class Local:
    """How a call runs on the shards when not simply as itself: another function, or other arguments.

    `args` and `kwargs` may hold `Value`s, in place of which come their shards, and `HeldValues`. `groups` names the
    groups of mesh axes over which the function communicates; it takes a `Collectives` for each before its arguments.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[int, ...], ...] = ()
    resized: bool = False  # the same op, with only the sizes among its arguments made local
    always: bool = False  # on replicated tensors too, where otherwise the function that is called runs as it is


class Collectives(Protocol):
    """What a distributed implementation may ask of the axes along which it is distributed, all merged into one group.

    Local tensors go in and come out. `psum`, `vary`, `window`, `gather` and `scatter` carry gradients, of any order;
    every member of the group must call them, in the same order, whatever its data. Members are numbered in the order
    of the axes, so member i of the axes that split a dim holds its i-th piece.
    """

    ins: Sequence[Layout]
    size: int

    def along(self, axes: tuple[int, ...]) -> Collectives:
        """The same of other axes."""

    def psum(self, x: Tensor) -> Tensor:
        """P -> R: the sum over the group."""

    def vary(self, x: Tensor) -> Tensor:
        """R -> V: the same value, about to be used differently on each rank."""

    def window(self, x: Tensor, dim: int, have: Sequence[Interval], want: Sequence[Interval]) -> Tensor:
        """S -> S: member i has the interval `have[i]` of a global dim, and gets `want[i]`, which is within the dim.
        Wanted intervals may overlap: a halo. The gradient adds up where they do. Where every member has what it wants,
        nothing is exchanged, and the result is a view."""

    def gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """S -> V: every member's part, of `sizes[i]` in `dim`, joined along it, to be used differently on each rank."""

    def scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """P -> S: of the sum over the group, our part of `sizes[i]` in `dim`."""

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """The `sum`, `max` or `min` over the group, without gradient."""

    def reduce_in_place(self, x: Tensor, op: str) -> None:
        """The same, written over `x`, which is contiguous and nobody else's. The largest of numbers and a NaN may be
        either."""

    def stack(self, x: Tensor) -> Tensor:
        """Every member's tensor along a new first dim, without gradient."""

    def tells_all(self, numel: int) -> bool:
        """Whether to `stack` so many numbers costs less than to `reduce` them twice."""

    def verify(self, number: Tensor, check: Callable[[Any], None]) -> None:
        """Call `check`, which may raise, with the value of a tensor that all members have alike; in a program that is
        captured, in every run of it."""

    @property
    def may_wait(self) -> bool:
        """Whether members may `tell` each other later what they found."""

    def tell(self, bad: int | None, refuse: Callable[[int], None]) -> None:
        """Have all members `refuse` the least of the bad numbers that they have found, when they communicate next."""

    @property
    def is_captured(self) -> bool:
        """Whether this is a program that is captured: tensors have no data yet."""

    def index(self) -> Any:
        """Our number in the group (an argument for `map`)."""

    def offset(self, position: int, dim: int) -> Any:
        """Where our shard of an input starts in a dim (an argument for `map`)."""

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run an ordinary local function on the shards."""

    def attach(self, value: Tensor, gradient_of: Tensor) -> Tensor:
        """`value`, with the gradient of `gradient_of`."""

    def place(self, x: Tensor) -> Tensor:
        """The place of `x` in the graph: a tensor that takes no memory, and has no meaning but as an input of
        `with_gradient` that is not looked at."""

    def with_gradient(self, value: Tensor, gradient: Gradient, inputs: Sequence[Tensor], saved: Saved) -> Tensor:
        """`value`, with the gradient that a function gives. Until then nobody may write to inputs or what is saved."""

    def with_gradient_by_itself(self, value: Tensor, gradient: GradientByResult, x: Tensor) -> Tensor:
        """`value`, with the gradient of `x` that a function gives: of `value` itself, as torch has it."""


Saved = Mapping[str, Tensor]
"""What is kept for a gradient, by name."""

Gradient = Callable[[Collectives, Tensor, Sequence[Tensor], Saved], Sequence[Tensor | None]]
"""Given the gradient of a value, the inputs and what was saved: the gradients of the inputs. Where grad mode is on,
these will be differentiated in turn."""

GradientByResult = Callable[[Collectives, Tensor, Tensor], Tensor]
"""Given the gradient of a value and this value: the gradient of what it was made of, which will be differentiated in
turn where grad mode is on."""


class HeldValues:
    """An argument that differs between ranks: one entry per held rank."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)


UNDECLARED_WRITES = {"native_batch_norm": ("running_mean", "running_var")}
"""Arguments that an op writes to, in training, though its schema does not say so."""


class _Arguments(dict[str, Any]):
    """Arguments by name, which remember whether somebody looked at a float: then what follows may depend on it."""

    float_read = False

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, (float, complex)):
            self.float_read = True
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - through our own look-up


class Signature:
    """What an op's schema says, kept: torch builds it each time it is asked."""

    __slots__ = ("may_write", "name", "parameters", "returns_view")

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.name: str = schema.name.split("::")[1]
        self.parameters = tuple(
            Parameter(
                argument.name,
                argument.default_value if argument.has_default_value() else None,
                argument.kwarg_only,
                argument.alias_info is not None and argument.alias_info.is_write,
            )
            for argument in schema.arguments
        )
        self.may_write = self.name in UNDECLARED_WRITES or any(parameter.is_written for parameter in self.parameters)
        aliases = [returned.alias_info for returned in schema.returns]
        self.returns_view = any(alias is not None and not alias.is_write for alias in aliases)

    @staticmethod
    def of(op: Any) -> Signature:
        found = _signatures.get(op)
        if found is None:
            found = _signatures[op] = Signature(op)
        return found


class Parameter(NamedTuple):
    name: str
    default: Any
    kwarg_only: bool
    is_written: bool


_signatures: dict[Any, Signature] = {}


class Call:
    """One aten op applied to global tensors. `name` is the op's without namespace and overload; `is_view` says whether
    outputs share storage with inputs; `mutated` are the positions among `inputs` that the op writes to."""

    def __init__(
        self, op: Any, args: tuple, kwargs: dict[str, Any], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
    ) -> None:
        self.op, self.args, self.kwargs, self.inputs, self.outputs = op, args, kwargs, inputs, outputs
        self.signature = Signature.of(op)
        self.name = self.signature.name
        self.is_view = self.signature.returns_view
        self.mutated = self._mutated() if self.signature.may_write else ()

    @cached_property
    def bound(self) -> _Arguments:
        """All arguments by schema name, defaults filled in."""
        found = _Arguments()
        args, kwargs = self.args, self.kwargs
        for position, (name, default, kwarg_only, _) in enumerate(self.signature.parameters):
            if position < len(args) and not kwarg_only:
                found[name] = args[position]
            else:
                found[name] = kwargs.get(name, default)
        return found

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """A dim argument (an int, a list, or None for all) as non-negative dims of the first input."""
        ndim, dim = self.inputs[0].ndim, self.bound[name]
        if dim is None or (isinstance(dim, (list, tuple)) and not dim):
            return tuple(range(ndim))
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        for d in dims:  # kernels for meta tensors do not always look
            if not -max(ndim, 1) <= d < max(ndim, 1):
                low, high = -max(ndim, 1), max(ndim, 1) - 1
                raise IndexError(f"Dimension out of range (expected to be in range of [{low}, {high}], but got {d})")
        return tuple(d % ndim if ndim else 0 for d in dims)

    def _mutated(self) -> tuple[int, ...]:
        if "batch_norm" in self.name and self.bound.get("training") is False:
            return ()  # whatever the schema says
        written: set[int] = set()
        for position, parameter in enumerate(self.signature.parameters):
            if parameter.is_written:
                held = self.args[position] if position < len(self.args) else self.kwargs.get(parameter.name)
                written.update(id(value) for value in flat_values(held))
        if self.name in UNDECLARED_WRITES and self.bound.get("training", True):
            written.update(id(self.bound[name]) for name in UNDECLARED_WRITES[self.name])
        return tuple(i for i, value in enumerate(self.inputs) if id(value) in written)

    def replace(self, **arguments: Any) -> tuple[list[Any], dict[str, Any]]:
        """The call's arguments with some replaced by name."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for position, parameter in enumerate(self.signature.parameters):
            if parameter.name in arguments:
                if position < len(args):
                    args[position] = arguments[parameter.name]
                else:
                    kwargs[parameter.name] = arguments[parameter.name]
        return args, kwargs

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))}) -> {self.outputs}"


def flat_values(tree: Any) -> list[Value]:
    """The `Value`s in nested lists and tuples, in order."""
    if isinstance(tree, Value):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [value for item in tree for value in flat_values(item)]
    return []


Strategies = Callable[[Call], list[Strategy]]
Lowering = Callable[[Call, Sequence[Layout], Sequence[Layout]], Local | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an op may run on shards, and how to run it there.

    `strategies` lists the ways along one axis, the replicated one first. `local` says how the shards run, given the
    layouts chosen; None, or a rule without it, means: the op itself, on the shards, with its own arguments.
    """

    strategies: Strategies
    local: Lowering | None = None
    sees_all: bool = False  # it looks at a few numbers that every rank must see: gathering them is no news


def replicated(call: Call) -> Strategy:
    """Everything replicated: always right."""
    return Strategy((None,) * len(call.inputs), (None,) * len(call.outputs))
