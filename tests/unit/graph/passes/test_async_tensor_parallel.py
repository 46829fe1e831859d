"""Products of matrices in chunks: as many bytes, of which one half is on its way while the other is multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimised import R, kinds, mlp, operands, ops, program_of, red
from torch.nn import functional as F

import shardwise as sw
from shardwise.graph.passes import Traffic

GATHER, SCATTER = "all_gather", "reduce_scatter"
CHUNKED = ("tidy", "async_tensor_parallel")


def made(size: int, *shape: int) -> list[Any]:
    return operands(sw.simulate((size,), ("tp",)), *shape)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shape", [(8, 4), (7, 4), (2, 7, 4), (1, 12, 4)], ids=str)
def test_both_ends_of_a_block(size: int, shape: tuple[int, ...]) -> None:
    before = program_of(mlp, lambda: made(size, *shape), ("tidy",))
    after = program_of(mlp, lambda: made(size, *shape), CHUNKED)
    assert not any(report.left_out for report in after.reports)
    assert kinds(before) == [GATHER, SCATTER]
    for rank in range(size):
        assert kinds(after, rank) == [GATHER, GATHER, SCATTER, SCATTER]
        graphs = [program.ranks[rank].graph for program in (before, after)]
        assert abs(Traffic.of(graphs[0]).bytes - Traffic.of(graphs[1]).bytes) <= 4 * size  # of uneven chunks


def test_a_chunk_is_on_its_way_while_another_is_multiplied() -> None:
    found = ops(program_of(mlp, lambda: made(2, 8, 4), (*CHUNKED, "overlap")))
    steps = [op for op in found if op in ("mm", "wait") or "gather" in op or "scatter" in op]
    assert steps == [
        *("all_gather", "start_all_gather", "mm", "wait", "mm"),
        *("mm", "start_reduce_scatter", "mm", "reduce_scatter", "wait"),
    ]


def used_otherwise(x: Any, up: Any, down: Any) -> Any:
    whole = red(x, R)
    return F.linear(whole, up), whole * 2


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        pytest.param(mlp, (2, 4), [GATHER, SCATTER], id="one row for each rank"),
        pytest.param(lambda x, up, down: red(x, R) * 2, (8, 4), [GATHER], id="no product"),
        pytest.param(lambda x, up, down: F.linear(x, red(up, R)), (8, 4), [GATHER], id="the other operand"),
        pytest.param(used_otherwise, (8, 4), [GATHER] * 2, id="used otherwise too"),
    ],
)
def test_where_it_does_not_act(function: Any, shape: tuple[int, ...], expected: list[str]) -> None:
    assert kinds(program_of(function, lambda: made(2, *shape), CHUNKED)) == expected


def test_it_is_not_done_unasked() -> None:
    assert kinds(program_of(mlp, lambda: made(2, 8, 4), "default")) == [GATHER, SCATTER]


def test_a_step_is_close() -> None:
    """Rows are computed of the same numbers, but kernels may add these up in another order for fewer rows."""
    found = []
    for passes in ((), [*sw.graph.passes.DEFAULT, "async_tensor_parallel"]):
        x, up, down = made(2, 16, 4)
        weights = [torch.nn.Parameter(w.detach() / 8) for w in (up, down)]
        optimizer = torch.optim.SGD(weights, lr=0.01)

        def step(x: Any, weights: Any = weights, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            mlp(x, *weights).square().mean().backward()
            optimizer.step()

        compiled = sw.compile(step, backend="fx", passes=passes)
        for _ in range(3):
            compiled(x)
        assert kinds(compiled.programs[-1]).count(GATHER) == (4 if passes else 2)
        found.append([w.detach().full_tensor() for w in weights])
    torch.testing.assert_close(found[1], found[0])
