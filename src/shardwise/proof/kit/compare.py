"""When a DTensor is what one device has: its shards fit their layout, replicas agree, and its numbers are the same."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import shards_of
from shardwise.tensor import DTensor

TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-5, torch.complex64: 1e-5}
"""How far results may be apart, of their own size; other floats: 1e-2, the rest: 0."""

OF_LARGEST = {torch.float64: 1e-11, torch.complex128: 1e-11}
"""The same, of the largest among them; others: as of their own size."""

NOISE = 1e-4
"""Of the tolerance: how large a number may be whose true value is zero."""


class Wrong(Exception):
    """A difference from the answer of one device, in words; where only numbers differ, how far they are `off`."""

    def __init__(self, words: str, off: float = math.inf) -> None:
        super().__init__(words)
        self.off = off


# Numbers


def same(a: Any, b: Any) -> bool:
    """Whether two plain values are the same, number by number: NaN is NaN, and zero has no sign."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        try:
            return bool(_agree(a, b))
        except (RuntimeError, ValueError):
            return False
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = _plain(a).reshape(-1), _plain(b).reshape(-1)  # torch compares no more than 64 dims
    return torch.equal(a, b) or bool(_agree(a, b).all())


def near(a: Tensor, b: Tensor) -> bool:
    """Whether two plain tensors are the same, but for the rounding of sums in another order."""
    return same(a, b) or (a.shape == b.shape and a.dtype == b.dtype and distance(a, b) is None)


def distance(a: Tensor, b: Tensor) -> float | None:
    """How far two tensors of one shape and dtype are apart; None if no farther than rounding usually brings them."""
    inexact = b.is_floating_point() or b.is_complex()
    tolerance = TOLERANCE.get(b.dtype, 1e-2) if inexact else 0.0
    anywhere = OF_LARGEST.get(b.dtype, tolerance) * largest(b) + tolerance * NOISE
    a, b = _wide(a), _wide(b)
    far = (a - b).abs()
    far[_agree(a, b)] = 0.0
    far.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    allowed = tolerance * torch.nan_to_num(b.abs(), posinf=0.0) + anywhere
    return None if bool((far <= allowed).all()) else float(far.max())


def largest(x: Tensor) -> float:
    """The size of the largest finite number."""
    size = _wide(x).abs()
    size = size[torch.isfinite(size)]
    return float(size.max()) if size.numel() else 0.0


def _agree(a: Any, b: Any) -> Any:
    return (a == b) | ((a != a) & (b != b))


def _plain(x: Tensor) -> Tensor:
    """Without history and lazy bits, in a dtype that can be compared."""
    x = x.detach().resolve_conj().resolve_neg()
    return x.to(torch.complex64) if x.dtype == torch.complex32 else x


def _wide(x: Tensor) -> Tensor:
    return _plain(x).to(torch.complex128 if x.is_complex() else torch.float64)


# DTensors


def whole(x: Tensor) -> Tensor:
    """What one device would have of a DTensor, or of a plain tensor."""
    with torch.no_grad():
        return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def shards(x: Tensor) -> list[Tensor]:
    """The shards that are held here, as plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return [shard.detach().as_subclass(Tensor) for shard in shards_of(x)]


def pieces(name: str, x: DTensor) -> list[tuple[Any, Tensor]]:
    """The shards that are held here, each with what it is: which part of the whole, and which term of what is pending.
    Shards of one piece are replicas."""
    layout, held = x._layout, shards(x)
    shapes = [tuple(shard.shape) for shard in held]
    if shapes != list(layout.held_shapes):
        raise Wrong(f"{name}: shards of shapes {shapes} do not fit {layout}")
    terms = [tuple(at for at, p in zip(c, layout.pending, strict=True) if p is not None) for c in layout.mesh.held]
    return [((layout.box(c), term), x) for c, term, x in zip(layout.mesh.held, terms, held, strict=True)]


def check_shards(name: str, x: DTensor, *, replicas: bool = True) -> None:
    """Raise if shards do not fit their layout, or, if that is asked for, replicas differ."""
    seen: dict[Any, Tensor] = {}
    for piece, shard in pieces(name, x):
        if replicas and not near(shard, seen.setdefault(piece, shard)):
            raise Wrong(f"{name}: replicas differ as {x._layout}")


def check_value(name: str, mine: DTensor, expected: Tensor) -> None:
    """Raise if the numbers of a DTensor are not those of a plain tensor."""
    value, expected = whole(mine), expected.detach()
    if not same(value, expected) and (off := distance(value, expected)) is not None:
        raise Wrong(f"{name}: off by {off:.2g} (largest: {largest(expected):.2g}) as {mine._layout}", off)


def check_kind(name: str, mine: Any, expected: Tensor) -> None:
    """Raise if something is no DTensor of the shape and dtype of a plain tensor."""
    if not isinstance(mine, DTensor):
        raise Wrong(f"{name}: a {type(mine).__name__}, not a DTensor")
    if mine.shape != expected.shape:
        raise Wrong(f"{name}: shape {list(mine.shape)}, not {list(expected.shape)}")
    if mine.dtype != expected.dtype:
        raise Wrong(f"{name}: dtype {mine.dtype}, not {expected.dtype}")


def check(name: str, mine: Any, expected: Tensor) -> None:
    """Raise if something is not what one device has."""
    check_kind(name, mine, expected)
    check_shards(name, mine)
    check_value(name, mine, expected)
