"""Calls that are not computations: metadata, values leaving for Python, writes to parts. One handler per function.

Those of autograd are in `dispatch.interop.autograd`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import local_tensor, noters, shards_of
from shardwise.dispatch.aliasing.copied_views import CopiedView, watch_view
from shardwise.dispatch.aliasing.global_strides import copied, inferred_strides, on_one_device, shards_contiguous
from shardwise.dispatch.aliasing.views import OnCopiedViews
from shardwise.dispatch.plan import reduce_terms, runs_in_cpp, wrap_fresh
from shardwise.dispatch.planning.fallback import WithoutData, needs_data, on_meta
from shardwise.dispatch.planning.trace import flat_tensors, map_tensors
from shardwise.dispatch.refits import refits
from shardwise.dispatch.steps import Whole
from shardwise.errors import MixedTensorError
from shardwise.layout import Layout
from shardwise.rules.kit.treatments import Handler, treat
from shardwise.tensor import DTensor, as_layout, distribute_tensor, localise, observe, within_graph, wrap

_disabled = torch._C.DisableTorchFunctionSubclass
_on_shard = torch._C._disabled_torch_function_impl
_device: Any = torch._C.TensorBase.device.__get__


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        treat(*functions, handler=handler)
        return handler

    return add


# Facts that are the same for the shard and the tensor


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(getattr(Tensor, name, None), "__get__")]


@handles(
    *_getters(
        *("dtype", "device", "layout", "requires_grad", "is_leaf", "_version", "output_nr", "names", "name"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested"),
        *("is_mps", "is_xpu", "is_xla", "is_ipu", "is_vulkan", "is_maia", "is_mtia"),
        *("itemsize", "retains_grad", "_cdata"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_grad_fn", "grad_dtype", "volatile"),
    ),
    Tensor._backward_hooks.__set__,  # type: ignore[union-attr]  # autograd sets it, with the tensor's lock held
    *(Tensor.element_size, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    *(Tensor.is_signed, torch.is_signed, Tensor.get_device, Tensor.is_inference, torch.is_inference, Tensor._is_view),
    *(Tensor.is_conj, torch.is_conj, Tensor.is_neg, torch.is_neg, Tensor.is_pinned, Tensor.is_coalesced),
    *(Tensor.dense_dim, Tensor.sparse_dim, Tensor.is_shared, Tensor.storage_type, Tensor._is_zerotensor),
    *(torch._is_zerotensor, Tensor.is_distributed, torch.is_distributed),
    *(getattr(Tensor, name) for name in ("has_names",) if hasattr(Tensor, name)),  # of torch 2.11
    Tensor.__dir__,  # asked for by tracebacks, on one rank alone
    *(torch.result_type, torch.can_cast, torch._has_compatible_shallow_copy_type),
)
def _of_the_shard(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return torch._C._disabled_torch_function_impl(func, (), args, kwargs)


@handles(Tensor.type)
def _type(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`type()` names a type; given one it converts, and a plain tensor of the kind says to what."""
    x, *how = args
    found = func(torch.empty(0, dtype=x.dtype, device=x.device), *how, **kwargs)
    return found if isinstance(found, str) else x.to(found.device, found.dtype)


@handles(Tensor.contiguous)
def _contiguous(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    """The tensor itself if it would be contiguous on one device. Otherwise a copy, on every rank."""
    x = args[0]
    if isinstance(x, CopiedView):
        return OnCopiedViews(func)(args, kwargs)
    ordinary = len(args) == 1 and not kwargs
    if ordinary and x.__dict__.keys().isdisjoint(("_peers", "_strides")):
        return x if _shows_contiguous(x._layout, _of_the_shard(Tensor.stride, args, {})) else copied(x)
    if (ordinary and shards_contiguous(x)) or on_one_device(x).is_contiguous(*args[1:], **kwargs):
        return x
    return copied(x, *args[1:], **kwargs)


@lru_cache(maxsize=1024)
def _shows_contiguous(layout: Layout, steps: tuple[int, ...]) -> bool:
    """Whether a tensor is contiguous, if the one shard held here has these strides."""
    strides = inferred_strides(layout.shape, layout.held_shapes[0], steps)
    return torch.empty_strided(layout.shape, strides, device="meta").is_contiguous()


@handles(Tensor.ravel, torch.ravel)
def _ravel(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Unlike `reshape(-1)`, torch's copies every tensor that is not contiguous."""
    return args[0].contiguous().view(-1)


@handles(Tensor.stride, Tensor.dim_order)
def _stride(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The strides of the tensor on one device, or their order."""
    return func(on_one_device(args[0]), *args[1:], **kwargs)


@handles(Tensor.is_contiguous)
def _is_contiguous(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    x = args[0]
    return (len(args) == 1 and not kwargs and shards_contiguous(x)) or func(on_one_device(x), *args[1:], **kwargs)


_OF_SHAPE: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda x: x.shape,  # type: ignore[attr-defined]
    Tensor.nbytes.__get__: lambda x: x.numel() * x.element_size(),  # type: ignore[attr-defined]
    **dict.fromkeys((Tensor.ndim.__get__, Tensor.dim), lambda x: x.ndim),  # type: ignore[attr-defined]
    **dict.fromkeys((Tensor.numel, torch.numel, Tensor.nelement), lambda x: x.numel()),
    **dict.fromkeys((Tensor.is_same_size, torch.is_same_size), lambda x, y: x.shape == y.shape),
    Tensor.size: lambda x, *dim, **named: x.size(*dim, **named),
    Tensor.__len__: len,
}


@handles(*_OF_SHAPE)
def _of_shape(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return _OF_SHAPE[func](*args, **kwargs)


# Values that leave for Python


def whole_of(x: Any) -> Any:
    """The values of a DTensor, plain and outside the graph."""
    if not isinstance(x, DTensor):
        return x
    with torch.no_grad():
        return x.detach().full_tensor()


@handles(Tensor.tolist, Tensor.__contains__)
def of_data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a function makes of gathered tensors, which Python is to see."""
    if on_meta(flat_tensors((args, kwargs))):
        raise needs_data(func, args, kwargs)
    return func(*map(whole_of, args), **kwargs)


@handles(
    *(Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__),
    *(Tensor.is_nonzero, torch.is_nonzero),
)
def _to_number(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if x._layout.numel != 1:  # torch refuses, in its own words
        return func(torch.zeros((), dtype=x.dtype).expand(x.shape))
    return of_data(func, args, kwargs)


@handles(Tensor.__format__)
def _format(func: Callable, args: tuple, kwargs: dict[str, Any]) -> str:
    x, spec = args
    return format(x.item(), spec) if not x.ndim and not x.is_meta else object.__format__(x, spec)


@handles(Tensor.equal, torch.equal)
def _equal(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Compare shard by shard; only the verdict travels."""
    a, b = args
    if a.shape != b.shape:
        return False
    with torch.no_grad():
        return bool((a == b).all().item())


@handles(torch._nested_tensor_from_mask_left_aligned)
def _left_aligned(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the marked places of every row come first: a question about the mask alone."""
    mask = args[1]
    return bool((mask[:, 1:] <= mask[:, :-1]).all())


@handles(Tensor.allclose, torch.allclose)
def _allclose(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    with torch.no_grad():
        return bool(torch.isclose(*args, **kwargs).all().item())


@handles(Tensor.__iter__)
def _iterate(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not args[0].ndim:
        raise TypeError("iteration over a 0-d tensor")
    return iter(args[0].unbind(0))


@handles(Tensor.__rdiv__, Tensor.__rtruediv__)
def _divide_number(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Two calls, as in torch: each plan holds for all numbers, where one for both would hold for this one."""
    return args[0].reciprocal() * args[1]


# Changes of dtype and device: the shards change, the layout stays


@handles(
    *(Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(Tensor.int, Tensor.long, Tensor.short, Tensor.char, Tensor.byte, Tensor.bool, Tensor.pin_memory),
)
def _convert(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not isinstance(x, DTensor):  # `plain.type_as(x)`: of x only the dtype and the device are asked for
        return func(*map_tensors(args, kind_of), **map_tensors(kwargs, kind_of))
    if isinstance(x, CopiedView):
        return OnCopiedViews(func)(args, kwargs)
    if not x._layout.has_pending and runs_in_cpp(x._layout.mesh):
        return wrap_fresh(_on_shard(func, (), args, kwargs), x._layout)
    to_device = len(args) == 2 and not kwargs and args[1].__class__ is torch.device
    if to_device and args[1] == _on_shard(_device, (), (x,), {}):
        return x
    if "_peers" in x.__dict__ and _changes_nothing(func, x._peers[-1], args, kwargs):
        return x
    if x._layout.has_pending:
        with _disabled():
            changed = func(torch.empty((0,) * max(x.ndim, 1), dtype=x.dtype, device=x.device), *args[1:], **kwargs)
            if changed.dtype.itemsize > x.dtype.itemsize and changed.device == x.device:
                return NotImplemented  # planned like any other call: it may be reduced before it grows
            linear = x.dtype == changed.dtype or (x.dtype.is_floating_point and changed.dtype.is_floating_point)
        if not linear:
            x = as_layout(x, x._layout.without_pending, "self")
    rest = [arg for arg in args[1:] if isinstance(arg, Tensor)]
    plan: Any = Whole(func, [None] * (1 + len(rest)), [x._layout], [None], x._layout.mesh)
    if x._layout.mesh.device_type == "meta":
        plan = WithoutData(plan, func)
    out = plan((x, *args[1:]), kwargs)
    with _disabled():
        is_alias = torch._C._is_alias_of(out, x)  # type: ignore[attr-defined]
    return x if is_alias else out  # nothing to change


def _changes_nothing(func: Callable, shard: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a conversion gives the tensor itself. In the simulator, functions are given aliases of the shards."""
    with _disabled():
        alias = shard.detach()
        return func(alias, *args[1:], **kwargs) is alias


def kind_of(x: Tensor) -> Tensor:
    """In place of a DTensor, a plain tensor of its dtype, where it is."""
    if not isinstance(x, DTensor):
        return x
    with _disabled():
        return torch.empty(0, dtype=x.dtype, device=x.device)


@handles(torch.empty_like)
def _empty_like(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """By this a module on the meta device is given memory, shard by shard. Kernels for meta tensors are partly Python,
    which asks a DTensor for its global shape."""
    x = args[0] if args else kwargs.get("input")
    if x.__class__ is not DTensor or len(args) != 1 or x._layout.has_pending:
        return NotImplemented
    if _on_shard(_device, (), (x,), {}).type != "meta" or x._layout.mesh.device_type == "meta":
        return NotImplemented
    return Whole(func, [None], [x._layout], [None], x._layout.mesh, plain=True)(args, kwargs)


# State that every shard has


_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


@handles(
    *(_SET_REQUIRES_GRAD, Tensor.requires_grad_, Tensor.retain_grad, Tensor.detach_, Tensor.record_stream),
    *(Tensor.share_memory_, *([Tensor.grad_dtype.__set__] if hasattr(Tensor, "grad_dtype") else [])),  # type: ignore[union-attr]
)
def _on_every_shard(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if func in (_SET_REQUIRES_GRAD, Tensor.requires_grad_) and all((*args[1:], *kwargs.values())):
        reduce_terms(args[0], within_graph)
    if func is Tensor.retain_grad:
        observe(args[0])
    needed_gradient = args[0].requires_grad
    with _disabled():
        for shard in shards_of(args[0]):
            func(shard, *args[1:], **kwargs)
    if args[0].requires_grad != needed_gradient:
        refits.count += 1
        facts = args[0].__dict__  # what was moved before has another graph, or none
        facts.pop("_moved", None)
        facts["_layout"] = facts["_layout"].unreduced
    return args[0] if func in (Tensor.requires_grad_, Tensor.detach_, Tensor.share_memory_) else None


@handles(Tensor.data.__get__, Tensor.detach, torch.detach)  # type: ignore[attr-defined]
def _data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    """The same shards outside the graph, whatever is pending on them but for terms of products and norms."""
    if args[0]._layout.has_pending and not args[0].requires_grad:
        reduce_terms(args[0])
    with _disabled():
        shards = [func(shard) for shard in shards_of(args[0])]
    out = wrap(local_tensor(shards), args[0]._layout.unreduced)
    if isinstance(args[0], CopiedView):
        watch_view(out, args[0])
    if func == _GET_DATA:
        _keep_no_moves(args[0])
    return out


_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


def _keep_no_moves(x: DTensor) -> None:
    """Forget what was moved of a tensor, and of what it is a view of, and keep nothing from now on. (What was moved of
    a leaf of the graph is forgotten with every write to it.)"""
    with _disabled():
        base = x._base
    for y in (x, base):
        if isinstance(y, DTensor) and not (y.requires_grad and y.is_leaf):
            observe(y)  # which will not find what is forgotten
            y.__dict__["_moved"], y._layout = _Unshared(), y._layout.unreduced


class _Unshared(dict[Any, Any]):
    """What was moved of a tensor whose `data` were handed out: nothing is kept, as nobody would notice a write."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@handles(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    x, value = args
    if not isinstance(x, DTensor) or not isinstance(value, DTensor):
        raise MixedTensorError("data of a DTensor must be set to a DTensor, and of a plain tensor to a plain one")
    reduce_terms(value)
    gradient = x.grad if x._layout is not value._layout else None
    with _disabled():
        for shard, new in zip(shards_of(x), shards_of(value), strict=True):
            if noters:
                noters[-1].set_data(shard, new)
            if shard.requires_grad and x._layout is not value._layout:
                func(shard, new.new_empty(0, dtype=_another(new.dtype)))  # lets go of what accumulates old shards
            func(shard, new)
    x._layout = value._layout
    refits.count += 1
    x.__dict__.pop("_moved", None)
    if gradient is not None:
        x.grad = gradient if gradient.shape == x.shape else None


def _another(dtype: torch.dtype) -> torch.dtype:
    kinds = (torch.complex64, torch.complex128) if dtype.is_complex else (torch.float32, torch.float64)
    return kinds[dtype == kinds[0]]


# Methods that make tensors from nothing but numbers


@handles(Tensor.new, torch._C.TensorBase.new)
def _new(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Numbers are sizes, and so is a `torch.Size`; other sequences are data. A tensor is itself, outside the graph."""
    x, *given = args
    if "size" in kwargs:
        given = [torch.Size(kwargs["size"])]
    if not given or isinstance(given[0], (int, torch.Size)):
        return x.new_empty(given[0] if given and isinstance(given[0], torch.Size) else given or (0,))
    return given[0].detach() if isinstance(given[0], DTensor) else x.new_tensor(given[0])


@handles(Tensor.new_tensor, torch._C.TensorBase.new_tensor)
def _new_tensor(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Of the tensor only its dtype and device matter, none of its numbers."""
    if len(args) != 2 or not isinstance(args[0], DTensor) or isinstance(args[1], Tensor):
        return NotImplemented
    with _disabled():
        made = args[0].new_tensor(args[1], **kwargs)
    return distribute_tensor(made, args[0]._layout.mesh, src_data_rank=None)


# Conjugates and negatives that torch leaves for later: a bit of the tensor, which a trace on meta tensors lacks. Every
# shard has it, and ops on the shards heed it; only who wants them computed must ask every shard


@handles(Tensor.resolve_conj, torch.resolve_conj, Tensor.resolve_neg, torch.resolve_neg)
def _resolve(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    x = args[0] if args else kwargs["input"]
    if isinstance(x, CopiedView):
        return NotImplemented  # asked again by `OnCopiedViews`, with a usual tensor
    with _disabled():
        is_left = x.is_neg() if "neg" in func.__name__ else x.is_conj()
    return x if not is_left else wrap(func(localise(x)), x._layout)


@handles(torch.real, torch.imag, Tensor.real.__get__, Tensor.imag.__get__)  # type: ignore[attr-defined]
def _part(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Of a conjugate, torch makes these of other ops than a trace shows."""
    x = args[0]
    with _disabled():
        left_for_later = x.is_conj()
    return wrap(func(localise(x)), x._layout) if left_for_later and x.__class__ is DTensor else NotImplemented
