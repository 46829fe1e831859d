"""A model's files: one, or a set with an index that says which file has which key, as `transformers` writes them."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint.files.reader import Reader, explained, is_plain_name
from shardwise.checkpoint.files.safetensors import LONGEST_HEADER, Header, Stored, parsed, read_header
from shardwise.errors import CheckpointError, CheckpointFileError, DamagedFileError
from shardwise.words import some

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class FileSet:
    """The keys of a model's files, each in one of them."""

    path: Path
    files: tuple[Header, ...]
    keys: Mapping[str, Stored]


def find_files(path: str | os.PathLike[str]) -> FileSet:
    """The files that a path means: a safetensors file, an index, or a folder with either."""
    where = Path(path)
    with explained(f"read {where}"):
        is_folder = where.is_dir()
    main = _in_folder(where) if is_folder else where
    if main.name.endswith(".json"):
        return _indexed(where, main)
    header = read_header(main)
    return FileSet(where, (header,), header.tensors)


def _in_folder(folder: Path) -> Path:
    """The index, if there is one; else the one file: several may be the rest of a set that was never complete."""
    with explained(f"list {folder}"):
        names = sorted(entry.name for entry in os.scandir(folder))
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    for usual in ("model" + INDEX_SUFFIX, "model" + SUFFIX):
        if usual in names:
            return folder / usual
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} has several indexes, {', '.join(indexes)}: name the one that is meant")
    if indexes:
        return folder / indexes[0]
    if "index.json" in names and any(name.startswith("rank-") for name in files):
        raise CheckpointError(f"{folder} is a step of training: load it with load_step")
    if any(name.startswith("step-") for name in names):
        raise CheckpointError(f"{folder} has steps of training: go on from the latest with load_latest")
    if not files:
        raise CheckpointFileError(
            errno.ENOENT,
            f"no {SUFFIX} file, and no {INDEX_SUFFIX} file, is in {folder}; of other formats, `shardwise checkpoint "
            f"convert` makes some",
        )
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} has {len(files)} safetensors files and no index that says which belong together: "
            f"{some(files, most=3)}. Name one file; or, if they were being saved, "
            f"save them again"
        )
    return folder / files[0]


def _indexed(path: Path, index: Path) -> FileSet:
    """All that an index names must be there; what else is in its files does not count."""
    named = _weight_map(index)
    headers = {name: read_header(index.parent / name) for name in sorted({*named.values()})}
    _check_same_save(list(headers.values()))
    for key, name in named.items():
        if key not in headers[name].tensors:
            raise DamagedFileError(f"the index says that it is in {name}, which does not have it", index, key=key)
    keys = {key: headers[name].tensors[key] for key, name in named.items()}
    return FileSet(path, tuple(headers.values()), keys)


def _weight_map(index: Path) -> dict[str, str]:
    with Reader(index) as file:
        if file.size > LONGEST_HEADER:
            raise DamagedFileError(f"an index of {file.size} bytes is no index", index)
        said = parsed(file.read(0, file.size), index).get("weight_map")
    if not isinstance(said, dict) or not all(isinstance(name, str) for name in said.values()):
        raise DamagedFileError("an index has a weight_map, from keys to names of files", index)
    for key, name in said.items():
        if not is_plain_name(name) or not name.endswith(SUFFIX):
            raise DamagedFileError(f"{name!r} is no name of a safetensors file beside the index", index, key=key)
    return said


SET = "shardwise.set"
"""Under this name the metadata of a file say which others it was saved with."""


def _check_same_save(headers: list[Header]) -> None:
    """Files of two saves in one set would give some tensors of the one and some of the other."""
    first: dict[str, Header] = {}
    for header in headers:
        first.setdefault(header.metadata.get(SET, ""), header)
    if len(first) > 1:
        a, b = list(first.values())[:2]
        raise DamagedFileError(f"this file and {a.path.name} are not of the same save: save again", b.path)
