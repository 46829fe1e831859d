"""What only processes can show: ranks that do not do exactly the same outside of Shardwise must stay together in it."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from bodies import R, S, assert_close, doubles, everywhere, held
from launch import Case
from shardwise.comm import as_mesh
from shardwise.errors import MeshError, PlanError, ReplicaError, ShardShapeError, ShardwiseError
from shardwise.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module
from shardwise.redistribute.move_cache import WINDOW


def line(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("tp",))


def results_die_with_their_last_reference(rank: int, world_size: int) -> None:
    """A backend's thread must not keep a result alive: what is remembered by weak references would differ by rank."""
    ours = as_mesh(line(world_size))
    for collective in (
        lambda x: ours.port.all_reduce([x], ours, (0,), "sum"),
        lambda x: ours.port.broadcast([x], ours, (0,), 0),
        lambda x: ours.port.reduce_scatter([[x, x]], ours, (0,), "sum"),
        lambda x: ours.port.all_gather([x], ours, (0,), [[(4,), (4,)]])[0],
        lambda x: ours.port.all_to_all([[x, x]], ours, (0,), [[(4,), (4,)]])[0],
    ):
        for _ in range(100):
            result = weakref.ref(collective(torch.ones(4))[0])
            assert result() is None


def equal_meshes_are_one(rank: int, world_size: int) -> None:
    assert as_mesh(line(world_size)) is as_mesh(line(world_size))
    x = sw.distribute_tensor(torch.arange(3.0), line(world_size), [S(0)])
    assert_close(x + sw.distribute_tensor(torch.ones(3), line(world_size), [R]), torch.arange(3.0) + 1)
    other_name = DeviceMesh("cpu", list(range(world_size)), mesh_dim_names=("dp",))
    assert as_mesh(other_name) is not as_mesh(line(world_size))
    with pytest.raises(MeshError, match="mixes tensors on"):
        x + sw.distribute_tensor(torch.ones(3), other_name, [R])


def meshes_that_torch_calls_equal(rank: int, world_size: int) -> None:
    """A part of a grid goes with its other parts, whichever mesh of these ranks was there first."""
    alone = sw.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = sw.distribute_tensor(torch.arange(4.0), alone, [S(0)])
    grid = sw.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    assert grid["dp"] == alone
    net = parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 2)), grid["tp"], {"0": ColwiseParallel()})
    assert sw.fully_shard(net, mesh=grid["dp"])(torch.ones(1, 4)).shape == (1, 2)
    words = (
        r"mixes tensors on Mesh\(dp=2\) and on Mesh\(dp=2\), the one of Mesh\(dp=2\), the other of Mesh\(dp=2, tp=1\);"
    )
    with pytest.raises(MeshError, match=words):
        x + sw.distribute_tensor(torch.arange(4.0), grid["dp"], [S(0)])


def a_mesh_on_a_device_that_is_not_there(rank: int, world_size: int) -> None:
    kind = "xpu" if torch.cuda.is_available() else "cuda"
    words = f'^the mesh is on "{kind}", and torch finds none here; on Gloo, init_device_mesh\\("cpu", ...\\) runs$'
    with pytest.raises(MeshError, match=words):
        sw.distribute_tensor(torch.arange(4.0), sw.init_device_mesh(kind, (2,)), [S(0)])


def a_mesh_without_this_rank(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    if rank == 0:
        assert_close(sw.distribute_tensor(torch.arange(3.0), mesh, [S(0)]), torch.arange(3.0))
    else:
        with pytest.raises(MeshError, match="rank 1 is not part of"):
            sw.distribute_tensor(torch.ones(3), mesh, [S(0)])


def fallback_warns_everywhere(rank: int, world_size: int) -> None:
    whole = doubles(4, 4)
    x = sw.distribute_tensor(whole, line(world_size), [S(0)])
    with sw.strict(), pytest.raises(ShardwiseError):
        torch.linalg.inv(x)
    with pytest.warns(sw.errors.FallbackWarning, match="inv"):
        inverse = torch.linalg.inv(x)
    assert_close(inverse, torch.linalg.inv(whole))


def one_rank_keeps_its_loss(rank: int, world_size: int) -> None:
    """Rank 0 keeps a loss with its graph, as for a log: whether what was moved for it is reused is the same for all.

    Ranks that do not communicate alike hang, or fail, in what comes next.
    """
    mesh, kept, num_reduced = line(world_size), [], 0
    w = sw.distribute_tensor(doubles(5, 3), mesh, [sw.Partial()]).requires_grad_()
    for x in (w, w * 2, w, w * 2):
        for _ in range(2):
            with sw.debug.CommDebugMode() as comm:
                loss = x.sigmoid().sum()
            if rank == 0:
                kept.append(loss)
            del loss
            counts: list[Any] = [None] * world_size
            dist.all_gather_object(counts, [c.kind for c in comm.comms])
            assert counts[0] == counts[1]
            num_reduced += len(comm.comms)
        (x * 1).sum().backward()
    assert num_reduced


def ranks_with_other_seeds(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", list(range(world_size)), mesh_dim_names=("new",))  # seeds are compared once per mesh
    x, w = (sw.zeros(64, device_mesh=mesh, placements=[p]) for p in (R, S(0)))
    draws = {
        "dropout": lambda: F.dropout(x, 0.5),
        "dropout of shards": lambda: F.dropout(w, 0.5),
        "initialisation": lambda: torch.nn.init.normal_(w),
        "in place": lambda: x.uniform_(),
        "alike": lambda: torch.randn_like(x),
        "rand": lambda: sw.rand(4, device_mesh=mesh, placements=[S(0)]),
        "randn": lambda: sw.randn(4, device_mesh=mesh),
    }
    for name, draw in draws.items():
        for low, high in ((0, 1), (-1, 2**63 - 1)):
            torch.manual_seed(high if rank else low)
            state = torch.get_rng_state()
            with pytest.raises(ReplicaError) as error:
                draw()
            assert str(error.value) == (
                f"random numbers on Mesh(new=2) need its ranks in step, but their generators were seeded differently, "
                f"from {low} to {high}; call torch.manual_seed with the same seed on every rank"
            ), name
            assert torch.equal(torch.get_rng_state(), state), f"{name} drew numbers before it was refused"
    assert not x.any() and not w.any(), "a refused draw has written"
    own = torch.Generator().manual_seed(3)
    assert_close(
        w.clone().uniform_(generator=own), torch.zeros(64).uniform_(generator=own.clone_state().manual_seed(3))
    )


def ranks_with_one_seed(rank: int, world_size: int) -> None:
    mesh = line(world_size)
    x = sw.ones(64, device_mesh=mesh, placements=[R])
    torch.manual_seed(5)
    with sw.debug.CommDebugMode() as comm:
        shards = everywhere(held(F.dropout(x, 0.5)))
    assert torch.equal(shards[0,], shards[1,])
    assert not comm.comms, "the comparison of seeds is not the program's"


# Ranks of one submesh do what the others do not


def on_one_submesh(rank: int, world_size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for aside in (a_backward_pass, a_move_without_gradients, a_step, more_moves_than_are_remembered):
        torch.manual_seed(0)
        weight, data = doubles(4, 3).requires_grad_(), doubles(6, 4)
        w = sw.distribute_tensor(weight.detach(), mesh, [R, R]).requires_grad_()
        x = sw.distribute_tensor(data, mesh, [S(0), R])
        first = x @ w
        if mesh.get_local_rank("dp") == 0:
            kept = aside(mesh["tp"])
        second = (2 * x) @ w  # shares the move of `w` with the first, or on no rank
        (first.sin().sum() + second.cos().sum()).backward()
        ((data @ weight).sin().sum() + (2 * data @ weight).cos().sum()).backward()
        assert_close(w.grad, weight.grad)
        kept = None  # noqa: F841


def a_backward_pass(mesh: DeviceMesh) -> Any:
    sw.distribute_tensor(doubles(4), mesh, [S(0)]).requires_grad_().square().sum().backward()


def a_move_without_gradients(mesh: DeviceMesh) -> Any:
    with torch.no_grad():
        return sw.distribute_tensor(doubles(4, 4), mesh, [S(0)]).sum(0) + sw.distribute_tensor(doubles(4), mesh, [S(0)])


def a_step(mesh: DeviceMesh) -> Any:
    parameter = torch.nn.Parameter(sw.distribute_tensor(doubles(4), mesh, [S(0)]))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], 0.1).step()


def more_moves_than_are_remembered(mesh: DeviceMesh) -> Any:
    shards = sw.distribute_tensor(doubles(4), mesh, [S(0)])
    return [sw.distribute_tensor(doubles(4), mesh, [R]).requires_grad_() * shards for _ in range(WINDOW + 1)]


def owing_more_than_a_submesh_can_pay(rank: int, world_size: int) -> None:
    mesh = sw.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight, data = doubles(4, 3).requires_grad_(), doubles(6, 4)
    w = torch.nn.Parameter(sw.distribute_tensor(weight.detach(), mesh, [R, R]))
    x = sw.distribute_tensor(data, mesh, [S(0), R])
    with sw.parallel.no_sync():
        (x @ w).sin().sum().backward()
    if mesh.get_local_rank("dp") == 0:
        a_backward_pass(mesh["tp"])
    (x @ w).cos().sum().backward()
    ((data @ weight).sin() + (data @ weight).cos()).sum().backward()
    assert_close(w.grad, weight.grad)


def kernels_make_a_view_on_some_ranks(rank: int, world_size: int) -> None:
    """The rank that contributes the bias has added it; the others have what `linear` gives, a view of its product."""
    mesh = line(world_size)
    x, weight, bias = doubles(1, 5), doubles(5, 3), doubles(5)
    mine = [sw.distribute_tensor(x, mesh, [S(1)])[0, ::2], *(sw.distribute_tensor(t, mesh) for t in (weight, bias))]
    mine[2].requires_grad_()
    y = F.linear(*mine)
    assert y.placements == (sw.Partial("sum"),)
    assert_close((y > 0), F.linear(x[0, ::2], weight, bias) > 0)  # reduced, and remembered
    y.tanh_()
    assert_close(y, F.linear(x[0, ::2], weight, bias).tanh())


def a_checkpoint_returns_a_copied_view(rank: int, world_size: int) -> None:
    data = doubles(2, 2)
    x = sw.distribute_tensor(data, line(world_size), [S(1)])
    with warnings.catch_warnings(action="ignore"):  # nothing needs a gradient
        y = checkpoint(torch.ravel, x, use_reentrant=True)
    x.add_(2)
    assert_close(y, (data + 2).ravel())


def ranks_with_different_modules(rank: int, world_size: int) -> None:
    """Nobody waits for a rank that has refused, and nothing is distributed on any."""
    mesh, linear = line(world_size), torch.nn.Linear
    columns, apart = ColwiseParallel(), "have different modules or plans"
    cases: list[tuple[Any, Any, str]] = [
        (linear(4, 4 + rank), {"": columns}, apart),
        (linear(4, 4, dtype=(torch.float32, torch.float64)[rank]), {"": columns}, apart),
        (linear(4, 4).requires_grad_(bool(rank)), {"": columns}, apart),
        (linear(4, 4), {"": (ColwiseParallel, RowwiseParallel)[rank]()}, apart),
        (linear(4, 4), {"": ColwiseParallel(output_layouts=(R, None)[rank])}, apart),
        (linear(4, 4), ("colwise", "rowwise")[rank], apart),
        (linear(4, 4), (columns, None)[rank], apart),
        (linear(4, 4), {("", "up")[rank]: columns}, ("that another rank of", "the plan names 'up'")[rank]),
        ((linear(4, 4), 4)[rank], columns, ("that another rank of", "takes a torch.nn.Module, not a int")[rank]),
    ]
    for module, plan, words in cases:
        with pytest.raises((PlanError, TypeError), match=words):
            parallelize_module(module, mesh, plan)
        assert module == 4 or type(module.weight) is torch.nn.Parameter
    with pytest.raises(PlanError, match=apart):
        parallelize_module(linear(4, 4), mesh, columns, src_data_rank=rank)
    parallelize_module(linear(4, 4), mesh, _OfAUser(rank))


def ranks_with_different_modules_to_distribute(rank: int, world_size: int) -> None:
    mesh, linear = line(world_size), torch.nn.Linear
    apart = r"distribute_module: the ranks of Mesh\(tp=2\) have different modules: names, shapes, dtypes and what is tr"
    for module in (
        linear(4, 4 + rank),
        linear(4, 4, bias=bool(rank)),
        linear(4, 4, dtype=(torch.float32, torch.float64)[rank]),
        linear(4, 4).requires_grad_(bool(rank)),
    ):
        with pytest.raises(ReplicaError, match=apart):
            sw.distribute_module(module, mesh)
        assert type(module.weight) is torch.nn.Parameter
    with pytest.raises((ReplicaError, TypeError), match=("another rank of", "not a int")[rank]):
        sw.distribute_module((linear(4, 4), 4)[rank], mesh)  # type: ignore[arg-type]


def ranks_that_make_different_modules(rank: int, world_size: int) -> None:
    """Also where modules are made shard by shard: nobody waits for a rank that has refused."""
    mesh, linear = line(world_size), torch.nn.Linear
    apart, columns = r"init_on: the ranks of Mesh\(tp=2\) make different modules", {"weight": [S(0)]}
    cases: list[tuple[Any, int, str]] = [
        ({("weight", "wieght")[rank]: [S(0)]}, 4, ("that another rank of", "the plan names 'wieght'")[rank]),
        ({("", "up")[rank]: ColwiseParallel()}, 4, ("that another rank of", "the plan names 'up'")[rank]),
        ({"weight": [S(rank)]}, 4, apart),
        (columns, 4 + rank, apart),
    ]
    for plan, width, words in cases:
        with pytest.raises(PlanError, match=words), sw.init_on(mesh, plan):
            linear(4, width)
    with sw.init_on(mesh, columns):
        made = linear(4, 4)
    assert made.weight.placements == (S(0),)


class _OfAUser(ParallelStyle):
    """A style that says of itself what is different on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __repr__(self) -> str:
        return f"a style on rank {self.rank}"

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        return module


def ranks_with_batches_of_unequal_length(rank: int, world_size: int) -> None:
    """All of them say so, in every call, and go on; parts of a sequence may be uneven."""
    mesh, layer = line(world_size), torch.nn.Linear(4, 4)
    net = parallelize_module(torch.nn.Sequential(layer, torch.nn.ReLU()), mesh, {"0": ColwiseParallel()})
    named = parallelize_module(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh, {"0": "colwise_rep"})
    unlike = "the shard at tp=1 has shape [2, 4], but [3,4] R wants [3, 4] there"
    calls: list[tuple[Callable[[torch.Tensor], Any], str]] = [
        (net, f"module '0': what the ranks of Mesh(tp=2) bring does not fit together: {unlike}. Batches of a step are"),
        (named, f"Sequential: plain tensors are the same on all ranks of Mesh(tp=2), but {unlike}. Batches of a step"),
        (net[0], f"module '0': what the ranks of Mesh(tp=2) bring does not fit together: {unlike}. Batches of a step"),
        (
            lambda x: sw.distribute_tensor(x, mesh, [S(0)]),
            f"distribute_tensor takes the same tensor on every rank of Mesh(tp=2): {unlike}. Where ranks have parts",
        ),
    ]
    for call, words in calls:
        call(torch.ones(3, 4))
        for _ in range(2):
            with pytest.raises(ShardShapeError, match=f"^{re.escape(words)}"):
                call(torch.ones(3 - rank, 4))
            call(torch.ones(2, 4))
    for call, _ in calls[:2]:
        for given in ((torch.ones(2, 4), None)[rank], *((torch.ones(2, 4),) * (1 + rank),)):
            with pytest.raises(ShardShapeError, match=r"Sequential: .* this one with (f32 plain(, f32 plain)?|none)\."):
                call(*given) if isinstance(given, tuple) else call(given)
    batches_of_data_parallelism(rank, mesh)
    norm = parallelize_module(torch.nn.LayerNorm(4), mesh, SequenceParallel(sequence_dim=0))
    assert norm(torch.ones(3 - rank, 4)).shape == (5, 4)
    rows = parallelize_module(torch.nn.Linear(5, 4), mesh, RowwiseParallel())
    with pytest.raises(ShardShapeError, match="the shard at tp=1 has shape"):
        rows(torch.ones(3, (3, 1)[rank]))
    assert rows(torch.ones(3, (3, 2)[rank])).shape == (3, 4)


def batches_of_data_parallelism(rank: int, mesh: DeviceMesh) -> None:
    """Nothing is wrong with a part that is laid out by a rank alone, until it meets the others'."""

    def part(length: int) -> sw.DTensor:
        return sw.DTensor.from_local(torch.ones(length, 4), mesh, [S(0)])

    replicated = sw.distribute_module(torch.nn.Sequential(torch.nn.Linear(4, 4)), mesh)
    prepared = sw.distribute_module(torch.nn.Linear(4, 4), mesh, input_fn=lambda _, given, __: part(given[0]))
    for net in (replicated, prepared, sw.fully_shard(torch.nn.Linear(4, 4), mesh=mesh)):
        lay = int if net is prepared else part
        for _ in range(2):
            words = (
                rf"the ranks of Mesh\(tp=2\) call it with .* this one with f32\[{(6, 4)[rank]},4\] S\(0\)@tp\. Batches"
            )
            with pytest.raises(ShardShapeError, match=words):
                net(lay(3 - rank))
            net(lay(2)).sum().backward()
        if net is not prepared:
            net(sw.DTensor.from_local(torch.ones(3 - rank, 4), mesh, [S(0)], run_check=True)).sum().backward()
    net(torch.ones(3 - rank, 4)).sum().backward()  # to a fully sharded module each may bring its own
    with pytest.raises(
        ShardShapeError, match=r"FSDPLinear: .* this one with (f32 plain|f32\[4,4\] S\(0\)@tp)\. Batches"
    ):
        net((torch.ones(2, 4), part(2))[rank])
    with pytest.raises(ShardShapeError, match=r"FSDPLinear: .* this one with (f32|f64) plain\. Batches"):
        net(torch.ones(2, 4, dtype=(torch.float32, torch.float64)[rank]))
    if rank == 0:  # with nothing to reduce, a rank may go alone
        replicated(sw.DTensor.from_local(torch.ones(3, 4), mesh))
        with torch.no_grad():
            replicated(part(3))


def one_rank_keeps_its_inputs(rank: int, world_size: int) -> None:
    """Layers that are given one tensor share its gradient's reduction, or on no rank."""
    mesh, kept = line(world_size), []
    net = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
    parallelize_module(net, mesh, {"*": ColwiseParallel(output_layouts=R)})
    for _ in range(3):
        x = doubles(3, 4).requires_grad_()
        if rank == 0:
            kept.append(x)
        first = net[0](x)
        if rank == 0:
            kept.append(first.detach())
        (first + net[1](x)).sum().backward()
        weights = sum(layer.weight.detach().full_tensor().sum(0) for layer in net)
        assert_close(x.grad, weights.expand(3, 4))


BODIES: dict[int, list[Callable[[int, int], None]]] = {
    2: [
        *(results_die_with_their_last_reference, equal_meshes_are_one, a_mesh_without_this_rank),
        *(meshes_that_torch_calls_equal, a_mesh_on_a_device_that_is_not_there),
        *(kernels_make_a_view_on_some_ranks, a_checkpoint_returns_a_copied_view),
        *(fallback_warns_everywhere, one_rank_keeps_its_loss, ranks_with_other_seeds, ranks_with_one_seed),
        *(ranks_with_different_modules, ranks_with_different_modules_to_distribute, ranks_that_make_different_modules),
        *(ranks_with_batches_of_unequal_length, one_rank_keeps_its_inputs),
    ],
    4: [on_one_submesh, owing_more_than_a_submesh_can_pay],
}
CASES = [Case(body.__name__, size, body) for size, bodies in BODIES.items() for body in bodies]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_stay_together(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)
