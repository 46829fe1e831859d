"""User-written `torch.autograd.Function`s: forward and backward both see DTensors.

`Function.apply` does not ask `__torch_function__`; C++ would take a DTensor for its shard, and backward and
`ctx.saved_tensors` would be plain shards. So with a DTensor among the arguments of `apply` (see `torch_hooks`), a
function derived from the user's runs instead. Its inputs and outputs are the shards of all held ranks, and its context
joins them into DTensors wherever the user's code looks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.utils.checkpoint import CheckpointFunction

from shardwise.comm import Ranked, ranked, shards_of
from shardwise.comm.rendezvous import expect
from shardwise.dispatch.aliasing.copied_views import CopiedView, KeepsStrides, StaleView, renew, storage_of
from shardwise.dispatch.interop.nodes import pass_none_on
from shardwise.dispatch.modes import as_now
from shardwise.layout import Layout
from shardwise.redistribute import own_node
from shardwise.tensor import DTensor, InFlight, gradient_shards, gradient_tensor, localise, settled, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_enabled = torch._C._is_torch_function_enabled
_users_code = torch._C._EnableTorchFunction  # which a pass may have disabled
_apply: Any = vars(torch._C._FunctionBase)["apply"]

Strides = tuple[int, ...] | None
"""What a DTensor remembers of the strides of the global tensor, where its shards do not show them."""


def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """What `Function.apply` comes to, for plain tensors and for DTensors."""
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if type(arg) in _KINDS and _enabled():  # `isinstance` takes three times as long, and plain programs pay for it
            return _apply_to_dtensors(cls, args, kwargs)
    return _apply(cls, *args, **kwargs)


_KINDS = frozenset({DTensor, InFlight, CopiedView, KeepsStrides, StaleView})


def _apply_to_dtensors(cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    function = cls.__dict__.get("_on_dtensors") or _derive(cls)
    call = _Call(args, function.users_backward)
    pass_none_on(x for x in args if isinstance(x, DTensor))
    out = _apply(function, call, *flat_shards(args), **kwargs)
    flat: Sequence[Any] = _as_tuple(out)
    if cls is CheckpointFunction:
        flat = _part_nodes(flat, call.outputs)
    results = joined(flat, call.outputs, call.strides)
    return tuple(results) if call.returns_tuple else results[0]


def _part_nodes(flat: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
    """Give each rank's shard of the simulator's a node of its own, as results of calls have. Where torch keeps a
    gradient for one that is not the first of its node, after a write to a view of it, it looks for the first, and dies.
    The first has one, too, or hooks would come before what is handed out of its gradient, and after that of others."""
    with _disabled():
        return [
            own_node(x) if len(parts) > 1 and x.requires_grad else x
            for parts, _ in _grouped(flat, layouts)
            for x in parts
        ]


class _Call:
    """One call of a function: for each argument and each result its layout, or None if it is not a DTensor."""

    __slots__ = ("backward", "inputs", "outputs", "returns_tuple", "strides", "tensor_inputs")

    def __init__(self, args: Sequence[Any], backward: Callable) -> None:
        self.backward = as_now(backward)
        self.inputs = _layouts(args)
        self.tensor_inputs = [x._layout if isinstance(x, DTensor) else None for x in args if isinstance(x, Tensor)]
        self.outputs: list[Layout | None] = []
        self.strides: list[Strides] = []
        self.returns_tuple = False


def _layouts(values: Iterable[Any]) -> list[Layout | None]:
    return [x._layout if isinstance(x, DTensor) else None for x in values]


def _strides(values: Iterable[Any]) -> list[Strides]:
    return [x.__dict__.get("_strides") if isinstance(x, DTensor) else None for x in values]


def flat_shards(values: Iterable[Any]) -> list[Any]:
    """The values with the shards of all held ranks in place of DTensors."""
    return [part for x in values for part in (shards_of(x) if isinstance(x, DTensor) else (x,))]


def _grouped(flat: Iterable[Any], layouts: Sequence[Layout | None]) -> Iterable[tuple[list[Any], Layout | None]]:
    parts = iter(flat)
    for layout in layouts:
        yield [next(parts) for _ in (layout.mesh.held if layout is not None else (0,))], layout


def joined(flat: Iterable[Any], layouts: Sequence[Layout | None], strides: Sequence[Strides]) -> list[Any]:
    """Flat values with DTensors again in place of their shards. Those that remembered strides still do: ranks whose
    shards do not show them would otherwise not agree with the others on what is a view."""
    found: list[Any] = []
    for (parts, layout), remembered in zip(_grouped(flat, layouts), strides, strict=True):
        first = parts[0]
        if layout is None:
            found.append(first)
        elif first.__class__ in (DTensor, CopiedView, KeepsStrides) and first._layout is layout:
            if len(parts) > 1:
                first._peers = tuple(parts[1:])  # torch may have put views in their place
            found.append(first)
        elif len(parts) > 1:  # one to which nothing has been done, though what has the first shard was reduced since
            found.append(wrap(ranked([_shard(first), *parts[1:]]), layout))
        else:
            found.append(wrap(first, layout))
        if remembered is not None:
            found[-1].__class__, found[-1]._strides = KeepsStrides, remembered
    return found


def _shard(x: Tensor) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    with _disabled():
        return x._layout.mesh.port.alias(x, Tensor)


def joined_gradients(flat: Iterable[Tensor | None], layouts: Sequence[Layout | None]) -> list[Tensor | None]:
    """Gradients of values with these layouts, as DTensors."""
    found: list[Tensor | None] = []
    for parts, layout in _grouped(flat, layouts):
        if layout is None or all(part is None for part in parts):
            found.append(parts[0])
        else:
            some = next(part for part in parts if part is not None)
            shapes = layout.held_shapes
            grads = [some.new_zeros(shape) if x is None else x for x, shape in zip(parts, shapes, strict=True)]
            found.append(gradient_tensor(grads, layout))
    return found


def _flat_gradients(gradients: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Tensor | None]:
    """What user code returns as gradients of values with these layouts, shard by shard."""
    flat: list[Tensor | None] = []
    for gradient, layout in zip(gradients, layouts, strict=True):
        if layout is None:
            flat.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
        elif gradient is None:
            flat += [None] * len(layout.mesh.held)
        else:
            flat += gradient_shards(gradient, layout, "a gradient that backward returned")
    return flat


class _Context:
    """What a context does differently where its function runs on DTensors."""

    call: _Call
    saved: tuple[list[Layout | None], list[Strides]]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved = _layouts(tensors), _strides(tensors)
        super().save_for_backward(*flat_shards(tensors))  # type: ignore[misc]

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        flat = super().saved_tensors  # type: ignore[misc]
        with torch.enable_grad():  # what was no leaf is none: only then is it remembered what its sums have come to
            return tuple(joined(flat, *self.saved)) if flat else flat

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        flat = super().needs_input_grad[1:]  # type: ignore[misc]
        return tuple(parts[0] for parts, _ in _grouped(flat, self.call.inputs))

    def mark_dirty(self, *tensors: Tensor) -> None:
        super().mark_dirty(*flat_shards(tensors))  # type: ignore[misc]

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        super().mark_non_differentiable(*flat_shards(tensors))  # type: ignore[misc]

    def register_hook(self, hook: Callable) -> Any:
        """A hook on the node: `hook(gradients of inputs, gradients of outputs)`."""
        call = self.call

        def on_shards(grad_inputs: tuple, grad_outputs: tuple) -> tuple | None:
            result = hook(
                tuple(joined_gradients(grad_inputs, call.tensor_inputs)),
                tuple(joined_gradients(grad_outputs, call.outputs)),
            )
            return None if result is None else tuple(_flat_gradients(_as_tuple(result), call.tensor_inputs))

        return super().register_hook(on_shards)  # type: ignore[misc]

    def register_prehook(self, hook: Callable) -> Any:
        """A hook on the node: `hook(gradients of outputs)`."""
        call = self.call

        def on_shards(grad_outputs: tuple) -> tuple | None:
            result = hook(tuple(joined_gradients(grad_outputs, call.outputs)))
            return None if result is None else tuple(_flat_gradients(_as_tuple(result), call.outputs))

        return super().register_prehook(on_shards)  # type: ignore[misc]


def _without_arguments(ctx: Any, results: tuple, args: tuple) -> list[Any]:
    """The results with aliases in place of arguments that come back unchanged: torch would make them by a call on the
    DTensor, which may move it."""
    dirty = {id(x) for x in ctx.dirty_tensors or ()}
    kept = {id(x) for x in args if isinstance(x, DTensor)} - dirty
    made = {id(x): wrap(localise(x), x._layout) for x in results if id(x) in kept}
    taken = {storage_of(x) for x in args if isinstance(x, Tensor)}
    made |= {id(x): x.detach() for x in results if id(x) not in dirty | kept and _is_hidden_view(x, taken)}
    if made and ctx.non_differentiable:
        shards = {
            id(old): new for x in results if id(x) in made for old, new in zip(shards_of(x), shards_of(made[id(x)]))
        }
        ctx.non_differentiable = tuple(shards.get(id(x), x) for x in ctx.non_differentiable)
    return [x if id(x) in dirty else settled(made.get(id(x), x)) for x in results]


def _is_hidden_view(x: Any, taken: set[int]) -> bool:
    """Whether shards are views of what only the call has seen, though the tensor would be none on one device. Torch
    lets nobody write to views that a function returns."""
    if not isinstance(x, DTensor) or storage_of(x) in taken:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(shard._is_view() for shard in shards_of(x))


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


_ONCE = once_differentiable(lambda ctx: None).__code__


def _derive(cls: Any) -> Any:
    """The user's function as a function of shards."""
    user = cls.backward if cls.vjp is Function.vjp else cls.vjp
    once = getattr(user, "__code__", None) is _ONCE  # the decorator works in C++: it must have the shards
    if once:
        user = user.__wrapped__

    def forward(ctx: Any, call: _Call, *flat: Any, **kwargs: Any) -> tuple:
        ctx.call = call
        args = tuple(parts[0] for parts, _ in _grouped(flat, call.inputs))
        if cls.setup_context is not Function.setup_context:
            out = cls.forward(*args, **kwargs)
            cls.setup_context(ctx, args, out)
        else:
            out = cls.forward(ctx, *args, **kwargs)
        call.returns_tuple = isinstance(out, tuple)
        results = _without_arguments(ctx, _as_tuple(out), args)
        for x in results:
            if isinstance(x, StaleView):
                renew(x)
        call.outputs, call.strides = _layouts(results), _strides(results)
        return tuple(flat_shards(results))

    def backward(ctx: Any, *flat: Tensor | None) -> tuple:
        expect([ctx])  # the pass may have begun at a plain result of it
        gradients: list[Any] = joined_gradients(flat, ctx.call.outputs)
        if getattr(cls, "boxed_grads_call", False):
            gradients = [gradients]
        with _users_code():
            result = list(_as_tuple(ctx.call.backward(ctx, *gradients)))
        wanted = len(ctx.call.inputs)
        while len(result) > wanted and result[-1] is None:
            result.pop()
        if len(result) != wanted:
            raise RuntimeError(
                f"{cls.__name__}.backward returned an incorrect number of gradients "
                f"(expected {wanted}, got {len(result)})"
            )
        return None, *_flat_gradients(result, ctx.call.inputs)

    derived = type(cls)(
        cls.__name__,
        (cls,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(once_differentiable(backward) if once else backward),
            "users_backward": staticmethod(user),
            "vjp": staticmethod(Function.vjp),
            "setup_context": staticmethod(Function.setup_context),
            "boxed_grads_call": False,
            "__module__": cls.__module__,
        },
    )
    made = derived._backward_cls
    derived._backward_cls = type(
        made.__name__,
        (_Context, BackwardCFunction),
        {"_forward_cls": derived, "_autograd_function_id": made._autograd_function_id},
    )
    cls._on_dtensors = derived
    return derived


# Whoever listens for saved tensors (a checkpoint, offloading) is given plain shards. C++ would hand a DTensor on as it
# is: with the data of a shard, and in Python the global shape. A result that is saved for its own gradient and needs
# none (the indices of a sort) is plain when it is saved, and a DTensor when the call returns: an alias is given.


def _is_inside(x: Tensor) -> bool:
    """Whether a tensor is one that only the call in which it is saved has seen: ranks' shards together, or a result."""
    return x.__class__ is Ranked or (x.__class__ is Tensor and not x.requires_grad)


def _as_saved(x: Any) -> Any:
    if not isinstance(x, DTensor) and (_enabled() or not _is_inside(x)):
        return x
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        shard: Any = x.detach()
    if x.__dict__.get("_is_param"):
        shard._is_param = True  # listeners leave parameters where they are
    return shard


def listening_to_shards(listen: Callable) -> Callable:
    """`saved_tensors_hooks.__init__`."""

    @functools.wraps(listen)
    def init(self: Any, pack_hook: Callable, unpack_hook: Callable) -> None:
        if isinstance(pack_hook, torch.fx.GraphModule):
            listen(self, pack_hook, unpack_hook)
            return

        unpack = as_now(unpack_hook)  # a checkpoint recomputes in it

        def packed(x: Any) -> Any:
            if x.__class__ is Tensor and _enabled():  # as all are in a plain program, which pays for every question
                return pack_hook(x)
            return pack_hook(_as_saved(x))

        def unpacked(x: Any) -> Any:
            if _enabled():
                return unpack(x)
            with _users_code():
                return unpack(x)

        listen(self, packed, unpacked)

    return init


# A checkpoint keeps the arguments that it recomputes from as autograd keeps tensors. Where somebody listens for these
# (another checkpoint around it, offloading), C++ hands on a detached shard.


def keeping_shards(frame: Any) -> type:
    """`_CheckpointFrame`, which keeps shards and joins them again. (In torch 2.11 an autograd function of torch's does,
    like any user's.)"""
    if not hasattr(frame, "save_inputs"):
        return frame

    def save_inputs(self: Any, *args: Any) -> None:
        self.kept = None
        if not _KINDS.isdisjoint(map(type, args)):
            self.kept = _layouts(args), _strides(args)
            args = tuple(flat_shards(args))
        frame.save_inputs(self, *args)

    def get_inputs(self: Any) -> list[Any]:
        flat = frame.get_inputs(self)
        if self.kept is None:
            return flat
        with torch.enable_grad():  # as above
            return joined(flat, *self.kept)

    methods = {"save_inputs": save_inputs, "get_inputs": get_inputs, "__wrapped__": frame}
    return type(frame.__name__, (frame,), {**methods, "__module__": frame.__module__})
