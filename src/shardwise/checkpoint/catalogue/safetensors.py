"""safetensors files, one or a set."""

from __future__ import annotations

from pathlib import Path

from shardwise.checkpoint.catalogue.items import Catalogue, Check, RegionItem
from shardwise.checkpoint.catalogue.steps import checks_of
from shardwise.checkpoint.files.file_sets import FileSet, find_files
from shardwise.checkpoint.files.reader import Opened
from shardwise.checkpoint.files.reading import contiguous_region
from shardwise.checkpoint.files.safetensors import Stored
from shardwise.checkpoint.files.verifying import claims_of
from shardwise.checkpoint.pieces import whole
from shardwise.errors import CheckpointError, DamagedFileError
from shardwise.words import counted, dtype_name


def open_safetensors(path: Path) -> Catalogue:
    found, files = find_files(path), Opened()
    items = {key: _item(key, stored, files) for key, stored in found.keys.items()}
    checks, unproven = _checks(found, files)
    about = counted(len(found.files), "file")
    return Catalogue(path, "safetensors", items, {}, checks, files, about, unproven)


def _item(key: str, stored: Stored, files: Opened) -> RegionItem:
    box, dtype = whole(stored.shape), stored.dtype
    regions = {} if dtype is None else {box: (stored.path, contiguous_region(stored.begin, stored.shape, dtype))}
    name = stored.code if dtype is None else dtype_name(dtype)
    return RegionItem(key, name, stored.shape, (box,), "", (key,), regions, files)


def _checks(found: FileSet, files: Opened) -> tuple[list[Check], str]:
    try:
        return checks_of(claims_of(found), files), ""
    except DamagedFileError:
        raise
    except CheckpointError:
        return [], "the files carry no checksums: their headers were verified, and not their data"
