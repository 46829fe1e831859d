"""DTensor: a tensor that is its own shard. The global view lives in `_layout`; every torch call goes to `dispatch`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.comm import AnyMesh, Ranked, as_mesh, local_tensor, ranked, shards_of
from shardwise.comm.faked import as_fakes
from shardwise.errors import MeshError, MixedTensorError, PlacementError, ShardShapeError
from shardwise.from_local import check_strides, gradient_layout, laid_out, layout_of_shards
from shardwise.layout import Layout, Partial, Placement, Placements, Replicate, Shard
from shardwise.local import (
    check_strided,
    on_shards,
    part_held,
    plain_alias,
    single,
    spread,
)
from shardwise.redistribute import (
    CastBackward,
    Gathered,
    LookedUp,
    Move,
    MoveGradient,
    plan_moves,
    run_path,
)

_disabled = torch._C.DisableTorchFunctionSubclass
# (function, types, args, kwargs): run it where a DTensor is its shard
_on_shard = torch._C._disabled_torch_function_impl
_as_subclass = torch._C.TensorBase.as_subclass
_get_grad = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
_set_grad = torch._C.TensorBase.grad.__set__  # type: ignore[union-attr]


class _Withheld:
    """An attribute that torch's tensors have and DTensors do not."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, x: Any, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self.name}: it would give out a shard for the whole")


class DTensor(Tensor):
    """A tensor with a layout on a mesh. It holds this rank's shard and behaves as the global tensor.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> x = sw.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [sw.Shard(0)])
    >>> x.shape, x.to_local().shape, x.sum().item()
    (torch.Size([4, 2]), torch.Size([2, 2]), 28.0)
    """

    # All that is kept on a tensor. What else is in its `__dict__`, users have put there.
    _layout: Layout
    _peers: tuple[Tensor, ...]  # in the simulator, the shards of the other ranks
    _is_param: bool  # as torch marks parameters that are no instances of Parameter
    _moved: dict[Any, Any]  # what it was moved to, for further uses (`dispatch.plan.Mover`); terms that are `Disjoint`
    _gathered: Gathered | LookedUp  # where it was gathered from, if it was asked to be, or of what it has rows
    _grad_set: tuple[Tensor, Tensor]  # a gradient as kernels see it, and as it was set
    _kept: dict[int, Any]  # terms of the gradient that `no_sync` keeps
    _watched: bool  # there are hooks on its node in the graph
    _rendezvous: dict[int, Any]  # hooks of a leaf in the simulator (`comm.rendezvous`)
    _strides: tuple[int, ...] | None  # those of the whole, where its shard does not show them
    _view_of: Any  # of a copy in the place of a view (`dispatch.aliasing`): of what, and how it was taken,
    _shown: int  # the source's version when the copy was brought up to date,
    _copy: Any  # and the copy that a view of it is part of

    @staticmethod
    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError("make a DTensor with shardwise.distribute_tensor, DTensor.from_local or a shardwise factory")

    def __init_subclass__(cls) -> None:
        if not cls.__module__.startswith("shardwise."):
            raise TypeError(
                "DTensor is not to be subclassed: results of calls are DTensors, whatever their arguments are"
            )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only called for shards without data: C++ sees plain shards. (`torch.compile` leaves alone tensors whose class
        has this.)"""
        return as_fakes(func, args, kwargs or {})

    def as_subclass(self, cls: type) -> Any:
        if not torch._C._is_torch_function_enabled():  # the shard is what is meant
            return _as_subclass(self, cls)
        raise MixedTensorError(
            "as_subclass would take this rank's shard of a DTensor for the whole; use x itself, x.full_tensor(), or "
            "x.to_local() where the shard is what you mean"
        )

    def set_(self, *args: Any, **kwargs: Any) -> DTensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], DTensor):
            raise MixedTensorError("set_ of a DTensor takes another DTensor: its shards and its layout, as data = does")
        self.data = args[0]  # parametrizations do this
        return self

    __dlpack_c_exchange_api__ = _Withheld()  # functions in C that give out memory without asking: not for a shard's

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

    def size(self, dim: int | None = None) -> Any:
        shape = self._layout.size
        if dim is None:
            return shape
        try:
            return shape[dim]
        except IndexError:
            return torch.empty(shape, device="meta").size(dim)  # in torch's words

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

    if TYPE_CHECKING:  # torch says that these return a Tensor; two are set in `tensor.gradients` and `tensor.in_flight`
        grad: DTensor | None

        def detach(self) -> DTensor: ...

        def requires_grad_(self, mode: bool = True) -> DTensor: ...

        _departed: Any

    # Making and leaving

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: AnyMesh | None = None,
        placements: Placements | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
    ) -> DTensor:
        """A DTensor of the shards each rank has. Shards of a dim may differ in size between ranks if `shape` says so
        or if `run_check` may look; `run_check` also makes sure that the ranks agree where they must. `stride`, if
        given, must be the global strides. `grad_placements` are those of the gradient that each rank gets back, where
        they are not those of the tensor."""
        if isinstance(local_tensor, DTensor):
            raise TypeError(
                "from_local takes a plain tensor; this already is a DTensor (redistribute changes its placements)"
            )
        mesh = as_mesh(device_mesh)
        check_strided(local_tensor)
        local = local_tensor if isinstance(local_tensor, Ranked) else spread(local_tensor, mesh)
        layout = layout_of_shards(local, mesh, placements, run_check=run_check, shape=shape)
        local = plain_shards(local, layout)
        if grad_placements is not None:
            back = plan_moves(layout.gradient, gradient_layout(layout, grad_placements))
            local = on_shards(local, lambda shards: MoveGradient.apply(back, *shards), back)
        made = wrap(local, layout)
        if stride is not None:
            check_strides(layout, made.stride(), stride)
        return made

    def to_local(self, *, grad_placements: Placements | None = None) -> Tensor:
        """This rank's shard, as a plain tensor (in the simulator, all ranks' shards as one `Ranked` tensor).

        `grad_placements` are those of the gradient that comes back, where they are not those of the tensor.
        """
        local = localise(self)
        layout = self._layout
        given = layout.gradient if grad_placements is None else Layout.of(layout.mesh, layout.shape, grad_placements)
        back = plan_moves(given, layout.gradient)
        leaves_the_graph = len(layout.mesh.held) == 1 and local.requires_grad and not self.is_leaf
        if not back and not (leaves_the_graph and torch.is_grad_enabled()):
            return local
        return on_shards(local, lambda shards: MoveGradient.apply(back, *shards), back)

    def redistribute(
        self,
        device_mesh: AnyMesh | None = None,
        placements: Placements | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same global tensor in other placements; differentiable.

        The dtypes say in which precision to communicate, forward and backward. With `async_op` the call returns while
        data are under way, and the first use of the result waits for them. Several may be under way at once.
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
        cast = None if backward_dtype == local.dtype or not linear else backward_dtype
        if async_op and layout.mesh.port.overlaps and any(move.communicates for move in moves):
            return self._departed(local, moves, target, cast)
        if cast is not None:
            return wrap(on_shards(local, lambda shards: CastBackward.apply(moves, cast, False, *shards), moves), target)
        moved = run_path(local, moves)
        if moves and all(move.shares_memory for move in moves):  # some ranks would share it with the source
            moved = moved.clone()
        return remembering(wrap(moved, target), local, moves)

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
            shards = [_as_subclass(x, Tensor).clone() for x in shards_of(self)]
        copy = wrap(local_tensor(shards), self._layout)
        copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        if getattr(self, "_is_param", False):  # as of torch's own parameters, nothing else is copied
            copy._is_param = True
            return copy
        if self.grad is not None:
            copy.grad = deepcopy(self.grad.detach(), memo)
        copy.__dict__.update(deepcopy(_set_by_users(self), memo))
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _disabled():
            shards = [_as_subclass(x.detach(), Tensor) for x in shards_of(self)]
        facts = shards, self._layout, self.requires_grad, getattr(self, "_is_param", False)
        attributes = _set_by_users(self)
        return _rebuild, (*facts, attributes) if attributes else facts

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """This rank's part of the tensor, under its name unless it is the whole; nothing is communicated."""
        names = ", ".join(f"{name}: {p}" for name, p in zip(self._layout.mesh.names, self.placements, strict=True))
        with _disabled(), torch.no_grad():
            shard = repr(_as_subclass(self.detach(), Tensor))
            node = self.grad_fn
            history = f", grad_fn=<{node.name()}>" if node is not None else ", requires_grad=True"
            graph = history if self.requires_grad else ""
        begin = f"DTensor({part_held(self._layout)}"
        shard = shard.replace("\n", "\n" + " " * len(begin))
        return f"{begin}{shard}, shape={list(self._layout.shape)}, {{{names}}}{graph})"

    def __hash__(self) -> int:
        return id(self)


# Between DTensors and local tensors


def wrap(local: Tensor, layout: Layout) -> DTensor:
    """The DTensor whose shard is `local`. A fresh result becomes it; anything else is aliased first."""
    made: Any = localise(local) if isinstance(local, DTensor) else local
    made.__class__ = DTensor
    made.__dict__["_layout"] = layout
    return made


def plain_shards(local: Tensor, layout: Layout) -> Tensor:
    """Aliases of the shards that ranks bring, which may become a DTensor."""
    with _disabled():
        aliases = [plain_alias(shard, layout.mesh) for shard in laid_out(shards_of(local), layout)]
    return local_tensor(aliases)


def kernels_see(x: DTensor) -> Tensor:
    """A DTensor as torch's kernels may see it: itself, but on meta, where they are partly Python, its shard."""
    return localise(x) if x._layout.mesh.device_type == "meta" else x


def localise(x: DTensor) -> Tensor:
    """The shard as a plain tensor that shares storage and history; in the simulator, a `Ranked` of all shards."""
    facts = x.__dict__
    local: Any = _on_shard(facts["_layout"].mesh.port.alias, (), (x, Tensor))  # type: ignore[call-arg]
    if "_peers" not in facts:
        return local
    with _disabled():  # all by aliases: ranks whose graphs differ would add up gradients in different orders
        alias = facts["_layout"].mesh.port.alias
        return ranked((local, *(alias(peer, Tensor) for peer in facts["_peers"])))


def remembering(made: DTensor, local: Tensor, moves: Sequence[Move]) -> DTensor:
    """What was moved from `local`. If it was gathered it remembers from where."""
    if len(moves) == 1 and moves[0].kind == "all_gather" and made.requires_grad:
        with _disabled():
            made.__dict__["_gathered"] = Gathered(moves[0], shards_of(local), made)
    return made


def as_layout(value: Tensor, layout: Layout, name: str) -> DTensor:
    """A DTensor argument brought into a layout."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a DTensor, not a {type(value).__name__}")
    if not isinstance(value, DTensor):
        raise MixedTensorError(
            f"{name} must be a DTensor like the tensor it belongs to, not a plain tensor; see from_local"
        )
    if value._layout.unreduced is layout.unreduced:
        return value
    if value._layout.shape != layout.shape:
        raise ShardShapeError(f"{name} has shape {list(value.shape)}, the tensor it belongs to {list(layout.shape)}")
    return wrap(run_path(localise(value), plan_moves(value._layout, layout)), layout)


OURS = frozenset(DTensor.__annotations__)


def _set_by_users(x: DTensor) -> dict[str, Any]:
    return {name: value for name, value in x.__dict__.items() if name not in OURS}


def _rebuild(
    shards: list[Tensor],
    layout: Layout,
    requires_grad: bool,
    is_param: bool,
    attributes: dict[str, Any] | None = None,
) -> DTensor:
    made = wrap(local_tensor(shards), layout).requires_grad_(requires_grad)
    if is_param:
        made._is_param = True
    if attributes:
        made.__dict__.update(attributes)
    return made


_rebuild.__module__ = __package__  # by that name it is found in what was pickled
# What torch.load(weights_only=True) may call
torch.serialization.add_safe_globals([_rebuild, Layout, Shard, Replicate, Partial])
