"""How torch's functions are treated: the one table, with one entry per function.

Most functions need none: they are traced, and the ops that they make have rules (`registry`). An entry says what
else is to be done. What handles a function, or stands for it, is where its family is; `treat` puts it here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Handler = Callable[[Callable, tuple, dict[str, Any]], Any]


@dataclass(slots=True)
class Treatment:
    """What is done about a function beside tracing it."""

    handler: Handler | None = None
    """Answers the call in place of a plan; or gives NotImplemented, and the call is planned."""
    op: Any = None
    """The one op that a composite function is recorded as, because that has a rule of its own."""
    function: Callable | None = None
    """For an op of ours, which runs on meta tensors only: the function that it stands for."""
    runs_as: Callable | None = None
    """The binding that a Python function calls with the same arguments: it is traced and run instead."""
    traced_as: Callable | None = None
    """What is traced in place of a function. The shards run the function itself, or what the rules say."""
    unmerged: Callable | None = None
    """For a function that merges dims which may be sharded: a form that does not. It is traced, and run where
    the shards cannot run the function itself."""
    keeps_composites: bool = False
    """For such a form: the composite functions with an `op` that it calls are recorded as that."""
    program: Callable[..., Any] | None = None
    """Runs on shards what cannot be traced, because the size of its results depends on data; or NotImplemented."""
    autocast: str | None = None
    """The name by which autocast knows the function."""
    reshape: Literal["view", "view or copy", "view or error"] | None = None
    """What torch makes of a tensor by this function; the last two depend on strides."""
    reshapes_operands: bool = False
    """Torch reshapes its operands, and keeps for the backward pass what that comes to: views or copies."""
    takes_replicated: bool = False
    """Plain arguments are taken as replicated, because torch's modules make them, alike on all ranks."""
    unrecorded: bool = False
    """Autograd does not record what the function writes."""

    @property
    def stand_in(self) -> Callable | None:
        """What is planned in place of the function."""
        return self.runs_as or self.traced_as or self.unmerged


_table: dict[Any, Treatment] = {}
_untreated = Treatment()

handlers: dict[Any, Handler] = {}
"""The handlers of the table once more, by themselves: every call asks for one."""


def treat(*functions: Any, **facts: Any) -> None:
    """Say how functions are treated. What was said of a function before stays."""
    for function in functions:
        entry = _table.setdefault(function, Treatment())
        for name, fact in facts.items():
            assert getattr(entry, name) in (None, False, fact), f"{function} is treated twice: {name}"
            setattr(entry, name, fact)
        if entry.handler is not None:
            handlers[function] = entry.handler


def treatment_of(function: Any) -> Treatment:
    return _table.get(function, _untreated)


def traced_form(function: Any) -> Any:
    """What is traced in place of a function."""
    return treatment_of(function).traced_as or function


def composite_ops() -> set[Any]:
    """Ops that are made of others, and yet have rules of their own."""
    return {entry.op for entry in _table.values()}
