"""Compare the tensors of two checkpoints, which may be of different formats.

Which keys, shapes, dtypes and values differ, and by how much. NaNs are equal to NaNs. The exit status is 0 if there
are no differences, and 1 if there are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shardwise.checkpoint.catalogue import open_checkpoint
from shardwise.checkpoint.command.show import together
from shardwise.checkpoint.compare import Difference, Tolerance, differences
from shardwise.debug.table import Cells, Table
from shardwise.terminal import print_tables, progress
from shardwise.words import counted, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("first", type=Path, metavar="PATH")
    add("second", type=Path, metavar="PATH")
    add("--under", nargs=2, default=("", ""), metavar="KEY", help="compare what is below a key on either side")
    add("--relative", type=float, default=0.0, metavar="R", help="numbers may be apart by R times the second (0)")
    add("--absolute", type=float, default=0.0, metavar="A", help="and by A (0)")
    add("--no-values", action="store_true", help="compare keys, shapes and dtypes only")


def run(options: argparse.Namespace) -> int:
    with open_checkpoint(options.first) as one, open_checkpoint(options.second) as two:
        first, second = one.under(options.under[0]), two.under(options.under[1])
        with progress("comparing", first.num_bytes, said=size) as done:
            found = list(
                differences(
                    first,
                    second,
                    values=not options.no_values,
                    tolerance=Tolerance(options.relative, options.absolute),
                    done=done,
                )
            )
    if not found:
        print(f"the same: {counted(len(first.items), 'tensor')}")
        return 0
    rows: list[Cells] = [(key, *_facts(group[0])) for key, group in together(found, _facts)]
    print_tables(
        [
            Table(
                counted(len(found), "difference"),
                ("key", "differs in", str(options.first), str(options.second)),
                rows,
                4,
            )
        ]
    )
    return 1


def _facts(one: Difference) -> tuple[str, str, str]:
    return one.what, one.first, one.second
