"""Calls while somebody watches what is communicated: they know which of their arguments moves, and why.

A plan that moves something is labelled when it is made, from what it was lowered to. Running one never looks at labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from shardwise.comm.cause import CONFLICT, INSIDE, NEEDED, NO_RULE, called, calling, name_of, reduction
from shardwise.dispatch.limits import refuse_moves
from shardwise.dispatch.modes import limits
from shardwise.dispatch.plan import Plan
from shardwise.dispatch.planning.lower import Lowered, LoweredCall
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.dispatch.positional import argument_names
from shardwise.layout import Layout
from shardwise.redistribute import Move, plan_moves
from shardwise.rules import Value
from shardwise.tensor import DTensor

Moves = tuple[Move, ...]
RESULT = "its result"


@dataclass(frozen=True, slots=True)
class Label:
    """A value that a plan moves: an argument, by its number among the tensors of the call, or one inside of it, or its
    result."""

    argument: int | None
    moves: Moves
    itemsize: int
    gathers: bool = False
    alone: bool = False  # whether it meets no other tensor
    op: Any = None  # inside of the call, of which it is the operand numbered `at`, or a result where that is None
    at: int | None = 0

    @property
    def operand(self) -> str:
        if self.op is None:
            return RESULT if self.at is None else "brought where the call needs it"
        names = [argument.name for argument in self.op._schema.arguments]
        return f"{self.op._schema.name.replace('::', '.')}, {RESULT if self.at is None else _numbered(names, self.at)}"


def labelled(plan: Plan, lowered: Lowered) -> Plan:
    """A plan that knows what it moves."""
    numbers = {value.index: number for number, value in reversed(list(enumerate(lowered.trace.inputs)))}
    labels = [
        Label(
            numbers.get(value.index),
            call.moves[at],
            value.dtype.itemsize,
            call.gathers,
            len(call.call.inputs) == 1,
            call.call.op,
            at,
        )
        for call in lowered.calls
        for at, value in enumerate(call.call.inputs)
        if not all(move.is_identity for move in call.moves[at])
    ]
    labels += [label for call in lowered.calls for label in _of_results(call, lowered.trace.results)]
    if labels:
        plan.labels = tuple(labels)  # type: ignore[attr-defined]
    return plan


def _of_results(lowered: LoweredCall, results: Sequence[Value]) -> Iterator[Label]:
    for value, moves in zip(lowered.call.outputs, lowered.out_moves, strict=True):
        if moves:
            op = None if value in results else lowered.call.op
            yield Label(None, moves, value.dtype.itemsize, op=op, at=None)


def labels_of(plan: Any, args: tuple, kwargs: dict[str, Any] | None) -> tuple[Label, ...]:
    """What a plan will move, in a call with these arguments; programs inside of functions move no argument."""
    plan = getattr(plan, "__self__", plan)
    if (choose := getattr(plan, "plan_for", None)) is not None:
        return labels_of(choose(args, kwargs), args, kwargs)
    if (labels := getattr(plan, "labels", None)) is not None:
        return labels
    if (inner := getattr(plan, "plan", None)) is not None:
        return labels_of(inner, args, kwargs)
    tensors = flat_tensors((args, kwargs or {}))
    if (moves_of := getattr(plan, "moves_of", None)) is not None:
        paths = moves_of(tensors)
    else:
        paths = [() if mover is None else mover.moves for mover in getattr(plan, "movers", ())]
    alone = len(tensors) == 1
    return tuple(Label(at, moves, tensors[at].dtype.itemsize, alone=alone) for at, moves in enumerate(paths) if moves)


class SeenCall:
    """A call that runs while somebody watches."""

    __slots__ = ("args", "func", "function", "gathers", "kwargs", "labels", "name", "outer", "tensors")

    def __init__(self, func: Callable, args: tuple, kwargs: dict[str, Any] | None, labels: tuple[Label, ...]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs or {}
        self.tensors = flat_tensors((args, self.kwargs))
        self.labels = labels
        self.outer = calling()
        self.name = name_of(func)
        self.function = self.name if self.outer is None else self.outer.function
        self.gathers = False  # set where it turns out that there is no rule

    def explain(self, path: Any, x: Tensor | None) -> tuple[str, str]:
        number = self.number(x)
        found = [label for label in self.labels if label.moves == path]
        label = next((label for label in found if label.argument == number), found[0] if found else None)
        if number is None and label is not None:
            number = label.argument  # a copy was made of it first, in another dtype say
        if label is None and number is None:
            return self._inside(""), NO_RULE if self.gathers and path else INSIDE
        argument = self.argument(number) if number is not None else "" if label is None else label.operand
        return self._inside(argument), self._why(path, label)

    def number(self, x: Tensor | None) -> int | None:
        """Which of the tensors of the call a tensor is."""
        return next((at for at, tensor in enumerate(self.tensors) if tensor is x), None)

    def argument(self, number: int) -> str:
        """An argument as users know it: `argument 1 (weight)`."""
        seen = 0
        for at, arg in enumerate((*self.args, *self.kwargs.values())):
            count = len(flat_tensors(arg))
            if number < seen + count:
                inside = "" if isinstance(arg, Tensor) else f"[{number - seen}]"
                named = at - len(self.args)
                if named >= 0:
                    return f"argument {list(self.kwargs)[named]}{inside}"
                return f"{_numbered(argument_names(self.func, self.args), at)}{inside}"
            seen += count
        raise AssertionError(number)

    def _why(self, path: Moves, label: Label | None) -> str:
        if self.gathers or (label is not None and label.gathers):
            return NO_RULE
        alone = len(self.tensors) == 1 if label is None else label.alone
        return reduction(path) or (NEEDED if alone else CONFLICT)

    def _inside(self, argument: str) -> str:
        """Said of a call that another one makes."""
        return argument if self.name == self.function else ", ".join(filter(None, (self.name, argument)))


def _numbered(names: list[str], at: int) -> str:
    return f"argument {at} ({names[at]})" if at < len(names) else f"argument {at}"


def gathered(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """A call turned out to have no rule, and is about to be gathered."""
    if isinstance(call := calling(), SeenCall):
        call.gathers = True
    if limits() is not None:
        tensors = [(at, x) for at, x in enumerate(flat_tensors((args, kwargs))) if isinstance(x, DTensor)]
        whole = [(at, x, plan_moves(x._layout, Layout(x._layout.mesh, x._layout.shape))) for at, x in tensors]
        labels = tuple(Label(at, moves, x.dtype.itemsize, gathers=True) for at, x, moves in whole if moves)
        refuse_moves(SeenCall(func, args, kwargs, labels), labels)


def unplanned(x: Tensor, moves: Moves) -> None:
    """A call is about to move a tensor, and its plan did not tell."""
    if limits() is not None and isinstance(call := calling(), SeenCall):
        refuse_moves(call, [Label(call.number(x), moves, x.dtype.itemsize)])


def watched(plan: Plan, func: Callable, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """Run a plan for those who watch."""
    call = SeenCall(func, args, kwargs, labels_of(plan, args, kwargs))
    if limits() is not None:
        refuse_moves(call, call.labels)
    return called(call, call.tensors, partial(plan, args, kwargs))
