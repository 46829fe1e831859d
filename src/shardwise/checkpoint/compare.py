"""Two checkpoints compared, part by part: which keys, shapes, dtypes and values differ, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shardwise.checkpoint.catalogue import Catalogue, Item
from shardwise.checkpoint.convert import part_of
from shardwise.checkpoint.pieces import volume

Done = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Difference:
    """How a key differs: what it is on either side, and of values how many and how far apart."""

    key: str
    what: str
    first: str = ""
    second: str = ""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Numbers are the same if they are apart by at most `absolute`, and `relative` times the second one."""

    relative: float = 0.0
    absolute: float = 0.0


EXACT = Tolerance()


def differences(
    first: Catalogue,
    second: Catalogue,
    *,
    values: bool = True,
    tolerance: Tolerance = EXACT,
    done: Done = lambda num_bytes: None,
) -> Iterator[Difference]:
    """All differences, key by key. Other values than tensors are not compared."""
    for key, item in first.items.items():
        other = second.items.get(key)
        if other is None:
            done(item.num_bytes)
            yield Difference(key, "only in the first", _described(item))
        else:
            yield from _of_tensors(item, other, tolerance if values else None, done)
    for key, item in second.items.items():
        if key not in first.items:
            yield Difference(key, "only in the second", "", _described(item))


def _described(item: Item) -> str:
    return f"{item.dtype} {list(item.shape)}"


def _of_tensors(first: Item, second: Item, tolerance: Tolerance | None, done: Done) -> Iterator[Difference]:
    if first.shape != second.shape:
        done(first.num_bytes)
        yield Difference(first.key, "shape", _described(first), _described(second))
        return
    if first.dtype != second.dtype:
        yield Difference(first.key, "dtype", first.dtype, second.dtype)
    if tolerance is None:
        done(first.num_bytes)
    else:
        apart = _Apart()
        for box in (first if second.reads_parts else second).parts():
            apart.add(part_of(first, box), part_of(second, box), tolerance)
            done(int(volume(box) * first.itemsize))
        if apart.count:
            yield Difference(first.key, "values", apart.told(prod(first.shape)))


class _Apart:
    """How far two tensors are apart, part by part."""

    def __init__(self) -> None:
        self.count = 0
        self.absolute = self.relative = 0.0
        self.has_none = False

    def add(self, first: Tensor, second: Tensor, tolerance: Tolerance) -> None:
        a, b = _comparable(first), _comparable(second)
        differ = (a != b) & ~((a != a) & (b != b))
        if not differ.any():
            return
        x, y = first[differ], second[differ]
        apart, sizes = _distance(x, y), _wide(y).abs()
        beyond = ~(apart <= tolerance.absolute + tolerance.relative * sizes)
        self.count += int(beyond.sum())
        self.has_none |= bool((beyond & ~apart.isfinite()).any())
        beyond &= apart.isfinite()
        if beyond.any():
            self.absolute = max(self.absolute, float(apart[beyond].max()))
            self.relative = max(self.relative, float((apart / sizes.clamp(min=_TINY))[beyond].max()))

    def told(self, total: int) -> str:
        by = [f"by at most {self.absolute:.3g} (relative {self.relative:.3g})"] if self.absolute else []
        by += ["some infinite or NaN on one side"] if self.has_none else []
        return f"{self.count} of {total} elements, {', '.join(by)}"


def _comparable(x: Tensor) -> Tensor:
    """In a dtype that torch compares."""
    if x.dtype in (torch.uint16, torch.uint32):
        return x.to(torch.int64)
    if x.dtype == torch.uint64:
        return x.view(torch.int64)
    return x.to(torch.float32) if x.is_floating_point() and x.itemsize < 4 else x


_TINY = torch.finfo(torch.float64).tiny


def _distance(x: Tensor, y: Tensor) -> Tensor:
    apart = (_wide(x) - _wide(y)).abs()
    if any(z.is_floating_point() or z.is_complex() for z in (x, y)):
        return apart
    return torch.maximum(apart, (x.long() - y.long()).abs().double())  # which rounds nothing, but may overflow


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
