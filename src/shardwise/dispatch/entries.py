"""Entries where torch reads a tensor in C++ and asks nobody: there a DTensor would pass its shard off as the whole.

Most of torch asks `__torch_function__`. What does not is of three kinds, and each has one door to watch:

- numbers read out of tensors (`torch.full((2,), x)`, `torch.arange(x)`, `plain.roll(x)`, `alpha=x`): every one of them
  goes through the op `_local_scalar_dense` (`item`), whose kernel here answers for the whole tensor;
- a tensor's data replaced by another's (`plain.data = x`): before, it is asked by another op, rarely used otherwise,
  whether the two are of one kind, and its kernel here refuses;
- functions that take any Python object (`torch.tensor(x)`, `torch.Tensor(x)`, `torch.FloatTensor(x)`, scripted
  functions, torch.distributed): these are replaced, under their own names, by ones that look at what they are given,
  and so are the names that other modules took from torch before (`from torch import tensor`).

Plain tensors pass as ever. An op's kernel in Python costs them a microsecond or two: `item` is the only one that is
common, and none of these is on the way of a DTensor's own calls. (An op that returns tensors could not be watched so:
they would come out of Python, and `as_subclass`, say, wants one that never was there.)

Not caught: what took a function of torch before the first import of shardwise and keeps it elsewhere than under a name
of a module (an attribute of a class, a default argument, a closure, a partial); private functions of `torch._C`; and
extensions in C++ that are bound without the dispatcher, which get the shard like all C++ that unpacks tensors.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.nested
import torch.utils.dlpack
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.jit import _builtins

from shardwise.dispatch.constructors import watch_calls
from shardwise.errors import MixedTensorError
from shardwise.tensor import DTensor, arrivals

_enabled = torch._C._is_torch_function_enabled
"""Whether a DTensor is a DTensor here, and not only its shard, as it is where its own calls run."""


# Ops of the dispatcher

BACKENDS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "hpu": "HPU", "privateuseone": "PrivateUse1"}
_kernels: dict[str, torch.library.Library] = {}


def watch_ops(device_type: str) -> None:
    """From now on DTensors on devices of a type are noticed by the ops below."""
    backend = BACKENDS.get(device_type)
    if backend is None or device_type in _kernels:
        return
    _kernels[device_type] = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")  # that is what it is
        for op, answer in OPS.items():
            kernel = _asking(torch.library.get_kernel(op, backend), answer)
            _kernels[device_type].impl(op, kernel, backend, with_keyset=True, allow_override=True)


def unwatch_ops(device_type: str) -> None:
    """Torch's own kernels again, as if there had been no DTensors on devices of the type."""
    if (library := _kernels.pop(device_type, None)) is not None:
        library._destroy()


def _asking(theirs: torch._C._SafeKernelFunction, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that lets `answer` see DTensors; NotImplemented and plain tensors go on to the kernel that torch has."""

    def kernel(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
        x = args[-1]
        if (isinstance(x, DTensor) and _enabled()) or not isinstance(x, Tensor):
            answered = answer(*args)
            if answered is not NotImplemented:
                return answered
        return theirs.call_boxed(keys, *args)

    return kernel


def _refusal(what: str, instead: str) -> MixedTensorError:
    return MixedTensorError(f"{what} would take this rank's shard of a DTensor for the whole; use {instead}")


def _number(x: Any) -> Any:
    return x.item() if isinstance(x, Tensor) else x  # torch gives what it wrapped in a tensor itself as it was


def _take_over(x: Tensor, data: DTensor) -> Any:
    if isinstance(x, DTensor):
        return NotImplemented
    raise _refusal("plain.data = x", "x itself in place of the plain tensor, or x.full_tensor()")


OPS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense.default: _number,
    torch.ops.aten._has_compatible_shallow_copy_type.default: _take_over,
}

arrivals.append(watch_ops)


# Functions of torch, under their names


WATCHED: list[Watched] = []


class Watched:
    """A function in place of torch's own. It equals the one it replaces, so that torch finds it in its tables."""

    def __init__(self, original: Callable, answer: Callable, *, lists: bool) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.answer = answer
        self.lists = lists

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(x, DTensor) or (self.lists and isinstance(x, (list, tuple)) and _holds_some(x)):
                return self.answer(self.original, *args, **kwargs) if _enabled() else self.original(*args, **kwargs)
        return self.original(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.original

    def __hash__(self) -> int:
        return hash(self.original)

    def __reduce__(self) -> str:
        return self.__name__  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return repr(self.original)


def _holds_some(given: Any) -> bool:
    for x in given:  # noqa: SIM110 (a generator takes twice as long)
        if isinstance(x, DTensor):
            return True
    return False


def _watch(home: Any, name: str, answer: Callable, *, lists: bool = False) -> None:
    if (original := getattr(home, name, None)) is None:
        return
    watched = Watched(original, answer, lists=lists)
    if builtin := _builtins._find_builtin(original):  # TorchScript knows functions by identity
        _builtins._register_builtin(watched, builtin)
    setattr(home, name, watched)
    WATCHED.append(watched)


def _watch_method(home: type, name: str, answer: Callable, *, static: bool = False) -> None:
    original = getattr(home, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if _holds_some((*args, *kwargs.values()) if kwargs else args) and _enabled():
            return answer(original, *args, **kwargs)
        return original(*args, **kwargs)

    _trace_alike(original, method)
    setattr(home, name, staticmethod(method) if static else method)


def _trace_alike(original: Callable, method: Callable) -> None:
    """If torch.compile was there before us it knows by identity what it does not look into."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.decorators import substitute_in_graph
        from torch._dynamo.variables import PolyfilledFunctionVariable

        for function, known in tuple(PolyfilledFunctionVariable._get_polyfill_handlers().items()):
            if function is original:
                substitute_in_graph(method, skip_signature_check=True)(known.__torch_dynamo_polyfill__)  # type: ignore[attr-defined]


def _copied(original: Callable, data: DTensor, **how: Any) -> Tensor:
    """`torch.tensor`: a copy outside the graph, as torch makes it of a tensor, with torch's advice."""
    like = original(_stand_in(data), **how)
    return data.detach().to(like.device, like.dtype, copy=True).requires_grad_(like.requires_grad)


def _converted(original: Callable, data: DTensor, **how: Any) -> Tensor:
    like = original(_stand_in(data), **how)
    return data.to(like.device, like.dtype)


def _as_array(original: Callable, obj: DTensor, *, copy: bool | None = None, **how: Any) -> Tensor:
    like = original(_stand_in(obj), copy=copy, **how)
    made = obj.to(like.device, like.dtype, copy=bool(copy))
    if like.requires_grad == made.requires_grad:
        return made
    return made.requires_grad_() if like.requires_grad else made.detach()


def _stand_in(x: DTensor) -> Tensor:
    """A plain tensor of the same kind: what torch makes of it says what to make of the DTensor, errors included."""
    return torch.empty(0, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)


def _new_tensor(original: Callable, x: Tensor, data: Any, **how: Any) -> Any:
    if isinstance(x, DTensor) or not isinstance(data, DTensor):
        return original(x, data, **how)
    return _copied(lambda stand_in, **how: original(x, stand_in, **how), data, **how)


_CLONE = "x.clone(), or x.full_tensor() for a plain tensor"
_DENSE = "plain tensors (full_tensor()): sparse and nested tensors have no shards"


def _legacy(original: Callable, *args: Any, **kwargs: Any) -> Any:
    if isinstance(args[0], DTensor) or _are_sizes(*args[1:], **kwargs):
        return original(*args, **kwargs)
    raise _refusal("torch.Tensor(x) and plain.new(x)", _CLONE)


def _typed(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.FloatTensor(...)` and its kin."""
    if _holds_some((*args, *kwargs.values()) if kwargs else args) and _enabled() and not _are_sizes(*args, **kwargs):
        raise _refusal(f"{cls.__module__}.{cls.__name__}(x)", _DENSE if cls.is_sparse else _CLONE)
    return type.__call__(cls, *args, **kwargs)


def _are_sizes(*args: Any, **kwargs: Any) -> bool:
    """Of several arguments, as in `torch.Tensor(n, 3)`, numbers are sizes, and read as numbers are."""
    return len(args) > 1 and not kwargs and all(x.ndim == 0 for x in args if isinstance(x, DTensor))


def _dense_only(original: Callable, *args: Any, **kwargs: Any) -> Any:
    raise _refusal(f"torch.{original.__name__}", _DENSE)


def _other_class(original: Callable, *args: Any, **kwargs: Any) -> Any:
    raise _refusal(original.__name__, "x itself, x.full_tensor(), or x.to_local() where the shard is what you mean")


def _set(original: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(x, DTensor) and len(args) == 1 and isinstance(args[0], DTensor):  # parametrizations do this
        x.data = args[0]
        return x
    raise _refusal("set_", "data = of a DTensor, which takes the shards and the layout of another")


def _scripted(original: Callable, *args: Any, **kwargs: Any) -> Any:
    return DTensor.__torch_function__(args[0], (DTensor,), args[1:], kwargs)


_watch(torch, "tensor", _copied)
_watch(torch, "as_tensor", _converted)
_watch(torch, "asarray", _as_array)
_watch_method(Tensor, "new_tensor", _new_tensor)
_watch_method(Tensor, "set_", _set)
_watch_method(Tensor, "new", _legacy)
_watch_method(Tensor, "__new__", _legacy, static=True)
_watch_method(Tensor, "as_subclass", _other_class)
_watch_method(Tensor, "_make_subclass", _other_class, static=True)
_watch_method(torch.jit.ScriptFunction, "__call__", _scripted)
for _home in (torch, torch.utils.dlpack):
    _watch(_home, "to_dlpack", lambda original, x: x.__dlpack__())
for _name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow"):
    _watch(torch.nested, _name, _dense_only, lists=True)
for _name in ("coo", "csr", "csc", "bsr", "bsc", "compressed"):
    _watch(torch, f"sparse_{_name}_tensor", _dense_only)
try:
    watch_calls(type(torch.FloatTensor), _typed)
except NotImplementedError as reason:
    warnings.warn(f"torch.FloatTensor(x) would take a shard of a DTensor for the whole, unseen: {reason}", stacklevel=2)


# torch.distributed


def refuse_collective(*_: Any, **__: Any) -> Any:
    raise MixedTensorError(
        "torch.distributed knows nothing of layouts, and would change or send this rank's shard of a DTensor; use "
        "redistribute() or full_tensor(), or to_local() where the shard is what you mean. A mesh axis over which "
        "parameters are replicated and the batch is sharded takes the place of DistributedDataParallel"
    )


def is_collective(func: Any) -> bool:
    """Whether a call is one of torch.distributed's own."""
    return getattr(func, "__module__", None) in _COLLECTIVES


_COLLECTIVES = {
    "torch.distributed.distributed_c10d",
    *(f"torch._ops.{name}" for name in ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")),
}


def _watch_checks(name: str) -> None:
    """Those of torch.distributed's functions that ask nobody begin with one of these."""
    original = getattr(distributed_c10d, name)

    @functools.wraps(original)
    def check(param: Any, param_name: str) -> None:
        if _holds_some(param if isinstance(param, (list, tuple)) else (param,)) and _enabled():
            refuse_collective()
        original(param, param_name)

    setattr(distributed_c10d, name, check)


if torch.distributed.is_available():
    _watch_checks("_check_single_tensor")
    _watch_checks("_check_tensor_list")
    for _name in (
        "_broadcast_coalesced",
        "_verify_params_across_processes",
    ):  # DistributedDataParallel begins with them
        _watch(torch.distributed, _name, refuse_collective, lists=True)


# Names that others took before


def rebind(replaced: list[tuple[Any, Any]]) -> None:
    """Where a module outside of torch has taken one of torch's functions, by any name, it gets what replaces it.

    Modules are read as they lie: one that loads what it names when it is asked is not asked.
    """
    theirs = {id(original): ours for original, ours in replaced}
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "shardwise") or not issubclass(type(module), ModuleType):
            continue
        names = _names(module)
        if not theirs.keys().isdisjoint(map(id, tuple(names.values()))):
            names.update({key: theirs[id(x)] for key, x in tuple(names.items()) if id(x) in theirs})


_names: Callable[[ModuleType], dict[str, Any]] = vars(ModuleType)["__dict__"].__get__

rebind([(watched.original, watched) for watched in WATCHED])
