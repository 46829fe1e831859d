"""Folders of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from shardwise.checkpoint.catalogue.items import Catalogue, Check, Item, outer
from shardwise.checkpoint.dcp_files import METADATA, DcpFolder, DcpTensor, Place, read_dcp
from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.pieces import Flaw, flaw, within
from shardwise.checkpoint.torch_files import Saved
from shardwise.errors import DamagedFileError
from shardwise.layout import Box
from shardwise.words import counted, dtype_name


def open_dcp(path: Path) -> Catalogue:
    folder, files = read_dcp(path), Opened()
    items = {key: _item(tensor, folder, files) for key, tensor in folder.tensors.items()}
    values = {key: _Written(key, path / place.file, place, files) for key, place in folder.values.items()}
    others = {folder.keys[key]: value.load for key, value in values.items()}
    checks = [check for item in items.values() for check in item.checks(path)]
    checks += [Check(value.place.length, value.check) for value in values.values()]
    names = {place.file for tensor in folder.tensors.values() for place in tensor.boxes.values()}
    about = counted(len(names), "file")
    return Catalogue(path, "dcp", items, others, checks, files, about)


@dataclass(frozen=True, slots=True)
class _Written:
    """What torch.save wrote in some place."""

    key: str
    path: Path
    place: Place
    files: Opened

    def load(self) -> object:
        return self._saved.load()

    def check(self) -> None:
        self._saved.check()

    @property
    def _saved(self) -> Saved:
        return Saved(self.files[self.path], self.place.offset, self.place.length, self.key)


@dataclass(frozen=True, slots=True)
class _DcpItem(Item):
    """Each box was written by a torch.save of its own, and is read as a whole."""

    written: Mapping[Box, _Written]

    def read(self, box: Box) -> Tensor:
        whole = outer(box, self.written)
        return self._whole(whole)[within(box, whole)]

    @property
    def reads_parts(self) -> bool:
        return False

    def checks(self, folder: Path) -> list[Check]:
        """That its boxes are the whole, and that each is what it should be."""
        boxes = [Check(written.place.length, partial(self._check, box)) for box, written in self.written.items()]
        return [Check(0, partial(_check_whole, self, folder)), *boxes]

    def _check(self, box: Box) -> None:
        self.written[box].check()
        self._whole(box)

    def _whole(self, box: Box) -> Tensor:
        found, written = self.written[box].load(), self.written[box]
        if isinstance(found, Tensor) and found.dtype == self.torch_dtype and tuple(found.shape) == box[1]:
            return found
        kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        what = f"expected {self.torch_dtype} {list(box[1])}, found {kind}"
        raise DamagedFileError(what, written.path, key=self.key, offset=written.place.offset)


def _item(tensor: DcpTensor, folder: DcpFolder, files: Opened) -> _DcpItem:
    written = {box: _Written(tensor.key, folder.path / place.file, place, files) for box, place in tensor.boxes.items()}
    dtype = dtype_name(tensor.dtype)
    layout = "" if len(written) < 2 else f"{len(written)} boxes"
    return _DcpItem(tensor.key, dtype, tensor.shape, tuple(written), layout, folder.keys[tensor.key], written)


_FLAWS = {"missing": "was not saved", "twice": "was saved twice", "outside": "is outside of it"}


def _check_whole(item: Item, folder: Path) -> None:
    found = flaw(item.shape, item.boxes)
    if found is not None:
        raise DamagedFileError(f"of the tensor {list(item.shape)}, {_told(found)}", folder / METADATA, key=item.key)


def _told(found: Flaw) -> str:
    starts, sizes = found.box
    part = ", ".join(f"{start}:{start + size}" for start, size in zip(starts, sizes, strict=True))
    return f"[{part}] {_FLAWS[found.what]}"
