"""What is done before and after a module's forward, and before its backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.comm import as_mesh, noters
from shardwise.dispatch.interop.compiled import run_as_it_is
from shardwise.layout import Layout, Mesh
from shardwise.local import spread
from shardwise.parallel.fully_sharded.group import Group, Place
from shardwise.parallel.fully_sharded.schedule import Schedule
from shardwise.parallel.fully_sharded.unsharded import Use
from shardwise.parallel.parts import check_batches
from shardwise.tensor import DTensor, localise, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_task = torch._C._current_graph_task_id

Unsharded = tuple[Use, list[Tensor]]
"""A use, and the whole parameters in it."""

Shown = tuple[nn.Module, str, Tensor, Tensor]
"""Where a buffer is kept, what is kept there, and what is shown instead."""

HOOKS = "_fully_sharded"
"""Under this name a module keeps its hooks."""


class Hooks:
    """Of the modules of one group. `mesh` is that of the batch, in the last forward pass: None if each rank has one of
    its own."""

    def __init__(self, group: Group, buffers: list[Place]) -> None:
        self.group, self.buffers = group, buffers
        self._schedule: Schedule | None = None
        self.mesh: Mesh | None = None
        self._running: list[_Running] = []  # the innermost last
        self._to_run: set[nn.Module] = set()  # of several modules, until all have run
        self._shared: Unsharded | None = None  # by them,
        self._round = 0  # in this forward pass
        for module in group.modules:
            module.__dict__[HOOKS] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=True)

    # Forward

    @run_as_it_is
    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        outer, is_backward = _innermost.get(), _task() != -1
        if noters:
            return self._record_before(args, kwargs, outer)
        if outer is not None:
            self._join(outer)
        elif not is_backward:
            self.schedule.begin()
            if not self.group.is_gathered:  # then all ranks are here
                check_batches(type(module).__name__, self.group.data.mesh, args, kwargs)
        self.group.gather()
        if not is_backward:
            self.schedule.enter(self.group)
            self.mesh = self._mesh_of_batch(args, kwargs, outer)
        made = self._unsharded()
        before = self.group.show(made[1])
        return self._begun(_Running(made, before, outer, self._show_buffers(), args, is_backward), kwargs)

    def _record_before(self, args: tuple, kwargs: dict[str, Any], outer: Hooks | None) -> tuple[tuple, dict[str, Any]]:
        """The same in a program that is captured."""
        self.mesh = self._mesh_of_batch(args, kwargs, outer)
        self.group.record_gather()
        use = Use(self.group, None, self.mesh)
        made = use, use.tensors()
        before = self.group.show(made[1])
        return self._begun(_Running(made, before, outer, self._show_buffers(), args, True), kwargs)

    def _begun(self, run: _Running, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self._running.append(run)
        _innermost.set(self)
        args, policy = run.args, self.group.options.policy
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            return _converted(args, policy.param_dtype), _converted(kwargs, policy.param_dtype)
        return args, kwargs

    @property
    def schedule(self) -> Schedule:
        """That of the outermost module, which makes it, for all modules in it."""
        if self._schedule is None:
            modules = [module for root in self.group.modules for module in root.modules()]
            inside = list(dict.fromkeys(found for module in modules if (found := hooks_of(module)) is not None))
            schedule = Schedule(self.group, [hooks.group for hooks in inside])
            for hooks in inside:
                hooks._schedule = schedule
            return schedule
        return self._schedule

    def _join(self, outer: Hooks) -> None:
        """A module that is called inside of another need not be part of it."""
        if outer.schedule is not self._schedule:
            self._schedule = outer.schedule
            self._schedule.add(self.group)

    def _mesh_of_batch(self, args: tuple, kwargs: dict[str, Any], outer: Hooks | None) -> Mesh | None:
        """The mesh of DTensors among the inputs that covers data parallelism. A module inside another that is given no
        such tensor does as that one does."""
        for x in _tensors((args, kwargs)):
            if isinstance(x, DTensor) and as_mesh(self.group.data.mesh).is_within(x._layout.mesh):
                return x._layout.mesh
        return None if outer is None else outer.mesh

    def _unsharded(self) -> Unsharded:
        """Several modules of a group that run one after the other share a use, and its one reduction."""
        shared = self._shared if self._to_run and self._round == self.schedule.round else None
        if shared is not None and shared[0].mesh is self.mesh:
            return shared
        use = Use(self.group, self.schedule, self.mesh)
        made = use, use.tensors()
        if len(self.group.modules) > 1:
            self._to_run, self._shared, self._round = set(self.group.modules), made, self.schedule.round
        return made

    def _show_buffers(self) -> list[Shown]:
        """Show buffers as replicated along the axes of a batch of DTensors. They share memory: writes arrive."""
        shown: list[Shown] = []
        mesh = self.mesh
        if mesh is None:
            return shown
        for module, name in self.buffers:
            if (buffer := module._buffers.get(name)) is None:
                continue
            if noters:  # it goes over to the mesh of the program
                noters[-1].meet(buffer)
            if (made := _on(mesh, buffer)) is not None:
                module._buffers[name] = made
                shown.append((module, name, buffer, made))
        return shown

    @run_as_it_is
    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """This is called after a failure, too."""
        if not self._running:
            return None
        run = self._running.pop()
        _innermost.set(run.outer)
        for owner, name, buffer, made in run.buffers:
            if owner._buffers.get(name) is made:
                owner._buffers[name] = buffer
        self.group.show(run.before)
        if noters:
            return self._converted(output)
        self._to_run.discard(module)
        is_seen = _before_nodes(output, partial(self.before_backward, *run.made))
        if not any(run.made[0].trained):  # then no gradient of theirs will say that the pass is through with them
            is_graph = _before_nodes(run.args, partial(self.after_backward, run.made[0]))
        else:
            is_graph = output is not None
        if not run.is_backward:
            self._leave(run.outer, may_free=is_seen or not is_graph)
        return self._converted(output)

    def _converted(self, output: Any) -> Any:
        dtype = self.group.options.policy.output_dtype
        return output if dtype is None else _converted(output, dtype)

    def _leave(self, outer: Hooks | None, may_free: bool) -> None:
        """What is computed may leave by a way that nobody sees, on `self` say. Then nobody will gather again."""
        if not self._to_run:
            self._shared = None
            self.schedule.leave(self.group)
            reshard = self.group.options.reshard_after_forward
            reshard = self.schedule.root is not self.group if reshard is None else reshard
            if reshard and may_free and not self._running:  # a module may call itself
                self.group.reshard()
        if outer is None:
            self.schedule.end()

    def show_unsharded(self) -> None:
        """Outside of a forward: have the modules show their parameters whole, laid out as in the last forward."""
        self.group.gather()
        self.group.show(Use(self.group, self.schedule, self.mesh).tensors())

    # Backward

    def before_backward(self, use: Use, tensors: list[Tensor], grads: Any) -> None:
        """A gradient of the module's outputs is there."""
        here = self.schedule.backward()
        uses = here.uses.setdefault(self.group, {})
        if use in uses or not self.group.options.unshard_in_backward:
            return
        uses[use] = None
        use.check_unchanged()
        self.group.gather()
        self.group.show(tensors)  # a checkpoint inside may compute with them again
        for other in here.previous(self.group):
            other.start()

    def after_backward(self, use: Use, grads: Any) -> None:
        self.schedule.backward().release(use)


@dataclass(slots=True)
class _Running:
    """A forward that goes on."""

    made: Unsharded
    before: Sequence[Any] | None
    outer: Hooks | None
    buffers: list[Shown]
    args: tuple
    is_backward: bool


_innermost: ContextVar[Hooks | None] = ContextVar("innermost", default=None)


def hooks_of(module: nn.Module) -> Hooks | None:
    return module.__dict__.get(HOOKS)


def _on(mesh: Mesh, buffer: Tensor) -> DTensor | None:
    """A buffer as it is on a mesh, if it is not there already: plain, or on other axes of the mesh."""
    if not isinstance(buffer, DTensor):
        return wrap(spread(buffer.detach().view_as(buffer), mesh), Layout(mesh, buffer.shape))
    around = buffer._layout.mesh
    return None if around is mesh or not around.is_within(mesh) else wrap(localise(buffer), buffer._layout.on(mesh))


def _before_nodes(tree: Any, hook: Any) -> bool:
    """Have a hook run before gradients of tensors are used, and say whether any has one. It is the nodes', so that the
    tensors may be written to."""
    with _disabled():
        shards = [shard for x in _tensors(tree) for shard in (x, *x.__dict__.get("_peers", ())) if shard.requires_grad]
        for shard in shards:
            if shard.grad_fn is not None:
                shard.grad_fn.register_prehook(hook)
    return bool(shards)


def _converted(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        yield from _tensors(tuple(tree.values()))
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from _tensors([getattr(tree, f.name) for f in fields(tree)])
