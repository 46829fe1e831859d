"""Captured programs as text that a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.graph.guards.guards import FIRST
from shardwise.graph.run.run import Run
from shardwise.graph.show.report import Report
from shardwise.graph.show.text import Page, Text, drawn, labelled, plain
from shardwise.words import counted

if TYPE_CHECKING:
    from shardwise.graph.captured import Captured

__all__ = ["show"]


def show(captured: Captured, *, width: int, every: bool = False, color: bool = False) -> str:
    """The programs of a function, in the order in which they were captured."""
    count = len(captured.runs)
    page: Page = [plain(f"{captured.name}: {counted(count, 'program') if count else 'no programs'} captured", "head")]
    page += _states(captured, width)
    for number, (guards, run) in enumerate(reversed(captured.runs)):
        why = f"at {guards.why}" if guards.why == FIRST else f"since {guards.why}"
        why = f"program {number + 1} of {count}, {captured.origin} {why}"
        how = _how(run)
        page += [plain(""), plain(why, "head"), *Report(run.program, guards, how, width, every).page()]
    return drawn(page, width, color=color)


def _states(captured: Captured, width: int) -> Iterator[Text]:
    if captured.gave_up:
        yield from labelled("run", f"it {captured.gave_up}", width)
    elif not captured.runs:
        yield from labelled("run", "it is captured when it is called", width)


def _how(run: Run) -> str:
    """What runs a program, and if that is no CUDA graph, why not."""
    facts = (node.meta.get("facts") for part in run.program.ranks for node in part.graph.nodes)
    if any(x is not None and x.device.type == "meta" for x in facts):
        return "by nothing: its tensors have no data"
    if not hasattr(run.runner, "no_cuda_graph"):
        return "node by node, as torch runs it (fx)"
    why: str | None = run.runner.no_cuda_graph
    return "compiled by Inductor, " + ("in a CUDA graph" if why is None else f"but in no CUDA graph: {why}")
