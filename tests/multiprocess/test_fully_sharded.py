"""Fully sharded training on real ranks: what torch's FSDP2 gives, bit for bit, and one device; and what overlaps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from random_modules import train
from sharded_models import NUM_BLOCKS, Model, Tied, Twice, batch, loss_of, shard
from torch import nn

import shardwise as sw
from launch import Case
from shardwise import parallel as ours
from shardwise.parallel.fully_sharded.group import Group
from shardwise.parallel.fully_sharded.reduction import Reduction

HALF, FULL = torch.bfloat16, torch.float32
SHAPES: dict[str, Any] = {"one axis": (2,), "replicas": (2, 1), "one replica": (1, 2)}
NAMES = {1: ("dp",), 2: ("replicate", "shard")}

PROGRAMS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "default": (Model, {}),
    "freed": (Model, {"reshard_after_forward": True}),
    "kept": (Model, {"reshard_after_forward": False}),
    "offloaded": (Model, {"offload": True}),
    "half precision": (Model, {"precision": (HALF, FULL)}),
    "half precision throughout": (Model, {"precision": (HALF, None)}),
    "called twice": (Twice, {}),
    "checkpoint inside": (partial(Model, inner=False), {}),
    "checkpoint around": (partial(Model, outer=False), {}),
    "checkpoints in checkpoints": (partial(Model, inner=False, outer=False), {}),
    "reentrant inside": (partial(Model, inner=True), {}),
    "reentrant around": (partial(Model, outer=True), {}),
}


def options_for(library: Any, offload: bool = False, precision: Any = (), **options: Any) -> dict[str, Any]:
    """The same options, in the words of either library."""
    if offload:
        options["offload_policy"] = library.CPUOffloadPolicy(pin_memory=False)
    return {**options, "mp_policy": library.MixedPrecisionPolicy(*precision)}


@cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    """Made once: threads of each of Gloo's groups never rest."""
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])


def step(net: Any, optimizer: Any, data: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(net, *data).float()
    loss.backward()
    optimizer.step()
    return loss.detach()


def like_torch(rank: int, size: int, shape: tuple[int, ...], name: str) -> None:
    import torch.distributed.fsdp as theirs

    mesh, (make, options) = mesh_of(shape), PROGRAMS[name]
    torch.manual_seed(0)
    plain = make()
    nets = [
        shard(copy.deepcopy(plain), library.fully_shard, mesh=mesh, **options_for(library, **options))
        for library in (ours, theirs)
    ]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in nets]
    exact = {} if make is Twice else {"atol": 0, "rtol": 0}  # torch adds gradients of several uses up in another order
    same = partial(torch.testing.assert_close, **exact)
    for _ in range(3):
        data = [x.chunk(size)[rank] for x in batch()]
        found, right = (step(net, optimizer, data) for net, optimizer in zip(nets, optimizers, strict=True))
        same(found, right)
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        assert p.dtype == q.dtype and p.grad.dtype == q.grad.dtype
        same(p.to_local(), q.to_local())
        same(p.grad.to_local(), q.grad.to_local())


def like_one_device(rank: int, size: int, shape: tuple[int, ...], kind: str) -> None:
    """Batches as DTensors."""
    mesh = mesh_of(shape)
    torch.manual_seed(0)
    plain = {"model": Model, "tied": Tied, "twice": Twice}[kind]().double()
    net = shard(copy.deepcopy(plain), sw.fully_shard, mesh=mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (plain, net)]
    for _ in range(3):
        data = batch()
        right = step(plain, optimizers[0], data)
        placed = [sw.distribute_tensor(x, mesh, [sw.Shard(0)] * mesh.ndim) for x in data]
        torch.testing.assert_close(step(net, optimizers[1], placed).full_tensor(), right)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        torch.testing.assert_close(p.full_tensor(), q)


def with_styles(rank: int, size: int, styles_first: bool) -> None:
    """Module styles on one axis, fully sharded on the other, and a batch for each of its ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Model().double()
    net = copy.deepcopy(plain)
    if not styles_first:
        shard(net, sw.fully_shard, mesh=mesh["dp"])
    for block in net.blocks:
        ours.parallelize_module(block, mesh["tp"], {"up": ours.ColwiseParallel(), "down": ours.RowwiseParallel()})
    if styles_first:
        shard(net, sw.fully_shard, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model in (plain, net)]
    for _ in range(3):
        data = batch()
        step(plain, optimizers[0], data)
        step(net, optimizers[1], [x.chunk(2)[mesh.get_local_rank("dp")] for x in data])
    assert str(net.blocks[0].up.weight.layout_on_mesh) == "[18,6] S(0)@tp,dp"
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        torch.testing.assert_close(p.full_tensor(), q)


def random_models(rank: int, size: int, own: bool) -> None:
    for seed in range(12):
        train(seed, mesh_of((2,)), own, is_simulated=False)


def accumulated(rank: int, size: int) -> None:
    """Both ways to keep gradients give what one backward pass of all batches gives."""
    mesh = mesh_of((2,))
    for by_flag in (True, False):
        torch.manual_seed(0)
        plain = Model().double()
        net = shard(copy.deepcopy(plain), sw.fully_shard, mesh=mesh)
        for i in range(3):
            data = batch()
            loss_of(plain, *data).backward()
            net.set_requires_gradient_sync(i == 2 or not by_flag)
            with ours.no_sync(enabled=i < 2 and not by_flag):
                loss_of(net, *(x.chunk(size)[rank] for x in data)).backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def asked_for(rank: int, size: int) -> None:
    """Gradients of a plain loss that a caller wants, and nobody else gets."""
    torch.manual_seed(0)
    plain = Model().double()
    net = shard(copy.deepcopy(plain), sw.fully_shard, mesh=mesh_of((2,)))
    data = batch()
    loss = loss_of(net, *(x.chunk(size)[rank] for x in data))
    found = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    right = torch.autograd.grad(loss_of(plain, *data), list(plain.parameters()))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
    loss.backward(inputs=[net.head.weight])
    torch.testing.assert_close(net.head.weight.grad.full_tensor(), right[-1])
    assert all(p.grad is None for p in net.blocks.parameters())


def overlapping(rank: int, size: int) -> None:
    """Gathers are under way while the module before computes, reductions while the backward pass goes on."""
    net = shard(Model(), sw.fully_shard, mesh=mesh_of((2,)))
    data = [x.chunk(size)[rank] for x in batch()]
    loss_of(net, *data).backward()
    seen: list[str] = []
    start, wait = Reduction.__init__, Reduction.wait

    def started(self: Any, *args: Any) -> None:
        start(self, *args)
        seen.append("reduction starts")

    def waited(self: Any) -> Any:
        seen.append("reduction ends")
        return wait(self)

    def computes(i: int) -> None:
        following = net.blocks[i + 1]._group if i + 1 < NUM_BLOCKS else None
        seen.append(f"forward {i}, next is {'under way' if is_under_way(following) else 'not there'}")

    def computes_backward(i: int) -> None:
        before = net.blocks[i - 1]._group if i else None
        seen.append(f"backward {i}, next is {'under way' if is_under_way(before) else 'not there'}")

    for i, block in enumerate(net.blocks):
        block.up.register_forward_hook(lambda m, args, out, i=i: computes(i))
        block.up.register_forward_hook(
            lambda m, args, out, i=i: out.register_hook(lambda g: computes_backward(i)) and None
        )
    Reduction.__init__, Reduction.wait = started, waited
    try:
        loss_of(net, *data).backward()
    finally:
        Reduction.__init__, Reduction.wait = start, wait
    assert seen == [
        *("forward 0, next is under way", "forward 1, next is under way", "forward 2, next is not there"),
        *("backward 2, next is under way", "reduction starts"),
        *("backward 1, next is under way", "reduction starts"),
        *("backward 0, next is not there", "reduction starts", "reduction starts"),
        *["reduction ends"] * 4,
    ]


def is_under_way(group: Group | None) -> bool:
    return group is not None and group._pending is not None and not group.is_gathered


class Either(nn.Module):
    """Ranks use different parameters of one group."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


def unused(rank: int, size: int) -> None:
    torch.manual_seed(0)
    plain = Either().double()
    net = sw.fully_shard(copy.deepcopy(plain), mesh=mesh_of((2,)))
    net.set_reduce_scatter_unused_params(True)
    x = torch.randn(2, 3, 4).double()
    for which in range(size):
        (plain(x[which], which).square().sum() / 2).backward()
    net(x[rank], rank).square().sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def different_modules(rank: int, size: int) -> None:
    """All ranks are told, and none has sharded anything; then they go on."""
    mesh = mesh_of((2,))
    for module, error, said in (
        (nn.Linear(4, 4 + rank), sw.errors.ReplicaError, "have different modules"),
        (nn.ModuleList() if rank else nn.Linear(4, 4), None, "refused its module|has no forward"),
    ):
        with pytest.raises(error or (ValueError, sw.errors.ReplicaError), match=said):
            sw.fully_shard(module, mesh=mesh)
        assert not any(isinstance(p, sw.DTensor) for p in module.parameters())
    half = [ours.MixedPrecisionPolicy(), ours.MixedPrecisionPolicy(torch.bfloat16)]
    for options in ({"mp_policy": half[rank]}, {"reshard_after_forward": bool(rank)}):
        with pytest.raises(sw.errors.ReplicaError, match="have different modules or options"):
            sw.fully_shard(nn.Linear(4, 4), mesh=mesh, **options)
    with pytest.raises(sw.errors.ReplicaError, match="what is trained"):
        sw.fully_shard(nn.Linear(4, 4).requires_grad_(bool(rank)), mesh=mesh)
    sw.fully_shard(nn.Linear(4, 4), mesh=mesh)(torch.randn(2 + rank, 4)).sum().backward()


def refused(rank: int, size: int) -> None:
    """torch's own wrappers say what to call for our tensors."""
    import torch.distributed.fsdp as theirs
    from torch.nn.parallel import DistributedDataParallel

    mesh = mesh_of((2,))
    for placement in (sw.Replicate(), sw.Shard(0)):
        net = sw.distribute_module(nn.Linear(4, 4), mesh)
        net.weight = nn.Parameter(sw.distribute_tensor(torch.ones(4, 4), mesh, [placement]))
        with pytest.raises(sw.errors.MixedTensorError, match=r"shardwise\.parallel\.fully_shard"):
            theirs.fully_shard(net, mesh=mesh)
        with pytest.raises(sw.errors.ShardwiseError):
            DistributedDataParallel(net)
    its = nn.Sequential(nn.Linear(4, 4), theirs.fully_shard(nn.Linear(4, 4), mesh=mesh))
    for call in (
        lambda: ours.fully_shard(its, mesh=mesh),
        lambda: sw.distribute_module(its, mesh),
        lambda: ours.parallelize_module(its, mesh, {"*": ours.ColwiseParallel()}),
        lambda: ours.parallelize_module(its, mesh, {"0": "colwise"}),
        lambda: sw.distribute_tensor(its[1].weight.detach(), mesh),
        lambda: sw.DTensor.from_local(its[1].weight.detach(), mesh),
    ):
        with pytest.raises(
            sw.errors.MixedTensorError, match=r"a DTensor of torch's is laid out already, and not known"
        ):
            call()
        assert type(its) is nn.Sequential and type(its[0].weight) is nn.Parameter and not its[0]._forward_hooks


CASES = [
    *(Case(f"like torch, {name}", 2, like_torch, ((2,), name)) for name in PROGRAMS),
    *(Case(f"like torch, {where}", 2, like_torch, (SHAPES[where], "default")) for where in ("replicas", "one replica")),
    *(Case(f"one device, {kind}", 2, like_one_device, ((2,), kind)) for kind in ("model", "tied", "twice")),
    Case("one device, replicas", 4, like_one_device, ((2, 2), "model")),
    Case("styles first", 4, with_styles, (True,)),
    Case("styles later", 4, with_styles, (False,)),
    *(Case(f"random models, {own=}", 2, random_models, (own,)) for own in (False, True)),
    Case("accumulated", 2, accumulated),
    Case("asked for", 2, asked_for),
    Case("overlapping", 2, overlapping),
    Case("different modules", 2, different_modules),
    Case("unused", 2, unused),
    Case("refused", 2, refused),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_processes(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)
