"""DTensor: a tensor that is its own shard. The global view lives in `_layout`; every torch call goes to `dispatch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import Ranked, as_mesh, ranked
from shardwise.errors import MeshError, MixedTensorError, PlacementError, ReplicaError, ShardShapeError
from shardwise.layout import Layout, Mesh, Partial, Placement, Placements, Replicate
from shardwise.redistribute import Move, Typed, plan_moves, run_path, transition

_disabled = torch._C.DisableTorchFunctionSubclass
_on_shard = (
    torch._C._disabled_torch_function_impl
)  # (function, types, args, kwargs): run it where a DTensor is its shard
_as_subclass = torch._C.TensorBase.as_subclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[attr-defined]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[attr-defined]


class DTensor(Tensor):
    """A tensor with a layout on a mesh. It holds this rank's shard and behaves as the global tensor.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> x = sw.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [sw.Shard(0)])
    >>> x.shape, x.to_local().shape, x.sum().item()
    (torch.Size([4, 2]), torch.Size([2, 2]), 28.0)
    """

    _layout: Layout
    _peers: tuple[Tensor, ...]  # in the simulator, the shards of the other ranks

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError("make a DTensor with shardwise.distribute_tensor, DTensor.from_local or a shardwise factory")

    # The global view, as plain properties: they cost no dispatch.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._layout.size

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._layout.shape)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._layout.placements

    @property
    def device_mesh(self) -> Any:
        """The mesh as the user passed it."""
        return self._layout.mesh.origin

    @property
    def layout_on_mesh(self) -> Layout:
        """The whole layout: ordered axes per dim, pending reductions, explicit sizes."""
        return self._layout

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        shape = self._layout.size
        return shape if dim is None else shape[dim]

    def dim(self) -> int:
        return len(self._layout.shape)

    def numel(self) -> int:
        return self._layout.numel

    nelement = numel
    ndimension = dim

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    # Gradients: torch accumulates plain shards; they become DTensors when looked at.

    @property
    def grad(self) -> DTensor | None:  # type: ignore[override]
        grad = _on_shard(_get_grad, (), (self,), {})
        if grad is None or (grad.__class__ is DTensor and "_peers" not in self.__dict__):
            return grad
        return self._labelled(grad)

    def _labelled(self, grad: Tensor) -> DTensor:
        """What torch accumulated, as a DTensor."""
        with _disabled():
            peers = self.__dict__.get("_peers", ())
            others = tuple(peer.grad for peer in peers)
            if any(other is None for other in others):
                raise RuntimeError(
                    "only some of the simulated ranks have a gradient: a backward pass of a plain tensor was given "
                    "this DTensor in inputs=; use torch.autograd.grad, or call backward on a DTensor"
                )
            if grad.requires_grad and _summed_axes(self._layout):
                return gradient_tensor((grad, *others), self._layout)
            if grad.__class__ is Tensor:
                grad.__class__ = DTensor
                grad._layout = self._layout.gradient
            if peers:
                grad._peers = others
            return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        peers = self.__dict__.get("_peers", ())
        if value is None:
            _on_shard(_set_grad, (), (self, None), {})
            for peer in peers:
                peer.grad = None
            return
        with _disabled():
            grad = as_layout(value, self._layout.gradient, "grad")
            _set_grad(self, grad)
            for peer, piece in zip(peers, grad.__dict__.get("_peers", ()), strict=True):
                peer.grad = piece

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    # Making and leaving

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: Any,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> DTensor:
        """A DTensor of the shards each rank has. Shards of a dim may differ in size between ranks if `shape` says so
        or if `run_check` may look; `run_check` also makes sure that the ranks agree where they must."""
        return _from_local(local_tensor, as_mesh(device_mesh), placements, run_check, shape)

    def to_local(self, *, grad_placements: Placements | None = None) -> Tensor:
        """This rank's shard, as a plain tensor (in the simulator, all ranks' shards as one `Ranked` tensor).

        `grad_placements` says how the gradient that comes back lies, where that is not how the tensor lies.
        """
        local = localise(self)
        if grad_placements is None:
            return local
        layout = self._layout
        given = Layout.of(layout.mesh, layout.shape, grad_placements)
        if given is layout.gradient:
            return local
        back = plan_moves(given, layout.gradient)
        return on_shards(local, lambda shards: _MoveGradient.apply(back, *shards))

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same global tensor in other placements; differentiable.

        The dtypes say in which precision to communicate, forward and backward. `async_op` is accepted as in torch:
        on streams the collective is asynchronous in any case, and the result is always ready to use.
        """
        layout = self._layout
        if device_mesh is not None and as_mesh(device_mesh) is not layout.mesh:
            raise MeshError(f"redistribute stays on the tensor's mesh {layout.mesh}; it cannot move to {device_mesh}")
        if placements is None:
            raise PlacementError("redistribute needs the placements to go to")
        target = Layout.of(layout.mesh, layout.shape, placements)
        moves = plan_moves(layout, target)
        local = localise(self)
        if forward_dtype is not None:
            local = local.to(forward_dtype)
        linear = all(p is None or p.reduce_op == "sum" for p in layout.pending)
        if backward_dtype is None or backward_dtype == local.dtype or not linear:
            moved = run_path(local, moves)
            if any(move.kind == "mask" for move in moves):  # some ranks would share storage with the source, others not
                moved = moved.clone()
            return wrap(moved, target)
        return wrap(on_shards(local, lambda shards: _CastBackward.apply(moves, backward_dtype, *shards)), target)

    def full_tensor(self, *, grad_placements: Placements | None = None) -> Tensor:
        """The whole tensor, plain, on every rank."""
        whole = self.redistribute(placements=[Replicate()] * self._layout.mesh.ndim)
        return single(whole.to_local(grad_placements=grad_placements))

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only DTensors that are leaves of the graph can be deep-copied; detach() it first")
        with _disabled(), torch.no_grad():
            shards = [_as_subclass(x, Tensor).clone() for x in (self, *self.__dict__.get("_peers", ()))]
        copy = wrap(shards[0] if len(shards) == 1 else ranked(shards), self._layout)
        copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = deepcopy(self.grad.detach(), memo)
        if getattr(self, "_is_param", False):
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _disabled():
            shards = [_as_subclass(x.detach(), Tensor) for x in (self, *self.__dict__.get("_peers", ()))]
        return _rebuild, (shards, self._layout, self.requires_grad, getattr(self, "_is_param", False))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        names = ", ".join(f"{name}: {p}" for name, p in zip(self._layout.mesh.names, self.placements, strict=True))
        with _disabled(), torch.no_grad():
            local = repr(_as_subclass(self.detach(), Tensor))
        return f"DTensor({local}, shape={list(self._layout.shape)}, {{{names}}})"

    def __hash__(self) -> int:
        return id(self)


# Between DTensors and local tensors


def wrap(local: Tensor, layout: Layout) -> DTensor:
    """The DTensor whose shard is `local`. A fresh result becomes it; anything else is aliased first."""
    if local.__class__ is DTensor:
        local = localise(local)
    local.__class__ = DTensor
    local._layout = layout
    return local


def localise(x: DTensor) -> Tensor:
    """The shard as a plain tensor that shares storage and history; in the simulator, a `Ranked` of all shards."""
    peers = x.__dict__.get("_peers")
    with _disabled():
        if x.__dict__.get("_hooks") and x.requires_grad and torch.is_grad_enabled():
            return ranked(x._hooks.uses(x))  # type: ignore[attr-defined]
        local = _as_subclass(x, Tensor)
        return local if peers is None else ranked((local, *peers))


def on_shards(local: Tensor, function: Callable[[Sequence[Tensor]], Any]) -> Tensor:
    """Apply a function of all held shards to a local tensor."""
    with _disabled():
        out = function((local, *local.__dict__.get("_peers", ())))
        if type(local) is not Ranked:
            return out[0] if isinstance(out, tuple) else out
        return ranked(out if isinstance(out, tuple) else (out,))


def single(local: Tensor) -> Tensor:
    """A replicated local tensor as one plain tensor."""
    if type(local) is not Ranked:
        return local
    with _disabled():
        return _OneOfAll.apply(local, *local._peers)


def spread(plain: Tensor, mesh: Mesh) -> Tensor:
    """A plain tensor as the local tensor that every rank holds alike."""
    if len(mesh.held) == 1:
        return plain
    with _disabled():
        return ranked(_AllOfOne.apply(len(mesh.held), plain))


def as_layout(value: Tensor, layout: Layout, name: str) -> DTensor:
    """A DTensor argument brought into a layout."""
    if not isinstance(value, DTensor):
        raise MixedTensorError(
            f"{name} must be a DTensor like the tensor it belongs to, not a plain tensor; see from_local"
        )
    if value._layout is layout:
        return value
    if value._layout.shape != layout.shape:
        raise ShardShapeError(f"{name} has shape {list(value.shape)}, the tensor it belongs to {list(layout.shape)}")
    return wrap(run_path(localise(value), plan_moves(value._layout, layout)), layout)


# A gradient of a pending sum is whole on every rank, and what each rank computes from it differs: `V` in the table of
# transitions. Users see it replicated. The two meet only where a gradient is itself differentiated.


def gradient_tensor(grads: Sequence[Tensor], layout: Layout) -> DTensor:
    """The gradient of a tensor that lies as `layout`, from the held ranks' plain gradients."""
    with _disabled():
        grads = [grads[0].view_as(grads[0]), *grads[1:]]
        if (axes := _summed_axes(layout)) and torch.is_grad_enabled():
            varying = Typed(layout.gradient, frozenset(axes))
            grads = transition(Move(varying, Typed(layout.gradient), axes), grads)
        return wrap(grads[0] if len(grads) == 1 else ranked(grads), layout.gradient)


def gradient_shards(gradient: Tensor, layout: Layout, name: str) -> tuple[Tensor, ...]:
    """A gradient for a tensor that lies as `layout`, as the held ranks' gradients."""
    local = localise(as_layout(gradient, layout.gradient, name))
    with _disabled():
        shards = (_as_subclass(local, Tensor), *local.__dict__.get("_peers", ()))
        if (axes := _summed_axes(layout)) and torch.is_grad_enabled():
            varying = Typed(layout.gradient, frozenset(axes))
            return tuple(transition(Move(Typed(layout.gradient), varying, axes), shards))
        return shards


def _summed_axes(layout: Layout) -> tuple[int, ...]:
    return tuple(axis for axis, p in enumerate(layout.pending) if p is not None and p.reduce_op == "sum")


class _OneOfAll(torch.autograd.Function):
    """All ranks' equal tensors → one of them; each rank gets the gradient."""

    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> Tensor:
        ctx.num_ranks = len(shards)
        return shards[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllOfOne.apply(ctx.num_ranks, grad)


class _AllOfOne(torch.autograd.Function):
    """One tensor → the same on all ranks. The ranks' gradients agree; one of them is it."""

    @staticmethod
    def forward(ctx: Any, num_ranks: int, x: Tensor) -> Any:
        return tuple(x.view_as(x) for _ in range(num_ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, _OneOfAll.apply(*grads)


class _MoveGradient(torch.autograd.Function):
    """The same shards; their gradient is moved on its way back."""

    @staticmethod
    def forward(ctx: Any, moves: Sequence[Move], *shards: Tensor) -> Any:
        ctx.moves = moves
        return tuple(x.view_as(x) for x in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shards: Sequence[Tensor] = grads
        for move in ctx.moves:
            shards = transition(move, shards)
        return None, *shards


class _CastBackward(torch.autograd.Function):
    """Moves whose backward communicates in another dtype."""

    @staticmethod
    def forward(ctx: Any, moves: Sequence[Move], dtype: torch.dtype, *shards: Tensor) -> Any:
        ctx.moves, ctx.dtype, ctx.original = moves, dtype, shards[0].dtype
        for move in moves:
            shards = tuple(transition(move, shards))
        return tuple(x.view_as(x) for x in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shards: Sequence[Tensor] = [grad.to(ctx.dtype) for grad in grads]
        for move in reversed(ctx.moves):
            shards = transition(move.dual, shards)
        return None, None, *(shard.to(ctx.original) for shard in shards)


# from_local


def _from_local(
    local: Tensor, mesh: Mesh, placements: Placements | None, run_check: bool, shape: Sequence[int] | None
) -> DTensor:
    if isinstance(local, DTensor):
        raise TypeError(
            "from_local takes a plain tensor; this already is a DTensor (redistribute changes its placements)"
        )
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    local = local if isinstance(local, Ranked) else spread(local, mesh)
    with _disabled():
        shards = (local, *local.__dict__.get("_peers", ()))
        shapes = [tuple(shard.shape) for shard in shards]
    probe = Layout.of(mesh, shapes[0], placements)
    if run_check and len(mesh.held) == 1:
        coordinates, all_shapes = _gather_shapes(shards[0], mesh)
    else:
        coordinates, all_shapes = mesh.held, shapes
    layout = _infer_layout(probe, coordinates, all_shapes, shape)
    for coordinate, found in zip(coordinates, all_shapes, strict=True):
        if found != layout.local_shape(coordinate):
            raise ShardShapeError(
                f"the shard at {_place(mesh, coordinate)} has shape {list(found)}, but {layout} wants "
                f"{list(layout.local_shape(coordinate))} there"
            )
    if run_check:
        _check_replicas(shards, layout)
    with _disabled():
        alias = [_as_subclass(x, Tensor) for x in shards]
    return wrap(alias[0] if len(alias) == 1 else ranked(alias), layout)


def _place(mesh: Mesh, coordinate: Sequence[int]) -> str:
    return ", ".join(f"{name}={at}" for name, at in zip(mesh.names, coordinate, strict=True))


def _gather_shapes(shard: Tensor, mesh: Mesh) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    axes = tuple(range(mesh.ndim))
    mine = torch.tensor(tuple(shard.shape), dtype=torch.int64, device=shard.device)
    rows = mesh.port.all_gather([mine], mesh, axes, [[(shard.dim(),)] * mesh.size()])[0]
    coordinates = [
        tuple(c) for c in torch.cartesian_prod(*(torch.arange(n) for n in mesh.shape)).reshape(-1, mesh.ndim).tolist()
    ]
    return coordinates, [tuple(row.tolist()) for row in rows]


def _infer_layout(
    probe: Layout,
    coordinates: Sequence[tuple[int, ...]],
    shapes: Sequence[tuple[int, ...]],
    shape: Sequence[int] | None,
) -> Layout:
    """The layout whose shards have these shapes. Where only one rank's is known, the others are taken to be alike."""
    mesh, sizes, whole = probe.mesh, [], []
    for dim, axes in enumerate(probe.splits):
        num_pieces = math.prod(mesh.shape[axis] for axis in axes)
        known = {probe.piece_index(dim, at): found[dim] for at, found in zip(coordinates, shapes, strict=True)}
        if not axes:
            sizes.append(None)
            whole.append(shapes[0][dim])
        elif len(known) == num_pieces:
            sizes.append(tuple(known[index] for index in range(num_pieces)))
            whole.append(sum(known.values()))
        else:
            sizes.append(None)
            whole.append(shapes[0][dim] * num_pieces)
    if shape is None:
        return Layout(mesh, whole, probe.splits, probe.pending, sizes)
    if len(shape) != len(whole):
        raise ShardShapeError(f"shape={list(shape)} has {len(shape)} dims, the shard has {len(whole)}")
    if list(shape) == whole:
        return Layout(mesh, whole, probe.splits, probe.pending, sizes)
    return Layout(mesh, shape, probe.splits, probe.pending)


def _check_replicas(shards: Sequence[Tensor], layout: Layout) -> None:
    """Ranks that hold the same piece must hold the same values. All ranks find out, and raise, together."""
    mesh = layout.mesh
    for axis in range(mesh.ndim):
        if layout.axis_dim(axis) is None and layout.pending[axis] is None:
            with _disabled(), torch.no_grad():
                first = mesh.port.broadcast([x.detach() for x in shards], mesh, (axis,), 0)
                same = [
                    torch.tensor(float(torch.equal(a, b)), device=a.device) for a, b in zip(first, shards, strict=True)
                ]
                agree = mesh.port.all_reduce(same, mesh, tuple(range(mesh.ndim)), "min")
            if not all(bool(flag) for flag in agree):
                raise ReplicaError(
                    f"from_local: {layout} says that the ranks along {mesh.names[axis]!r} hold the same values, but "
                    f"they differ; use Shard or Partial there, or make them equal first"
                )


def _rebuild(shards: list[Tensor], layout: Layout, requires_grad: bool, is_param: bool) -> DTensor:
    made = wrap(shards[0] if len(shards) == 1 else ranked(shards), layout).requires_grad_(requires_grad)
    if is_param:
        made._is_param = True
    return made


torch.serialization.add_safe_globals([_rebuild, Layout, Partial])  # what torch.load(weights_only=True) may call


def distribute_tensor(
    tensor: Tensor, device_mesh: Any, placements: Placements | None = None, *, src_data_rank: int | None = 0
) -> DTensor:
    """Lay a plain tensor, the same single-device tensor on every rank, on a mesh.

    The values of the rank numbered `src_data_rank` on each axis count; None means all ranks have them already.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2, 2), ("dp", "tp"))
    >>> sw.distribute_tensor(torch.ones(4, 4), mesh, [sw.Shard(0), sw.Shard(1)]).to_local().shape
    torch.Size([2, 2])
    """
    mesh = as_mesh(device_mesh)
    placements = [Replicate()] * mesh.ndim if placements is None else placements
    if isinstance(tensor, DTensor):
        if tensor._layout.mesh is not mesh:
            raise MeshError(f"the tensor already lies on {tensor._layout.mesh}, not on {mesh}; use full_tensor() first")
        return tensor.redistribute(placements=placements)
    layout = Layout.of(mesh, tensor.shape, placements)
    with torch.no_grad():
        plain = tensor.detach().to(mesh.device_type) if tensor.device.type != mesh.device_type else tensor.detach()
        if src_data_rank is not None and mesh.device_type != "meta":
            for axis in range(mesh.ndim):
                plain = mesh.port.broadcast([plain] * len(mesh.held), mesh, (axis,), src_data_rank)[0]
        moved = run_path(spread(plain, mesh), plan_moves(Layout(mesh, tensor.shape), layout))
        if moved is plain or layout.replicated:
            moved = moved.clone()
        made = wrap(moved, layout)
    return made.requires_grad_(tensor.requires_grad)
