"""Numbers of the host that are no constants of a program: learning rates, counts of steps, what is computed of them.

To Python such a number is one of torch's symbolic ones (`torch.SymFloat`), which optimizers and torch's ops take like
any other; its node is ours. So arithmetic becomes nodes of the program, done in the same order, with the same
roundings, when it runs. Where only a number will do, to branch on it say, the value becomes a condition of the program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx


class Number:
    """The node of a symbolic number: the value that it has while the program is captured, and the node of the program
    that computes it. torch asks it for what its own nodes have."""

    __slots__ = ("conditions", "node", "value")

    def __init__(self, value: Any, node: Any, conditions: dict[fx.Node, Any]) -> None:
        self.value, self.node, self.conditions = value, node, conditions

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def has_hint(self) -> bool:
        return True

    def _nothing(self) -> None:
        return None

    maybe_as_int = maybe_as_float = maybe_as_bool = constant_int = constant_bool = nested_int = _nothing

    def _wrap(self, value: Any) -> Number:
        return Number(value, value, self.conditions)

    wrap_int = wrap_float = wrap_bool = _wrap

    # Whoever needs the number itself makes it a condition.

    def _read(self, file: str = "", line: int = 0) -> Any:
        if isinstance(self.node, fx.Node):
            self.conditions[self.node] = self.value
        return self.value

    guard_int = guard_float = guard_bool = int_ = bool_ = guard_size_oblivious = _read

    def expect_true(self, file: str, line: int) -> bool:
        """An assertion of torch's, which Python's own arithmetic would make as well."""
        return self.value

    guard_or_false = guard_or_true = _read

    def str(self) -> str:
        return f"{self.value}"

    __repr__ = __str__ = _graph_repr = str


def _operation(function: Callable[..., Any]) -> Callable[..., Number]:
    def apply(self: Number, *others: Number) -> Number:
        all_of_it = (self, *others)
        value = function(*(x.value for x in all_of_it))
        found = next((x.node for x in all_of_it if isinstance(x.node, fx.Node)), None)
        if found is None:
            return self._wrap(value)
        graph, home = found.graph, next(x for x in all_of_it if isinstance(x.node, fx.Node))
        node = graph.call_function(function, tuple(x.node for x in all_of_it))
        node.meta["number"] = type(value)
        return Number(value, node, home.conditions)

    return apply


def _both(a: bool, b: bool) -> bool:
    return a and b


def _either(a: bool, b: bool) -> bool:
    return a or b


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "mod", "pow", "neg", "abs")},
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{
        "float_truediv": operator.truediv,
        "int_truediv": operator.truediv,
        "float_pow": operator.pow,
        "sym_sqrt": math.sqrt,
    },
    **{"pow_by_natural": operator.pow, "floordiv": operator.floordiv, "int_floordiv": operator.floordiv},
    **{"sym_float": float, "sym_int": int, "sym_max": max, "sym_min": min, "sym_not": operator.not_},
    **{"and_": _both, "or_": _either, "pos": operator.pos},
}
FUNCTIONS: tuple[Callable[..., Any], ...] = tuple(dict.fromkeys(_OPERATIONS.values()))
"""What numbers are computed by."""

for _name, _function in _OPERATIONS.items():
    setattr(Number, _name, _operation(_function))


def symbolic(value: Any, node: fx.Node, conditions: dict[fx.Node, Any]) -> Any:
    """A number as the program's Python sees it. `conditions` are those of the program: what numbers must be."""
    made: Any = Number(value, node, conditions)
    if type(value) is bool:
        return torch.SymBool(made)
    return torch.SymInt(made) if type(value) is int else torch.SymFloat(made)


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_ours(x: Any) -> bool:
    return isinstance(x, SYMBOLIC) and isinstance(x.node, Number)
