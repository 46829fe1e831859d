"""List the checkpoints in a folder, or the steps of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.checkpoint.catalogue import Catalogue, found_in, open_checkpoint
from shardwise.debug.table import Table
from shardwise.errors import CheckpointError
from shardwise.terminal import print_tables
from shardwise.words import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", type=Path, default=Path("."), help="the folder (this one)")


def run(options: argparse.Namespace) -> int:
    found = list(found_in(options.path)) if options.path.is_dir() else []
    if not found:
        found = [(options.path, open_checkpoint(options.path))]
    rows = [(path.name or str(path), *_told(one)) for path, one in found]
    print_tables([Table(str(options.path), ("name", "format", "about", "tensors", "bytes"), rows, 3)])
    return 0


def _told(found: Catalogue | CheckpointError) -> tuple[str, ...]:
    if isinstance(found, CheckpointError):
        return "", f"cannot be read: {found}", "", ""
    with found:
        return found.kind, found.about, str(len(found.items)), size(found.num_bytes)
