"""A folder of torch.distributed.checkpoint, written box by box, by torch's own writer, which asks for one at a time."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint.catalogue import Item
from shardwise.checkpoint.files.reader import explained
from shardwise.checkpoint.pieces import volume
from shardwise.checkpoint.torch_files import Keys, key_of
from shardwise.errors import CheckpointError
from shardwise.layout import Box

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem

Others = Mapping[Keys, Callable[[], Any]]


def write_dcp(path: Path, items: Sequence[Item], others: Others, done: Callable[[int], object]) -> None:
    """Write tensors and other values, each under the keys that lead to it in nested dicts, joined by dots."""
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.planner import SavePlan

    content = _Content.of(items, others, done)

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            self.plan = SavePlan(content.writes(), planner_data=content.keys)
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> Any:
            return content.data(write_item)

    with warnings.catch_warnings(), explained(f"write {path}"):
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save({}, storage_writer=FileSystemWriter(path), planner=Planner(), no_dist=True)
        except CheckpointException as error:
            raise _cause(next(iter(error.failures.values()))[0]) from None  # there is one rank


def _cause(failed: BaseException) -> BaseException:
    """torch's writer, when the disk is full, raises over what the operating system has said."""
    below = failed.__context__
    return below if isinstance(below, OSError) and type(failed) is RuntimeError else failed


@dataclass(frozen=True, slots=True)
class _Content:
    """What is to be written, by key; boxes also by where they start, as dcp knows them."""

    keys: Mapping[str, Keys]
    items: Mapping[str, Item]
    others: Mapping[str, Callable[[], Any]]
    boxes: Mapping[tuple[str, tuple[int, ...]], Box]
    done: Callable[[int], object]

    @staticmethod
    def of(items: Sequence[Item], others: Others, done: Callable[[int], object]) -> _Content:
        by_key = {key_of(item.keys): item for item in items}
        values = {key_of(keys): read for keys, read in others.items()}
        keys = {key_of(keys): keys for keys in (*(item.keys for item in items), *others)}
        if len(keys) < len(items) + len(others):
            raise CheckpointError("two values have the same key, once the keys that lead to them are joined by dots")
        boxes = {(key, box[0]): box for key, item in by_key.items() for box in item.parts()}
        return _Content(keys, by_key, values, boxes, done)

    def writes(self) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        found = []
        for (key, start), (_, sizes) in self.boxes.items():
            chunk, item = ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)), self.items[key]
            facts = TensorWriteData(chunk, TensorProperties(dtype=item.torch_dtype), torch.Size(item.shape))
            found.append(WriteItem(MetadataIndex(key, start), WriteItemType.SHARD, tensor_data=facts))
        return [*found, *(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.others)]

    def data(self, write_item: WriteItem) -> Any:
        """What a write is to write: a tensor, or the bytes of another value."""
        key, start = write_item.index.fqn, write_item.index.offset
        if start is None:
            torch.save(self.others[key](), content := io.BytesIO())
            return content
        box, item = self.boxes[key, tuple(start)], self.items[key]
        self.done(int(volume(box) * item.itemsize))
        return item.read(box)
