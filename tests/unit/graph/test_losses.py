"""Losses over a sharded vocabulary in captured programs: bit for bit the same, their checks made in every run, and each
pass over the logits one op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured import Made, assert_same, compare
from saved import fake_mesh
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import IndexRangeError
from shardwise.graph.nodes import is_op
from shardwise.graph.run import inductor
from shardwise.graph.run.inductor import lowered
from shardwise.parallel import cross_entropy, linear_cross_entropy
from shardwise.rules.rows import row_passes

R, S = sw.Replicate(), sw.Shard
CLASSES, WIDTH = 13, 8
TARGETS = [torch.tensor(x) for x in ([0, 5, 12, 7, -100, 6], [1, -100, -100, 9, 4, 12])]

LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda x, head, t: F.cross_entropy(F.linear(x, head), t),
    "every option": lambda x, head, t: cross_entropy(F.linear(x, head), t, label_smoothing=0.1, z_loss=0.1),
    "in place": lambda x, head, t: cross_entropy(F.linear(x, head), t, reduction="none", inplace_backward=True).sum(),
    "log_softmax": lambda x, head, t: F.log_softmax(F.linear(x, head), 1).square().mean(),
    "head": lambda x, head, t: linear_cross_entropy(x, head, t, label_smoothing=0.1, z_loss=0.1, chunk_size=4),
    "rows": lambda x, head, t: linear_cross_entropy(x, head, t, reduction="none", chunk_size=4).mean(),
    "sequence parallel": lambda x, head, t: linear_cross_entropy(
        x.redistribute(placements=[S(0)]), head, t.redistribute(placements=[S(0)]), chunk_size=4
    ),
}


class Head(nn.Module):
    def __init__(self, mesh: Any, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(sw.distribute_tensor(torch.randn(CLASSES, WIDTH, dtype=dtype), mesh, [S(0)]))


def made_on(mesh: Any, loss: Callable[..., Tensor], dtype: torch.dtype) -> Made:
    net = Head(mesh, dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(x, net.weight, target)
        found.backward()
        optimizer.step()
        return found

    def arguments(call: int) -> tuple[Any, ...]:
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(call)).to(dtype)
        return tuple(sw.distribute_tensor(given, mesh, [R]) for given in (x, TARGETS[call % 2]))

    return (net, optimizer), step, arguments


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in LOSSES), ("head", torch.bfloat16)])
def test_steps(name: str, dtype: torch.dtype) -> None:
    mesh = sw.simulate((2,), ("tp",))
    compare(lambda: made_on(mesh, LOSSES[name], dtype), calls=3)


@pytest.mark.parametrize("name", ["every option", "head", "rows"])
def test_one_rank_of_real_ones(name: str) -> None:
    """Its shards are no simulated ones, which know each other."""
    with fake_mesh(1, names=("tp",)) as mesh:
        compare(lambda: made_on(mesh, LOSSES[name], torch.float32), calls=2)


@pytest.mark.parametrize("name", ["cross_entropy", "head", "sequence parallel"])
def test_every_run_refuses_targets_that_are_no_class(name: str) -> None:
    mesh = sw.simulate((2,), ("tp",))
    _, step, arguments = made_on(mesh, LOSSES[name], torch.float32)
    compiled = sw.compile(step, backend="fx")
    for call in range(2):
        compiled(*arguments(call))
    x, _ = arguments(0)
    bad = sw.distribute_tensor(torch.tensor([0, 5, CLASSES, 7, -100, 6]), mesh, [R])
    with pytest.raises(IndexRangeError, match="target 13 is out of bounds: it must be from 0 to 12"):
        compiled(x, bad)


@pytest.mark.parametrize("name", ["in place", "head", "rows"])
def test_a_backward_pass_can_be_made_again(name: str) -> None:
    """It writes over nothing that the next one needs."""
    mesh = sw.simulate((2,), ("tp",))
    (net, _), _, arguments = made_on(mesh, LOSSES[name], torch.float32)
    compiled = sw.compile(LOSSES[name], backend="fx")
    x, target = arguments(0)
    (expected,) = torch.autograd.grad(LOSSES[name](x, net.weight, target), net.weight)
    for _ in range(2):
        loss = compiled(x, net.weight, target)
        for _ in range(2):
            assert_same(torch.autograd.grad(loss, net.weight, retain_graph=True), [expected], name)


def test_a_pass_is_one_op_however_many_blocks_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """And to Inductor a few of torch's ops on whole tensors, which it fuses."""
    monkeypatch.setattr(row_passes, "CACHED", CLASSES)
    seen: list[Counter[str]] = []

    def only_lowered(graph: Any, given: Any) -> Any:
        for known in (graph, lowered(graph, given).graph):
            seen.append(Counter(str(node.target).split(".")[1] for node in known.nodes if is_op(node.target)))
        raise NotImplementedError

    monkeypatch.setattr(inductor, "lowered", only_lowered)
    with fake_mesh(2, names=("tp",)) as mesh:
        _, step, arguments = made_on(mesh, LOSSES["cross_entropy"], torch.bfloat16)
        compiled = sw.compile(step)
        for call in range(2):
            with pytest.raises(NotImplementedError) if call else nullcontext():
                compiled(*arguments(call))
    program, ops = seen
    assert program["row_exponentials"] == program["row_gradient"] == 1
    assert not program["amax"] and ops["amax"] == 1
    assert not any(name.startswith("row_") for name in ops)


@pytest.mark.slow
def test_as_inductor_compiles_them() -> None:
    """On one rank of two in a process group whose reductions give each what it brought."""
    with fake_mesh(2, names=("tp",)) as mesh:
        (net, _), step, arguments = made_on(mesh, LOSSES["every option"], torch.bfloat16)
        (other, _), again, _ = made_on(mesh, LOSSES["every option"], torch.bfloat16)
        compiled = sw.compile(again)
        for call in range(2):
            torch.testing.assert_close(compiled(*arguments(call)).to_local(), step(*arguments(call)).to_local())
        torch.testing.assert_close(other.weight.to_local(), net.weight.to_local())
