"""A local tensor of the simulator: rank 0's tensor, carrying the tensors of all other ranks.

Every torch function applied to it runs once per rank, so that code written for one rank runs for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.faked import on_faked, plain_alias
from shardwise.comm.rendezvous import expect
from shardwise.errors import ReplicaError

_disabled = torch._C.DisableTorchFunctionSubclass


class PerRank:
    """A Python value that differs between the ranks: entry i is rank i's."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerRank) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"PerRank{self.values}"


def per_rank(values: Sequence[Any]) -> Any:
    """The common value if all ranks agree, else a `PerRank`."""
    first = values[0]
    return first if all(_same(value, first) for value in values[1:]) else PerRank(values)


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one and the same to the program, NaNs included."""
    if isinstance(a, float) and isinstance(b, float) and a != a:
        return b != b
    try:
        return bool(a == b)
    except ValueError:  # arrays compare element by element
        return False


class Ranked(Tensor):
    """Rank 0's tensor with its peers' (`_peers`); functions map over all of them."""

    _peers: tuple[Tensor, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(cls, other) for other in types):
            return NotImplemented  # a DTensor knows what to say about local tensors
        kwargs = kwargs or {}
        with _disabled():
            if func in _TOGETHER:
                return _TOGETHER[func](*args, **kwargs)
            num_ranks = _num_ranks((*args, *kwargs.values()))
            if isinstance(func, torch._ops.OpOverload) and func.namespace != "aten":
                args, kwargs = _apart(args), _apart(kwargs)  # it may be Python, and must not find the others' tensors
            results = [func(*pick(args, rank), **pick(kwargs, rank)) for rank in range(num_ranks)]
            return join(results, func)

    __torch_dispatch__: Any = classmethod(on_faked)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with _disabled():
            shards = [_plain(shard) for shard in shards_of(self)]
        return f"Ranked({', '.join(map(repr, shards))})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranked:
        if id(self) not in memo:
            with _disabled():
                shards = shards_of(self)
                if not self.is_leaf:
                    raise RuntimeError("only leaves of the graph can be deep-copied; detach() the tensor first")
                copies = [shard.detach().clone().requires_grad_(shard.requires_grad) for shard in shards]
                for shard, copied in zip(shards, copies, strict=True):
                    copied.grad = None if shard.grad is None else _plain(shard.grad).clone()
                memo[id(self)] = ranked(copies)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _disabled():
            return _rebuild, ([_plain(shard) for shard in shards_of(self)], self.requires_grad)


def _rebuild(shards: list[Tensor], requires_grad: bool) -> Ranked:
    return ranked([shard.requires_grad_(requires_grad) for shard in shards])


def _plain(x: Tensor) -> Tensor:
    return x.detach().as_subclass(Tensor)


# Backward passes run for all ranks at once: their graphs meet in the collectives.


def _backward(
    x: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    _backward_of_many(x, gradient, retain_graph, create_graph, inputs=inputs)


def _backward_of_many(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    *,
    inputs: Any = None,
) -> None:
    tensors = as_list(tensors)
    given = [None] * len(tensors) if grad_tensors is None else as_list(grad_tensors)
    inputs = None if inputs is None else _flat(inputs)
    roots = _flat(tensors)
    expect(x.grad_fn for x in roots)
    torch.autograd.backward(roots, _seeds(tensors, given), retain_graph, create_graph, inputs=inputs)


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    outputs, inputs = as_list(outputs), as_list(inputs)
    given = [None] * len(outputs) if grad_outputs is None else as_list(grad_outputs)
    roots = _flat(outputs)
    expect(x.grad_fn for x in roots)
    flat = iter(torch.autograd.grad(roots, _flat(inputs), _seeds(outputs, given), *args, **kwargs))
    found = [[next(flat) for _ in shards_of(x)] for x in inputs]
    return tuple(join(grads) if isinstance(x, Ranked) else grads[0] for x, grads in zip(inputs, found, strict=True))


def _seeds(tensors: Sequence[Tensor], given: Sequence[Any]) -> list[Any]:
    seeds = [pick(seed, rank) for x, seed in zip(tensors, given, strict=True) for rank in range(len(shards_of(x)))]
    return [plain_alias(seed) if type(seed) is Ranked else seed for seed in seeds]  # functions see plain ones


def as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _flat(tensors: Any) -> list[Tensor]:
    return [shard for x in as_list(tensors) for shard in shards_of(x)]


_TOGETHER: dict[Any, Callable] = {
    Tensor.backward: _backward,
    torch.autograd.backward: _backward_of_many,
    torch.autograd.grad: _grad,
}

_MUST_AGREE = frozenset(
    {Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__complex__, Tensor.__index__}
)
"""What a program may branch on: Python numbers, of which the simulator can have only one."""


def join(results: Sequence[Any], func: Callable | None = None) -> Any:
    """One value from one per rank: tensors become `Ranked`, equal Python values stay, others become `PerRank`."""
    first = results[0]
    if isinstance(first, Tensor):
        if type(first) is not Ranked:
            given = first.__dict__.get("_all")
            if given is not None and all(x is peer for x, peer in zip(results[1:], given._peers, strict=True)):
                return given  # the function returned its own argument, of which it was given an alias
            return ranked(results)
        if all(result is peer for result, peer in zip(results[1:], first._peers, strict=True)):
            return first  # the function returned its own argument
        return ranked([plain_alias(first), *results[1:]])  # on rank 0 only, as `contiguous` may
    if isinstance(first, (list, tuple)) and any(isinstance(item, Tensor) for item in first):
        items = [join(column) for column in zip(*results, strict=True)]
        return items if isinstance(first, list) else type(first)(items)
    if func in _MUST_AGREE:
        if not all(_same(result, first) for result in results):
            raise ReplicaError(f"ranks disagree about a value the program branches on: {list(results)}")
        return first
    return per_rank(results)


def ranked(shards: Sequence[Tensor]) -> Ranked:
    """A `Ranked` of one tensor per rank. Rank 0's becomes the object itself."""
    first: Any = shards[0]
    first.__class__ = Ranked
    first._peers = tuple(shards[1:])
    return first


def local_tensor(shards: Sequence[Tensor]) -> Tensor:
    """What the ranks held here have, as one local tensor: one rank's shard itself, or a `Ranked` of several."""
    return shards[0] if len(shards) == 1 else ranked(shards)


def shards_of(x: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the ranks held here, of a local tensor (a `Ranked` in the simulator)."""
    peers = x.__dict__.get("_peers")
    return (x,) if peers is None else (x, *peers)


def pick(value: Any, rank: int) -> Any:
    """One rank's part of an argument."""
    if isinstance(value, Tensor):
        if type(value) is not Ranked:
            return value
        return value._peers[rank - 1] if rank else _first(value)
    if isinstance(value, PerRank):
        return value.values[rank]
    if isinstance(value, (list, tuple)):
        items = [pick(item, rank) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: pick(item, rank) for key, item in value.items()}
    return value


def _apart(value: Any) -> Any:
    """Arguments in which rank 0's tensors are plain aliases, without their peers."""
    if type(value) is Ranked:
        return PerRank((plain_alias(value), *value._peers))
    if isinstance(value, (list, tuple)):
        items = [_apart(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: _apart(item) for key, item in value.items()} if isinstance(value, dict) else value


def _first(value: Ranked) -> Tensor:
    """Rank 0's tensor: the object itself, as long as nobody looks at what autograd saves. Those who do (a checkpoint)
    compare it later, and then it must be one rank's tensor and not speak for all."""
    if value.requires_grad or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return value
    alias: Any = plain_alias(value)
    alias._all = value
    return alias


def _num_ranks(values: Sequence[Any]) -> int:
    """How many ranks the `Ranked` tensors and `PerRank` values among some arguments speak of."""
    return max(map(_count, values), default=1)


def _count(value: Any) -> int:
    if isinstance(value, Tensor):
        return len(shards_of(value))
    if isinstance(value, PerRank):
        return len(value.values)
    if isinstance(value, dict):
        return _num_ranks(list(value.values()))
    return _num_ranks(value) if isinstance(value, (list, tuple)) else 1
