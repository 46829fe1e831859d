"""Show what a checkpoint has: keys, shapes, dtypes, layouts, bytes.

Tensors that are alike but for numbers in their keys, as those of a model's layers are, share a line.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardwise.checkpoint.catalogue import Catalogue, Item, open_checkpoint
from shardwise.checkpoint.torch_files import key_of
from shardwise.debug.table import Cells, Table
from shardwise.errors import CheckpointError
from shardwise.terminal import print_tables
from shardwise.words import counted, size

LONGEST = 100
"""Letters of a value that are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH")
    parser.add_argument("keys", nargs="*", default=[], metavar="KEY", help="only these keys, which may have * in them")
    parser.add_argument("--every", action="store_true", help="a line for every tensor")


def run(options: argparse.Namespace) -> int:
    with open_checkpoint(options.path) as found:
        print_tables(tables(found, options.keys, every=options.every))
    return 0


def tables(found: Catalogue, keys: Sequence[str], *, every: bool) -> list[Table]:
    items = [item for item in found.items.values() if _is_wanted(item.key, keys)]
    has_layouts = any(item.layout for item in items)
    rows = []
    for name, group in together(items, _facts, every=every):
        first, count = group[0], "" if len(group) == 1 else str(len(group))
        layout = (first.layout,) if has_layouts else ()
        shape = f"[{', '.join(map(str, first.shape))}]"
        rows.append((name, first.dtype, shape, *layout, count, size(sum(item.num_bytes for item in group))))
    total = size(sum(item.num_bytes for item in items))
    rows.append((counted(len(items), "tensor"), "", "", *([""] if has_layouts else []), "", total))
    columns = ("key", "dtype", "shape", *(["layout"] if has_layouts else []), "×", "bytes")
    made = [Table(f"{found.path}: {found.told}", columns, rows, len(columns) - 2)]
    values: list[Cells] = [
        (key_of(path), _value(read)) for path, read in found.others.items() if _is_wanted(key_of(path), keys)
    ]
    if keys and not items and not values:
        raise CheckpointError(f"{found.path} has no key like {' or '.join(keys)}: the first one is {_first(found)}")
    return [*made, Table("Other values", ("key", "value"), values, 2)] if values else made


def _first(found: Catalogue) -> str:
    return repr(next(iter(found.items), None) or key_of(next(iter(found.others), ())))


def _is_wanted(key: str, keys: Sequence[str]) -> bool:
    return not keys or any(fnmatch.fnmatchcase(key, pattern) for pattern in keys)


def _value(read: Any) -> str:
    text = re.sub(r"\s+", " ", repr(read()))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _facts(item: Item) -> tuple[Any, ...]:
    return item.dtype, item.shape, item.layout


class Keyed(Protocol):
    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Keyed)


def together(
    items: Iterable[T], facts: Callable[[T], tuple[Any, ...]], *, every: bool = False
) -> list[tuple[str, list[T]]]:
    """What has the same facts, and differs only by numbers in the keys, under one name, in the order of the first."""
    groups: dict[tuple[Any, ...], list[T]] = {}
    for item in items:
        parts = item.key.split(".")
        pattern = parts if every else ["*" if part.isdecimal() else part for part in parts]
        groups.setdefault((*pattern, *facts(item)), []).append(item)
    return [(_name([item.key.split(".") for item in group]), group) for group in groups.values()]


def _name(keys: Sequence[Sequence[str]]) -> str:
    """`layers.{0..31}.weight` for keys that differ by numbers, if they are all those that it says; else `*`."""
    columns = [list(dict.fromkeys(column)) for column in zip(*keys, strict=True)]
    is_all = prod(map(len, columns)) == len(keys)
    return ".".join(column[0] if len(column) == 1 else _numbers(column) if is_all else "*" for column in columns)


def _numbers(column: Sequence[str]) -> str:
    numbers = sorted(map(int, column))
    is_row = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{{{numbers[0]}..{numbers[-1]}}}" if is_row else f"{{{','.join(map(str, numbers))}}}"
