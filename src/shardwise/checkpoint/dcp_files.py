"""What a folder of torch.distributed.checkpoint holds, as its `.metadata` say: a pickle, of which only its own records
are taken, and these as plain values. Neither torch's classes nor any other code that a file may name is run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr  # of what holds itself many times over, the beginning
from typing import Any

import torch

from shardwise.checkpoint.files.reader import Reader, is_plain_name
from shardwise.checkpoint.files.reading import are_sizes, is_possible
from shardwise.checkpoint.torch_files import Keys, Section
from shardwise.errors import CheckpointError, CheckpointFileError, DamagedFileError
from shardwise.layout import Box

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written by torch.save."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor, and the boxes that it was written in."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Mapping[Box, Place]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """What a checkpoint holds; `keys` are where in nested dicts each key is."""

    path: Path
    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, Place]
    keys: Mapping[str, Keys]


def read_dcp(folder: Path) -> DcpFolder:
    """What a folder holds, if it says so without contradicting itself."""
    path = folder / METADATA
    try:
        file = Reader(path)
    except CheckpointFileError:
        if list(folder.glob(f"__*{METADATA}")):
            raise CheckpointError(
                f"{folder} was saved without collectives, and has no {METADATA} that speaks for all ranks"
            ) from None
        raise
    with file:
        said = _unpickled(file)
    try:
        return _folder(folder, said)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"these are no metadata of a checkpoint: {error}", path) from error


# The pickle


class _Record:
    """An object of a class that the pickle names, of which only the state is taken."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        """None is not always written."""
        return self.state.get(name)


class _Metadata(_Record): ...


class _Tensor(_Record): ...


class _Bytes(_Record): ...


class _Chunk(_Record): ...


class _Index(_Record):
    """What was written, as a key."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash((self["fqn"], self["offset"]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and (self["fqn"], self["offset"]) == (other["fqn"], other["offset"])


_NAMES: dict[tuple[str, str], Callable[..., Any]] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): kind
        for name, kind in {
            "Metadata": _Metadata,
            "TensorStorageMetadata": _Tensor,
            "BytesStorageMetadata": _Bytes,
            "ChunkStorageMetadata": _Chunk,
            "MetadataIndex": _Index,
            **dict.fromkeys(("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"), _Record),
        }.items()
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch", "Size"): tuple,
    **{
        (module, name): _Record
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""All that metadata name."""


class _Unpickler(pickle._Unpickler):
    """The one in Python: that in C takes memory for as many objects as a file says that it remembers."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")


def _unpickled(file: Reader) -> Any:
    section = Section(file)
    try:
        return _Unpickler(section).load()
    except (DamagedFileError, CheckpointFileError):
        raise
    except Exception as error:  # of a pickle that was not written by pickle, anything
        what = f"these are no metadata of a checkpoint: {str(error) or type(error).__name__}"
        raise DamagedFileError(what, file.path, offset=section.tell()) from error


# What it says


def _folder(folder: Path, said: Any) -> DcpFolder:
    if not isinstance(said, _Metadata):
        raise TypeError(f"found a {type(said).__name__}")
    written = {(index["fqn"], index["offset"]): _place(info) for index, info in said["storage_data"].items()}
    found = said["state_dict_metadata"]
    if not all(isinstance(key, str) for key in found):
        raise TypeError("a key is no text")
    _check_files(folder, {key: place for (key, _), place in written.items()})
    tensors = {key: _tensor(folder, key, one, written) for key, one in found.items() if isinstance(one, _Tensor)}
    values = {key: written[key, None] for key, one in found.items() if isinstance(one, _Bytes)}
    keys = {key: _keys(path) for key, path in (said["planner_data"] or {}).items()}
    return DcpFolder(folder, tensors, values, {key: keys.get(key, (key,)) for key in found})


def _keys(said: Any) -> Keys:
    if not isinstance(said, tuple) or not all(isinstance(part, (str, int)) for part in said):
        raise TypeError(f"{repr(said)} are no keys")
    return said


def _place(info: Any) -> Place:
    if info["transform_descriptors"]:
        raise ValueError(f"written through {repr(info['transform_descriptors'])}, which are not known here")
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    if not is_plain_name(name):
        raise ValueError(f"{repr(name)} is no name of a file in the folder")
    return Place(name, *_sizes((offset, length)))


def _tensor(folder: Path, key: str, said: Any, written: Mapping[Any, Place]) -> DcpTensor:
    properties, shape = said["properties"].state, _sizes(said["size"])
    dtype = properties[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key!r} has the dtype {repr(dtype)}")
    if not is_possible(shape):
        raise ValueError(f"no tensor has a shape like that of {key!r}")
    boxes: dict[Box, Place] = {}
    for chunk in said["chunks"]:
        box = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        if (key, box[0]) not in written:
            raise DamagedFileError(f"nothing says where its box {box} was written", folder / METADATA, key=key)
        if not len(box[0]) == len(box[1]) == len(shape):
            raise ValueError(f"{key!r} has {len(shape)} dims, and a box of others: {box}")
        boxes[box] = written[key, box[0]]
    return DcpTensor(key, dtype, shape, boxes)


def _sizes(said: Any) -> tuple[int, ...]:
    if not are_sizes(said, tuple):
        raise ValueError(f"{repr(said)} are not sizes")
    return said


def _check_files(folder: Path, places: Mapping[str, Place]) -> None:
    """They are as long as they must be."""
    sizes: dict[str, int] = {}
    for key, place in places.items():
        if place.file not in sizes:
            with Reader(folder / place.file) as file:
                sizes[place.file] = file.size
        if place.offset + place.length > sizes[place.file]:
            raise DamagedFileError(
                f"the file ends at byte {sizes[place.file]}, before byte {place.offset + place.length} where its data "
                f"do: it was cut off",
                folder / place.file,
                key=key,
                offset=place.offset,
            )
