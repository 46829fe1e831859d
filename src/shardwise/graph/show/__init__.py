"""Captured programs as text that a person can read."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.graph.guards import Guards
from shardwise.graph.run import Run
from shardwise.graph.show.report import Report
from shardwise.graph.show.text import Page, drawn, plain

__all__ = ["show"]


def show(
    name: str, runs: Sequence[tuple[Guards, Run]], how: str, *, width: int, every: bool = False, color: bool = False
) -> str:
    """The programs of a function, in the order in which they were captured."""
    count = len(runs)
    page: Page = [plain(f"{name}: {count} program{'' if count == 1 else 's'}", "head")]
    for number, (guards, run) in enumerate(runs):
        why = f"program {number + 1} of {count}, captured for {guards.why}"
        page += [plain(""), plain(why, "head"), *Report(run.program, guards, how, width, every).page()]
    return drawn(page, width, color=color)
