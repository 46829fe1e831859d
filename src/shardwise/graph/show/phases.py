"""Forward, backward, what is done with gradients, and the optimizer's step: which of them a node is part of."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from shardwise.graph.nodes import collective_of, written
from shardwise.graph.program import Line

_aten = torch.ops.aten
FORWARD, BACKWARD, GRADIENTS, OPTIMIZER = "forward", "backward", "gradients", "optimizer"


def phases_of(graph: fx.Graph, kept_by_optimizers: Set[fx.Node]) -> dict[fx.Node, str]:
    """The phase of every node. `kept_by_optimizers` are the inputs that optimizers write to.

    Nodes of autograd's passes know that they are. What else is computed of gradients (their norm, say) is neither
    forward nor backward; it is the optimizer's where the user's line is one that writes to what an optimizer keeps.
    """
    stepping = _lines_of_steps(graph, kept_by_optimizers)
    found: dict[fx.Node, str] = {}
    of_gradients: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_backward(node):
            found[node] = BACKWARD
            of_gradients.add(node)
        elif _place(node) in stepping:
            found[node] = OPTIMIZER
        elif not of_gradients.isdisjoint(node.all_input_nodes):
            found[node] = GRADIENTS
            of_gradients.add(node)
        else:
            found[node] = FORWARD
    for node in reversed(graph.nodes):
        if node.users and (not node.all_input_nodes or node.target is _aten.ones_like.default):
            phases = {found[user] for user in node.users}
            found[node] = phases.pop() if len(phases) == 1 else found[node]  # made for that: gradients begin with ones
    return found


def _is_backward(node: fx.Node) -> bool:
    line: Line | None = node.meta.get("line")
    return bool(node.meta.get("backward")) or (line is not None and line.backward)


def _place(node: fx.Node) -> tuple[str, int] | None:
    line: Line | None = node.meta.get("line")
    return None if line is None or not line.file else (line.file, line.number)


def _lines_of_steps(graph: fx.Graph, kept: Set[fx.Node]) -> set[tuple[str, int] | None]:
    """Lines outside of autograd's passes that write to what optimizers keep."""
    views: dict[fx.Node, fx.Node] = {node: node for node in kept}
    found: set[tuple[str, int] | None] = set()
    for node in graph.nodes:
        if node in views:
            continue
        inputs = node.all_input_nodes
        if len(inputs) == 1 and inputs[0] in views and collective_of(node) is None:
            views[node] = views[inputs[0]]  # a view, or a copy that nobody writes to
        if not _is_backward(node) and any(target in views for target in written(node)):
            found.add(_place(node))
    return found - {None}
