"""`fuse_loss`: a model's own loss, of logits that are never there as a whole.

While such a model computes a loss, its head gives out `Logits`: what they will be computed from, if anybody asks. The
losses of Hugging Face's models convert them, take rows of them, and hand them to `cross_entropy`, which needs no more.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.dispatch import implicit_replication
from shardwise.errors import PlanError
from shardwise.layout import Placement, Replicate
from shardwise.parallel.fully_sharded.hooks import hooks_of
from shardwise.parallel.linear_loss import linear_cross_entropy, whole_local
from shardwise.parallel.style import Later, is_styled
from shardwise.tensor import DTensor

_disabled = torch._C.DisableTorchFunctionSubclass
_fusing: ContextVar[bool] = ContextVar("fusing", default=False)


def fuse_loss(model: nn.Module) -> nn.Module:
    """Let a Hugging Face model compute its loss by `linear_cross_entropy`, in one line: `fuse_loss(model)`.

    While the model trains (`model.train()`) and is given labels, its head's product and its loss are one function, in
    which logits exist only for a chunk of rows at a time; they are missing from the output then (`output.logits` is
    None). Its loss function is not replaced: whatever it does with the logits beyond handing them to `cross_entropy`
    is right, and computes them. It goes before `parallelize_module` or after, and with any style of the
    head whose output is whole, or a DTensor. A head that is fully sharded by itself, and not with the model, computes
    its logits as before, and so does one that gives each rank a plain part of them.

    >>> import torch, shardwise as sw
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.head = torch.nn.Linear(4, 10)
    ...     def get_output_embeddings(self):
    ...         return self.head
    ...     def forward(self, x, labels=None):
    ...         logits = self.head(x)
    ...         return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
    >>> model = sw.parallel.fuse_loss(Model())
    >>> output = model(torch.randn(3, 4), labels=torch.arange(3))
    >>> output["loss"].requires_grad, output["logits"]
    (True, None)
    """
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    if not isinstance(head, nn.Linear):
        raise PlanError(
            f"fuse_loss takes a model whose get_output_embeddings() is an nn.Linear, such as Hugging Face's causal "
            f"language models; {type(model).__name__} has {type(head).__name__}"
        )
    if "labels" not in inspect.signature(model.forward).parameters:
        raise PlanError(f"fuse_loss takes a model whose forward takes labels; that of {type(model).__name__} does not")
    for module, derived in ((model, _with_fused_loss), (head, _with_logits_later)):
        cls: Any = type(module)
        module.__class__ = derived(cls)
    return model


# The model and its head: each of a class of the same name, derived from its own


@contextmanager
def _fused() -> Iterator[None]:
    token = _fusing.set(True)
    try:
        yield
    finally:
        _fusing.reset(token)


@functools.cache
def _with_fused_loss(cls: Any) -> Any:
    signature = inspect.signature(cls.forward)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        has_labels = signature.bind(self, *args, **kwargs).arguments.get("labels") is not None
        if not (has_labels and self.training):
            return cls.forward(self, *args, **kwargs)
        with _fused():
            return _without_logits(cls.forward(self, *args, **kwargs))

    return _derived(cls, forward, _with_fused_loss)


@functools.cache
def _with_logits_later(cls: Any) -> Any:
    @functools.wraps(cls.forward)
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        moves_outputs = getattr(self, "_distribute_module_applied", False) and not is_styled(self)
        if not _fusing.get() or moves_outputs or hooks_of(self) is not None:  # its weight is whole in here only
            return cls.forward(self, input)
        return Logits.of(input, self)

    return _derived(cls, forward, _with_logits_later)


def _derived(cls: Any, forward: Callable[..., Any], derive: Callable[[Any], Any]) -> Any:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        """A class that has another's name is not found by it."""
        _, _, *rest = cast(tuple, nn.Module.__reduce_ex__(self, protocol))
        return _again, (derive, cls), *rest

    facts = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce_ex__": reduce}
    return type(cls.__name__, (cls,), {"forward": forward, **facts})


def _again(derive: Callable[[Any], Any], cls: Any) -> nn.Module:
    return object.__new__(derive(cls))


def _without_logits(output: Any) -> Any:
    """An output in which logits that were not computed are None."""
    if isinstance(output, dict):
        return type(output)(**{name: None if isinstance(x, Logits) else x for name, x in output.items()})
    if type(output) in (list, tuple):
        return type(output)(None if isinstance(x, Logits) else x for x in output)
    return output


# Logits


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What logits are computed from."""

    hidden: Tensor
    head: nn.Linear
    factor: float = 1.0
    move: Callable[[Tensor], Tensor] | None = None
    """What the head's style does to its output."""
    local: nn.Module | None = None
    """The head, if that makes it plain."""

    def logits(self) -> Tensor:
        logits = F.linear(self.hidden, self.head.weight, self.head.bias)
        return logits if self.move is None else self.move(logits)


class Logits(Later):
    """What a head gives for some hidden states, times a factor: `[..., d] -> [..., c]`, of which only the shape is
    known. Whoever does anything else with it than losses do is given the numbers."""

    _source: Source
    _computed: Tensor | None

    @classmethod
    def of(cls, hidden: Tensor, head: nn.Linear) -> Logits:
        device = hidden.device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        return cls._made(Source(hidden, head), (*hidden.shape[:-1], head.out_features), narrow)

    @classmethod
    def _made(cls, source: Source, shape: tuple[int, ...], dtype: torch.dtype) -> Logits:
        made: Any = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made._source, made._computed = source, None
        return made

    def but(self, *, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, **source: Any) -> Logits:
        """The same logits in another shape of rows, in another dtype, or of another source."""
        return self._made(replace(self._source, **source), shape or tuple(self.shape), dtype or self.dtype)

    def moved(
        self, move: Callable[[Tensor], Tensor], where: Sequence[Placement] | None, local: nn.Module | None
    ) -> Tensor:
        """As long as each rank's part has the shape of all."""
        hidden = self._source.hidden
        is_whole = where == (Replicate(),) and isinstance(hidden, DTensor) and hidden._layout.replicated
        return self.but(move=move, local=local) if local is None or is_whole else move(self.computed())

    def computed(self) -> Tensor:
        if self._computed is None:
            logits = self._source.logits().to(self.dtype).reshape(self.shape)
            self._computed = logits if self._source.factor == 1 else logits * self._source.factor
        return self._computed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and isinstance(args[0] if args else None, Logits):
            found = handler(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        args, kwargs = tree_map_only(Logits, Logits.computed, (args, kwargs))
        return func(*args, **kwargs)


def _of_shape(func: Callable, *args: Any) -> Any:
    with _disabled():
        return func(*args)


def _in_another_shape(func: Callable, x: Logits, *args: Any, **kwargs: Any) -> Any:
    with _disabled():
        shape = tuple(func(x.as_subclass(Tensor), *args, **kwargs).shape)
    return x.but(shape=shape) if x._computed is None and shape[-1:] == x.shape[-1:] else NotImplemented


def _in_another_dtype(func: Callable, x: Logits, *args: Any, **kwargs: Any) -> Any:
    dtype, stays = {Tensor.float: torch.float32, Tensor.double: torch.float64}.get(func, x.dtype), True
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, Tensor):
            dtype, stays = given.dtype, given.device == x._source.hidden.device
        elif isinstance(given, (str, torch.device)):
            here = x._source.hidden.device
            stays = torch.device(given) in (here, torch.device(here.type))
        elif not isinstance(given, (bool, NoneType)):
            return NotImplemented
    is_exact = dtype in (x.dtype, torch.float32, torch.float64)  # the loss is computed in one of these
    return x.but(dtype=dtype) if x._computed is None and stays and is_exact else NotImplemented


def _rows(func: Callable, x: Logits, index: Any) -> Any:
    """Some rows, by slices."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (x.ndim + 1 - len(index))
    whole = len(index) < x.ndim or index[-1] == slice(None)
    unmoved = x._source.hidden.shape[:-1] == x.shape[:-1] and x._computed is None
    if not (unmoved and whole and all(isinstance(i, slice) for i in index)):
        return NotImplemented
    hidden = x._source.hidden[tuple(index)]
    return x.but(hidden=hidden, shape=(*hidden.shape[:-1], x.shape[-1]))


def _times(func: Callable, x: Logits, number: Any) -> Any:
    """Some models scale their logits, which is to scale hidden states. (Or a bias as well: not here.)"""
    if x._computed is not None or type(number) not in (int, float) or x._source.head.bias is not None:
        return NotImplemented
    return x.but(factor=x._source.factor * (1 / number if "div" in func.__name__ else number))


def _loss(
    func: Callable,
    x: Logits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if x._computed is not None or x.ndim > 2 or target.is_floating_point():
        return NotImplemented
    if size_average is not None or reduce is not None:
        return NotImplemented
    source = x._source
    with nullcontext() if source.local is None else implicit_replication():  # plain targets are whole, as the logits
        loss = linear_cross_entropy(
            source.hidden if source.factor == 1 else source.hidden * source.factor,
            source.head.weight,
            target.reshape(source.hidden.shape[:-1]),
            linear_bias=source.head.bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            dtype=x.dtype,
        )
        loss = loss.reshape(target.shape) if reduction == "none" else loss
    return loss if source.local is None else whole_local(loss, source.local)


def _device(func: Callable, x: Logits) -> torch.device:
    return x._source.hidden.device


def _requires_grad(func: Callable, x: Logits) -> bool:
    return torch.is_grad_enabled() and (x._source.hidden.requires_grad or x._source.head.weight.requires_grad)


def _itself(func: Callable, x: Logits) -> Logits:
    return x


_getters: dict[str, Any] = {
    name: getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad")
}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            *(_getters["shape"], _getters["ndim"], _getters["dtype"], Tensor.size, Tensor.dim, Tensor.__len__),
            *(Tensor.numel, Tensor.nelement, Tensor.is_floating_point),
        ),
        _of_shape,
    ),
    **dict.fromkeys((Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape), _in_another_shape),
    **dict.fromkeys((Tensor.float, Tensor.double, Tensor.to, Tensor.type_as), _in_another_dtype),
    **dict.fromkeys((Tensor.mul, Tensor.__mul__, torch.mul, Tensor.div, Tensor.__truediv__, torch.div), _times),
    _getters["device"]: _device,
    _getters["requires_grad"]: _requires_grad,
    Tensor.contiguous: _itself,
    Tensor.__getitem__: _rows,
    F.cross_entropy: _loss,
}
"""What is known of logits that nobody has computed, and what a loss does to them."""
