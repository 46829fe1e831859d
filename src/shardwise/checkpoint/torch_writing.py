"""A file of `torch.save`, written tensor by tensor: a pickle that says where the bytes of each will be, and then these.

The format is that of torch's own files: a zip archive without compression, in which each storage is a record.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3
from torch.storage import UntypedStorage, _dtype_to_storage_type_map

from shardwise.checkpoint.files.memory import bytes_of, in_rows
from shardwise.checkpoint.files.reader import explained
from shardwise.checkpoint.torch_files import Keys, nested

ROOT, VERSION = "archive", b"3\n"
ALIGNMENT = 64
"""Bytes begin at multiples of this, so that the file can be mapped."""


@dataclass(frozen=True, slots=True)
class Later:
    """A tensor whose elements come when they are asked for: parts of it, one after the other, in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[Tensor]]


def write_torch_file(path: Path, values: Mapping[Keys, Any], done: Callable[[int], object]) -> None:
    """Write nested dicts and lists, given by where each value is. `done` is told of the bytes that were written."""
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, protocol=2)
    pickler.dump(nested(values))
    with explained(f"write {path}"), open(path, "xb") as file:
        _write(file, pickled.getvalue(), pickler.tensors, done)
        file.flush()
        os.fsync(file.fileno())


def _write(file: IO[bytes], pickled: bytes, tensors: Iterable[Later], done: Callable[[int], object]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in (("data.pkl", pickled), ("byteorder", sys.byteorder.encode())):
            archive.writestr(f"{ROOT}/{name}", content)
        for number, tensor in enumerate(tensors):
            with archive.open(_aligned(f"{ROOT}/data/{number}", file.tell()), "w", force_zip64=True) as record:
                for part in tensor.parts():
                    record.write(bytes_of(whole := in_rows(part)))
                    done(whole.numel() * whole.itemsize)
        archive.writestr(f"{ROOT}/version", VERSION)


def _aligned(name: str, offset: int) -> zipfile.ZipInfo:
    """A record whose data are aligned, by a field that nobody reads."""
    info = zipfile.ZipInfo(name)
    begin = offset + _HEADER + len(name) + 4
    info.extra = struct.pack("<2sH", b"FB", -begin % ALIGNMENT) + b"Z" * (-begin % ALIGNMENT)
    return info


_HEADER = 30 + 20  # that of a record, with sizes of 64 bits


@dataclass(frozen=True, slots=True)
class _Storage:
    """The elements of a tensor, as the pickle names them."""

    kind: type
    number: int
    count: int


class _Pickler(pickle.Pickler):
    """`tensors` are those that the pickle names, in the order of their numbers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tensors: list[Later] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", obj.kind, str(obj.number), "cpu", obj.count
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            obj = Later(obj.dtype, tuple(obj.shape), partial(iter, [obj]))
        if not isinstance(obj, Later):
            return NotImplemented
        count = prod(obj.shape)
        kind = getattr(torch, _dtype_to_storage_type_map().get(obj.dtype, ""), None)  # of younger dtypes, none
        storage = _Storage(kind or UntypedStorage, len(self.tensors), count if kind else count * obj.dtype.itemsize)
        self.tensors.append(obj)
        strides = tuple(prod(obj.shape[dim + 1 :]) for dim in range(len(obj.shape)))
        facts: tuple[Any, ...] = storage, 0, obj.shape, strides, False, OrderedDict()
        return (_rebuild_tensor_v2, facts) if kind else (_rebuild_tensor_v3, (*facts, obj.dtype))
