"""Captured programs as text that a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.graph.program import Program
from shardwise.graph.show.report import Report
from shardwise.graph.show.text import Page, Text, drawn, labelled, plain

if TYPE_CHECKING:
    from shardwise.graph.captured import Captured

__all__ = ["show"]


def show(captured: Captured, *, width: int, every: bool = False, color: bool = False) -> str:
    """The programs of a function, in the order in which they were captured."""
    count = len(captured.runs)
    page: Page = [plain(f"{captured.name}: {count or 'no'} program{'' if count == 1 else 's'} captured", "head")]
    page += _states(captured, width)
    for number, (guards, run) in enumerate(reversed(captured.runs)):
        why = f"program {number + 1} of {count}, captured for {guards.why}"
        how = _how(captured.backend, run.program)
        page += [plain(""), plain(why, "head"), *Report(run.program, guards, how, width, every).page()]
    return drawn(page, width, color=color)


def _states(captured: Captured, width: int) -> Iterator[Text]:
    if captured.gave_up:
        yield from labelled("run", f"as it is: it {captured.gave_up}", width)
    elif not captured.runs:
        yield from labelled("run", "it is captured when it is called", width)


def _how(backend: str, program: Program) -> str:
    """What runs a program, and why no CUDA graph does."""
    facts = [node.meta["facts"] for part in program.ranks for node in part.graph.nodes if "facts" in node.meta]
    devices = {x.device.type for x in facts}
    if "meta" in devices:
        return "nothing: its tensors have no data"
    how = "compiled by Inductor" if backend == "inductor" else "node by node, as torch runs it"
    why = "" if "cuda" in devices else "; no CUDA graph: nothing is on a GPU"
    return f"{how} (backend={backend!r}){why}"
