"""What is set of fully sharded modules, and the gradients that these keep for later passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardwise.graph.guards.reached import Reached
from shardwise.parallel.fully_sharded.group import Group
from shardwise.parallel.fully_sharded.hooks import hooks_of


def of_groups(reached: Reached) -> Iterator[tuple[dict[Any, Any], str]]:
    """The options, and the kept gradients, of each group of parameters, with the name of its module."""
    for group, name in _groups(reached).items():
        for kept in (group.options.__dict__, group.kept, group.scattered):
            yield kept, name


def keep_gradients(reached: Reached) -> bool:
    """Whether a pass would keep gradients, or add some that were kept before."""
    return any(
        group.kept or group.scattered or not (group.options.sync and group.options.all_reduce)
        for group in _groups(reached)
    )


@contextmanager
def gathered_anew(reached: Reached) -> Iterator[None]:
    """While a program is captured, it gathers what it needs, also what is gathered already; and what it gathers, which
    is without data, is nobody else's."""
    groups = [*_groups(reached)]
    before = [(group, dict(group.__dict__), [entry.wholes for entry in group.entries]) for group in groups]
    for group in groups:
        group.is_gathered, group.stamp, group._pending = False, (), None
        for entry in group.entries:
            entry.wholes = []
    try:
        yield
    finally:
        for group, facts, wholes in before:
            group.__dict__.update(facts)
            for entry, was in zip(group.entries, wholes, strict=True):
                entry.wholes = was


def _groups(reached: Reached) -> dict[Group, str]:
    found = [(hooks_of(module), reached.names[key]) for key, module in reached.modules.items()]
    return {hooks.group: name for hooks, name in reversed(found) if hooks is not None}
