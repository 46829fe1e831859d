"""A rank's part of a program while passes work on it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.comm.record import Comm
from shardwise.graph.draft.storages import Storages
from shardwise.graph.nodes import Check, Collective, Draw, Start, collective_of, has_effects, wait
from shardwise.graph.program import Facts, Part

_aten = torch.ops.aten

NUMBERS, JOINED, CHUNK, UNUSED = "collectives", "joined", "chunk", "unused"
"""What passes note at a collective: the numbers that it, and all that went into it, had at first; the records of what
was joined to it; that it was taken apart on purpose; and that this rank never used it, which others may do."""


class Draft:
    """A copy of a part, to be changed, and `held`: which of the ranks held here it is of."""

    def __init__(self, part: Part, held: int) -> None:
        self.held = held
        self.graph = fx.Graph()
        self._part = part
        env: dict[fx.Node, fx.Node] = {}
        for node in part.graph.nodes:
            env[node] = self.graph.node_copy(node, env.__getitem__)
        for number, node in enumerate(self.collectives()):
            node.meta[NUMBERS] = (number,)
            node.meta.update({} if node.users else {UNUSED: True})

    def done(self) -> Part:
        """The part as it is now, without inputs that nobody reads."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        pairs = list(zip(inputs, self._part.sources, strict=True))
        for node, _ in pairs:
            if not node.users:
                self.graph.erase_node(node)
        return replace(self.part, sources=tuple(source for node, source in pairs if node.users))

    @property
    def part(self) -> Part:
        return replace(self._part, graph=self.graph)

    def storages(self) -> Storages:
        return Storages(self.part)

    def collectives(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if collective_of(node) is not None]

    @property
    def output(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    # Changing it

    def before(self, node: fx.Node) -> AbstractContextManager[None]:
        """Inside, what is added comes before a node."""
        return self.graph.inserting_before(node)

    def call(self, op: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        """Add an op, in the place and for the line of another node."""
        node = self._add(op, args, kwargs, like)
        found = _run(op, args, kwargs)
        if isinstance(found, Tensor):
            node.meta["facts"] = replace(Facts.of(found), device=_device(args) or found.device)
        return node

    def collective(self, target: Collective, brought: Any, *, like: fx.Node, comm: Comm | None) -> fx.Node:
        """Add a collective in the place of others; `like` is the one whose line it has."""
        node = self._add(target, (brought,), {}, like)
        if comm is not None:
            node.meta["comm"] = comm
        if target.kind in ("all_reduce", "broadcast"):
            node.meta["facts"] = contiguous(brought.meta["facts"])
        node.meta[NUMBERS] = like.meta.get(NUMBERS, ())
        return node

    def element(self, node: fx.Node, index: int, facts: Facts) -> fx.Node:
        """Add one of the tensors that a node gives a list of."""
        made = self._add(operator.getitem, (node, index), {}, node)
        made.meta["facts"] = facts
        return made

    def awaited(self, node: fx.Node) -> fx.Node:
        """Add what waits for a collective, of which it has what is known of the result."""
        made = self._add(wait, (node,), {}, node)
        made.meta.update({key: node.meta.pop(key) for key in ("facts", "layout") if key in node.meta})
        return made

    def _add(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update({key: like.meta[key] for key in ("line", "backward") if key in like.meta})
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Have everybody who uses one node use another, of the same value."""
        if "layout" in old.meta:
            new.meta.setdefault("layout", old.meta["layout"])
        old.replace_all_uses_with(new)

    def sweep(self) -> None:
        """Erase what is computed, or communicated, for nothing: what nobody uses, and what is only written to."""
        storages = self.storages()
        wanted = storages.outside | storages.escaping
        for node in reversed(self.graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            if node.users or not _is_for_its_result(node, storages, wanted):
                wanted.update(storages.read_by(node))
            else:
                self.graph.erase_node(node)


def _is_for_its_result(node: fx.Node, storages: Storages, wanted: set[int]) -> bool:
    """Whether a node does nothing that anybody will see, but to give its result."""
    if isinstance(node.target, (Collective, Start)):
        return UNUSED not in node.meta
    if isinstance(node.target, (Check, Draw)):
        return False
    writes = storages.written_by(node)
    return all(storage >= 0 and storage not in wanted for storage in writes) if writes else not has_effects(node)


def _device(args: Any) -> torch.device | None:
    found: list[torch.device] = []
    fx.map_arg(args, lambda node: found.append(node.meta["facts"].device) if "facts" in node.meta else None)
    return found[0] if found else None


def _run(op: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What an op gives for tensors like these, on the meta device."""
    args, kwargs = fx.map_arg((args, kwargs), lambda node: meta_of(node.meta["facts"]))
    return op(*args, **kwargs)


def meta_of(facts: Facts) -> Tensor:
    return torch.empty_strided(facts.shape, facts.strides, dtype=facts.dtype, device="meta")


def contiguous(facts: Facts, shape: Sequence[int] | None = None) -> Facts:
    """Facts of a tensor that is contiguous, and else like another one."""
    made = torch.empty(facts.shape if shape is None else tuple(shape), device="meta")
    return replace(facts, shape=tuple(made.shape), strides=tuple(made.stride()))


def is_contiguous(facts: Facts) -> bool:
    return meta_of(facts).is_contiguous()


def in_backward(node: fx.Node) -> bool:
    """Whether a node is part of a backward pass."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    line = node.meta.get("line")
    return bool(node.meta.get("backward") or (line is not None and line.backward))


def elements(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The tensors of the list that a node gives, by their numbers, where they are used."""
    for user in node.users:
        if user.target is operator.getitem:
            yield user.args[1], user  # type: ignore[misc]
