"""Numbers that are no constants of a program: learning rates, counts of steps, those read out of tensors, and what is
computed of them.

To Python such a number is one of torch's symbolic ones (`torch.SymFloat`), which optimizers and torch's ops take like
any other; its node is ours. So arithmetic becomes nodes of the program, done in the same order, with the same
roundings, when it runs. Where only a number will do, to branch on it say, the value becomes a condition of the program,
if the host knows it; of a number that is read out of data nothing is known.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.optim import _adafactor

Needed = Callable[[fx.Node, Any], None]
"""Is told which number Python needs to know, and what it is."""

GUESS = 1.5
"""The value of whatever is read out of data, while a program is captured. Nothing may depend on it."""


class Number:
    """The node of a symbolic number: the value that it has while the program is captured (of data: any), the node that
    computes it, and who is told if Python needs to know it. torch asks it for what its own nodes have."""

    __slots__ = ("needed", "node", "value")

    def __init__(self, value: Any, node: Any, needed: Needed) -> None:
        self.value, self.node, self.needed = value, node, needed

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
        return Number(value, value, self.needed)

    wrap_int = wrap_float = wrap_bool = _wrap

    # Whoever needs the number itself is told of.

    def _read(self, file: str = "", line: int = 0) -> Any:
        if isinstance(self.node, fx.Node):
            self.needed(self.node, self.value)
        return self.value

    guard_int = guard_float = guard_bool = int_ = bool_ = guard_size_oblivious = _read

    def expect_true(self, file: str, line: int) -> bool:
        """An assertion of torch's, which Python's own arithmetic would make as well."""
        return self.value

    guard_or_false = guard_or_true = _read

    def trunc(self) -> Number:
        return self._wrap(math.trunc(self._read()))

    def round(self, ndigits: int | None = None) -> Number:
        return _rounded(self, *(() if ndigits is None else (self._wrap(ndigits),)))

    def str(self) -> str:
        return f"{self._read() if is_of_data(self) else self.value}"

    _graph_repr = str


def _operation(function: Callable[..., Any]) -> Callable[..., Number]:
    def apply(self: Number, *others: Number) -> Number:
        all_of_it = (self, *others)
        made = [x for x in all_of_it if isinstance(x.node, fx.Node)]
        home = next(filter(is_of_data, made), made[0] if made else None)
        value = _computed(function, [x.value for x in all_of_it], is_guess=home is not None and is_of_data(home))
        if home is None:
            return self._wrap(value)
        node = home.node.graph.call_function(function, tuple(x.node for x in all_of_it))
        node.meta.update({"number": type(value)}, **({"data": True} if is_of_data(home) else {}))
        return Number(value, node, home.needed)

    return apply


_rounded = _operation(round)


def _computed(function: Callable[..., Any], values: list[Any], *, is_guess: bool) -> Any:
    """What a program would compute; where that fails for values that are only guessed, another guess."""
    try:
        return function(*values)
    except (ArithmeticError, ValueError):
        if not is_guess:
            raise
        return GUESS


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
    **{"and_": _both, "or_": _either, "pos": operator.pos, "floor": math.floor, "ceil": math.ceil},
}
FUNCTIONS: tuple[Callable[..., Any], ...] = (*dict.fromkeys(_OPERATIONS.values()), round)
"""What numbers are computed by."""

for _name, _function in _OPERATIONS.items():
    setattr(Number, _name, _operation(_function))


def symbolic(value: Any, node: fx.Node, needed: Needed) -> Any:
    """A number as the program's Python sees it."""
    made: Any = Number(value, node, needed)
    if type(value) is bool:
        return torch.SymBool(made)
    return torch.SymInt(made) if type(value) is int else torch.SymFloat(made)


SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_ours(x: Any) -> bool:
    return isinstance(x, SYMBOLIC) and isinstance(x.node, Number)


def is_of_data(x: Number) -> bool:
    """Whether a number is read out of data, or computed of one that is."""
    return isinstance(x.node, fx.Node) and "data" in x.node.meta


def _largest(*numbers: Any) -> Any:
    return functools.reduce(torch.sym_max, map(_number, numbers)) if any(map(_is_lazy, numbers)) else max(*numbers)


def _smallest(*numbers: Any) -> Any:
    return functools.reduce(torch.sym_min, map(_number, numbers)) if any(map(_is_lazy, numbers)) else min(*numbers)


def _is_lazy(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, *SYMBOLIC))


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, torch.Tensor) else x


def _formatted(x: Any, spec: str) -> str:
    return format(x.node.guard_float("", 0), spec)


@contextmanager
def in_python() -> Iterator[None]:
    """Inside, Python's own functions take such numbers: formatting, and Adafactor's `max` and `min`, which would branch
    on what it reads out of tensors."""
    changes: list[tuple[Any, str, Any]] = [(_adafactor, "max", _largest), (_adafactor, "min", _smallest)]
    changes.append((torch.SymFloat, "__format__", _formatted))
    for owner, name, function in changes:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, _ in changes:
            delattr(owner, name)
