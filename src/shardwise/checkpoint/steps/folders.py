"""The folders of the steps of a run: their names, their order, and which are no longer needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.files.reader import explained

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")


class StepFolder(NamedTuple):
    """A step that was saved again has the next number for its `save`; the highest one counts."""

    step: int
    save: int
    path: Path


def steps_in(directory: Path) -> list[StepFolder]:
    """The steps that are there, the latest last."""
    if not directory.exists():
        return []
    with explained(f"list {directory}"):
        found = [(_NAME.fullmatch(entry.name), entry) for entry in directory.iterdir() if entry.is_dir()]
    return sorted(StepFolder(int(name[1]), int(name[2] or 1), path) for name, path in found if name is not None)


def new_folder(directory: Path, step: int) -> Path:
    """A name for a step that is to be saved. It is never that of one that is there: to put one folder in the place of
    another takes two renames, and between them there would be none."""
    saves = [folder.save for folder in steps_in(directory) if folder.step == step]
    return directory / (f"step-{step:08}.{max(saves) + 1}" if saves else f"step-{step:08}")


def superseded(path: Path, keep: int | None) -> list[Path]:
    """What is no longer needed when a step has been saved: earlier saves of it and, unless all are kept, the steps
    before the last so many. Steps after it are left alone, whatever they are."""
    folders = steps_in(path.parent)
    step = next(folder.step for folder in folders if folder.path == path)
    gone = [folder.path for folder in folders if folder.step == step and folder.path != path]
    before = sorted({folder.step for folder in folders if folder.step < step}, reverse=True)
    old = before[keep - 1 :] if keep is not None else []
    return gone + [folder.path for folder in folders if folder.step in old]
