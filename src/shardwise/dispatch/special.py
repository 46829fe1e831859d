"""Calls that are not computations: metadata, autograd, values leaving for Python. A table, one handler per function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import ranked
from shardwise.dispatch.build import Whole
from shardwise.dispatch.fallback import describe
from shardwise.errors import InPlaceError, MixedTensorError
from shardwise.layout import Layout
from shardwise.tensor import DTensor, as_layout, localise, wrap

Handler = Callable[[Callable, tuple, dict[str, Any]], Any]
_disabled = torch._C.DisableTorchFunctionSubclass
SPECIAL: dict[Any, Handler] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        for function in functions:
            SPECIAL[function] = handler
        return handler

    return add


def shards_of(x: DTensor) -> tuple[Tensor, ...]:
    """The tensors of all ranks held here; the first is `x` itself."""
    return (x, *x.__dict__.get("_peers", ()))


# Facts that are the same for the shard and the whole


def _getters(*names: str) -> list[Any]:
    return [getattr(Tensor, name).__get__ for name in names if hasattr(getattr(Tensor, name, None), "__get__")]


@handles(
    *_getters(
        *("dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "_version", "output_nr", "names", "name"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested"),
        *(
            "is_mps",
            "is_xpu",
            "is_xla",
            "is_ipu",
            "is_vulkan",
            "is_maia",
            "is_mtia",
            "itemsize",
            "retains_grad",
            "_cdata",
        ),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_grad_fn"),
    ),
    *(Tensor.element_size, Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex),
    *(Tensor.is_signed, torch.is_signed, Tensor.get_device, Tensor.is_inference, torch.is_inference, Tensor._is_view),
    *(
        Tensor.is_conj,
        torch.is_conj,
        Tensor.is_neg,
        torch.is_neg,
        Tensor.is_contiguous,
        Tensor.is_pinned,
        Tensor.is_coalesced,
    ),
    *(Tensor.storage_offset, Tensor.data_ptr, Tensor.untyped_storage, Tensor.dense_dim, Tensor.is_shared),
    *(torch.result_type, torch.can_cast),
)
def _of_the_shard(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    with _disabled():
        return func(*args, **kwargs)


@handles(Tensor.stride)
def _stride(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The strides of a global tensor whose dims are ordered in memory as the shard's are."""
    x = args[0]
    with _disabled():
        local = func(x)
    strides = [0] * len(local)
    step = 1
    for dim in sorted(range(len(local)), key=lambda d: (local[d], -d)):
        strides[dim] = step if local[dim] else 0
        step *= max(x._layout.shape[dim], 1) if local[dim] else 1
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return tuple(strides) if dim is None else strides[dim]


@handles(
    *_getters("shape", "ndim"), Tensor.size, Tensor.dim, Tensor.numel, torch.numel, Tensor.nelement, Tensor.__len__
)
def _of_the_whole(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
        return x.shape
    if func == Tensor.ndim.__get__ or func is Tensor.dim:  # type: ignore[attr-defined]
        return x.ndim
    if func is Tensor.size:
        return x.size(*args[1:], **kwargs)
    return len(x) if func is Tensor.__len__ else x.numel()


@handles(Tensor.is_same_size, torch.is_same_size)
def _is_same_size(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


# Values that leave for Python


def _whole(x: Any) -> Any:
    if not isinstance(x, DTensor):
        return x
    with torch.no_grad():
        return x.detach().full_tensor()


@handles(
    *(
        Tensor.item,
        Tensor.tolist,
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__index__,
        Tensor.__complex__,
    ),
    *(Tensor.numpy, Tensor.__array__, Tensor.__contains__, Tensor.__format__, Tensor.is_nonzero, torch.is_nonzero),
)
def _to_python(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    return func(*(_whole(arg) for arg in args), **kwargs)


@handles(Tensor.equal, torch.equal)
def _equal(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Compare shard by shard; only the verdict travels."""
    a, b = args
    if a.shape != b.shape:
        return False
    with torch.no_grad():
        return bool((a == b).all().item())


@handles(Tensor.allclose, torch.allclose)
def _allclose(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    with torch.no_grad():
        return bool(torch.isclose(*args, **kwargs).all().item())


@handles(Tensor.__iter__)
def _iterate(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not args[0].ndim:
        raise TypeError("iteration over a 0-d tensor")
    return iter(args[0].unbind(0))


# Changes of dtype and device: the shards change, the layout stays


@handles(Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type_as)
def _convert(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    x = args[0]
    with _disabled():
        changed = func(torch.empty(0, dtype=x.dtype, device=x.device), *args[1:], **kwargs)
        exact = x.dtype == changed.dtype or (x.dtype.is_floating_point and changed.dtype.is_floating_point)
    if x._layout.has_pending and not exact:
        x = as_layout(x, x._layout.with_(pending=[None] * x._layout.mesh.ndim), "self")
    rest = [arg for arg in args[1:] if isinstance(arg, Tensor)]
    plan = Whole(func, [None] * (1 + len(rest)), [x._layout], [None])
    return plan((x, *args[1:]), kwargs)


# Autograd


@handles(Tensor.requires_grad_)
def _requires_grad_(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    with _disabled():
        for shard in shards_of(args[0]):
            func(shard, *args[1:], **kwargs)
    return args[0]


@handles(Tensor.requires_grad.__set__, Tensor.retain_grad, Tensor.detach_)  # type: ignore[attr-defined]
def _on_every_shard(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    with _disabled():
        for shard in shards_of(args[0]):
            func(shard, *args[1:], **kwargs)
    return args[0] if func is Tensor.detach_ else None


@handles(Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    with _disabled():
        shards = [func(shard) for shard in shards_of(args[0])]
    return wrap(shards[0] if len(shards) == 1 else ranked(shards), args[0]._layout)


@handles(Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    x, value = args
    if not isinstance(x, DTensor) or not isinstance(value, DTensor):
        raise MixedTensorError("data of a DTensor must be set to a DTensor, and of a plain tensor to a plain one")
    with _disabled():
        for shard, new in zip(shards_of(x), shards_of(value), strict=True):
            func(shard, new)
    x._layout = value._layout


def _settled(x: DTensor) -> DTensor:
    """The tensor with reductions other than sums done, so that its gradient has the seed's layout."""
    keep = [p if p is not None and p.reduce_op == "sum" else None for p in x._layout.pending]
    return as_layout(x, x._layout.with_(pending=keep), "self")


def _seed(x: DTensor, gradient: Tensor | None) -> list[Tensor]:
    """The gradient that a backward pass starts from, per held rank, in the layout of gradients of `x`."""
    if gradient is None:
        if x._layout.numel != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        with _disabled():
            return [torch.ones_like(shard) for shard in shards_of(x)]
    if not isinstance(gradient, DTensor) and gradient.dim() == 0 and x._layout.numel == 1:
        with _disabled():
            return [gradient.expand(shard.shape) for shard in shards_of(x)]
    return list(shards_of(as_layout(gradient, x._layout.gradient, "gradient")))


def _flat_shards(tensors: Any) -> list[Tensor] | None:
    if tensors is None:
        return None
    items = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    return [shard for x in items for shard in (shards_of(x) if isinstance(x, DTensor) else (x,))]


@handles(Tensor.backward)
def _backward(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    x = _settled(args[0])
    seeds = _seed(x, given.get("gradient"))
    with _disabled():
        torch.autograd.backward(
            shards_of(x),
            seeds,
            retain_graph=given.get("retain_graph"),
            create_graph=bool(given.get("create_graph", False)),
            inputs=_flat_shards(given.get("inputs")),
        )


@handles(torch.autograd.grad)
def _grad(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor | None, ...]:
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    given = dict(zip(names, args, strict=False)) | kwargs
    outputs = _as_list(given.pop("outputs"))
    inputs = _as_list(given.pop("inputs"))
    grad_outputs = given.pop("grad_outputs", None)
    grad_outputs = [None] * len(outputs) if grad_outputs is None else _as_list(grad_outputs)
    flat_outputs: list[Tensor] = []
    seeds: list[Tensor | None] = []
    for out, seed in zip(outputs, grad_outputs, strict=True):
        if isinstance(out, DTensor):
            out = _settled(out)
            flat_outputs += shards_of(out)
            seeds += _seed(out, seed)
        else:
            flat_outputs.append(out)
            seeds.append(seed)
    with _disabled():
        flat = iter(func(flat_outputs, _flat_shards(inputs), seeds, **given))
    found: list[Tensor | None] = []
    for x in inputs:
        if not isinstance(x, DTensor):
            found.append(next(flat))
            continue
        grads = [next(flat) for _ in shards_of(x)]
        missing = any(grad is None for grad in grads)
        found.append(None if missing else gradient_tensor(grads, x._layout))
    return tuple(found)


def _as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def gradient_tensor(grads: Sequence[Tensor], layout: Layout) -> DTensor:
    """The gradient of a tensor that lies as `layout`, from the held ranks' plain gradients."""
    with _disabled():
        first = grads[0].view_as(grads[0])
    return wrap(first if len(grads) == 1 else ranked((first, *grads[1:])), layout.gradient)


@handles(Tensor.register_post_accumulate_grad_hook)
def _post_accumulate_hook(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The hook runs when all ranks held here have their gradient."""
    x, hook = args
    arrived = [0]
    total = len(shards_of(x))

    def when_complete(_: Tensor) -> None:
        arrived[0] += 1
        if arrived[0] == total:
            arrived[0] = 0
            hook(x)

    with _disabled():
        handles = [func(shard, when_complete) for shard in shards_of(x)]
    return handles[0] if total == 1 else _Handles(handles)


class _Handles:
    """Several hook handles as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> _Handles:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()


@handles(Tensor.register_hook)
def _register_hook(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The hook sees the gradient as a DTensor, and may return another one."""
    x, hook = args
    layout = x._layout

    def call(*grads: Tensor) -> Sequence[Tensor] | None:
        result = hook(gradient_tensor(grads, layout))
        return None if result is None else shards_of(as_layout(result, layout.gradient, "the hook's result"))

    if "_peers" not in x.__dict__:

        def with_local(grad: Tensor) -> Tensor | None:
            result = call(grad)
            return None if result is None else localise(result[0])  # type: ignore[arg-type]

        with _disabled():
            return func(x, with_local)
    return x.__dict__.setdefault("_hooks", GradientHooks()).add(call)


class GradientHooks:
    """In the simulator the ranks' gradients arrive one by one; hooks wait for all of them (see `hooked`)."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable] = {}

    def add(self, call: Callable) -> Any:
        self.calls[id(call)] = call
        hooks = self

        class Handle:
            def remove(self) -> None:
                hooks.calls.pop(id(call), None)

        return Handle()


# Writing to parts


@handles(Tensor.__setitem__)
def _set_item(func: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """`x[ints and slices] = value`, as a copy into slices, which are views of the shards."""
    x, index, value = args
    if not isinstance(x, DTensor):
        raise MixedTensorError("a part of a plain tensor cannot be set to a DTensor; use full_tensor()")
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(item, (int, slice)) or item is Ellipsis or item is None for item in items) or any(
        isinstance(item, bool) for item in items
    ):
        raise InPlaceError(
            f"{describe('__setitem__', args, kwargs)}: only ints, slices, None and ... can index a DTensor that is "
            f"written to. Nothing was changed; use torch.where or index_put on a replicated tensor"
        )
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    num_dims = sum(item is not None and item is not Ellipsis for item in items)
    items[at : at + 1] = [slice(None)] * (x.ndim - num_dims)
    sizes = iter(x.shape)
    slices: list[Any] = []
    shape: list[int] = []
    for item in items:
        if item is None:
            shape.append(1)
            continue
        size = next(sizes)
        if isinstance(item, int):
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for a dim of size {size}")
            slices.append(slice(item % size, item % size + 1))
        else:
            slices.append(item)
            shape.append(len(range(*item.indices(size))))
    view = x[tuple(slices)] if slices else x
    if isinstance(value, Tensor) and value.dim():
        view.copy_(value.expand(shape).reshape(view.shape))
    elif isinstance(value, Tensor):
        view.copy_(value)
    else:
        view.fill_(value)
