"""What torch.distributed.checkpoint asks of a tensor: methods that torch looks for on any class of tensors.

A tensor is saved as the boxes that its shards are. Replicas name the same boxes, of which torch has each written by the
rank that has least to write. To load, a rank names the boxes that it wants, and is handed what fills them, whatever
boxes were saved. So checkpoints of torch's own DTensor are read, and read there, on any mesh and in any layout.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torch import Size, Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.checkpoint.files.memory import held_shards
from shardwise.checkpoint.pieces import held_ranks, pieces
from shardwise.dispatch.aliasing.copied_views import CopiedView, KeepsStrides, StaleView
from shardwise.dispatch.interop.state_dicts import settled
from shardwise.errors import InPlaceError, NoDataError
from shardwise.layout import Box, Layout
from shardwise.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_reduced: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What tensors that are saved while something is pending on them have come to."""


@lru_cache(maxsize=4096)
def _boxes(layout: Layout) -> tuple[tuple[Box, int], ...]:
    """The boxes of the shards held here, and which of these has them. In the simulator replicas come last."""
    if len(layout.mesh.held) == 1:
        box = layout.box(layout.mesh.held[0])
        return ((box, 0),) if 0 not in box[1] or not layout.numel else ()
    first: list[tuple[Box, int]] = []
    replicas: list[tuple[Box, int]] = []
    held = held_ranks(layout.mesh)
    for box, ranks in pieces(layout):
        owners = [at for at, rank in enumerate(held) if rank in ranks]
        first.append((box, owners[0]))
        replicas += [(box, at) for at in owners[1:]]
    return (*first, *replicas)


def _num_pieces(layout: Layout) -> int:
    """How many of the boxes are no replicas of others here."""
    return 1 if len(layout.mesh.held) == 1 else len(pieces(layout))


def _write_items(x: DTensor, fqn: str, same: Any) -> list[WriteItem]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if x.is_meta:
        raise NoDataError(f"{fqn} is on the meta device and has nothing to save: give it memory first, with to_empty()")
    if x._layout.has_pending:
        _reduced[x] = settled(x)
    layout = x._layout
    properties = TensorProperties.create_from_tensor(_shards(x)[0])
    return [
        WriteItem(
            index=MetadataIndex(fqn, Size(box[0])),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(Size(box[0]), Size(box[1])), properties=properties, size=layout.size
            ),
        )
        for box, _ in _boxes(layout)[: _num_pieces(layout)]
    ]


def _chunk_list(x: DTensor) -> list[ChunkStorageMetadata]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if x._layout.has_pending:
        raise InPlaceError(  # torch would make another error of a ValueError
            f"a checkpoint cannot be loaded into a tensor that is {x._layout}: no value is taken apart into pending "
            f"terms. Load into x.redistribute(placements=...), without Partial"
        )
    if isinstance(x, (CopiedView, StaleView)) and not isinstance(x, KeepsStrides):
        raise InPlaceError(
            "a checkpoint cannot be loaded into a view of a DTensor that had to be a copy, because its data came from "
            "other ranks: load into the tensor that it is a view of"
        )
    return [ChunkStorageMetadata(Size(box[0]), Size(box[1])) for box, _ in _boxes(x._layout)]


def _tensor_shard(x: DTensor, index: MetadataIndex) -> Tensor:
    """The shard that starts at an offset. Replicas in one process start at the same: then the number counts, too."""
    boxes, at = _boxes(x._layout), index.index
    if at is None or not 0 <= at < len(boxes) or boxes[at][0][0] != index.offset:
        at = next((i for i, (box, _) in enumerate(boxes) if box[0] == index.offset), None)
    if at is None:
        raise ValueError(f"{index.fqn}: no shard of {x._layout} held here starts at {index.offset}")
    return _shards(x)[boxes[at][1]]


def _shards(x: DTensor) -> list[Tensor]:
    """The shards held here, of what a tensor has come to if something was pending on it."""
    return [shard for _, shard in held_shards(_reduced[x] if x._layout.has_pending else x)]


DTensor.__create_write_items__ = _write_items  # type: ignore[attr-defined]
DTensor.__create_chunk_list__ = _chunk_list  # type: ignore[attr-defined]
DTensor.__get_tensor_shard__ = _tensor_shard  # type: ignore[attr-defined]
