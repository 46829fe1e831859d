"""`save`: a model as safetensors files with whole tensors, each rank writing its part of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.background import wait
from shardwise.checkpoint.entries import state_of
from shardwise.checkpoint.files.checksums import CHECKSUMS, Summed, as_text, seed
from shardwise.checkpoint.files.file_sets import INDEX_SUFFIX, SET, SUFFIX
from shardwise.checkpoint.files.folders import appear, beside, make_folder, remove, remove_unfinished
from shardwise.checkpoint.files.reader import explained
from shardwise.checkpoint.files.reading import contiguous_region
from shardwise.checkpoint.files.safetensors import CODES, Written, check_key, in_file_order, make_header
from shardwise.checkpoint.files.writing import flush_folder, make_file, open_to_write, write_file
from shardwise.checkpoint.models.sources import KeyMap, resolved
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.writers import (
    Place,
    Whole,
    Writable,
    check_has_data,
    parts_of,
    put_together,
)
from shardwise.dispatch.interop.state_dicts import settled
from shardwise.errors import CheckpointError, CheckpointFileError
from shardwise.words import bytes_said, dtype_name

INDEX = f"model{INDEX_SUFFIX}"


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    keys: KeyMap | None = None,
    process_group: Any = None,
) -> None:
    """Save a model's parameters and persistent buffers as safetensors files, which `safetensors` and `transformers`
    open: whole tensors, in files of at most `max_shard_size`, with an index where there are several.

    `path` is a folder, or a file that ends in .safetensors. Every rank writes its part, at its place in the files; no
    rank ever has more than its shards. A tensor with several names is saved under the first. `keys` gives other names.
    Files are written beside, and renamed when all ranks have written theirs; if one could not, all raise, and what was
    at `path` is as it was. All ranks of the process group call it, and see the same file system.

    >>> import torch, shardwise as sw
    >>> mesh = sw.simulate((2,), ("tp",))
    >>> sw.checkpoint.save(sw.distribute_module(torch.nn.Linear(4, 2), mesh), "linear.safetensors")
    >>> from safetensors.torch import load_file
    >>> load_file("linear.safetensors")["weight"].shape
    torch.Size([2, 4])
    """
    wait()  # it talks through the same group
    ranks = Ranks(process_group)
    ranks.agree(f"saving {path}")
    room = ranks.all(f"saving {path}", lambda: num_bytes_of(max_shard_size))
    tensors = ranks.all(f"saving {path}", lambda: _named(model, keys))
    ranks.all(f"saving {path}", lambda: check_storable(tensors))
    parts, facts = parts_of({key: settled(x) for key, x in tensors.items()}, ranks)
    save_parts(parts, facts, Path(path), room, ranks)


def num_bytes_of(size: int | str) -> int:
    """A number of bytes, as users write it: 10**9, "5GB", "500 MB"."""
    found = bytes_said(size) if isinstance(size, str) else size
    if not isinstance(found, int) or isinstance(size, bool) or found <= 0:
        raise ValueError(f"max_shard_size={size!r} is no number of bytes: write 10**9, '5GB' or '500MB'")
    return found


def _named(model: nn.Module, keys: KeyMap | None) -> dict[str, Tensor]:
    """The tensors to be saved, by the keys that they get. Each is saved once."""
    entries, others = state_of(model)
    check_tensors_only(others, model)
    found: dict[str, Tensor] = {}
    origin = resolved([entry.name for entry in entries], keys)
    for entry in entries:
        key = origin[entry.name]
        if key is None:
            continue
        if len(key.keys) > 1 or key.make is not None:
            raise CheckpointError(f"{entry.name!r} is saved under one key, as it is: not as {key}")
        if key.keys[0] in found:
            raise CheckpointError(f"two tensors of {type(model).__name__} would be saved under the key {key.keys[0]!r}")
        found[key.keys[0]] = entry.tensor
    return found


def check_tensors_only(others: Mapping[str, Any], model: nn.Module) -> None:
    if others:
        raise CheckpointError(
            f"{next(iter(others))!r} of {type(model).__name__} is a {type(next(iter(others.values()))).__name__}, and "
            f"safetensors files hold tensors only; shardwise.checkpoint.save_step saves such state"
        )


def save_parts(parts: Sequence[Writable], facts: Mapping[str, Any], path: Path, room: int, ranks: Ranks) -> None:
    """Save the parts that the ranks have, of which `facts` tell; the data of each are asked for once."""
    doing = f"saving {path}"
    said = ranks.collect(facts)
    plans = ranks.first(doing, lambda: _plans(put_together(said or []), path, room))
    places = ranks.told(plans and {key: (plan.name, at) for plan in plans for key, at in plan.begins().items()})
    unfinished = Path(ranks.told(ranks.first(doing, lambda: str(_begin(path)))))
    try:
        ranks.first(doing, lambda: _make_files(plans or [], unfinished))
        sums = ranks.collect(ranks.all(doing, lambda: _write(parts, places, unfinished)))
        ranks.first(doing, lambda: _finish(plans or [], sums or [], unfinished, path))
    except BaseException:
        if ranks.is_first:
            with suppress(CheckpointFileError):  # what went wrong first is what counts
                remove(unfinished)
        raise


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    for key, x in tensors.items():
        check_key(key)
        if x.dtype not in CODES:
            raise CheckpointError(f"{key!r} is {dtype_name(x.dtype)}, which safetensors files do not have; convert it")
        check_has_data(key, x)


@dataclass(frozen=True, slots=True)
class _FilePlan:
    """A file to be: its name, its tensors in their order, and the boxes that these are written in."""

    name: str
    tensors: Sequence[Written]
    places: Mapping[str, Sequence[Place]]
    is_alone: bool

    def header(self, sums: Sequence[Sequence[int]] | None = None, save: str = "0" * 16) -> bytes:
        """Of the same length whatever the checksums are, of each rank's boxes, and the name of the save."""
        said = {
            key: [Summed(box, sums[rank][number] if sums else 0) for box, rank, number in places]
            for key, places in self.places.items()
        }
        metadata = {"format": "pt", CHECKSUMS: as_text(said)}
        return make_header(self.tensors, metadata if self.is_alone else {**metadata, SET: save})

    def begins(self) -> dict[str, int]:
        """Where the bytes of each tensor begin."""
        at, found = len(self.header()), {}
        for tensor in self.tensors:
            found[tensor.key] = at
            at += tensor.num_bytes
        return found

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def _plans(wholes: Sequence[Whole], path: Path, room: int) -> list[_FilePlan]:
    """Tensors in their order, as many in a file as there is room for."""
    is_file = path.suffix == SUFFIX
    files: list[list[Whole]] = [[]]
    left = room
    for whole in wholes:
        if (num_bytes := _stored(whole).num_bytes) > left and files[-1] and not is_file:
            files.append([])
            left = room
        files[-1].append(whole)
        left -= num_bytes
    names = [path.name if is_file else f"model{SUFFIX}"] if len(files) == 1 else _names_in(path, len(files))
    return [
        _FilePlan(name, in_file_order([*map(_stored, some)]), {one.key: one.places for one in some}, len(files) == 1)
        for name, some in zip(names, files, strict=True)
    ]


def _names_in(folder: Path, count: int) -> list[str]:
    """Names for the files of a set, of which none is there: an earlier set stays whole until this one is."""
    with explained(f"list {folder}"):
        there = {*os.listdir(folder)} if folder.exists() else set()
    for number in itertools.count(1):
        stem = "model" if number == 1 else f"model-{number}"
        names = [f"{stem}-{at:05}-of-{count:05}{SUFFIX}" for at in range(1, count + 1)]
        if there.isdisjoint(names):
            return names
    raise AssertionError("there is always another number")


def _stored(whole: Whole) -> Written:
    return Written(whole.key, CODES[getattr(torch, whole.dtype)], whole.shape)


def _begin(path: Path) -> Path:
    """A folder beside, without what earlier saves have left."""
    if path.suffix == SUFFIX or not path.exists():
        folder, name = path.parent, path.name
    else:
        folder, name = path, "model"
    make_folder(folder)
    remove_unfinished(folder, name)
    unfinished = beside(folder / name)
    make_folder(unfinished)
    return unfinished


def _make_files(plans: Sequence[_FilePlan], unfinished: Path) -> None:
    """Of their full size, so that every rank can write its parts where they belong."""
    for plan in plans:
        make_file(unfinished / plan.name, len(plan.header()) + plan.num_bytes)


def _write(parts: Sequence[Writable], places: Mapping[str, tuple[str, int]], unfinished: Path) -> list[int]:
    """Write this rank's boxes. What is returned are their checksums."""
    sums = [0] * len(parts)
    for name in dict.fromkeys(places[part.key][0] for part in parts):
        with open_to_write(unfinished / name) as file:
            for number, part in enumerate(parts):
                if places[part.key][0] == name:
                    data = part.data
                    region = contiguous_region(places[part.key][1], part.shape, data.dtype).box(*part.box)
                    checksum = seed(part.key, CODES[data.dtype], part.shape)
                    sums[number] = file.write_tensor(region, data, checksum)
    return sums


def _finish(plans: Sequence[_FilePlan], sums: Sequence[Sequence[int]], unfinished: Path, path: Path) -> None:
    """Headers, the index, and then the names that the files are to have."""
    save = hashlib.sha256(repr([plan.header(sums) for plan in plans]).encode()).hexdigest()[:16]
    for plan in plans:
        with open_to_write(unfinished / plan.name) as file:
            file.write(plan.header(sums, save), 0)
    if len(plans) > 1:
        weight_map = {tensor.key: plan.name for plan in plans for tensor in plan.tensors}
        said = {"metadata": {"total_size": sum(plan.num_bytes for plan in plans)}, "weight_map": weight_map}
        write_file(unfinished / INDEX, json.dumps(said, indent=2).encode() + b"\n")
    if path.suffix != SUFFIX and not path.exists():
        appear(unfinished, path)
        return
    folder = path.parent if path.suffix == SUFFIX else path
    flush_folder(unfinished)
    with explained(f"replace the files in {folder}"):
        if len(plans) > 1:
            _move_set(unfinished, folder, [plan.name for plan in plans])
        else:
            os.replace(unfinished / plans[0].name, folder / plans[0].name)
        if path.suffix != SUFFIX:
            _remove_others(folder, [plan.name for plan in plans])
    flush_folder(folder)
    remove(unfinished)


def _move_set(unfinished: Path, folder: Path, names: Sequence[str]) -> None:
    """The index comes last: until then nobody looks at the files, and an earlier model is as it was."""
    try:
        for name in names:
            os.replace(unfinished / name, folder / name)
        flush_folder(folder)
        os.replace(unfinished / INDEX, folder / INDEX)
    except OSError:
        for name in names:
            with suppress(OSError):
                (folder / name).unlink()
        raise


def _remove_others(folder: Path, names: Sequence[str]) -> None:
    """Files of an earlier save, the one by which they are found first."""
    if len(names) == 1:
        (folder / INDEX).unlink(missing_ok=True)
    flush_folder(folder)
    for entry in folder.iterdir():
        if re.fullmatch(r"model((-\d+)?-\d{5}-of-\d{5})?\.safetensors", entry.name) and entry.name not in names:
            entry.unlink()
