"""What later passes reach from the gradients of a pass that was recorded, and whether that is the same on all ranks.

The graph of such a gradient is what this pass recorded, down to the graph that it went through. On ranks that hold
nothing, or that have another part to play than the rest, some of it may be missing. Where ranks differ in what they
reach, all gradients of the pass are tied (`double_backward`). Elsewhere they are as torch made them, and what there is
nothing to differentiate by is a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.agreement import compared, digest
from shardwise.layout import Mesh
from shardwise.redistribute.backward.deferred_gradients import SECOND_ORDER
from shardwise.redistribute.backward.double_backward import Trail, anchors, tied

PREPARED = "shardwise.prepared"
"""Under this name a node of torch's that stands for a move, and has been told what it does to gradients that are
differentiated, is still known as one."""
STANDS_FOR_MOVES = SECOND_ORDER, PREPARED

_disabled = torch._C.DisableTorchFunctionSubclass
_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]

Node = Any
Shards = Sequence[Tensor]


def handed_out(
    found: Sequence[Shards], roots: Shards, own: Trail, ends: Sequence[Tensor], mesh: Mesh | None
) -> list[Shards]:
    """Gradients, of each tensor its shards', of a pass that began at some roots, as they are given to whoever asked.
    Tied, they lead to all that it recorded and to the `ends`. Without a mesh nobody can be asked."""
    with _disabled():
        reach = _Reach(found, roots, own.recorded)
        if mesh is None or reach.differs or compared(mesh, digest(reach.facts))[0]:
            return [tied(grads, [*chain(*own.recorded), *ends]) for grads in found]
        own.needs_no_anchors()
        constant = [not (grads[0].is_leaf or reach.leads_on(at)) for at, grads in enumerate(found)]
        return [[x.detach() for x in grads] if c else grads for grads, c in zip(found, constant, strict=True)]


class _Reach:
    """What each rank's gradients, and results of its collectives, lead to: of all nodes where ranks meet and of all
    leaves, a bit for each, in the order of their making, which is the program's and so the same on all ranks."""

    def __init__(self, found: Sequence[Shards], roots: Shards, recorded: Sequence[Shards]) -> None:
        self.num_ranks = max(map(len, found), default=1)
        before, after = below(_nodes(roots)), below(_nodes(chain(*found, *recorded)))
        self.bits = _numbered(dict.fromkeys((*_in_order(before), *_in_order(after))))
        self.known: dict[tuple[Node, int], int] = {}
        self.masks = [self._masks(shards) for shards in found]
        self.facts = len(self.bits), self.masks, [self._masks(shards) for shards in recorded]

    @property
    def differs(self) -> bool:
        """Whether ranks of this process differ."""
        n = self.num_ranks
        each = [masks[at : at + n] for one in self.facts[1:] for masks in one for at in range(0, len(masks), n)]
        return any(len(set(masks)) > 1 for masks in each)

    def leads_on(self, position: int) -> bool:
        """Whether there is a leaf that a gradient depends on."""
        leaves = reduce(or_, (bit for node, bit in self.bits.items() if node.__class__ is _Leaf), 0)
        return bool(int(self.masks[position][0], 16) & leaves)

    def _masks(self, shards: Shards) -> list[str]:
        """Of what belongs to one rank after the other."""
        return [hex(self._mask(x, at % self.num_ranks)) for at, x in enumerate(shards)]

    def _mask(self, grad: Tensor, rank: int) -> int:
        if grad.grad_fn is None:
            return 0
        todo = [grad.grad_fn]
        while todo:
            following = self._following(todo[-1], rank)
            missing = [node for node in following if (node, rank) not in self.known]
            if missing:
                todo += missing
            else:
                node = todo.pop()
                reached = (self.known[after, rank] for after in following)
                self.known[node, rank] = reduce(or_, reached, self.bits.get(node, 0))
        return self.known[grad.grad_fn, rank]

    def _following(self, node: Node, rank: int) -> list[Node]:
        edges = node.next_functions
        if self.num_ranks > 1 and _joins_ranks(node):
            edges = edges[rank :: self.num_ranks]
        return [following for following, _ in edges if following is not None]


def _numbered(nodes: Iterable[Node]) -> dict[Node, int]:
    """Bits of those among some nodes that count. Shards of one leaf are one leaf."""
    leaves = [node.variable for node in nodes if node.__class__ is _Leaf]
    first = {id(peer): id(x) for x in leaves for peer in x.__dict__.get("_peers", ())}
    numbers: dict[Any, int] = {}
    bits: dict[Node, int] = {}
    for node in nodes:
        if node.__class__ is _Leaf:
            what = first.get(id(node.variable), id(node.variable))
        elif _joins_ranks(node):
            what = node
        else:
            continue
        bits[node] = 1 << numbers.setdefault(what, len(numbers))
    return bits


def below(nodes: Iterable[Node]) -> dict[Node, None]:
    """All nodes of the graph below some, and these."""
    todo = [node for node in nodes if node is not None]
    found: dict[Node, None] = {}
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += [following for following, _ in node.next_functions if following is not None]
    return found


def is_ours(node: Node) -> bool:
    """Whether a node is one of this package's autograd functions."""
    return getattr(_function_of(node), "__module__", "").startswith("shardwise.")


def _joins_ranks(node: Node) -> bool:
    """Whether ranks meet in a node: each has one, or all have the same in the simulator."""
    return getattr(_function_of(node), "joins_ranks", False) or not node.metadata.keys().isdisjoint(STANDS_FOR_MOVES)


def _function_of(node: Node) -> Any:
    return getattr(node, "_forward_cls", None)


def _nodes(tensors: Iterable[Tensor]) -> list[Node]:
    return [node for x in tensors if (node := x.grad_fn) is not None]


def _in_order(nodes: Iterable[Node]) -> list[Node]:
    """Nodes in the order of their making; leaves, which are not made, as they are first used. Anchors do not count."""
    made = sorted((node for node in nodes if node.__class__ is not _Leaf), key=lambda node: node._sequence_nr())
    leaves = dict.fromkeys(node for one in made for node, _ in one.next_functions if node.__class__ is _Leaf)
    held = set(map(id, anchors()))
    return [*made, *(leaf for leaf in leaves if id(leaf.variable) not in held)]
