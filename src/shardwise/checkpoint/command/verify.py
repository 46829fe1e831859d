"""Read every byte of checkpoints, and compare it with checksums.

Of the folder of a run, all steps are verified. Steps, and files that shardwise.checkpoint.save wrote, carry checksums;
so does what torch.save wrote, folders of torch.distributed.checkpoint included. Other safetensors files carry none:
then only their headers are verified. What is wrong is named with its file, key and offset.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpoint.catalogue import open_checkpoint
from shardwise.checkpoint.steps.folders import steps_in
from shardwise.errors import CheckpointError, DamagedFileError
from shardwise.terminal import printable, progress
from shardwise.words import counted, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")


def run(options: argparse.Namespace) -> int:
    paths: Sequence[Path] = [
        inner
        for path in options.paths
        for inner in ([step.path for step in steps_in(path)] if path.is_dir() else []) or [path]
    ]
    found, unread = [0], []
    for path in paths:
        try:
            found.append(_verified(path))
        except CheckpointError as error:
            unread.append(error)
    if unread:
        raise CheckpointError("; ".join(getattr(error, "strerror", None) or str(error) for error in unread))
    return max(found)


def _verified(path: Path) -> int:
    """1 if something is wrong with a checkpoint. All that is wrong is told."""
    try:
        found = open_checkpoint(path)
    except DamagedFileError as error:
        print(f"{printable(str(path))}: damaged\n  {printable(str(error))}")
        return 1
    problems = []
    with found, progress(path.name, sum(check.num_bytes for check in found.checks), said=size) as done:
        for check in found.checks:
            try:
                check.run()
            except CheckpointError as error:
                problems.append(printable(str(error)))
            done(check.num_bytes)
    told = f"{printable(str(path))}: {found.kind}, {counted(len(found.items), 'tensor')}, {size(found.num_bytes)}"
    if problems:
        print(f"{told}: damaged", *problems, sep="\n  ")
        return 1
    print(f"{told}: {found.unproven or 'whole'}")
    return 0
