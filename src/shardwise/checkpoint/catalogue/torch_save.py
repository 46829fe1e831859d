"""Files of `torch.save`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint.catalogue.items import Catalogue, Check, Item, at_hand, outer
from shardwise.checkpoint.entries import check_dense
from shardwise.checkpoint.files.file_sets import SUFFIX
from shardwise.checkpoint.files.memory import held_shards, layout_of
from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.pieces import volume, within
from shardwise.checkpoint.torch_files import Keys, Record, Saved, key_of, leaves
from shardwise.errors import CheckpointError, DamagedFileError
from shardwise.layout import Box
from shardwise.words import dtype_name

ARCHIVE = b"PK\x03\x04"
"""So begins what torch.save has written."""


def open_torch_file(path: Path) -> Catalogue:
    files = Opened()
    if files[path].read(0, min(files[path].size, len(ARCHIVE))) != ARCHIVE:
        raise DamagedFileError(
            f"this is no zip archive, which is what torch.save has written since torch 1.6, and it is not called "
            f"*{SUFFIX} either",
            path,
            offset=0,
        )
    saved = Saved(files[path])
    items: dict[str, _TorchItem] = {}
    others: dict[Keys, Callable[[], Any]] = {}
    for keys, value in leaves(saved.load()):
        if isinstance(value, Tensor):
            _check_readable(key_of(keys), value)
            if key_of(keys) in items:
                raise CheckpointError(f"{path} has two tensors that are called {key_of(keys)!r}")
            items[key_of(keys)] = _item(keys, value)
        else:
            others[keys] = at_hand(value)
    records = saved.records()
    names = _keys_of([record for record in records if "/data/" in record.name and record.num_bytes], items)
    checks = [Check(one.num_bytes, partial(saved.check, one, key=names.get(one.name))) for one in records]
    return Catalogue(path, "torch.save", items, others, checks, files, "1 file")


def _check_readable(key: str, x: Tensor) -> None:
    check_dense(x, key)
    if x.is_meta:
        raise CheckpointError(f"{key!r} is a tensor of the meta device: it was saved without data")


def _keys_of(records: Sequence[Record], items: Mapping[str, _TorchItem]) -> dict[str, str]:
    """The first key that lies in each record. The file is mapped: memory has the order of the file."""
    first: dict[int, str] = {}
    for key, item in items.items():
        for shard in item.shards.values():
            if storage := shard.untyped_storage():
                first.setdefault(storage.data_ptr(), key)
    ordered = sorted(records, key=lambda record: record.offset)
    if len(ordered) != len(first):  # something else than tensors has data
        return {}
    return {record.name: first[at] for record, at in zip(ordered, sorted(first), strict=True)}


@dataclass(frozen=True, slots=True)
class _TorchItem(Item):
    """The file is mapped: what is not looked at is not read."""

    shards: Mapping[Box, Tensor]

    def read(self, box: Box) -> Tensor:
        whole = outer(box, self.shards)
        return self.shards[whole][within(box, whole)]


def _item(keys: Keys, x: Tensor) -> _TorchItem:
    shards = dict(held_shards(x))  # of replicas, one
    boxes = tuple(box for box in shards if volume(box)) or tuple(shards)[:1]
    layout = "" if (found := layout_of(x)) is None else str(found).partition("] ")[2]
    return _TorchItem(key_of(keys), dtype_name(x.dtype), tuple(x.shape), boxes, layout, keys, shards)
