"""How much a node computes: torch's formulas of floating point operations, on what a program knows of its tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise.graph.nodes import Seeded, is_op, op_of
from shardwise.graph.program import Facts

_aten = torch.ops.aten
_flash, _flash_backward = _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_backward
_LIKE: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    _aten._scaled_dot_product_attention_math: _flash,
}
"""Ops that torch has no formula for, and that compute what another does."""


def flops_of(node: fx.Node) -> int:
    """Multiplications and additions of a node, if it is a product of matrices, a convolution or attention; else 0."""
    from torch.utils.flop_counter import flop_registry  # which imports all of Triton's front end, where that is there

    op = op_of(node)
    if not is_op(op):
        return 0
    formula = flop_registry.get(_LIKE.get(op.overloadpacket, op.overloadpacket))
    if formula is None:
        return 0
    given = node.args[1:] if isinstance(node.target, Seeded) else node.args
    args, kwargs = fx.map_arg((tuple(given), node.kwargs), _shape)
    return int(formula(*args, **kwargs, out_val=_results(op, node, args)))


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype that a node computes in: that of its first operand."""
    facts = [x.meta["facts"] for x in node.all_input_nodes if "facts" in x.meta]
    return facts[0].dtype if facts else None


def _results(op: Any, node: fx.Node, args: Sequence[Any]) -> Any:
    """The shapes of what a node gives. Gradients of a convolution are like what they are gradients of."""
    if op.overloadpacket is _aten.convolution_backward:
        return [args[1], args[2], None]
    if "facts" in node.meta:
        return _shape(node)
    parts = {user.args[1]: _shape(user) for user in node.users if user.target is operator.getitem}
    return [parts.get(number) for number in range(len(op._schema.returns))]


def _shape(node: fx.Node) -> Any:
    facts: Facts | None = node.meta.get("facts")
    return None if facts is None else torch.Size(facts.shape)
