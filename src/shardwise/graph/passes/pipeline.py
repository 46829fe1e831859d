"""Passes over a program: which there are, in which order they run, and that all ranks come out alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from shardwise.errors import CaptureError
from shardwise.graph.draft.draft import NUMBERS, Draft
from shardwise.graph.draft.joined import facts_of
from shardwise.graph.draft.storages import replaces_memory
from shardwise.graph.nodes import collective_of
from shardwise.graph.passes.async_tensor_parallel import async_tensor_parallel
from shardwise.graph.passes.bucket import bucket
from shardwise.graph.passes.cancel import cancel
from shardwise.graph.passes.gather_again import gather_again
from shardwise.graph.passes.in_place import in_place
from shardwise.graph.passes.merge import merge
from shardwise.graph.passes.narrow import narrow
from shardwise.graph.passes.overlap import overlap
from shardwise.graph.passes.report import PassReport, Traffic
from shardwise.graph.passes.scatter import SPLIT, scatter
from shardwise.graph.passes.share import share, tidy
from shardwise.graph.program import Part, Program
from shardwise.layout import Mesh
from shardwise.parallel.agreement import agreed, first_difference, least

Pass = Callable[[Draft], list[str]]
"""What changes a rank's part, and says what it did."""

PASSES: dict[str, Pass] = {
    "tidy": tidy,
    "share": share,
    "cancel": cancel,
    "scatter": scatter,
    "narrow": narrow,
    "gather_again": gather_again,
    "async_tensor_parallel": async_tensor_parallel,
    "bucket": bucket,
    "merge": merge,
    "overlap": overlap,
    "in_place": in_place,
}
"""In the order in which they run."""

ON_REQUEST = frozenset({"gather_again", "async_tensor_parallel"})
"""What trades one thing for another: communication for memory, larger products for overlap."""

DEFAULT = tuple(name for name in PASSES if name not in ON_REQUEST)

FAILED = CaptureError("a pass over the program failed on another rank, whose error says why")


def optimised(program: Program, names: Sequence[str], meshes: Sequence[Mesh]) -> Program:
    """A program after passes. One after which the ranks of the meshes that it runs on would not communicate alike is
    left out by all of them."""
    if program.is_joint:
        return program
    left_out: set[str] = set()
    while True:
        find = partial(_run, program, [name for name in PASSES if name in names and name not in left_out])
        for mesh in meshes:
            find = partial(agreed, mesh, find, lambda _: None, FAILED, FAILED)
        ranks, reports, facts = find()
        different = _first_difference(facts, meshes)
        if different is None:
            break
        left_out.add(list(PASSES)[different])
    before = Traffic.of(program.ranks[0].graph)
    skipped = [PassReport(name, before, before, left_out=True) for name in PASSES if name in left_out]
    return replace(program, ranks=ranks, reports=(*reports, *skipped))


_Ran = tuple[tuple[Part, ...], list[PassReport], list[list[object]]]
"""The parts after passes, what these did, and for each rank held here what it communicates after each of all passes."""


def _run(program: Program, names: Sequence[str]) -> _Ran:
    drafts = [Draft(part, held) for held, part in enumerate(program.ranks)]
    reports: list[PassReport] = []
    facts: list[list[object]] = [[] for _ in drafts]
    for name, run in PASSES.items():
        before = Traffic.of(drafts[0].graph)
        notes: list[list[str]] = []
        for draft, own in zip(drafts, facts, strict=True):
            is_run = name in names and not replaces_memory(draft.graph)
            notes.append(run(draft) if is_run else [])
            own.append(communicated(draft) if is_run else None)
        if name in names:
            reports.append(PassReport(name, before, Traffic.of(drafts[0].graph), tuple(notes[0])))
    return tuple(draft.done() for draft in drafts), reports, facts


def communicated(draft: Draft) -> list[object]:
    """What all ranks must have in common: the collectives in their order, and what each of them is made of."""
    return [_described(node) for node in draft.collectives()]


def _described(node: fx.Node) -> object:
    collective = collective_of(node)
    assert collective is not None
    how = collective.how if collective.kind in ("all_reduce", "reduce_scatter", "broadcast") else None
    own = node.meta.get(NUMBERS), node.meta.get(SPLIT)
    return collective.kind, collective.axis_names, how, str(facts_of(node).dtype), *own


def _first_difference(facts: Sequence[list[object]], meshes: Sequence[Mesh]) -> int | None:
    """The number of the first pass after which ranks differ, the same on all ranks."""
    rows = [list(map(repr, own)) for own in facts]
    found = min((i for i, row in enumerate(zip(*rows, strict=True)) if len(set(row)) > 1), default=len(PASSES))
    found = min([found, *(first_difference(mesh, rows[0]) for mesh in meshes)])
    for _ in range(len(meshes) - 1):  # who is on one mesh only hears of the others from those that are on both
        found = min(least(mesh, found) for mesh in meshes)
    return None if found == len(PASSES) else found
