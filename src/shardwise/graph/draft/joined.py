"""Several collectives as one: what they bring is laid one behind the other, and what they give is taken apart again."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardwise.comm.record import Comm
from shardwise.graph.draft.draft import JOINED, NUMBERS, Draft, contiguous, elements, is_contiguous
from shardwise.graph.draft.order import Needs, rearranged
from shardwise.graph.nodes import Collective
from shardwise.graph.passes.report import bytes_of
from shardwise.graph.program import Facts

_aten = torch.ops.aten


def can_be_joined(node: fx.Node) -> bool:
    """Whether a collective brings tensors one by one."""
    collective = node.target
    if not isinstance(collective, Collective):
        return False
    return collective.kind in ("all_reduce", "broadcast", "all_gather") or isinstance(node.args[0], (list, tuple))


def key_of(node: fx.Node) -> tuple[Any, ...]:
    """What collectives have in common that can be made as one."""
    collective = node.target
    assert isinstance(collective, Collective)
    how = collective.how if collective.kind in ("all_reduce", "reduce_scatter", "broadcast") else None
    facts = facts_of(node)
    return collective.kind, collective.mesh, collective.axes, how, facts.dtype, facts.device


def facts_of(node: fx.Node) -> Facts:
    """Of what a collective is given, or of its first part."""
    brought: Any = node.args[0]
    first = brought if isinstance(brought, fx.Node) else brought[0]
    facts: Facts = first.meta["facts"]
    return facts


def bring_together(
    draft: Draft,
    before: Needs,
    groups: Sequence[Sequence[fx.Node]],
    *,
    late: Collection[fx.Node] = (),
    than: Sequence[fx.Node] = (),
) -> None:
    """Bring what depends on a member of a group behind its last member, so that they can be joined there; and what is
    `late` behind others."""
    last_of = {node: nodes[-1] for nodes in groups for node in nodes}
    wanted = {node: list(dict.fromkeys(last_of.get(x, x) for x in needed)) for node, needed in before.items()}
    for nodes in groups:
        wanted[nodes[-1]] += nodes[:-1]
    place = {node: position for position, node in enumerate(draft.graph.nodes)}
    end = max((place[node] for node in than), default=0)
    rearranged(draft, wanted, lambda node: end if node in late else place[node])


def join(draft: Draft, nodes: Sequence[fx.Node], *, what: str) -> fx.Node:
    """Have one collective, which comes where the last of some came, do what all of them do."""
    last = nodes[-1]
    with draft.before(last):
        made = _JOINS[last.target.kind](draft, nodes, what)  # type: ignore[union-attr]
    for node in nodes:
        for _, piece in list(elements(node)):
            draft.graph.erase_node(piece)
        draft.graph.erase_node(node)
    return made


def _of_whole_tensors(draft: Draft, nodes: Sequence[fx.Node], what: str) -> fx.Node:
    """`all_reduce(x), all_reduce(y)` → `apart(all_reduce(x, y))`; broadcasts likewise."""
    brought: list[Any] = [node.args[0] for node in nodes]
    node = _collective(draft, nodes, _laid_out(draft, brought), nodes[-1].target, what)
    for old, part in zip(nodes, _apart(draft, node, [x.meta["facts"] for x in brought])):
        draft.replace(old, part)
    return node


def _of_chunks(draft: Draft, nodes: Sequence[fx.Node], what: str) -> fx.Node:
    """`reduce_scatter([x0, x1]), reduce_scatter([y0, y1])` → `apart(reduce_scatter([x0 y0, x1 y1]))`."""
    chunks: list[Any] = [node.args[0] for node in nodes]
    brought = [_laid_out(draft, row) for row in zip(*chunks, strict=True)]
    node = _collective(draft, nodes, brought, nodes[-1].target, what)
    facts = [old.meta["facts"] for old in nodes]
    node.meta["facts"] = contiguous(facts[0], (sum(map(_numel, facts)),))
    for old, part in zip(nodes, _apart(draft, node, facts)):
        draft.replace(old, part)
    return node


def _of_lists(draft: Draft, nodes: Sequence[fx.Node], what: str) -> fx.Node:
    """`all_gather(x), all_gather(y)` → `apart(all_gather(x y))` for what each member brings; all-to-alls likewise."""
    given: list[Any] = [node.args[0] for node in nodes]
    is_gather = isinstance(given[0], fx.Node)
    brought = _laid_out(draft, given) if is_gather else [_laid_out(draft, row) for row in zip(*given, strict=True)]
    targets: list[Any] = [node.target for node in nodes]
    sizes = [
        [(sum(map(math.prod, by_member)),) for by_member in zip(*held, strict=True)]
        for held in zip(*(target.how for target in targets), strict=True)
    ]
    node = _collective(draft, nodes, brought, replace(targets[-1], how=sizes), what)
    used = [dict(elements(old)) for old in nodes]
    for member in sorted({number for pieces in used for number in pieces}):
        shapes = [target.how[draft.held][member] for target in targets]
        facts = [contiguous(facts_of(old), shape) for old, shape in zip(nodes, shapes, strict=True)]
        row = draft.element(node, member, contiguous(facts[0], sizes[draft.held][member]))
        for pieces, part in zip(used, _apart(draft, row, facts)):
            if member in pieces:
                draft.replace(pieces[member], part)
    return node


_JOINS: dict[str, Callable[[Draft, Sequence[fx.Node], str], fx.Node]] = {
    "all_reduce": _of_whole_tensors,
    "broadcast": _of_whole_tensors,
    "reduce_scatter": _of_chunks,
    "all_gather": _of_lists,
    "all_to_all": _of_lists,
}


def _collective(draft: Draft, nodes: Sequence[fx.Node], brought: Any, target: Any, what: str) -> fx.Node:
    comms: list[Comm] = [node.meta["comm"] for node in nodes if "comm" in node.meta]
    comm = None
    if comms:
        said = f"{len(nodes)} {what}"
        comm = replace(comms[0], bytes=bytes_of(brought), argument=said, source=None, target=None)
    node = draft.collective(target, brought, like=nodes[-1], comm=comm)
    node.meta[NUMBERS] = tuple(number for old in nodes for number in old.meta[NUMBERS])
    node.meta[JOINED] = tuple(comms)
    return node


def _laid_out(draft: Draft, tensors: Sequence[fx.Node]) -> fx.Node:
    """Tensors as one, of one dim."""
    return draft.call(_aten.cat.default, [_flat(draft, x) for x in tensors], like=tensors[-1])


def _flat(draft: Draft, x: fx.Node) -> fx.Node:
    facts: Facts = x.meta["facts"]
    if len(facts.shape) == 1:
        return x
    own = x if is_contiguous(facts) else draft.call(_aten.clone.default, x, like=x, memory_format=_CONTIGUOUS)
    return draft.call(_aten.view.default, own, [_numel(facts)], like=x)


def _apart(draft: Draft, flat: fx.Node, parts: Sequence[Facts]) -> Iterator[fx.Node]:
    """The tensors that a flat one is made of, as views of it."""
    start = 0
    for facts in parts:
        stop = start + _numel(facts)
        part = draft.call(_aten.slice.Tensor, flat, 0, start, stop, like=flat)
        yield part if len(facts.shape) == 1 else draft.call(_aten.view.default, part, list(facts.shape), like=flat)
        start = stop


def _numel(facts: Facts) -> int:
    return math.prod(facts.shape)


_CONTIGUOUS = torch.contiguous_format
