"""The programs of benchmarks/scheduled_blocks.py, whose best schedules are known: captured, they give the same bits
after passes, and never communicate more. That eager reaches the schedules is tested elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured import assert_same
from optimised import kinds

import scheduled_blocks
import shardwise as sw
from scheduled import Program, Size, lay_out, made, mesh_on, placements
from shardwise.graph.passes import Traffic

Found = tuple[sw.graph.Program, list[Any]]


def captured(program: Program, size: Size, mesh: Any, passes: Any) -> Found:
    """A program after passes, and what it gives: the result, and gradients."""
    module, inputs = made(program, size, device="cpu")
    lay_out(module, program, mesh)
    given = [
        sw.distribute_tensor(x.detach(), mesh, placements(split, mesh))
        for x, split in zip(inputs, [*program.input_splits, *[{}] * len(inputs)], strict=False)
    ]

    def step(*given: Any) -> Any:
        loss = module(*given)
        loss.backward()
        return loss.detach()

    compiled = sw.compile(step, backend="fx", passes=passes)
    found = compiled(*given)
    return compiled.programs[-1], [found, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("program", scheduled_blocks.PROGRAMS, ids=lambda program: program.name)
def test_never_more_than_the_schedule(program: Program) -> None:
    size = min((size for size in program.sizes if size.is_tiny), key=lambda size: size.activation)
    with torch.random.fork_rng(), mesh_on("simulated", size) as mesh:
        (before, wanted), (after, found) = (captured(program, size, mesh, passes) for passes in ((), "default"))
    assert_same(found, wanted, program.name)
    assert not any(report.left_out for report in after.reports)
    assert len(kinds(after)) <= len(kinds(before))
    sent = [Traffic.of(one.ranks[0].graph).bytes for one in (before, after)]
    assert sent[1] <= sent[0]
