"""Which format is at a path, and what there is in a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from shardwise.checkpoint.catalogue.dcp import open_dcp
from shardwise.checkpoint.catalogue.items import Catalogue
from shardwise.checkpoint.catalogue.safetensors import open_safetensors
from shardwise.checkpoint.catalogue.steps import open_step
from shardwise.checkpoint.catalogue.torch_save import open_torch_file
from shardwise.checkpoint.dcp_files import METADATA
from shardwise.checkpoint.files.file_sets import INDEX_SUFFIX, SUFFIX
from shardwise.checkpoint.files.reader import explained
from shardwise.checkpoint.steps.folders import steps_in
from shardwise.checkpoint.steps.index import INDEX
from shardwise.errors import CheckpointError, CheckpointFileError

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""How files of torch.save are usually called."""


def open_checkpoint(path: str | os.PathLike[str]) -> Catalogue:
    """What is at a path: a file or a folder of any format, or a folder of steps, of which the latest is taken."""
    where = Path(path)
    if where.name in (METADATA, INDEX):
        where = where.parent
    with explained(f"read {where}"):
        names = set(os.listdir(where)) if where.is_dir() else None
        where.stat()
    if names is None:
        return open_safetensors(where) if where.name.endswith((SUFFIX, INDEX_SUFFIX)) else open_torch_file(where)
    if INDEX in names:
        return open_step(where)
    if METADATA in names or any(_is_of_one_rank(name) for name in names):
        return open_dcp(where)
    if steps := steps_in(where):
        return open_step(steps[-1].path)
    if not any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names):
        raise CheckpointFileError(errno.ENOENT, f"no checkpoint is in {where}")
    return open_safetensors(where)


def found_in(folder: Path) -> Iterator[tuple[Path, Catalogue | CheckpointError]]:
    """The checkpoints in a folder, or what is wrong with them."""
    with explained(f"list {folder}"):
        entries = sorted(folder.iterdir())
    for entry in entries:
        if _looks_like_one(entry):
            try:
                yield entry, open_checkpoint(entry)
            except CheckpointError as error:
                yield entry, error


def _looks_like_one(entry: Path) -> bool:
    if not entry.is_dir():
        return entry.name.endswith((SUFFIX, *TORCH_SUFFIXES))
    names = os.listdir(entry)
    return any(
        name in (METADATA, INDEX) or name.endswith((SUFFIX, INDEX_SUFFIX)) or _is_of_one_rank(name) for name in names
    ) or bool(steps_in(entry))


def _is_of_one_rank(name: str) -> bool:
    return name.startswith("__") and name.endswith(METADATA)
