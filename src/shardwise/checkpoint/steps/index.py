"""The index of a step: which tensors it has, in which files their boxes lie, with which checksums, and all that is not
a tensor. JSON, which people can read; it carries a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.files.reader import Reader, explained, is_plain_name
from shardwise.checkpoint.files.reading import Region, are_sizes, contiguous_region, is_possible
from shardwise.checkpoint.files.safetensors import parsed
from shardwise.checkpoint.files.verifying import Claim, are_whole
from shardwise.errors import CheckpointError, DamagedFileError
from shardwise.layout import Box, Layout, Mesh
from shardwise.words import dtype_name, dtype_named

INDEX = "index.json"
FORMAT = "shardwise step"
VERSION = 1
LONGEST = 2**31


@dataclass(frozen=True, slots=True)
class SavedBox:
    """Where a box of a tensor lies: in which file, from which byte on, row after row; and its checksum."""

    box: Box
    file: str
    offset: int
    checksum: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """`layout` is how the tensor was laid out when it was saved; None of a plain one."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: SavedLayout | None
    boxes: tuple[SavedBox, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def region(self, box: SavedBox) -> Region:
        return contiguous_region(box.offset, box.box[1], self.dtype)


@dataclass(frozen=True, slots=True)
class SavedLayout:
    """A layout on a mesh that may be no more: axes by their names. `text` is for people."""

    text: str
    mesh: Mapping[str, int]
    splits: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[int, ...] | None, ...]

    @staticmethod
    def of(layout: Layout) -> SavedLayout:
        names = layout.mesh.names
        splits = tuple(tuple(names[axis] for axis in axes) for axes in layout.splits)
        return SavedLayout(str(layout), dict(zip(names, layout.mesh.shape, strict=True)), splits, layout.sizes)

    def on(self, mesh: Mesh, shape: Sequence[int]) -> Layout | None:
        """The same on a mesh with the same axes; None if there are others."""
        if self.mesh != dict(zip(mesh.names, mesh.shape, strict=True)):
            return None
        return Layout(mesh, shape, [tuple(map(mesh.axis, names)) for names in self.splits], None, self.sizes)


@dataclass(frozen=True, slots=True)
class StepIndex:
    """What a step has. `state` and `random` are as they were saved, in JSON (`trees`)."""

    folder: Path
    step: int
    num_ranks: int
    files: Mapping[str, int]
    tensors: Mapping[str, SavedTensor]
    state: Mapping[str, Any]
    random: Mapping[str, Any]
    made_by: Mapping[str, str]

    def check_files(self, *, number: int = 0, count: int = 1) -> None:
        """They are as long as is said: this rank looks at its share of them, of `count` ranks together."""
        for name in sorted(self.files)[number::count]:
            path = self.folder / name
            with explained(f"read {path}"):
                size = path.stat().st_size
            if size != self.files[name]:
                raise DamagedFileError(f"the file has {size} bytes, and was written with {self.files[name]}", path)

    def claims(self) -> list[Claim]:
        """What the data must be."""
        return [
            Claim(self.folder / box.file, tensor.key, tensor.region(box), box.checksum)
            for tensor in self.tensors.values()
            for box in tensor.boxes
        ]


# Writing


def index_text(index: StepIndex) -> bytes:
    """One line for each tensor, and for each part of the state."""
    said = {
        "format": FORMAT,
        "version": VERSION,
        "step": index.step,
        "ranks": index.num_ranks,
        "made_by": dict(index.made_by),
        "files": dict(index.files),
        "tensors": {key: _tensor_said(tensor) for key, tensor in index.tensors.items()},
        "state": dict(index.state),
        "random": dict(index.random),
    }
    said["checksum"] = _checksum(said)
    lines = [f"{json.dumps(name)}: {_in_lines(value)}" for name, value in said.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _in_lines(value: Any) -> str:
    if not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    return (
        "{\n"
        + ",\n".join(f" {json.dumps(key)}: {json.dumps(item, allow_nan=False)}" for key, item in value.items())
        + "\n}"
    )


def _checksum(said: Mapping[str, Any]) -> str:
    """The same for all texts that say the same."""
    text = json.dumps({key: said[key] for key in said if key != "checksum"}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _tensor_said(tensor: SavedTensor) -> dict[str, Any]:
    said: dict[str, Any] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
    if (layout := tensor.layout) is not None:
        said["layout"] = layout_said(layout)
    said["boxes"] = [[*map(list, box.box), box.file, box.offset, f"{box.checksum:08x}"] for box in tensor.boxes]
    return said


def layout_said(layout: SavedLayout) -> dict[str, Any]:
    sizes = [None if some is None else list(some) for some in layout.sizes]
    return {"text": layout.text, "mesh": layout.mesh, "splits": layout.splits, "sizes": sizes}


# Reading


def read_index(folder: Path) -> StepIndex:
    """The index of a step, if it is whole."""
    path = folder / INDEX
    with Reader(path) as file:
        if file.size > LONGEST:
            raise DamagedFileError(f"an index of {file.size} bytes is no index", path)
        said = parsed(file.read(0, file.size), path)
    if said.get("format") != FORMAT:
        raise DamagedFileError("this is no index of a step", path)
    if said.get("checksum") != _checksum(said):
        raise DamagedFileError("the index has changed since it was written: its checksum is another", path)
    if said.get("version") != VERSION:
        raise CheckpointError(f"{path} has version {said.get('version')} of the format; this is version {VERSION}")
    try:
        index = _index(folder, said)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"this is no index of a step: {type(error).__name__}: {error}", path) from error
    for tensor in index.tensors.values():
        _check_boxes(tensor, index)
    return index


def _index(folder: Path, said: Mapping[str, Any]) -> StepIndex:
    if any(not is_plain_name(name) or type(size) is not int for name, size in said["files"].items()):
        raise ValueError("a file's name is no plain name, or its size is no number")
    return StepIndex(
        folder,
        int(said["step"]),
        int(said["ranks"]),
        said["files"],
        {key: _tensor(key, tensor) for key, tensor in said["tensors"].items()},
        said["state"],
        said["random"],
        said["made_by"],
    )


def _tensor(key: str, said: Mapping[str, Any]) -> SavedTensor:
    layout = layout_from(said["layout"]) if "layout" in said else None
    boxes = tuple(
        SavedBox((_sizes(starts), _sizes(sizes)), str(file), _sizes([offset])[0], int(checksum, 16))
        for starts, sizes, file, offset, checksum in said["boxes"]
    )
    shape = _sizes(said["shape"])
    if not is_possible(shape):
        raise ValueError(f"no tensor has a shape like that of {key!r}")
    return SavedTensor(key, dtype_named(said["dtype"]), shape, layout, boxes)


def layout_from(said: Mapping[str, Any]) -> SavedLayout:
    sizes = tuple(None if some is None else _sizes(some) for some in said["sizes"])
    return SavedLayout(said["text"], said["mesh"], tuple(map(tuple, said["splits"])), sizes)


def _sizes(said: Any) -> tuple[int, ...]:
    if not are_sizes(said):
        raise ValueError(f"{said!r} are not sizes")
    return tuple(said)


def _check_boxes(tensor: SavedTensor, index: StepIndex) -> None:
    """They are the whole tensor, and within their files."""
    path = index.folder / INDEX
    if not are_whole(tensor.shape, [box.box for box in tensor.boxes]):
        raise DamagedFileError("its boxes are not the whole tensor, each element once", path, key=tensor.key)
    for box in tensor.boxes:
        if box.file not in index.files:
            raise DamagedFileError(
                f"it is said to be in {box.file!r}, which is no file of the step", path, key=tensor.key
            )
        if box.offset + tensor.region(box).num_bytes > index.files[box.file]:
            raise DamagedFileError(
                "its data end after their file", index.folder / box.file, key=tensor.key, offset=box.offset
            )
