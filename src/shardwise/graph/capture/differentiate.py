"""Programs whose results have gradients: the backward pass is recorded behind the forward pass, and cut off again.

It is the pass that autograd would make: what it needs of the forward pass is what autograd saves, and what checkpoints
recompute is recomputed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import _engine_run_backward
from torch.utils._pytree import tree_leaves

from shardwise.comm import shards_of
from shardwise.comm.faked import is_faked
from shardwise.graph.capture.parts import Copying, without_unused
from shardwise.graph.capture.recorder import Recorder
from shardwise.graph.nodes import Collective
from shardwise.graph.program import FromSaved, FromTangent, Part
from shardwise.layout import Layout

_disabled = torch._C.DisableTorchFunctionSubclass


@dataclass(frozen=True, slots=True)
class Backward:
    """What was recorded of a backward pass: the nodes of results that begin it, which of the ranks held here they are
    of, if they are of one, and leaves with the nodes of their gradients."""

    results: list[fx.Node]
    ranks: list[int | None]
    leaves: Sequence[tuple[Tensor, fx.Node | None]]


def differentiate(recorder: Recorder, returned: Any) -> Backward | None:
    """Record the backward pass of what a program returned, if that has gradients."""
    tensors = [x for x in tree_leaves(returned) if isinstance(x, Tensor) and is_faked(x)]
    with _disabled():
        ranks: list[int | None] = []
        results: list[Tensor] = []
        for x in tensors:
            shards = shards_of(x)
            wanted = [(rank, shard) for rank, shard in enumerate(shards) if shard.requires_grad]
            ranks += [rank if len(shards) > 1 else None for rank, _ in wanted]
            results += [shard for _, shard in wanted]
        leaves = [x for x, _ in recorder.inputs.values() if x.requires_grad]
        if not results or not leaves:
            return None
        recorder.is_backward = True
        tangents = [recorder.tangent(x) for x in results]
    options = {"allow_unreachable": True, "accumulate_grad": False}
    keep_graph = True  # runs of the program may be, so what is saved is not written over
    try:  # users' hooks compute with DTensors
        grads = _engine_run_backward(tuple(results), tuple(tangents), keep_graph, False, tuple(leaves), **options)
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        recorder.forget_backward()  # the program has made this pass itself
        return None
    with _disabled():
        found = [(x, None if grad is None else recorder.node_of(grad)) for x, grad in zip(leaves, grads, strict=True)]
        return Backward([recorder.node_of(x) for x in results], ranks, found)


def terms_of(
    graph: fx.Graph, gradients: Sequence[tuple[fx.Node | None, Layout | None]]
) -> list[tuple[fx.Node | None, tuple[int, ...]]]:
    """Gradients of tensors in some layouts, if they are DTensors, as they are before they are summed over ranks because
    these use them differently; and the axes of that sum. It is left to the graph around the program, which knows
    whether others are to be added first, and reduces many of them by one collective."""
    found: list[tuple[fx.Node | None, tuple[int, ...]]] = []
    reductions: dict[fx.Node, None] = {}
    for gradient, layout in gradients:
        if gradient is None or layout is None or not _is_sum(gradient, layout):
            found.append((gradient, ()))
            continue
        reduction: Any = gradient.args[0]
        reductions[reduction] = None
        found.append((reduction.args[0][gradient.args[1]], reduction.target.axes))
    for reduction in reductions:
        for part in list(reduction.users):
            graph.erase_node(part)
        graph.erase_node(reduction)
    return found


def _is_sum(gradient: fx.Node, layout: Layout) -> bool:
    """Whether a gradient is made by an all-reduce along axes on which the tensor is replicated, which makes nothing
    else that is used."""
    reduction: Any = gradient.args[0] if gradient.target is operator.getitem else None
    if reduction is None or not isinstance(reduction.target, Collective):
        return False
    is_sum = reduction.target.kind == "all_reduce" and reduction.target.how == "sum"
    along = [(layout.pending[axis], layout.axis_dims[axis]) for axis in reduction.target.axes] if is_sum else [None]
    return set(along) == {(None, None)} and not any(part.users for part in reduction.users)


def cut(part: Part, num_outputs: int) -> tuple[Part, Part]:
    """The forward and the backward pass of a part that runs both in one go. Behind its outputs the former gives what
    the latter needs."""
    nodes = list(part.graph.nodes)
    *_, last = nodes
    outputs: Sequence[fx.Node] = last.args[0]
    forward, backward = Copying(), Copying()
    sources = dict(zip([node for node in nodes if node.op == "placeholder"], part.sources, strict=True))
    after = {node for node in nodes if node.meta.get("backward") or isinstance(sources.get(node), FromTangent)}
    crossing = [
        node
        for node in nodes
        if node not in after
        and node.op != "output"
        and (any(user in after for user in node.users) or node in outputs[num_outputs:])
    ]
    for node in nodes:
        if node.op == "output":
            continue
        if node in after:
            backward.input(node, sources[node]) if node.op == "placeholder" else backward.copy(node)
            continue
        forward.input(node, sources[node]) if node.op == "placeholder" else forward.copy(node)
        if node in crossing:
            backward.input(node, FromSaved(crossing.index(node)))
    first = forward.done([*outputs[:num_outputs], *crossing])
    return without_unused(first), without_unused(backward.done(list(outputs[num_outputs:])))
