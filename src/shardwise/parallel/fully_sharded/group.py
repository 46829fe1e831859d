"""The parameters of one `fully_shard` call: gathered together, freed together, reduced together.

What is gathered lives in tensors that last as long as the group, and whose memory does not: `free` takes it away,
`gather` brings it back. Tensors that autograd saved in between share their storage, and so see it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from shardwise.comm import Handle, noters
from shardwise.errors import NoDataError, PlanError
from shardwise.parallel.fully_sharded.collectives import Joint
from shardwise.parallel.fully_sharded.layouts import DataParallel, Layouts, layouts_at_rest
from shardwise.parallel.fully_sharded.policies import MixedPrecisionPolicy
from shardwise.redistribute import drop, unreduced
from shardwise.redistribute.backward.buckets import held

Place = tuple[nn.Module, str]
"""Where a parameter is kept: a module, and the name there. In several places if it is tied."""

_disabled = torch._C.DisableTorchFunctionSubclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_task = torch._C._current_graph_task_id


@dataclass(eq=False)
class Entry:
    """One parameter of a group: `param` are its shards, as they were when last looked up; `wholes` is what is gathered,
    of each held rank, with or without memory."""

    name: str
    places: list[Place]
    layouts: Layouts
    param: Any
    wholes: list[Tensor] = field(default_factory=list)

    def look_up(self) -> None:
        """Modules may have been given other shards, by `to_empty` or `load_state_dict(assign=True)`."""
        module, name = self.places[0]
        if name not in module._parameters:
            raise PlanError(
                f"fully_shard knows a parameter {self.name!r} that its module no longer has; parametrize modules, or "
                f"take parameters out of them, before fully_shard"
            )
        self.param = module._parameters[name]
        if self.param._layout is not self.layouts.resting:  # styles came after fully_shard
            self.layouts = layouts_at_rest(self.param._layout, self.layouts.data, self.name)
            self.wholes = []

    def held(self) -> Sequence[Tensor]:
        """The shards of the ranks held here."""
        return held(self.param)

    def show(self, x: Any) -> None:
        """Have the modules hold a tensor."""
        for module, name in self.places:
            module._parameters[name] = x
            if isinstance(module, nn.RNNBase):  # which keeps a list of its weights, too
                module._flat_weights[module._flat_weights_names.index(name)] = x


@dataclass
class Options:
    """What users set, by `fully_shard` and by the methods of its module."""

    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    sync: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    reduce_unused: bool = False
    forward_prefetch: list[Group] | None = None
    backward_prefetch: list[Group] | None = None
    unshard_in_backward: bool = True


@dataclass
class Kept:
    """Gradients of a whole parameter that are not reduced yet: of passes inside `no_sync`, if they are `owed`. The last
    of these passes is `task`."""

    grads: list[Tensor]
    divisor: float
    owed: bool
    task: int


class Group:
    """Parameters that rest as shards and are gathered as one."""

    def __init__(
        self, modules: Sequence[nn.Module], entries: Sequence[Entry], data: DataParallel, options: Options
    ) -> None:
        self.modules, self.data, self.options = tuple(modules), data, options
        self.entries = list(entries)
        self._joints: dict[tuple[int, ...], Joint] = {}
        self.is_gathered = False
        self.kept: dict[Entry, Kept] = {}  # gradients of wholes that are not to be reduced yet,
        self.scattered: dict[Entry, list[Tensor]] = {}  # and of shards, not yet added up over their replicas
        self.stamp: tuple = ()
        self._shown: Sequence[Any] | None = None  # what modules hold in the place of shards
        self._pending: list[tuple[list[Entry], Handle]] | None = None

    def joint(self, entries: Sequence[Entry]) -> Joint:
        """Some parameters as one collective has them."""
        gathers = tuple([entry.layouts.gather for entry in entries])
        key = tuple(map(id, gathers))
        if key not in self._joints:
            self._joints[key] = Joint(self.data.mesh, self.data.shard_axis, gathers)
        return self._joints[key]

    # What is gathered

    def look(self) -> tuple:
        """Look the shards up. What is returned tells whether they have changed since."""
        if self._shown is None:
            for entry in self.entries:
                entry.look_up()
        with _disabled():
            return tuple([(entry.param.data_ptr(), entry.param._version) for entry in self.entries])

    def start(self) -> None:
        """Start to gather, unless that is done, or under way, with the shards as they are."""
        stamp = self.look()
        if (self.is_gathered or self._pending is not None) and stamp == self.stamp:
            return
        self.free()
        self.stamp = stamp
        with _disabled(), torch.no_grad():
            self._pending = [(entries, self._start(entries, dtype)) for dtype, entries in self._by_dtype().items()]

    def _by_dtype(self) -> dict[torch.dtype, list[Entry]]:
        """Each dtype takes a collective of its own."""
        found: dict[torch.dtype, list[Entry]] = {}
        for entry in self.entries:
            param = entry.param
            if param.is_meta and self.data.mesh.device_type != "meta":
                raise NoDataError(
                    f"fully_shard: {entry.name} is on the meta device, so there is nothing to gather: give the module "
                    f"memory with to_empty(device=...) and initialise it first"
                )
            found.setdefault(self.options.policy.gathered(param.dtype), []).append(entry)
        return found

    def _start(self, entries: Sequence[Entry], dtype: torch.dtype) -> Handle:
        shards = [entry.held() for entry in entries]
        return self.joint(entries).start_gather(shards, dtype, torch.device(self.data.mesh.device_type))

    def record_gather(self) -> None:
        """In a program that is captured: gather into tensors of this use alone. When to gather again, and what to
        start early, passes over the program decide."""
        self.look()
        with _disabled(), torch.no_grad():
            for dtype, entries in self._by_dtype().items():
                rows = self._start(entries, dtype).wait()
                for entry in entries:
                    noters[-1].meet(entry.param)
                    shapes = entry.layouts.whole.held_shapes
                    entry.wholes = [own[0].new_empty(shape) for own, shape in zip(rows, shapes, strict=True)]
                self.joint(entries).fill(rows, [entry.wholes for entry in entries])

    def gather(self) -> None:
        """Have the whole parameters in memory."""
        self.start()
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with _disabled(), torch.no_grad():
            for entries, handle in pending:
                rows = handle.wait()
                for entry in entries:
                    _allocate(entry, rows[0][0])
                self.joint(entries).fill(rows, [entry.wholes for entry in entries])
        self.is_gathered = True

    def drop(self) -> None:
        """Forget what is under way."""
        for _, handle in self._pending or ():
            handle.wait()
        self._pending = None

    def free(self) -> None:
        """Give back the memory of what was gathered."""
        self.drop()
        if self.is_gathered:
            for entry in self.entries:
                for whole in entry.wholes:
                    whole.untyped_storage().resize_(0)
        self.is_gathered = False

    # Gradients that wait for those of other passes

    def keep(self, entry: Entry, grads: Sequence[Tensor], divisor: float, owed: bool) -> None:
        dtype = self.options.policy.reduced(grads[0].dtype)
        self.kept[entry] = Kept([x.to(dtype) for x in grads], divisor, owed, _task())
        if owed:
            param = entry.param
            param.__dict__.setdefault("_kept", {})  # optimizers must not step without them
            unreduced[id(param)] = ref(param, partial(_gone, id(param)))

    def take(self, entry: Entry) -> Kept | None:
        """What was kept for a parameter; inside `no_sync`, unless its gradient was reset since."""
        kept = self.kept.pop(entry, None)
        if kept is None or not kept.owed:
            return kept
        drop(entry.param)
        was_reset = _get_grad(entry.param) is None and kept.task != _task()  # else it is still to come
        return None if was_reset else kept

    def with_kept(self, entry: Entry, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        kept = self.take(entry)
        return grads if kept is None else [a + b for a, b in zip(kept.grads, grads, strict=True)]

    # What the modules hold

    def show(self, tensors: Sequence[Any] | None) -> Sequence[Any] | None:
        """Put tensors in the place of the shards, or these themselves for None; what was there before is returned."""
        before, self._shown = self._shown, tensors
        if before is not tensors:
            for entry, x in zip(self.entries, tensors or [entry.param for entry in self.entries], strict=True):
                entry.show(x)
        return before

    def reshard(self) -> None:
        self.show(None)
        self.free()

    def done(self) -> None:
        """After a backward pass."""
        self.show(None)
        if self.options.reshard_after_backward:
            self.free()


def _gone(key: int, found: ref[Any]) -> None:
    unreduced.pop(key, None)


def _allocate(entry: Entry, like: Tensor) -> None:
    """Memory for a whole parameter."""
    if not entry.wholes or entry.wholes[0].dtype != like.dtype:
        with torch.inference_mode(False):  # what is evaluated first may be trained later
            entry.wholes = [like.new_empty(shape) for shape in entry.layouts.whole.held_shapes]
    for whole in entry.wholes:
        size = whole.numel() * whole.element_size()
        if whole.untyped_storage().size() != size:
            whole.untyped_storage().resize_(size)
