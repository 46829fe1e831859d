"""What a checkpoint has: tensors in boxes, other values, and what there is to check. Nothing is read before it is asked
for, and of a tensor one part at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.files.reading import Region, read
from shardwise.checkpoint.pieces import cut, volume, within
from shardwise.checkpoint.torch_files import Keys
from shardwise.errors import CheckpointError
from shardwise.layout import Box

Kind = Literal["step", "safetensors", "dcp", "torch.save"]

AT_ONCE = 64 * 2**20
"""Bytes of a tensor that are in memory at a time, where its file can be read in parts."""


@dataclass(frozen=True, slots=True)
class Item(ABC):
    """A tensor. `layout` is how it lay, as far as that is known; `keys` are where in nested dicts it was. `dtype` is
    torch's name, or the file's where torch has none."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    layout: str
    keys: Keys

    @abstractmethod
    def read(self, box: Box) -> Tensor:
        """What is in a part of one of the boxes."""

    @property
    def reads_parts(self) -> bool:
        """Whether a part is read without the rest of its box."""
        return True

    def parts(self) -> Iterator[Box]:
        """The boxes, those that are large cut so that little of them is in memory at a time."""
        for box in self.boxes:
            yield from in_parts(box, ceil(volume(box) * self.itemsize / AT_ONCE) if self.reads_parts else 1)

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointError(f"{self.key!r} is {self.dtype}, of which torch has no single elements")
        return found

    @property
    def itemsize(self) -> float:
        """Bytes. The dtypes that torch does not have are of four or six bits."""
        return self.torch_dtype.itemsize if hasattr(torch, self.dtype) else 0.5 if self.dtype == "F4" else 0.75

    @property
    def num_bytes(self) -> int:
        return ceil(prod(self.shape) * self.itemsize)


def in_parts(box: Box, num_parts: int) -> Iterator[Box]:
    """A box in about so many parts: along its first dim, and where that is shorter, along others as well."""
    parts = cut(box, num_parts)
    for part in parts:
        if 1 < len(parts) < num_parts:
            yield from in_parts(part, ceil(num_parts / len(parts)))
        else:
            yield part


def outer(box: Box, boxes: Mapping[Box, Any]) -> Box:
    """The box that another is part of."""
    if box in boxes:
        return box
    return next(
        whole
        for whole in boxes
        if all(a <= c and c + d <= a + b for a, b, c, d in zip(*whole, *box, strict=True)) and volume(whole)
    )


@dataclass(frozen=True, slots=True)
class RegionItem(Item):
    """A tensor whose boxes lie in files as they are."""

    regions: Mapping[Box, tuple[Path, Region]]
    files: Opened

    def read(self, box: Box) -> Tensor:
        found = torch.empty(box[1], dtype=self.torch_dtype, device="cpu")
        whole = outer(box, self.regions)
        path, region = self.regions[whole]
        read(self.files[path], region.box([part.start for part in within(box, whole)], box[1]), found, key=self.key)
        return found


@dataclass(frozen=True, slots=True)
class Check:
    """Something to be looked at, of so many bytes. It raises if it is not as it should be."""

    num_bytes: int
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What is at `path`. `others` are what is no tensor, each read when it is called; `about` says more in words, and
    `unproven` what no check can prove."""

    path: Path
    kind: Kind
    items: Mapping[str, Item]
    others: Mapping[Keys, Callable[[], Any]]
    checks: Sequence[Check]
    files: Opened
    about: str = ""
    unproven: str = ""

    @property
    def told(self) -> str:
        """What it is, in words."""
        return self.about if self.kind == "step" else f"{self.kind}, {self.about}"

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items.values())

    def under(self, prefix: str) -> Catalogue:
        """What has keys that begin so, by the rest of them."""
        found = {key.removeprefix(prefix): item for key, item in self.items.items() if key.startswith(prefix)}
        if not found:
            first = next(iter(self.items), None)
            raise CheckpointError(f"no key of {self.path} begins with {prefix!r}: the first one is {first!r}")
        items = {key: replace(item, key=key, keys=(key,)) for key, item in found.items()}
        return replace(self, items=items, others={}, checks=()) if prefix else self

    def __enter__(self) -> Catalogue:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.close()


def at_hand(value: Any) -> Callable[[], Any]:
    """One of the `others` that was read with the rest."""
    return lambda: value
