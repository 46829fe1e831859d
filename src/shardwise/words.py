"""Numbers, sizes and dtypes as people read them, and read back as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

_UNITS = {"": 1, **{f"{letter}B": 1000**power for power, letter in enumerate(("", "K", "M", "G", "T"))}}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate(("K", "M", "G", "T"), 1)}
_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32"}


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "tensor"), counted(3, "tensor")
    ('1 tensor', '3 tensors')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(items: Iterable[object], most: int = 5) -> str:
    """The first of many.

    >>> some("abcd", most=2)
    'a, b and 2 more'
    """
    listed = list(map(str, items))
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def size(num_bytes: int) -> str:
    """Bytes as people read them.

    >>> size(12), size(2_000), size(4_190_000)
    ('12 B', '2.0 kB', '4.2 MB')
    """
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if num_bytes >= 10**power:
            return f"{num_bytes / 10**power:.1f} {unit}"
    return f"{num_bytes} B"


def bytes_said(text: str) -> int | None:
    """A number of bytes as people write it; None of other text.

    >>> bytes_said("64MB"), bytes_said("1.5 KiB"), bytes_said("1_000"), bytes_said("much")
    (64000000, 1536, 1000, None)
    """
    found = re.fullmatch(r"([\d_]*\.?\d+)\s*([KMGT]?I?B|)", text.strip().upper())
    return int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


def dtype_name(dtype: torch.dtype) -> str:
    """
    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The inverse; a ValueError where this torch has no such dtype."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def short_dtype(dtype: torch.dtype) -> str:
    """
    >>> short_dtype(torch.bfloat16), short_dtype(torch.bool)
    ('bf16', 'bool')
    """
    name = dtype_name(dtype)
    return _SHORT.get(name, name)
