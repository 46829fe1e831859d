"""What the host computes, as a person would write it: `1.0 - lr * 0.01`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from shardwise.graph.nodes import Draw

LONGEST = 40
"""Characters, beyond which a number is only called by its number."""

_SIGNS: dict[Callable[..., Any], tuple[str, int]] = {
    operator.add: ("+", 1),
    operator.sub: ("-", 1),
    operator.mul: ("*", 2),
    operator.truediv: ("/", 2),
    operator.floordiv: ("//", 2),
    operator.mod: ("%", 2),
    operator.pow: ("**", 4),
}
"""Operators with how strongly they bind."""
_SAME = (float, int)
"""Functions of numbers that need not be said."""
_LOOSEST, _NEGATED, _WHOLE = 0, 3, 5


def expressions(graph: fx.Graph, names: Mapping[fx.Node, str]) -> list[str]:
    """The outputs of the host's part. `names` are those of its placeholders."""
    said: dict[fx.Node, tuple[str, int]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            said[node] = names.get(node) or node.name, _WHOLE
        elif node.op == "output":
            return [_short(said[x][0], number) for number, x in enumerate(node.args[0])]
        else:
            said[node] = _said(node, said)
    raise AssertionError("a graph ends with its output")


def _short(text: str, number: int) -> str:
    return text if len(text) <= LONGEST else f"number {number}"


def _said(node: fx.Node, said: Mapping[fx.Node, tuple[str, int]]) -> tuple[str, int]:
    """A node, and how strongly its outermost operator binds."""

    def of(x: Any, least: int) -> str:
        text, strength = said[x] if isinstance(x, fx.Node) else (_number(x), _WHOLE)
        return text if strength >= least else f"({text})"

    target: Any = node.target
    if isinstance(target, Draw):
        return "seed", _WHOLE
    if target in _SIGNS:
        sign, strength = _SIGNS[target]
        a, b = node.args[:2]
        return f"{of(a, strength)} {sign} {of(b, strength + 1)}", strength
    if target is operator.neg:
        return f"-{of(node.args[0], _NEGATED)}", _NEGATED
    if target is math.sqrt:
        return f"sqrt({of(node.args[0], _LOOSEST)})", _WHOLE
    if node.all_input_nodes and (
        target in _SAME or "number" not in node.meta or str(target).endswith("scalar_dense.default")
    ):
        return said[node.all_input_nodes[0]]  # a tensor of one number is called as what it is made of
    return f"{getattr(target, '__name__', target)}(…)", _WHOLE


def _number(x: Any) -> str:
    """A constant, as short as it may be and still be known."""
    return f"{x:.6g}" if isinstance(x, float) else str(x)
