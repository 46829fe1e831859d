"""Whether what a program relies on is still what it was, in forms that are quick to look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.comm import shards_of
from shardwise.dispatch.refits import refits
from shardwise.graph.guards.hooks import OF_ALL, hooks_of
from shardwise.graph.guards.kinds import differs, kind_of
from shardwise.graph.guards.names import Names
from shardwise.graph.guards.reached import MAX_COMPARED, Found, Reached
from shardwise.graph.guards.values import MAX_ITEMS, VALUES, is_same
from shardwise.graph.guards.whereabouts import equal
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass
_push, _pop = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack


class Contents:
    """What lists and dicts hold whose items are not looked at one by one, and the order of dicts."""

    def __init__(self, reached: Reached) -> None:
        attributes = {id(own) for own, _ in reached.holders}
        found = [x for x in reached.lengths if type(x.kept) is not MappingProxyType and id(x.kept) not in attributes]
        compared = [x for x in found if MAX_ITEMS < x.length <= MAX_COMPARED]
        held = [(x.kept, x.name) for x in compared if isinstance(x.kept, (list, deque, dict))]
        for key, optimizer in reached.optimizers.items():
            held += [(group["params"], f"a parameter of {reached.names[key]}") for group in optimizer.param_groups]
        modules = [(x._modules, reached.names[key]) for key, x in reached.modules.items() if isinstance(x, _IN_ORDER)]
        dicts = [(x.kept, x.name) for x in found if isinstance(x.kept, dict) and x.length <= MAX_COMPARED]
        self.held = [(kept, _copied(kept), name) for kept, name in held]
        self.ordered = [(kept, [*kept], name) for kept, name in (*modules, *dicts)]
        self._now = [kept for kept, *_ in self.held]
        self._before = [before for _, before, _ in self.held]
        self._dicts = [kept for kept, *_ in self.ordered]
        self._keys = [*chain.from_iterable(self._dicts)]

    def miss(self) -> str | None:
        if equal([self._now, [*chain.from_iterable(self._dicts)]], [self._before, self._keys]):
            return None
        for kept, before, name in self.held:
            if not equal([kept], [before]):
                return f"{name} is another one"
        for kept, keys, name in self.ordered:
            if not equal([[*kept]], [keys]):
                return f"{name or 'the module'} has another order"
        return None


_IN_ORDER = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _copied(kept: Any) -> Any:
    return next(kind(kept) for kind in (dict, deque, list) if isinstance(kept, kind))


class Hooks:
    """Hooks of modules, optimizers and parameters. Every hook that is registered anywhere counts torch's handles on, so
    as long as these are not counted on, only hooks that were there may be gone."""

    def __init__(self, reached: Reached) -> None:
        owners: list[tuple[Any, str]]
        modules = reached.modules.values()
        owners = [(module, reached.names[id(module)] or type(module).__name__) for module in modules]
        owners += [(x, reached.names[key]) for key, x in reached.optimizers.items()]
        found = [(hooks, name) for owner, name in owners for hooks in hooks_of(owner)]
        found += [(hooks, "every module or optimizer") for hooks in OF_ALL]
        self.now = [hooks for hooks, _ in found]
        self.before = [dict(hooks) for hooks in self.now]
        self.names = [name for _, name in found]
        self.leaves = [x for x in reached.objects if isinstance(x.value, Tensor)]
        self.of_leaves = [*map(dict, self._on_leaves())]
        present = [hooks for hooks in (*self.now, *self._on_leaves()) if hooks]
        self.single = [hooks for hooks in present if len(hooks) == 1]  # if one is gone, none is left
        self.some = [hooks for hooks in present if len(hooks) > 1]
        self.some_before = [dict(hooks) for hooks in self.some]
        self.handles = RemovableHandle.next_id

    def _on_leaves(self) -> Iterator[Any]:
        return (hooks for leaf in self.leaves for hooks in hooks_of(leaf.value))

    def miss(self) -> str | None:
        if RemovableHandle.next_id == self.handles and all(self.single) and self.some == self.some_before:
            return None
        for now, before, name in zip(self.now, self.before, self.names, strict=True):
            if now != before:
                return f"{name} has other hooks"
        if [*self._on_leaves()] != self.of_leaves:
            return "a parameter has other hooks"
        self.handles = RemovableHandle.next_id
        return None


ABSENT = object()
"""In place of what is not there."""


class Kinds:
    """What arguments are like. C++ looks at tensors; where ranks are simulated, or what it says is not enough, each is
    looked at again."""

    def __init__(self, leaves: Sequence[Any], marks: Sequence[Found]) -> None:
        self.marks = marks
        self._held = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *VALUES))]  # so that ids stay theirs
        self.tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.others = [number for number, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
        tensors = [leaves[number] for number in self.tensors]
        self._layouts = [x.__dict__.get("_layout") for x in tensors]
        with _disabled():
            self.of = [kind_of(leaf) for leaf in leaves]
            self._guards = _tensor_guards(tensors) if all(len(shards_of(x)) == 1 for x in tensors) else None

    def miss(self, leaves: Sequence[Any], names: Names) -> str | None:
        for number in self.others if self._are_alike(leaves) else range(len(leaves)):
            if (now := kind_of(leaf := leaves[number])) != (kind := self.of[number]):
                return f"{names.leaf(number)}: {differs(kind, now, leaf)}"
        for (number, key), value, name in self.marks:
            if not is_same(value, leaves[number].__dict__.get(key, ABSENT)):
                return f"{name} is another {type(value).__name__}"
        return None

    def _are_alike(self, leaves: Sequence[Any]) -> bool:
        """Whether all tensors are certainly what they were."""
        if self._guards is None:
            return False
        tensors = [leaves[number] for number in self.tensors]
        return self._guards.check(*tensors) and [x.__dict__.get("_layout") for x in tensors] == self._layouts


class Histories:
    """Where arguments that get gradients come from, and who listens for these: it matters to a program that goes back
    from what it computes by itself."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.of = [
            (number, _history(x)) for number, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad
        ]

    def miss(self, leaves: Sequence[Any], names: Names) -> str | None:
        for number, (was_leaf, hooks) in self.of:
            is_leaf, now = _history(leaves[number])
            if is_leaf != was_leaf:
                return f"{names.leaf(number)} is {'a leaf' if is_leaf else 'no leaf'} of the graph now"
            if now != hooks:
                return f"{names.leaf(number)} has other hooks"
        return None


def _history(x: Tensor) -> tuple[bool, list[Any]]:
    return x.is_leaf, [dict(hooks) for hooks in hooks_of(x)]


def _tensor_guards(tensors: Sequence[Tensor]) -> Any:
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class Identities:
    """Which arguments are one and the same tensor, and which of them the function reaches in another way, too; if one
    of them is written to, also which share memory."""

    def __init__(self, leaves: Sequence[Any], reached: Reached, *, is_written: bool) -> None:
        tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        first = {id(leaves[number]): number for number in reversed(tensors)}
        self.tensors = tensors
        self.equal = [(number, first[id(leaves[number])]) for number in tensors if first[id(leaves[number])] != number]
        known = {id(x.value): x.value for x in reached.objects}
        known |= {
            id(x): x for own in reached.optimizers.values() for group in own.param_groups for x in group["params"]
        }
        self.reached = [(number, known[id(leaves[number])]) for number in tensors if id(leaves[number]) in known]
        self.count = len(first)
        self._tensors = itemgetter(*tensors) if self.count > 1 else tuple
        self.shared = self._shared(leaves) if is_written and self.count > 1 else None

    def _shared(self, leaves: Sequence[Any]) -> list[int]:
        """For each tensor, the first that has its memory."""
        with _disabled():
            storages = [leaves[number].untyped_storage()._cdata for number in self.tensors]
        return [storages.index(one) for one in storages]

    def miss(self, leaves: Sequence[Any], names: Any) -> str | None:
        for number, x in self.reached:
            if leaves[number] is not x:
                return f"{names.leaf(number)} is another tensor than the one that the function reaches"
        for number, other in self.equal:
            if leaves[number] is not leaves[other]:
                return f"{names.leaf(number)} and {names.leaf(other)} are not the same tensor"
        if self.count > 1 and len({*map(id, self._tensors(leaves))}) != self.count:
            return "two arguments are now the same tensor"
        if self.shared is not None and self._shared(leaves) != self.shared:
            return "other arguments than before share memory"
        return None


class TensorFacts:
    """What tensors that are not arguments are like: they may get other data, or be frozen. For DTensors that is
    counted; plain ones are looked at."""

    def __init__(self, found: Sequence[Found]) -> None:
        self.found = found
        with _disabled():
            self.kinds = [kind_of(x.value) for x in found]
        self.refits = refits.count
        self.plain = [x.value for x in found if not isinstance(x.value, DTensor)]
        with _disabled():
            self._guards = _tensor_guards(self.plain)

    def miss(self) -> str | None:
        if refits.count == self.refits and (not self.plain or self._guards.check(*self.plain)):
            return None
        for x, before in zip(self.found, self.kinds, strict=True):
            if (now := kind_of(x.value)) != before:
                return f"{x.name}: {differs(before, now, x.value)}"
        self.refits = refits.count
        return None
