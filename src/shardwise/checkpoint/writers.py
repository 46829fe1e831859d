"""Which parts of tensors this process writes: each element once, by one of the ranks that hold it.

`pieces.share_out` decides it among the ranks of a tensor's mesh. Where a mesh does not take in all ranks, its siblings
hold the same tensors once more, and so does every rank that has plain ones; then each tensor is some sibling's, so that
all have about as much to write.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwise.checkpoint.files.memory import held_shards, layout_of
from shardwise.checkpoint.pieces import Stored, Written, flaw, held_ranks, share_out, volume, within
from shardwise.checkpoint.ranks import Ranks
from shardwise.comm import ProcessGroupPort
from shardwise.errors import CheckpointError
from shardwise.layout import Box, Layout, Mesh
from shardwise.tensor import DTensor
from shardwise.words import dtype_name


class Writable(Protocol):
    """A box of a tensor of some shape that this process writes, and what is in it when it is asked for."""

    @property
    def key(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def box(self) -> Box: ...
    @property
    def data(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor of some shape that this process writes, and what is in it."""

    key: str
    shape: tuple[int, ...]
    box: Box
    data: Tensor

    def copied(self) -> Part:
        """With a copy of the data on the host."""
        host = torch.empty(self.data.shape, dtype=self.data.dtype, device="cpu")
        return Part(self.key, self.shape, self.box, host.copy_(self.data))


def check_has_data(key: str, x: Tensor) -> None:
    if x.is_meta:
        raise CheckpointError(f"{key!r} is on the meta device, so there is nothing to save")


def parts_of(tensors: Mapping[str, Tensor], ranks: Ranks) -> tuple[list[Part], dict[str, Any]]:
    """What this process writes of some tensors, with nothing pending, and what to tell the others of it. All ranks ask
    together; a rank may have other tensors than the rest."""
    said = ranks.gather(_digest(tensors))
    kin = [number for number, digest in enumerate(said) if digest == said[ranks.number]]
    return ranks.all("finding out who saves what", lambda: _parts_of(tensors, kin, ranks))


def _parts_of(tensors: Mapping[str, Tensor], kin: Sequence[int], ranks: Ranks) -> tuple[list[Part], dict[str, Any]]:
    mine = _of_my_sibling(tensors, [ranks.members[number] for number in kin], ranks.members[ranks.number])
    shares = share_out({key: Stored(x._layout, x.itemsize) for key, x in mine.items() if isinstance(x, DTensor)})
    written = [part for key, x in mine.items() for part in _written(key, x, shares.get(key, ()))]
    facts = {
        "kin": kin[0],
        "tensors": [(key, dtype_name(x.dtype), tuple(x.shape)) for key, x in tensors.items()],
        "boxes": [(part.key, *part.box) for part in written],
    }
    if ranks.number != kin[0]:
        facts["tensors"] = []  # one of those that have the same is enough
    return written, facts


def _written(key: str, x: Tensor, shares: Sequence[Written]) -> Iterator[Part]:
    shards = held_shards(x)
    if not isinstance(x, DTensor):
        yield Part(key, tuple(x.shape), *shards[0])
        return
    numbers = held_ranks(x._layout.mesh)
    for box, rank in shares:
        if rank in numbers:
            held, shard = shards[numbers.index(rank)]
            yield Part(key, tuple(x.shape), box, shard[within(box, outer=held)])


def _digest(tensors: Mapping[str, Tensor]) -> str:
    facts = [(key, tuple(x.shape), str(x.dtype), _text(layout_of(x))) for key, x in tensors.items()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _text(layout: Layout | None) -> str:
    return "" if layout is None else f"{layout} on {layout.mesh}"


def _of_my_sibling(tensors: Mapping[str, Tensor], kin: Sequence[int], me: int) -> dict[str, Tensor]:
    """The tensors that fall to the ranks which hold them together with this one."""
    load: Counter[int] = Counter()
    mine = {}
    meshes: dict[Mesh | None, list[tuple[int, ...]]] = {}
    for key, x in sorted(tensors.items(), key=lambda item: (-_num_bytes(item[1]), item[0])):
        mesh = None if (layout := layout_of(x)) is None else layout.mesh
        if mesh not in meshes:
            meshes[mesh] = _siblings(mesh, kin, me)
        chosen = min(meshes[mesh], key=lambda members: max(load[rank] for rank in members))
        for rank in chosen:
            load[rank] += _num_bytes(x) // len(chosen)
        if me in chosen:
            mine[key] = x
    return {key: x for key, x in tensors.items() if key in mine}


def _num_bytes(x: Tensor) -> int:
    return math.prod(x.shape) * x.itemsize


def _siblings(mesh: Mesh | None, kin: Sequence[int], me: int) -> list[tuple[int, ...]]:
    """The groups of ranks of which each holds all of a tensor: each rank by itself what is plain, or simulated. If none
    is of kin alone, because some of its ranks have other tensors besides, it is this rank's own."""
    if mesh is None or not isinstance(mesh.port, ProcessGroupPort):
        return [(rank,) for rank in kin]
    ranks = mesh.port.ranks
    apart = [axis for axis in range(ranks.ndim) if axis not in mesh.root_axes]
    rows = ranks.permute(*apart, *mesh.root_axes).reshape(-1, mesh.size()).tolist()
    return [tuple(row) for row in rows if {*row} <= {*kin}] or [tuple(row) for row in rows if me in row]


# What all ranks have written, put together


class Place(NamedTuple):
    """A box that a rank writes: its `number`-th."""

    box: Box
    rank: int
    number: int


class Whole(NamedTuple):
    """A tensor, and the boxes that it is saved in."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    places: list[Place]


def put_together(said: Sequence[Any]) -> list[Whole]:
    """All tensors, in the order of the first rank that has them; of boxes that several have written one is kept."""
    found: dict[str, Whole] = {}
    for facts in said:
        for key, dtype, shape in facts["tensors"]:
            whole = found.setdefault(key, Whole(key, dtype, tuple(shape), []))
            if (dtype, tuple(shape)) != whole[1:3]:
                raise CheckpointError(
                    f"ranks have different tensors under the name {key!r}: {dtype} {list(shape)} and {whole.dtype} "
                    f"{list(whole.shape)}"
                )
    by_kin: dict[str, dict[int, list[Place]]] = {key: {} for key in found}
    for rank, facts in enumerate(said):
        for number, (key, starts, sizes) in enumerate(facts["boxes"]):
            place = Place((tuple(starts), tuple(sizes)), rank, number)
            by_kin[key].setdefault(facts["kin"], []).append(place)
    for key, whole in found.items():
        whole.places.extend(_complete(whole, by_kin[key]))
    return list(found.values())


def _complete(whole: Whole, by_kin: Mapping[int, Sequence[Place]]) -> list[Place]:
    """The boxes that are the whole tensor, each element once: all different ones; or, where ranks that hold different
    tensors have it in different layouts, those of some that hold the same."""
    everything = [place for kin in sorted(by_kin) for place in by_kin[kin]]
    for places in (everything, *by_kin.values()):
        different = list({place.box: place for place in reversed(places)}.values())
        boxes = [place.box for place in different]
        if sum(map(volume, boxes)) == math.prod(whole.shape) and flaw(whole.shape, boxes) is None:
            return sorted(different)
    raise CheckpointError(
        f"the ranks that save do not have all of {whole.key!r}: call it on all ranks of its mesh, with the same models"
    )
