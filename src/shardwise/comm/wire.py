"""Data on the wire. Shards may be uneven, strided, conjugated or of a dtype that a backend does not know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class Parts(list[Tensor]):
    """What a collective brought, by members; `whole` is the memory in which nothing else lies, flat, if they lie there
    one behind the other."""

    __slots__ = ("whole",)

    def __init__(self, parts: Iterable[Tensor], whole: Tensor | None = None) -> None:
        super().__init__(parts)
        self.whole = whole


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """What a collective brought, as one tensor along a dim; where it lies so already, that very memory."""
    whole = parts.whole if isinstance(parts, Parts) and dim == 0 else None
    if whole is None:
        return torch.cat(list(parts), dim)
    return lent(whole.view(sum(len(part) for part in parts), *parts[0].shape[1:]))


def adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """The memory of contiguous tensors that lie one behind the other, as one flat tensor."""
    first = parts[0]
    start = end = first.storage_offset()
    storage = first.untyped_storage()._cdata
    for part in parts:
        if part.storage_offset() != end or not part.is_contiguous() or part.is_conj() or part.is_neg():
            return None
        if part.untyped_storage()._cdata != storage or part.dtype != first.dtype:
            return None
        end += part.numel()
    return first.as_strided((end - start,), (1,), start)


def padded(flat: Tensor, room: int) -> Tensor:
    short = room - flat.numel()
    flat = torch.nn.functional.pad(flat, (0, short)) if short else flat.contiguous()
    return flat.resolve_conj().resolve_neg()


KNOWN = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)
_KNOWN_INTEGERS = frozenset(dtype for dtype in KNOWN if not dtype.is_floating_point)
"""The dtypes that every backend moves and reduces."""

_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Small integers wrap around alike whether each addition is cut short or only the last."""


def lent(out: Tensor) -> Tensor:
    """The same memory as another tensor, that does not refer to `out` as a view would.

    A backend's thread may hold what it was given a little longer than the collective lasts; a result should not live
    longer for that, nor its end differ between the ranks.
    """
    return out.data


def movable(flat: Tensor) -> Tensor:
    """A contiguous flat tensor as any backend moves it: as bytes where the dtype may be unknown there. (A single
    element is contiguous with any stride, but is seen as bytes only with a stride of one.)"""
    return flat if flat.dtype in KNOWN else flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def in_units(sizes: list[int], flat: Tensor) -> list[int]:
    """Sizes of parts of a flat tensor in the elements that `movable` makes of it."""
    unit = 1 if flat.dtype in KNOWN else flat.element_size()
    return [size * unit for size in sizes]


def reducible_dtypes(op: str) -> frozenset[torch.dtype]:
    """The dtypes that every backend reduces as torch does. Extrema of floats are not: backends lose NaNs."""
    return _KNOWN_INTEGERS if op in ("max", "min") else KNOWN


def reducible(fresh: Tensor, op: str) -> tuple[Tensor, str]:
    """A contiguous tensor of our own as any backend reduces it, and the operator that does to it what `op` means."""
    if fresh.dtype in reducible_dtypes(op):
        return fresh, op
    if fresh.dtype.is_floating_point:
        return _ordered(fresh, op), op
    if fresh.dtype == torch.bool:
        return fresh.view(torch.uint8), "max" if op == "sum" else op
    if fresh.is_complex():
        if op != "sum":
            raise TypeError(f"complex numbers have no {op}")
        return torch.view_as_real(fresh), op
    return fresh.to(_WIDER.get(fresh.dtype, fresh.dtype)), op


def restored(wire: Tensor, dtype: torch.dtype) -> Tensor:
    if wire.dtype == dtype:
        return wire
    if dtype == torch.bool:
        return wire.view(torch.bool)
    if dtype.is_floating_point:
        return _flipped(wire).view(_FLOATS[wire.dtype]).to(dtype)
    return torch.view_as_complex(wire) if dtype.is_complex else wire.to(dtype)


# Floats as integers of the same order, in which a NaN is the end that wins


_FLOATS = {torch.int32: torch.float32, torch.int64: torch.float64}


def _ordered(x: Tensor, op: str) -> Tensor:
    x = x if x.dtype == torch.float64 else x.float()
    bits = torch.int64 if x.dtype == torch.float64 else torch.int32
    ends = torch.iinfo(bits)
    return torch.where(x.isnan(), ends.max if op == "max" else ends.min, _flipped(x.view(bits)))


def _flipped(bits: Tensor) -> Tensor:
    """The bits of a float as an integer of the same order, and back: negative floats grow downwards."""
    ends = torch.iinfo(bits.dtype)
    return torch.where(bits < 0, bits ^ ends.max, bits)
