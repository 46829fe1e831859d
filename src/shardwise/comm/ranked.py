"""A local tensor of the simulator: rank 0's tensor, carrying the tensors of all other ranks.

Every torch function applied to it runs once per rank, so that code written for one rank runs for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ReplicaError

_disabled = torch._C.DisableTorchFunctionSubclass


class PerRank:
    """A Python value that differs between the ranks: entry i is rank i's."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerRank{self.values}"


def per_rank(values: Sequence[Any]) -> Any:
    """The common value if all ranks agree, else a `PerRank`."""
    first = values[0]
    return first if all(value == first for value in values[1:]) else PerRank(values)


class Ranked(Tensor):
    """Rank 0's tensor with its peers' (`_peers`); functions map over all of them."""

    _peers: tuple[Tensor, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        num_ranks = 1 + len(_find_peers((*args, *(kwargs or {}).values())))
        with _disabled():
            results = [func(*pick(args, rank), **(pick(kwargs, rank) if kwargs else {})) for rank in range(num_ranks)]
            return join(results, func)


def join(results: Sequence[Any], func: Callable | None = None) -> Any:
    """One value from one per rank: tensors become `Ranked`, equal Python values stay, others become `PerRank`."""
    first = results[0]
    if isinstance(first, Tensor):
        if type(first) is Ranked:  # an in-place function returned its own argument
            return first
        return ranked(results)
    if isinstance(first, (list, tuple)) and any(isinstance(item, Tensor) for item in first):
        items = [join(column) for column in zip(*results, strict=True)]
        return items if isinstance(first, list) else type(first)(items)
    if func is Tensor.item or func is Tensor.__bool__:
        if not all(result == first or result != result for result in results):
            raise ReplicaError(f"ranks disagree about a value the program branches on: {list(results)}")
        return first
    return per_rank(results)


def ranked(shards: Sequence[Tensor]) -> Ranked:
    """A `Ranked` of one tensor per rank. Rank 0's becomes the object itself."""
    first = shards[0]
    first.__class__ = Ranked
    first._peers = tuple(shards[1:])
    return first


def shards_of(x: Tensor) -> tuple[Tensor, ...]:
    """The tensors of the ranks held here, of a local tensor (a `Ranked` in the simulator)."""
    peers = x.__dict__.get("_peers")
    return (x,) if peers is None else (x, *peers)


def pick(value: Any, rank: int) -> Any:
    if isinstance(value, Tensor):
        return value if rank == 0 or type(value) is not Ranked else value._peers[rank - 1]
    if isinstance(value, PerRank):
        return value.values[rank]
    if isinstance(value, (list, tuple)):
        items = [pick(item, rank) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: pick(item, rank) for key, item in value.items()}
    return value


def _find_peers(values: Sequence[Any]) -> tuple[Tensor, ...]:
    for value in values:
        if type(value) is Ranked:
            return value._peers
        if isinstance(value, (list, tuple)):
            found = _find_peers(value)
            if found:
                return found
    return ()
