"""The ops of a rank's part, one to a line: `mm(%4 f32[8,16] S(0)@dp, up.weight f32[32,16] R) -> f32[8,32] S(0)@dp`.

Views are folded into whoever looks through them. A type in brackets is that of the whole tensor, with its layout; one
in parentheses, `f32(4,16)`, is that of this rank's part, where no layout is known.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardwise.debug.table import place
from shardwise.graph.nodes import Seeded, Start, collective_of, is_op, op_of
from shardwise.graph.program import Facts
from shardwise.layout import Layout
from shardwise.words import short_dtype

Styled = tuple[str, str]
"""Text, and what it is: "op", "collective", "name", "type", "place", "head" or "" (`show.text` gives them colours)."""

_aten = torch.ops.aten
_UNSAID = ("device", "layout", "memory_format", "pin_memory", "implicit")
"""Options that are said only if every op is shown."""
MOST = 3
"""Tensors of a list that are shown."""


@dataclass(frozen=True, slots=True)
class OpLine:
    """One op: its number, what is said of it, the numbers of the values that it reads, and the user's line."""

    number: int
    said: tuple[Styled, ...]
    reads: tuple[int, ...]
    place: str
    phase: str

    @property
    def structure(self) -> tuple[Any, ...]:
        """What it has in common with the same op of another layer: numbers in names and of values left out."""
        return self.place, *((alike(text) if style in ("name", "value") else text) for text, style in self.said)


def alike(name: str) -> str:
    """A name without the numbers in it.

    >>> alike("blocks.3.mlp.weight"), alike("optimizer.exp_avg[blocks.3.mlp2.weight]")
    ('blocks.*.mlp.weight', 'optimizer.exp_avg[blocks.*.mlp2.weight]')
    """
    return re.sub(r"(?<!\w)\d+(?!\w)", "*", name)


class Lines:
    """Says what the nodes of a part do, in their order."""

    def __init__(
        self,
        names: Mapping[fx.Node, str],
        layouts: Mapping[fx.Node, Layout],
        phases: Mapping[fx.Node, str],
        *,
        every: bool,
    ) -> None:
        self.names, self.layouts, self.phases, self.every = names, layouts, phases, every
        self._numbers: dict[fx.Node, int] = {}

    def of(self, graph: fx.Graph) -> list[OpLine]:
        lines: list[OpLine] = []
        for node in graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem and not self._is_folded(node):
                self._numbers[node] = len(lines) + 1
                lines.append(self._line(node))
        return lines

    def _is_folded(self, node: fx.Node) -> bool:
        return not self.every and is_seen_through(node)

    def _line(self, node: fx.Node) -> OpLine:
        reads: list[int] = []
        said: list[Styled] = [self._name(node), ("(", "")]
        options = {key: value for key, value in node.kwargs.items() if self.every or key not in _UNSAID}
        given = [*_given(node.args), *options.items()]
        for position, value in enumerate(given):
            if position:
                said.append((", ", ""))
            if position >= len(given) - len(options):
                key, value = value
                said.append((f"{key}=", ""))
            said += self._argument(value, reads)
        said.append((")", ""))
        if made := self._made(node):
            said += [(" -> ", ""), *made]
        line = node.meta.get("line")
        where = place(line.file, line.number) if line is not None and line.file else ""
        return OpLine(self._numbers[node], tuple(said), tuple(reads), where, self.phases.get(node, ""))

    def _name(self, node: fx.Node) -> Styled:
        target: Any = node.target
        if (collective := collective_of(node)) is not None:
            op = f"{collective.how}, " if collective.kind in ("all_reduce", "reduce_scatter") else ""
            start = "start " if isinstance(target, Start) else ""
            return f"{start}{collective.kind}[{op}{'×'.join(collective.axis_names)}]", "collective"
        if isinstance(target, Seeded):
            return f"{target.op.overloadpacket.__name__}[stream {target.stream}]", "op"
        if not is_op(target):
            return getattr(target, "__name__", str(target)), "op"
        name = target.overloadpacket.__name__ if target.namespace == "aten" else target.name().split(".")[0]
        overload = "" if not self.every or target._overloadname == "default" else f".{target._overloadname}"
        return f"{name}{overload}", "op"

    # What an op is given

    def _argument(self, value: Any, reads: list[int]) -> list[Styled]:
        if isinstance(value, fx.Node):
            return self._operand(value, reads)
        if isinstance(value, (list, tuple)) and any(isinstance(x, fx.Node) for x in value):
            return self._list(value, reads)
        if isinstance(value, torch.dtype):
            return [(short_dtype(value), "type")]
        if isinstance(value, float) and not self.every:
            return [(f"{value:.6g}", "")]
        return [(repr(value), "")]

    def _list(self, values: Sequence[Any], reads: list[int]) -> list[Styled]:
        shown = values if self.every or len(values) <= MOST + 1 else values[:MOST]
        said: list[Styled] = [("[", "")]
        for position, value in enumerate(shown):
            said += [(", ", "")] * bool(position) + self._argument(value, reads)
        left = values[len(shown) :]
        fx.map_arg(list(left), lambda x: reads.append(self._read(x)[1]))
        return [*said, (f", and {len(left)} more]" if left else "]", "")]

    def _operand(self, node: fx.Node, reads: list[int]) -> list[Styled]:
        name, number, way = self._read(node)
        reads.append(number)
        kind = self.type_of(node)
        return [
            (name, "value" if name.startswith("%") else "name"),
            (way, ""),
            *([(f" {kind}", "type")] if kind else []),
        ]

    def value(self, node: fx.Node) -> str:
        """What a value is called."""
        name, _, way = self._read(node)
        return f"{name}{way}"

    def _read(self, node: fx.Node) -> tuple[str, int, str]:
        """The name of what an operand is, the number of the line that makes it (0: an input), and how it is seen."""
        ways: list[str] = []
        part, seen = "", node
        while True:
            if node.target is operator.getitem:
                part = f".{node.args[1]}{part}"
                node = node.args[0]  # type: ignore[assignment]
            elif self._is_folded(node):
                ways.append(_way(node))
                node = node.all_input_nodes[0]
            else:
                break
        number = self._numbers.get(node, 0)
        name = f"%{number}{part}" if number else self.names.get(node) or node.name
        is_whole = node.meta.get("facts") == seen.meta.get("facts")
        return name, number, "" if is_whole else "".join(reversed(ways))

    # What it gives

    def _made(self, node: fx.Node) -> list[Styled]:
        if kind := self.type_of(node):
            return [(kind, "type")] if not _writes(node) else []
        parts: dict[Any, fx.Node] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if not parts:
            return []
        kinds = [self.type_of(parts[number]) if number in parts else "_" for number in range(max(parts) + 1)]
        if len(kinds) > MOST + 1 and not self.every:
            kinds = [*kinds[:MOST], f"and {len(kinds) - MOST} more"]
        return [(f"({', '.join(kinds)})", "type")]

    def type_of(self, node: fx.Node) -> str:
        facts: Facts | None = node.meta.get("facts")
        if facts is None:
            return ""
        layout = self.layouts.get(node)
        dtype = short_dtype(facts.dtype)
        return f"{dtype}({','.join(map(str, facts.shape))})" if layout is None else f"{dtype}{layout}"


def _given(args: Sequence[Any]) -> list[Any]:
    """Arguments, without what was left out at the end."""
    found = list(args)
    while found and found[-1] is None:
        found.pop()
    return found


def is_seen_through(node: fx.Node) -> bool:
    """Whether a node only gives another view of one tensor."""
    op: Any = node.target
    if not is_op(op) or not (op.is_view or op is _aten._unsafe_view.default) or "facts" not in node.meta:
        return False
    return len(node.all_input_nodes) == 1


_WAYS: dict[Any, Callable[..., str]] = {
    _aten.t.default: lambda *_: ".t",
    _aten.transpose.int: lambda a, b: f".t({a},{b})",
    _aten.permute.default: lambda order: f".permute({','.join(map(str, order))})",
    _aten.slice.Tensor: lambda dim=0, start=None, end=None, step=1: f".slice({dim}, {_range(start, end, step)})",
    _aten.select.int: lambda dim, index: f".select({dim}, {index})",
}


def _way(node: fx.Node) -> str:
    """How a view shows something else than all of a tensor in its order."""
    way = _WAYS.get(node.target)
    return "" if way is None or node.kwargs else way(*node.args[1:])


def _range(start: Any, end: Any, step: Any) -> str:
    last = "" if end is None or end >= 2**62 else end
    return f"{start or ''}:{last}{'' if step == 1 else f':{step}'}"


def _writes(node: fx.Node) -> bool:
    op = op_of(node)
    return is_op(op) and bool(op._schema.is_mutable)
