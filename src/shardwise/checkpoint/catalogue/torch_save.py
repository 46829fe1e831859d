"""Files of `torch.save`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.checkpoint.catalogue.items import Catalogue, Check, Item, outer
from shardwise.checkpoint.files.memory import held_shards, layout_of
from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.pieces import volume, within
from shardwise.checkpoint.torch_files import Keys, Saved, key_of, leaves
from shardwise.errors import CheckpointError
from shardwise.layout import Box


def open_torch_file(path: Path) -> Catalogue:
    files = Opened()
    saved = Saved(files[path])
    items: dict[str, Item] = {}
    others: dict[Keys, Callable[[], Any]] = {}
    for keys, value in leaves(saved.load()):
        if isinstance(value, Tensor):
            if key_of(keys) in items:
                raise CheckpointError(f"{path} has two tensors that are called {key_of(keys)!r}")
            items[key_of(keys)] = _item(keys, value)
        else:
            others[keys] = partial(_itself, value)
    checks = [Check(size, partial(saved.check, name)) for name, size in saved.records().items()]
    return Catalogue(path, "torch.save", items, others, checks, files, "1 file")


def _itself(value: Any) -> Any:
    return value


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
    return _TorchItem(key_of(keys), str(x.dtype).removeprefix("torch."), tuple(x.shape), boxes, layout, keys, shards)
