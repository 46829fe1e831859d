"""How the values of a rank's part lie: what was noted when it was captured, and what follows from that beyond doubt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardwise.comm.record import Comm
from shardwise.graph.nodes import collective_of, is_op, op_of
from shardwise.layout import Layout

_aten = torch.ops.aten
_SUMS = {_aten.add.Tensor, _aten.sub.Tensor}
_SAME = {_aten.alias.default, _aten.detach.default, _aten.view.default, _aten._unsafe_view.default}


def layouts_of(graph: fx.Graph, inputs: Mapping[fx.Node, Layout], rank: int) -> dict[fx.Node, Layout]:
    """The layouts of values whose layout is known, of the part of one of the ranks held here. `inputs` are those of
    placeholders."""
    found: dict[fx.Node, Layout] = {}
    for node in graph.nodes:
        layout = inputs.get(node) or node.meta.get("layout") or _following(node, found) or _moved(node)
        if layout is not None and _fits(layout, node, rank):
            found[node] = layout
    for node in graph.nodes:
        comm: Comm | None = node.meta.get("comm")
        if collective_of(node) is not None and comm is not None and comm.source is not None:
            _before_reduction(node, comm, found, rank)
    for node in graph.nodes:
        if node.target in _SUMS and node in found:
            _addends(node, found, rank)
    return found


def _fits(layout: Layout, node: fx.Node, rank: int) -> bool:
    facts = node.meta.get("facts")
    return facts is not None and rank < len(layout.mesh.held) and layout.held_shapes[rank] == facts.shape


def _following(node: fx.Node, found: Mapping[fx.Node, Layout]) -> Layout | None:
    """The layout of a view, or of what is computed element by element, from those of the operands."""
    op = op_of(node)
    if not is_op(op) or not node.all_input_nodes:
        return None
    first = found.get(node.all_input_nodes[0])
    if op in _SAME:
        return first
    if (order := _order(op, node.args)) is not None and first is not None:
        return _permuted(first, order)
    if torch.Tag.pointwise in op.tags:
        return _pointwise(node, found)
    return None


def _order(op: Any, args: Sequence[Any]) -> list[int] | None:
    """How a view puts dims in another order."""
    num_dims = len(args[0].meta["facts"].shape) if args and "facts" in getattr(args[0], "meta", ()) else 0
    order = list(range(num_dims))
    if op is _aten.t.default:
        return order[::-1]
    if op is _aten.transpose.int and num_dims:
        a, b = (dim % num_dims for dim in args[1:3])
        order[a], order[b] = b, a
        return order
    return [dim % num_dims for dim in args[1]] if op is _aten.permute.default and num_dims else None


def _permuted(layout: Layout, order: Sequence[int]) -> Layout:
    return layout.with_(
        shape=[layout.shape[dim] for dim in order],
        splits=[layout.splits[dim] for dim in order],
        sizes=[layout.sizes[dim] for dim in order],
    )


def _pointwise(node: fx.Node, found: Mapping[fx.Node, Layout]) -> Layout | None:
    """That of all operands with dims, if nothing is pending on them: numbers are computed with one by one."""
    operands = [x for x in node.all_input_nodes if "facts" in x.meta and x.meta["facts"].shape]
    layouts = {found.get(x) for x in operands}
    only = layouts.pop() if len(layouts) == 1 else None
    return only if only is not None and not only.has_pending else None


def _moved(node: fx.Node) -> Layout | None:
    """What a collective that gives one tensor brought it to."""
    comm: Comm | None = node.meta.get("comm")
    collective = collective_of(node)
    one = collective is not None and collective.kind in ("all_reduce", "reduce_scatter")
    return comm.target if one and comm is not None else None


def _before_reduction(node: fx.Node, comm: Comm, found: dict[fx.Node, Layout], rank: int) -> None:
    """What is summed was pending, as far back as it is only seen in another way."""
    collective: Any = collective_of(node)
    (x,) = node.args
    if collective.kind != "all_reduce" or collective.how != "sum" or not isinstance(x, fx.Node):
        return
    assert comm.source is not None
    pending = {name for name, p in zip(comm.source.mesh.names, comm.source.pending) if p and p.reduce_op == "sum"}
    if not pending.issuperset(collective.axis_names):
        return
    whole = x.meta.get("facts")
    while isinstance(x, fx.Node):
        if x not in found and x.meta.get("facts") == whole and _fits(comm.source, x, rank):
            found[x] = comm.source
        op: Any = x.target
        if not is_op(op) or not (op.is_view or op in _SAME):
            return
        x = x.all_input_nodes[0]


def _addends(node: fx.Node, found: dict[fx.Node, Layout], rank: int) -> None:
    """What is added to a pending sum counts once: it is pending, too, whole on one rank and zero on the others. On this
    rank it may be the value itself, which is also used as it is."""
    layout = found[node]
    for x in node.all_input_nodes:
        is_made_for_it = len(x.users) == 1 and is_op(x.target)
        if is_made_for_it and layout.has_pending and x in found and not found[x].has_pending and _fits(layout, x, rank):
            found[x] = layout
