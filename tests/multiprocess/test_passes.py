"""Passes on real ranks: programs give the functions' bits, and a pass after which ranks would differ is left out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from launch import Case
from shardwise.errors import CaptureError
from shardwise.graph.nodes import is_op
from shardwise.graph.passes import DEFAULT, PASSES
from shardwise.graph.passes.share import share
from shardwise.graph.run.inductor import lowered

sys.path.append(str(Path(__file__).parents[1] / "support"))  # the ranks import this file without pytest's settings
from captured import compare
from optimised import SMALL, case_of, kinds, mlp, only, operands, program_of, sharded_weights


def each_pass(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))
    for case in SMALL:
        assert kinds(case.program(mesh, only(case.acts))) == list(case.after), case


def all_passes(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for case in SMALL:
        program = case.program(mesh, "default")
        assert not any(report.left_out for report in program.reports), case


def ranks_that_differ(rank: int, size: int) -> None:
    mesh, case = sw.init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp")), case_of("gathered twice")
    original = PASSES["share"]
    try:
        PASSES["share"] = lambda draft: share(draft) if rank else []
        program = case.program(mesh, ("share", "merge"))
        assert {report.name for report in program.reports if report.left_out} == {"share"}
        assert kinds(program) == ["all_gather"]  # what merge makes of two

        def fails(draft: Any) -> list[str]:
            if rank:
                raise KeyError("only here")
            return []

        PASSES["share"] = fails
        with pytest.raises(KeyError if rank else CaptureError, match="only here" if rank else "on another rank"):
            case.program(mesh, "default")
    finally:
        PASSES["share"] = original
    assert kinds(case.program(mesh, "default")) == ["all_gather"]  # nothing is left over


def on_request(rank: int, size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    chunked = program_of(mlp, lambda: operands(mesh, 7, 4), (*DEFAULT, "async_tensor_parallel"))
    assert kinds(chunked) == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]
    (program,) = compare(lambda: sharded_weights(mesh), passes=(*DEFAULT, "gather_again")).programs
    assert kinds(program).count("all_gather") == 2  # one for all layers, and one for the backward pass


def written_while_it_is_gathered(rank: int, size: int) -> None:
    """Rows enough that a gather takes its time."""
    mesh = sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))

    def function(x: Any, y: Any) -> Any:
        whole = x.redistribute(placements=[sw.Replicate()])
        x.add_(1)
        return whole + y

    compiled = sw.compile(function, backend="fx")
    with torch.no_grad():
        for call in range(3):
            x = sw.distribute_tensor(torch.full((2**18, 8), float(call)), mesh, [sw.Shard(0)])
            y = sw.distribute_tensor(torch.zeros(2**18, 8), mesh)
            assert torch.equal(compiled(x, y).to_local(), torch.full((2**18, 8), float(call)))


def waits_where_it_is_used(rank: int, size: int) -> None:
    """As Inductor gets it: a functional collective, and behind other ops the op that waits for it."""
    mesh, case = sw.init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp")), case_of("meanwhile")
    (part,) = case.program(mesh, "default").ranks
    given = [torch.zeros(x.to_local().shape) for x in case.arguments(mesh)]
    targets = [node.target for node in lowered(part.graph, given).graph.nodes if is_op(node.target)]
    names = [target.overloadpacket.__name__ for target in targets]
    meanwhile = names[names.index("all_gather_into_tensor") : names.index("wait_tensor")]
    assert {"exp2", "sum"} <= set(meanwhile)


CASES = [
    Case("passes-on-request", 2, on_request),
    Case("passes-waits", 2, waits_where_it_is_used),
    Case("passes-each", 2, each_pass),
    Case("passes-all-4", 4, all_passes),
    Case("passes-ranks-that-differ", 2, ranks_that_differ),
    Case("passes-written-while-gathered", 2, written_while_it_is_gathered),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_passes_on_ranks(case: Case, on_ranks: Callable[[Case], object]) -> None:
    on_ranks(case)
