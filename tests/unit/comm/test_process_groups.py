"""Any process group that torch.distributed's functions run on: of threads, fake ones, and ones written in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import Mirror, alone_in, run_threads
from recorded import PROGRAMS, recorded
from saved import fake_mesh
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed import fake_pg

import shardwise as sw
from shardwise.errors import MeshError
from shardwise.graph import programs_of
from shardwise.graph.run.inductor import lowered

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
WAYS = [[R, R], [S(0), R], [S(1), S(0)], [S(0), S(0)], [R, S(1)]]


def mesh_of_threads() -> Any:
    return sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def moves(rank: int) -> list[Tensor]:
    mesh, found = mesh_of_threads(), []
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    for before in WAYS:
        for after in WAYS:
            laid = sw.distribute_tensor(x, mesh, before).requires_grad_()
            moved = laid.redistribute(placements=after)
            (moved * moved).sum().backward()
            found += [moved.detach().full_tensor(), laid.grad.full_tensor()]
    for op in ("sum", "avg", "max", "min", "product"):
        for after in WAYS:
            terms = sw.DTensor.from_local(x * (rank + 1), mesh, [P(op), P(op)])
            found.append(terms.redistribute(placements=after).full_tensor())
    return found


def test_moves_on_threads() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    by_rank = run_threads(moves, 4)
    for found in by_rank:
        for value, grad in zip(found[:50:2], found[1:50:2], strict=True):
            torch.testing.assert_close(value, x)
            torch.testing.assert_close(grad, 2 * x)
        terms = torch.stack([x * i for i in (1, 2, 3, 4)])
        expected = [terms.sum(0), terms.mean(0), terms.amax(0), terms.amin(0), terms.prod(0)]
        for i, value in enumerate(found[50:]):
            torch.testing.assert_close(value, expected[i // len(WAYS)])


def written(rank: int) -> list[Tensor]:
    """What was moved within the graph is the result's own, and may be written to."""
    mesh, found = mesh_of_threads(), []
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.complex64):
        for before in ([P(), P()], [P("max"), R] if dtype.is_floating_point else [P(), S(1)], *WAYS):
            for after in WAYS:
                laid = (sw.distribute_tensor(x.to(dtype), mesh, before) * 1).requires_grad_()
                moved = (laid * 1).redistribute(placements=after)
                moved.mul_(3)
                moved[1:].mul_(2)
                moved.abs().sum().backward()
                found += [moved.detach().full_tensor(), laid.grad.full_tensor()]
    return found


def test_writes_to_what_was_moved_on_threads() -> None:
    expected = []
    for dtype in (torch.float32, torch.complex64):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        moved = x * torch.tensor([3.0] + [6.0] * 5)[:, None]
        moved.abs().sum().backward()
        expected.append((moved.detach(), x.grad))
    for found in run_threads(written, 4):
        half = len(found) // 2
        for at in range(0, len(found), 2):
            for mine, theirs in zip(found[at : at + 2], expected[at >= half], strict=True):
                torch.testing.assert_close(mine, theirs)


def data() -> list[Tensor]:
    """Threads share torch's generator, so each draws from one of its own."""
    own = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=own) for shape in ((8, 4), (4, 8), (6, 4))]


def trained(rank: int) -> list[Tensor]:
    mesh, (up, down, x) = mesh_of_threads(), data()
    weights = [
        nn.Parameter(sw.distribute_tensor(up, mesh, [R, S(0)])),
        nn.Parameter(sw.distribute_tensor(down, mesh, [R, S(1)])),
    ]
    x = sw.distribute_tensor(x, mesh, [S(0), R])
    loss = (nn.functional.linear(nn.functional.linear(x, weights[0]).relu(), weights[1]) + x).square().mean()
    loss.backward()
    return [loss.detach().full_tensor(), *(w.grad.full_tensor() for w in weights)]


def test_a_perceptron_on_threads() -> None:
    up, down, x = data()
    loss = ((x @ up.requires_grad_().mT).relu() @ down.requires_grad_().mT + x).square().mean()
    loss.backward()
    for found in run_threads(trained, 4):
        for value, expected in zip(found, (loss.detach(), up.grad, down.grad), strict=True):
            torch.testing.assert_close(value, expected)


def test_the_fake_group_records_what_the_simulator_does() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=fake_pg.FakeStore())
    try:
        for name in PROGRAMS:
            assert recorded(name, mesh_of_threads()) == recorded(name, sw.simulate((2, 2), ("dp", "tp"))), name
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("dim", "copies"), [(0, 0), (1, 2)])
def test_even_rows_are_gathered_and_scattered_where_they_lie(dim: int, copies: int) -> None:
    """Weights sharded by rows with the batch: what arrives is the weight, and gradients are sent as they lie. Columns
    must be laid side by side."""
    with fake_mesh(2, names=("dp",)) as mesh:
        x = sw.distribute_tensor(torch.randn(64, 8), mesh, [S(0)])
        weight = sw.distribute_tensor(torch.randn(6, 8), mesh, [S(dim)]).requires_grad_()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            nn.functional.linear(x, weight).backward(sw.ones(64, 6, device_mesh=mesh, placements=[S(0)]))
        assert weight.grad.placements == (S(dim),)
    assert sum(event.name == "aten::cat" for event in profiler.events()) == copies


def test_in_a_compiled_program_they_are_as_well() -> None:
    with fake_mesh(2, names=("dp",)) as mesh:
        x = sw.distribute_tensor(torch.randn(64, 8), mesh, [S(0)])
        weight = sw.distribute_tensor(torch.randn(6, 8), mesh, [S(0)]).requires_grad_()

        def step() -> None:
            weight.grad = None
            nn.functional.linear(x, weight).square().sum().backward()

        compiled = sw.compile(step, backend="inductor")
        compiled.capture()
        part = programs_of(compiled).programs[0].ranks[0]
        inputs = [node.meta["facts"] for node in part.graph.nodes if node.op == "placeholder"]
        given = [torch.empty(facts.shape, dtype=facts.dtype) for facts in inputs]
        ops = [node.target for node in lowered(part.graph, given).graph.nodes]
    assert torch.ops._c10d_functional.reduce_scatter_tensor.default in ops
    assert torch.ops.aten.cat.default not in ops


def test_a_group_in_python_that_communicates_by_lists() -> None:
    with alone_in(Mirror) as made:
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.DTensor.from_local(torch.arange(6.0).view(3, 2), mesh, [S(0)])
        assert torch.equal(x.full_tensor(), torch.arange(6.0).view(3, 2).repeat(2, 1))
        turned = x.redistribute(placements=[S(1)])
        assert torch.equal(turned.to_local(), x.to_local()[:, :1].repeat(2, 1))
        terms = sw.DTensor.from_local(torch.ones(4, 2), mesh, [P("sum")])
        assert torch.equal(terms.full_tensor(), torch.full((4, 2), 2.0))
        assert torch.equal(terms.redistribute(placements=[S(0)]).to_local(), torch.full((2, 2), 2.0))
        laid = sw.distribute_tensor(torch.ones(4, 2), mesh, [S(0)])  # a broadcast, of ones from either rank
        assert torch.equal(laid.to_local(), torch.full((2, 2), 2.0))
        called = {name for group in made for name in group.calls}
    assert called == {"allgather", "alltoall", "allreduce"}


def test_a_group_that_lacks_a_method_says_which() -> None:
    class Deaf(Mirror):
        def allgather(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    with alone_in(Deaf):
        mesh = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = sw.DTensor.from_local(torch.ones(3, 2), mesh, [S(0)])
        with pytest.raises(MeshError, match=r"Deaf cannot all-gather .* it would need one of the methods .*allgather"):
            x.full_tensor()
