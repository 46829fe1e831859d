"""Folders that appear complete or not at all: written under another name beside, and renamed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from shardwise.checkpoint.files.reader import explained
from shardwise.checkpoint.files.writing import flush_folder

UNFINISHED = ".shardwise-unfinished-"
"""So begin the names of folders that are being written or removed. What is left of them, whoever saves next removes."""


def beside(path: Path) -> Path:
    """A new name in the same folder."""
    return path.parent / f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}"


def make_folder(path: Path) -> None:
    with explained(f"make the folder {path}"):
        path.mkdir(parents=True, exist_ok=True)


def appear(unfinished: Path, path: Path) -> None:
    """Give a folder, all of which is on the disk, its name, by which it is there for others."""
    flush_folder(unfinished)
    with explained(f"rename {unfinished} to {path}"):
        os.rename(unfinished, path)
    flush_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a folder, which is first no longer there for others: half of it is never seen. Of one that was moved
    elsewhere and has a link in its place, the link."""
    if not path.name.startswith(UNFINISHED):
        gone = beside(path)
        with explained(f"remove {path}"):
            os.rename(path, gone)
        path = gone
    with explained(f"remove {path}"):
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what earlier saves have left in a folder when they were stopped: of one name, or all."""
    theirs = re.compile(re.escape(UNFINISHED) + (re.escape(name) if name else ".*") + "-[0-9a-f]{8}")
    with explained(f"list {folder}"):
        left = [entry for entry in folder.iterdir() if theirs.fullmatch(entry.name)]
    for path in left:
        remove(path)
