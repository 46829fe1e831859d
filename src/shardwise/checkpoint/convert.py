"""A checkpoint in another format: written box by box as it is read, with no more than a few of them in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shardwise.checkpoint.catalogue import Catalogue, Item
from shardwise.checkpoint.catalogue.find import TORCH_SUFFIXES
from shardwise.checkpoint.catalogue.items import AT_ONCE, in_parts
from shardwise.checkpoint.dcp_writing import write_dcp
from shardwise.checkpoint.files.file_sets import SUFFIX
from shardwise.checkpoint.files.folders import beside, make_folder, remove, remove_unfinished
from shardwise.checkpoint.files.reader import explained
from shardwise.checkpoint.files.safetensors import CODES, check_key
from shardwise.checkpoint.files.writing import flush_folder
from shardwise.checkpoint.models.save import save_parts
from shardwise.checkpoint.pieces import fills, volume, whole, within
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.torch_files import Keys
from shardwise.checkpoint.torch_writing import Later, write_torch_file
from shardwise.errors import CheckpointError
from shardwise.layout import Box

Format = Literal["safetensors", "dcp", "torch.save"]
Done = Callable[[int], object]
"""Told of the bytes that were written."""


def convert(
    source: Catalogue, target: Path, to: Format, *, max_shard_size: int = 5 * 10**9, done: Done = lambda num_bytes: None
) -> list[Keys]:
    """Write a checkpoint as another format holds it. What is returned is left out there: values that are no tensors, in
    safetensors files. The target appears when it is complete."""
    if target.exists():
        raise CheckpointError(f"{target} is there already: name another place, or remove it first")
    make_folder(target.parent)
    match to:
        case "safetensors":
            _to_safetensors(source, target, max_shard_size, done)
            return list(source.others)
        case "dcp":
            _appearing(target, partial(_to_dcp, source, done=done))
        case "torch.save":
            _appearing(target, partial(_to_torch_file, source, done=done))
    return []


def _appearing(target: Path, write: Callable[[Path], None]) -> None:
    """Have something written beside, and then give it its name."""
    remove_unfinished(target.parent, target.name)
    unfinished = beside(target)
    make_folder(unfinished)
    try:
        write(unfinished / target.name)
        flush_folder(unfinished)
        with explained(f"write {target}"):
            os.rename(unfinished / target.name, target)
        flush_folder(target.parent)
    finally:
        remove(unfinished)


# Parts


def part_of(item: Item, box: Box) -> Tensor:
    """Any part of a tensor, put together from the boxes that it was saved in."""
    found = fills(box, item.boxes)
    if len(found) == 1 and found[0].box == box:
        return item.read(box)
    made = torch.empty(box[1], dtype=item.torch_dtype, device="cpu")
    for _, common in found:
        made[within(common, box)] = item.read(common)
    return made


def rows_of(item: Item) -> Iterator[Tensor]:
    """A tensor in row-major order, a stretch at a time: as a whole, where its boxes are read as wholes."""
    everything = whole(item.shape)
    count = -(-item.num_bytes // AT_ONCE) if item.reads_parts else 1
    for box in in_parts(everything, count):
        yield part_of(item, box)


# safetensors


@dataclass(frozen=True, slots=True)
class _Streamed:
    """A part of a tensor that is read when it is to be written."""

    item: Item
    box: Box
    done: Done

    @property
    def key(self) -> str:
        return self.item.key

    @property
    def shape(self) -> tuple[int, ...]:
        return self.item.shape

    @property
    def data(self) -> Tensor:
        self.done(int(volume(self.box) * self.item.itemsize))
        return self.item.read(self.box)


def _to_safetensors(source: Catalogue, target: Path, max_shard_size: int, done: Done) -> None:
    for item in source.items.values():
        check_key(item.key)
        if item.torch_dtype not in CODES:
            raise CheckpointError(f"{item.key!r} is {item.dtype}, which safetensors files do not have")
    parts = [_Streamed(item, box, done) for item in source.items.values() for box in item.parts()]
    facts = {
        "kin": 0,
        "tensors": [(item.key, item.dtype, item.shape) for item in source.items.values()],
        "boxes": [(part.key, *part.box) for part in parts],
    }
    save_parts(parts, facts, target, max_shard_size, Ranks())


# torch.save


def _to_torch_file(source: Catalogue, path: Path, *, done: Done) -> None:
    later = {item.keys: Later(item.torch_dtype, item.shape, partial(rows_of, item)) for item in source.items.values()}
    values = {keys: read() for keys, read in source.others.items()}
    write_torch_file(path, {**later, **values}, done)


# torch.distributed.checkpoint


def _to_dcp(source: Catalogue, path: Path, *, done: Done) -> None:
    write_dcp(path, list(source.items.values()), source.others, done)


def format_of(target: Path) -> Format | None:
    """What a name says of the format that is meant."""
    if target.name.endswith(SUFFIX):
        return "safetensors"
    return "torch.save" if target.name.endswith(TORCH_SUFFIXES) else None
