"""One name for each thing: aliases are what they are aliases of, and what is computed, or communicated, twice from the
same is computed once."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from shardwise.graph.draft.draft import Draft, in_backward
from shardwise.graph.draft.storages import Storage, is_alias, is_view
from shardwise.graph.nodes import Check, Draw, Start, collective_of, has_effects, wait
from shardwise.words import counted


def tidy(draft: Draft) -> list[str]:
    """`a = f(x); b = f(x)` → `a = f(x)`, and `b` is `a`; `a = detach(x)` → `a` is `x`. What communicates stays.

    A pass through a program and the recomputation of a part of it share nothing: they were parted to save memory.
    """
    _forget_aliases(draft)
    count = _Sharing(draft, collectives=False).run()
    return [f"{counted(count, 'op')} shared"] if count else []


def share(draft: Draft) -> list[str]:
    """`a = gather(x); b = gather(x)` → `a = gather(x)`, and `b` is `a`.

    Only of moves between layouts: of anything else one rank may have the same by accident, where others have not.
    """
    before = len(draft.collectives())
    _Sharing(draft, collectives=True).run()
    shared = before - len(draft.collectives())
    return [f"{counted(shared, 'collective')} shared"] if shared else []


def _forget_aliases(draft: Draft) -> None:
    """What the program gives back stays an object of its own."""
    for node in list(draft.graph.nodes):
        if is_alias(node) and draft.output not in node.users:
            source: Any = node.args[0]
            draft.replace(node, source)
            draft.graph.erase_node(node)


class _Sharing:
    def __init__(self, draft: Draft, *, collectives: bool) -> None:
        self.draft, self.with_collectives = draft, collectives
        self.storages = draft.storages()
        self.given_back = set(draft.output.all_input_nodes)
        self.counts: dict[Storage, int] = {}
        self.known: dict[Any, fx.Node] = {}

    def run(self) -> int:
        """How many nodes were others already."""
        count = 0
        for node in list(self.draft.graph.nodes):
            for storage in self.storages.written_by(node):
                self.counts[storage] = self.counts.get(storage, 0) + 1
            if not self._can_be_shared(node):
                continue
            same = self.known.setdefault(self._key(node), node)
            if same is not node and self._may_share(node, same):
                self._share(node, same)
                count += 1
        return count

    def _can_be_shared(self, node: fx.Node) -> bool:
        if node.op != "call_function" or isinstance(node.target, (Check, Draw, Start)) or node.target is wait:
            return False
        if collective_of(node) is None:
            return not has_effects(node)
        comm = node.meta.get("comm")
        return self.with_collectives and comm is not None and comm.source is not None and comm.target is not None

    def _share(self, node: fx.Node, same: fx.Node) -> None:
        if node in self.given_back:
            self.given_back.add(same)
        if self.storages.escapes(node):
            self.storages.escaping.update(self.storages.of(same))
        self.draft.replace(node, same)
        self.draft.graph.erase_node(node)

    def _key(self, node: fx.Node) -> Any:
        versions = tuple([self._version(given) for given in node.all_input_nodes])
        arguments = _frozen((node.args, node.kwargs))
        comm = node.meta.get("comm")
        ends = comm and (comm.source, comm.target)
        return node.target, ends, arguments, versions, in_backward(node), node.meta.get("backward")

    def _version(self, node: fx.Node) -> tuple[int, ...]:
        """What distinguishes a tensor from itself before a write."""
        return tuple([self.counts.get(storage, 0) for storage in self.storages.of(node)])

    def _may_share(self, node: fx.Node, same: fx.Node) -> bool:
        """Views of one tensor are the same memory anyway. Others must not be written to, nor be given back both."""
        if node in self.given_back and same in self.given_back:
            return False
        if is_view(node) or node.target is operator.getitem:
            return True
        storages = self.storages
        is_written = storages.is_written(node) or storages.is_written(same)
        return not is_written and not (storages.escapes(node) and storages.escapes(same))


def _frozen(x: Any) -> Any:
    """Arguments by value: -0.0 is not 0.0, and True is not 1."""
    if isinstance(x, (list, tuple)):
        return tuple([_frozen(y) for y in x])
    if isinstance(x, dict):
        return tuple([(name, _frozen(y)) for name, y in x.items()])
    if isinstance(x, slice):
        return slice, _frozen((x.start, x.stop, x.step))
    return x if isinstance(x, fx.Node) else (type(x), repr(x) if isinstance(x, float) else x)
