"""Which group is gathered next, and what is under way in a backward pass.

All groups of a model share a schedule. It learns the order of modules from the forward pass that goes on, and gathers
the next one while a module computes: in a forward pass by the order of the one before, in a backward pass by that of
its own forward, backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardwise.parallel.fully_sharded.group import Group
from shardwise.parallel.fully_sharded.reduction import Reduction, start
from shardwise.redistribute.backward.buckets import accumulate
from shardwise.redistribute.backward.deferred_gradients import blocks

_disabled = torch._C.DisableTorchFunctionSubclass
_task = torch._C._current_graph_task_id
_queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback


class Schedule:
    """The groups of one model, in the order in which their modules run."""

    def __init__(self, root: Group, groups: Sequence[Group]) -> None:
        self.root, self.groups = root, list(groups)
        self.entered: list[Group] = []  # in the forward pass before,
        self.left: list[Group] = []
        self._entering: list[Group] = []  # and in the one that goes on
        self._leaving: list[Group] = []
        self.passes: dict[int, Pass] = {}
        self.round = 0  # the number of forward passes

    def add(self, group: Group) -> None:
        """A group of a module that is not part of the outermost one, but called by it."""
        if group not in self.groups:
            self.groups.append(group)

    # Forward

    def begin(self) -> None:
        self.round += 1
        self._entering, self._leaving = [], []
        if self.passes:
            self.reset()

    def reset(self) -> None:
        """After a backward pass that failed: forget it."""
        self.passes.clear()
        for group in self.groups:
            group.done()

    def enter(self, group: Group) -> None:
        """A module of a group is about to run: start what comes after it."""
        at = len(self._entering)
        self._entering.append(group)
        following = group.options.forward_prefetch
        if following is None:
            known = self.entered[at : at + 2]
            following = known[1:] if known and known[0] is group else []
        for other in following:
            other.start()

    def leave(self, group: Group) -> None:
        self._leaving.append(group)

    def end(self) -> None:
        """The outermost module is done. What was started for modules that did not run is dropped."""
        self.entered, self.left = self._entering, self._leaving
        for group in self.groups:
            group.drop()

    # Backward

    def backward(self) -> Pass:
        """The backward pass that runs now."""
        task = _task()
        found = self.passes.get(task)
        if found is None:
            found = self.passes[task] = Pass(self, len(self.left))
            _queue_callback(partial(self._finish, task))
        return found

    def _finish(self, task: int) -> None:
        self.passes.pop(task).finish()


def reduction_of_kept(group: Group) -> list[Reduction]:
    """Of gradients that were kept for parameters which the pass that reduces them did not reach."""
    if not group.options.sync or not group.kept:
        return []
    kept = [(entry, kept) for entry in group.entries if (kept := group.take(entry)) is not None]
    return start(group, [(entry, one.grads) for entry, one in kept], kept[0][1].divisor) if kept else []


class Pass:
    """One backward pass: which uses of groups it is in, and what is on its way to their shards."""

    def __init__(self, schedule: Schedule, cursor: int) -> None:
        self.schedule, self.cursor = schedule, cursor
        self.uses: dict[Group, dict[Any, None]] = {}  # which it has begun, and is not through with
        self.reductions: list[Reduction] = []

    def previous(self, group: Group) -> Sequence[Group]:
        """What the pass will come to after a group."""
        if group.options.backward_prefetch is not None:
            return group.options.backward_prefetch
        left = self.schedule.left
        at = next((i for i in reversed(range(min(self.cursor, len(left)))) if left[i] is group), None)
        if at is None:
            return []
        self.cursor = at
        return [other for other in left[max(at - 1, 0) : at] if other.options.unshard_in_backward]

    def release(self, use: Any) -> None:
        """The pass is through with a use: unless there are others, its group is freed."""
        uses = self.uses.get(use.group)
        if uses is not None and use in uses:
            del uses[use]
            if not uses:
                del self.uses[use.group]
                use.group.done()

    def add(self, reductions: Sequence[Reduction]) -> None:
        """Reductions to be waited for at the end of the pass."""
        self.reductions += reductions

    def make_room(self) -> None:
        """Before the next reduction: each keeps the memory of a module's gradients until it is through."""
        for reduction in self.reductions:
            reduction.advance()

    def finish(self) -> None:
        """The pass is through: all gradients are there, and what was gathered for it is freed."""
        with _disabled(), torch.no_grad():
            if not blocks or blocks[-1] == "reduced":
                for group in self.schedule.groups:
                    self.reductions += reduction_of_kept(group)
            for reduction in self.reductions:
                reduction.advance()
            for reduction in self.reductions:
                for entry, grads in reduction.wait():
                    accumulate(entry.param, grads)
        if not self.schedule.passes:  # else a pass around this one goes on
            for group in self.schedule.groups:
                group.done()
