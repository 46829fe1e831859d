"""Fully sharded training is training on one device: values, gradients, parameters and the optimizer's state."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sharded_models import Model, Skipping, Tied, Twice, batch, loss_of, shard
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import shards_of
from shardwise.debug import CommDebugMode
from shardwise.parallel import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    no_sync,
)
from shardwise.parallel.fully_sharded.policies import policy_of

TWO, FOUR = sw.simulate((2,), ("dp",)), sw.simulate((4,), ("dp",))
HYBRID, GRID = sw.simulate((2, 2), ("replicate", "shard")), sw.simulate((2, 2), ("dp", "tp"))
R, S = Replicate(), Shard
WAYS = pytest.mark.parametrize("own", [False, True], ids=["dtensors", "a-batch-per-rank"])


def pair(make: Callable[[], nn.Module] = Model, mesh: Any = TWO, **options: Any) -> tuple[Any, Any]:
    """A model on one device, and the same fully sharded."""
    torch.manual_seed(0)
    plain = make().double()
    return plain, shard(copy.deepcopy(plain), fully_shard, mesh=mesh, **options)


def loss_on(net: Any, data: tuple[Tensor, Tensor], mesh: Any, own: bool, placements: Any = None) -> Tensor:
    """The loss of a batch that is split over all axes: as DTensors, or as a batch of each rank's own."""
    placed = [sw.distribute_tensor(x, mesh, placements or [S(0)] * mesh.ndim) for x in data]
    return loss_of(net, *(x.to_local() if own else x for x in placed))


def check(net: nn.Module, plain: nn.Module, what: Callable[[Any], Any] = lambda p: p.grad) -> None:
    for (name, p), q in zip(net.named_parameters(), plain.named_parameters(), strict=True):
        found, right = what(p), what(q[1])
        assert (found is None) == (right is None), name
        if right is not None:
            assert found.placements == p.placements
            torch.testing.assert_close(found.full_tensor(), right, msg=lambda m, n=name: f"{n}: {m}")


def check_training(plain: Any, net: Any, mesh: Any, own: bool, placements: Any = None, num_steps: int = 3) -> None:
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, net))
    for _ in range(num_steps):
        data = batch()
        first.zero_grad()
        second.zero_grad()
        loss_of(plain, *data).backward()
        loss_on(net, data, mesh, own, placements).backward()
        check(net, plain)
        first.step()
        second.step()
    check(net, plain, lambda p: p)
    states = zip(first.state.values(), second.state.values(), strict=True)
    for right, found in states:
        torch.testing.assert_close(found["exp_avg_sq"].full_tensor(), right["exp_avg_sq"])


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "freed": {"reshard_after_forward": True},
    "last-dim": {"shard_placement_fn": lambda p: Shard(-1)},
    "offloaded": {"offload_policy": CPUOffloadPolicy()},
}


@WAYS
@pytest.mark.parametrize("mesh", [TWO, FOUR, HYBRID], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_is_that_of_one_device(own: bool, mesh: Any, options: dict[str, Any]) -> None:
    check_training(*pair(mesh=mesh, **options), mesh, own)


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "called twice": Twice,
    "checkpoint inside": lambda: Model(inner=False),
    "checkpoint around": lambda: Model(outer=False),
    "checkpoints in checkpoints": lambda: Model(inner=False, outer=False),
    "reentrant inside": lambda: Model(inner=True),
    "reentrant around": lambda: Model(outer=True),
}


@WAYS
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(own: bool, name: str) -> None:
    if own and ("reentrant" in name or "in checkpoints" in name):
        pytest.skip("not with the simulator's local tensors; see tests/multiprocess/test_fully_sharded.py")
    check_training(*pair(PROGRAMS[name]), TWO, own)


@WAYS
def test_frozen_parameters(own: bool) -> None:
    """Some of a group, and all of another, whose memory is given back all the same."""
    torch.manual_seed(0)
    plain = Model().double()
    for p in (*plain.blocks[1].parameters(), plain.head.weight, plain.blocks[0].up.weight):
        p.requires_grad_(False)
    net = shard(copy.deepcopy(plain), fully_shard, mesh=TWO)
    data = batch()
    loss_of(plain, *data).backward()
    with CommDebugMode() as comms:
        loss_on(net, data, TWO, own).backward()
    check(net, plain)
    assert comms.get_comm_counts()["reduce_scatter"] == 3
    assert gathered_bytes(net) == 0


def gathered_bytes(net: nn.Module) -> int:
    groups = {m._group for m in net.modules() if isinstance(m, FSDPModule)}
    return sum(x.untyped_storage().size() for group in groups for e in group.entries for x in e.wholes)


@WAYS
def test_modules_that_a_step_does_not_reach(own: bool) -> None:
    plain, net = pair(Skipping)
    for skipped in (-1, 1, 1, 0, -1):
        for model in (plain, net):
            model.skipped = skipped
            model.zero_grad()
        data = batch()
        loss_of(plain, *data).backward()
        loss_on(net, data, TWO, own).backward()
        check(net, plain)


# Gradient accumulation


def accumulate(plain: Any, net: Any, mesh: Any, own: bool, begin: Callable[[int], Any]) -> list[dict]:
    """Three passes, of which the last reduces. What each communicated, of gradients."""
    counts = []
    for i in range(3):
        data = batch()
        loss_of(plain, *data).backward()
        with CommDebugMode() as comms, begin(i) or no_sync(enabled=False):
            loss_on(net, data, mesh, own).backward()
        counts.append([comm.kind for comm in comms.comms if comm.why.startswith("gradients")])
    check(net, plain)
    return counts


@WAYS
@pytest.mark.parametrize("mesh", [TWO, HYBRID], ids=str)
def test_no_sync(own: bool, mesh: Any) -> None:
    counts = accumulate(*pair(mesh=mesh), mesh, own, lambda i: no_sync(enabled=i < 2))
    assert counts[:2] == [[], []] and counts[2].count("reduce_scatter") == 4


@WAYS
@pytest.mark.parametrize("mesh", [TWO, HYBRID], ids=str)
def test_set_requires_gradient_sync(own: bool, mesh: Any) -> None:
    plain, net = pair(mesh=mesh)

    def begin(i: int) -> None:
        assert i == 0 or all(p.grad is None for p in net.parameters())
        net.set_requires_gradient_sync(i == 2)

    counts = accumulate(plain, net, mesh, own, begin)
    assert counts[:2] == [[], []] and counts[2].count("reduce_scatter") == 4


@WAYS
def test_set_requires_all_reduce(own: bool) -> None:
    plain, net = pair(mesh=HYBRID)
    counts = accumulate(plain, net, HYBRID, own, lambda i: net.set_requires_all_reduce(i == 2))
    assert counts[:2] == [["reduce_scatter"] * 4] * 2 and counts[2].count("all_reduce") == 4


@WAYS
def test_what_was_kept_is_reduced_where_the_last_pass_does_not_reach_it(own: bool) -> None:
    plain, net = pair(Skipping)
    for skipped in (-1, 1):
        plain.skipped = net.skipped = skipped
        data = batch()
        loss_of(plain, *data).backward()
        with no_sync(enabled=skipped < 0):
            loss_on(net, data, TWO, own).backward()
    check(net, plain)


def test_what_was_kept_is_forgotten_with_the_gradient_and_never_missed() -> None:
    plain, net = pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with no_sync():
        loss_on(net, batch(), TWO, False).backward()
    with pytest.raises(sw.errors.UnreducedGradientError):
        optimizer.step()
    optimizer.zero_grad()
    data = batch()
    loss_of(plain, *data).backward()
    loss_on(net, data, TWO, False).backward()
    check(net, plain)


def test_what_was_kept_survives_backward_passes_of_others() -> None:
    plain, net = pair()
    _, other = pair()
    for i in range(2):
        data = batch()
        loss_of(plain, *data).backward()
        with no_sync(enabled=i == 0):
            loss_on(net, data, TWO, False).backward()
        loss_on(other, data, TWO, False).backward()
    check(net, plain)


# The graph


@WAYS
def test_hooks_see_the_reduced_gradient(own: bool) -> None:
    plain, net = pair()
    seen: list[Tensor] = []
    for model in (plain, net):
        model.blocks[1].up.weight.register_hook(lambda g: g * 2)
        model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    data = batch()
    loss_of(plain, *data).backward()
    loss_on(net, data, TWO, own).backward()
    check(net, plain)
    torch.testing.assert_close(seen[1].full_tensor(), seen[0])


def test_gradients_that_are_asked_for() -> None:
    plain, net = pair()
    data = batch()
    loss = loss_on(net, data, TWO, False)
    found = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    right = torch.autograd.grad(loss_of(plain, *data), list(plain.parameters()))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
    assert all(p.grad is None for p in net.parameters())
    loss.backward(retain_graph=True, inputs=[net.head.weight])
    torch.testing.assert_close(net.head.weight.grad.full_tensor(), right[-1])
    assert net.blocks[0].up.weight.grad is None
    loss.backward()
    torch.testing.assert_close(net.head.weight.grad.full_tensor(), 2 * right[-1])


@WAYS
def test_two_forward_passes_before_two_backward_passes(own: bool) -> None:
    plain, net = pair()
    batches = [batch(), batch()]
    losses = [loss_on(net, data, TWO, own) for data in batches]
    for loss, data in zip(losses, batches, strict=True):
        loss.backward()
        loss_of(plain, *data).backward()
    check(net, plain)


def test_gradients_are_not_differentiated_again() -> None:
    _, net = pair()
    with pytest.raises(sw.errors.TransformError, match=r"create_graph=True.*layouts alone"):
        loss_on(net, batch(), TWO, False).backward(create_graph=True)
    plain, net = pair()
    check_training(plain, net, TWO, False, num_steps=1)


def test_a_parameter_written_to_before_the_backward_pass() -> None:
    plain, net = pair()
    loss = loss_on(net, batch(), TWO, False)
    with torch.no_grad():
        net.blocks[0].up.weight.mul_(2)
        plain.blocks[0].up.weight.mul_(2)
    with pytest.raises(sw.errors.InPlaceError, match="between the forward pass that used it and the backward pass"):
        loss.backward()
    check_training(plain, net, TWO, False)  # nothing of the pass that failed is left
    assert gathered_bytes(net) == 0


def test_a_forward_with_other_parameters() -> None:
    """It computes with them. In the backward pass they are gone."""
    plain, net = pair()
    data = batch()
    twice, whole_twice = ({name: 2 * p.detach() for name, p in m.named_parameters()} for m in (net, plain))
    placed = sw.distribute_tensor(data[0], TWO, [S(0)])
    found = torch.func.functional_call(net, twice, (placed,))
    torch.testing.assert_close(found.full_tensor(), torch.func.functional_call(plain, whole_twice, (data[0],)))
    with pytest.raises(
        sw.errors.InPlaceError, match=r"or replaced, .*; have the backward pass inside of what replaces"
    ):
        torch.func.functional_call(net, {k: x.requires_grad_() for k, x in twice.items()}, (placed,)).sum().backward()
    check_training(plain, net, TWO, False)


@pytest.mark.parametrize("computed", [False, True])
def test_other_parameters_until_the_backward_pass_is_through(computed: bool) -> None:
    """Gradients are theirs, and those of what they were computed from."""
    plain, net = pair()
    data, found = batch(), []
    for module in (plain, net):
        own = dict(module.named_parameters())
        others = {name: 2 * p if computed else (2 * p.detach()).requires_grad_() for name, p in own.items()}
        with _reparametrize_module(module, others):
            (loss_of(module, *data) if module is plain else loss_on(module, data, TWO, False)).backward()
        found.append([x.grad for x in (own if computed else others).values()])
    for right, grad in zip(*found, strict=True):
        torch.testing.assert_close(grad.full_tensor(), right)


def test_a_forward_that_fails_leaves_shards() -> None:
    plain, net = pair()
    with pytest.raises(IndexError):
        net(sw.distribute_tensor(torch.full((2, 2), 99), TWO, [S(0)]))
    assert all(p.placements == (S(0),) for p in net.parameters())
    check_training(plain, net, TWO, False)


# Precision


def halves(net: nn.Module, tokens: Tensor, targets: Tensor, num_ranks: int) -> list[Tensor]:
    """Gradients as one device would compute them: each rank's batch in bfloat16, added up in float32."""
    total = [torch.zeros_like(p) for p in net.parameters()]
    for rank in range(num_ranks):
        half = copy.deepcopy(net).bfloat16()
        half.scale = net.scale
        half.blocks[0].register_forward_pre_hook(lambda m, args: args[0].bfloat16())
        mine = [x.chunk(num_ranks)[rank] for x in (tokens, targets)]
        loss_of(half, *mine).backward()
        total = [a + p.grad.float() for a, p in zip(total, half.parameters(), strict=True)]
    return [x / num_ranks for x in total]


def test_mixed_precision_is_that_of_each_rank() -> None:
    """Bit for bit: parameters in half precision, gradients added up in full."""
    torch.manual_seed(0)
    plain = Model()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    net = shard(copy.deepcopy(plain), fully_shard, mesh=TWO, mp_policy=policy)
    data = batch()
    loss_on(net, data, TWO, True).backward()
    for p, right in zip(net.parameters(), halves(plain, *data, 2), strict=True):
        assert p.dtype == p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), right, atol=0, rtol=0)


@WAYS
def test_dtypes_of_inputs_outputs_and_wires(own: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    seen: list[torch.dtype] = []
    net[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    net[1].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
    fully_shard(net, mesh=TWO, mp_policy=policy)
    x = sw.distribute_tensor(torch.randn(6, 4), TWO, [S(0)])
    with CommDebugMode() as comms:
        y = net(x.to_local() if own else x)
        y.sum().backward()
    assert seen == [torch.bfloat16] * 2 and y.dtype == torch.float64
    count = sum(p.numel() for p in net.parameters())
    sizes = {c.kind: c.bytes for c in comms.comms if c.function == "fully_shard"}
    assert sizes == {"all_gather": count // 2 * 2, "reduce_scatter": count * 4}
    assert all(p.grad.dtype == torch.float32 for p in net.parameters())


def test_float16_is_divided_in_two_steps() -> None:
    net = fully_shard(nn.Linear(1, 1, bias=False), mesh=FOUR, mp_policy=MixedPrecisionPolicy(torch.float16))
    big = sw.distribute_tensor(torch.full((4, 1), 30000.0), FOUR, [S(0)])
    net(big.to_local()).sum().backward()
    assert net.weight.grad.full_tensor().item() == 30000  # the sum of all four would be infinite


# With tensor parallelism


def split(net: Any, mesh: Any) -> Any:
    """As Megatron does: what is plain is left to fully_shard."""
    ahead = [R] * (mesh.ndim - 1)
    for block in net.blocks:
        for linear, name, dim in ((block.up, "weight", 0), (block.up, "bias", 0), (block.down, "weight", 1)):
            setattr(linear, name, nn.Parameter(sw.distribute_tensor(getattr(linear, name), mesh, [*ahead, S(dim)])))
    return net


@pytest.mark.parametrize("placements", [[S(0), R], [S(0), S(1)]], ids=["batch", "batch and sequence"])
def test_tensor_parallel_parameters_on_the_same_mesh(placements: list[Any]) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    net = shard(split(copy.deepcopy(plain), GRID), fully_shard, mesh=GRID["dp"])
    assert str(net.blocks[0].up.weight.layout_on_mesh) == "[18,6] S(0)@tp,dp"
    assert str(net.blocks[0].down.weight.layout_on_mesh) == "[6,18] S(0)@dp S(1)@tp"
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)
    check_training_on_grid(plain, net, placements)


def check_training_on_grid(plain: Any, net: Any, placements: Any, own: bool = False) -> None:
    """Placements of parameters differ, so only values are compared."""
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, net))
    for _ in range(3):
        data = batch()
        first.zero_grad()
        second.zero_grad()
        loss_of(plain, *data).backward()
        loss_on(net, data, GRID, own, placements).backward()
        for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert p.grad.layout_on_mesh is p.layout_on_mesh, name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, n=name: f"{n}: {m}")
        first.step()
        second.step()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)


def test_tensor_parallel_parameters_on_a_part_of_the_mesh() -> None:
    """As module styles have it: blocks take and give plain tensors, and inside these are DTensors on `tp` alone."""
    torch.manual_seed(0)
    plain = Model().double()
    net, tp = copy.deepcopy(plain), GRID["tp"]
    for block in split(net, tp).blocks:
        sw.distribute_module(block, tp)
        block.register_forward_pre_hook(lambda m, args: (sw.DTensor.from_local(args[0], tp, [R]),))
        block.register_forward_hook(lambda m, args, out: out.redistribute(placements=[R]).to_local())
    shard(net, fully_shard, mesh=GRID["dp"])
    assert str(net.blocks[0].up.weight.layout_on_mesh) == "[18,6] S(0)@tp,dp"
    check_training_on_grid(plain, net, [S(0), R], own=True)


@pytest.mark.parametrize("placements", [[R], [S(1)]], ids=str)
def test_batches_that_are_not_split_by_the_first_dim(placements: list[Any]) -> None:
    """Where all ranks compute the same, gradients are whole, and cut: nothing is reduced."""
    plain, net = pair()
    with CommDebugMode() as comms:
        check_training(plain, net, TWO, False, placements, num_steps=1)
    assert (comms.get_comm_counts()["reduce_scatter"] == 0) == (placements == [R])


@WAYS
def test_evaluation_before_training(own: bool) -> None:
    plain, net = pair()
    data = batch()
    right = loss_of(plain, *data)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = loss_on(net, data, TWO, own)
            with torch._C.DisableTorchFunctionSubclass():
                found = sum(x.item() for x in shards_of(found)) / 2 if own else found.full_tensor().item()
            torch.testing.assert_close(found, right.item())
    check_training(plain, net, TWO, own)


def test_sparse_gradients_are_reduced_as_dense_ones() -> None:
    plain = nn.Embedding(11, 4, sparse=True)
    net = fully_shard(copy.deepcopy(plain), mesh=TWO)
    data = batch()[0]
    plain(data).square().sum().backward()
    net(sw.distribute_tensor(data, TWO, [S(0)])).square().sum().backward()
    torch.testing.assert_close(net.weight.grad.full_tensor(), plain.weight.grad.to_dense())


# Modules of many kinds


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(3, 5, batch_first=True), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.lstm(x)[0][:, -1])


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def test_recurrent_layers_and_buffers() -> None:
    plain = Recurrent().double()
    net = fully_shard(copy.deepcopy(plain), mesh=TWO)
    for _ in range(2):
        x = torch.randn(6, 4, 3).double()
        plain(x).square().sum().backward()
        net(sw.distribute_tensor(x, TWO, [S(0)])).square().sum().backward()
    check(net, plain)
    for found, right in zip(net.buffers(), plain.buffers(), strict=True):
        assert not isinstance(found, sw.DTensor)
        torch.testing.assert_close(found, right)


def test_several_modules_as_one_group() -> None:
    torch.manual_seed(0)
    plain = Model().double()
    net = copy.deepcopy(plain)
    for block in net.blocks:
        fully_shard(block, mesh=TWO)
    assert fully_shard([net.norm, net.head], mesh=TWO) == [net.norm, net.head]
    fully_shard(net, mesh=TWO)
    data = batch()
    loss_of(plain, *data).backward()
    with CommDebugMode() as comms:
        loss_on(net, data, TWO, False).backward()
    check(net, plain)
    counts = comms.get_comm_counts()
    assert counts["reduce_scatter"] == 5 and counts["all_gather"] == 5 + 4


def test_a_part_of_a_group_may_run_later_and_in_chunks() -> None:
    """The head is not part of the model's forward: it is called for parts of what that returns."""

    class Chunked(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    def loss(net: Any, tokens: Tensor) -> Tensor:
        return sum(net.head(part).square().mean() for part in net(tokens).chunk(2, 1))

    torch.manual_seed(0)
    plain = Chunked().double()
    net = copy.deepcopy(plain)
    for block in net.blocks:
        fully_shard(block, mesh=TWO)
    fully_shard([net.norm, net.head], mesh=TWO)
    fully_shard(net, mesh=TWO)
    for _ in range(2):
        data = batch()[0]
        loss(plain, data).backward()
        loss(net, sw.distribute_tensor(data, TWO, [S(0)])).backward()
        check(net, plain)
    assert gathered_bytes(net) == 0


def test_a_module_that_calls_itself() -> None:
    class Again(nn.Linear):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            y = super().forward(x)
            return self(y, depth - 1) + super().forward(y) if depth else y

    plain = Again(4, 4).double()
    net = nn.Sequential(fully_shard(copy.deepcopy(plain), mesh=TWO))
    fully_shard(net, mesh=TWO)
    x = torch.randn(6, 4).double()
    plain(x).square().sum().backward()
    net(sw.distribute_tensor(x, TWO, [S(0)])).square().sum().backward()
    check(net[0], plain)


class Aside(nn.Module):
    """What it computes leaves on `self`, or in an object of its own kind."""

    def __init__(self, on_self: bool) -> None:
        super().__init__()
        self.up, self.down, self.on_self = nn.Linear(4, 6), nn.Linear(6, 4), on_self

    def forward(self, x: Tensor) -> Any:
        y = self.down(torch.tanh(self.up(x))).square().sum()
        self.kept = y if self.on_self else None
        return x if self.on_self else SimpleNamespace(y=y)


@pytest.mark.parametrize("on_self", [True, False])
def test_results_that_leave_unseen(on_self: bool) -> None:
    """They keep whole parameters until the backward pass is through."""
    plain = Aside(on_self).double()
    net = fully_shard(copy.deepcopy(plain), mesh=TWO, reshard_after_forward=True)
    x = torch.randn(6, 4).double()
    for model, data in ((plain, x), (net, sw.distribute_tensor(x, TWO, [S(0)]))):
        out = model(data)
        (model.kept if on_self else out.y).backward()
    check(net, plain)
    assert gathered_bytes(net) == 0


def test_ignored_parameters_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = net[1].weight
    fully_shard(net, mesh=TWO, ignored_params={weight})
    assert net[1].weight is weight and net[0].weight.placements == (S(0),)


def test_state_dicts_are_of_shards_and_load_back() -> None:
    plain, net = pair()
    _, other = pair()
    check_training(plain, net, TWO, False, num_steps=1)
    other.load_state_dict(net.state_dict())
    check(other, plain, lambda p: p)
    check_training(plain, other, TWO, False, num_steps=1)


def test_built_without_memory() -> None:
    """Sharded on the meta device, given memory, and then filled, shard by shard."""
    with torch.device("meta"):
        net = shard(Model(), fully_shard, mesh=TWO)
    with pytest.raises(sw.errors.NoDataError, match=r"Model\.tokens\.weight is on the meta device.*to_empty"):
        net(sw.distribute_tensor(batch()[0], TWO, [S(0)]))
    net.to_empty(device="cpu")
    plain = Model()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert p.placements == (S(0),)
        with torch.no_grad():
            p.copy_(sw.distribute_tensor(q.detach(), TWO, [S(0)]))
    net.scale.copy_(plain.scale)
    check_training(plain.double(), net.double(), TWO, False)


def test_other_methods_may_find_parameters_gathered() -> None:
    net = nn.Linear(4, 4)
    net.twice = lambda x: nn.functional.linear(nn.functional.linear(x, net.weight), net.weight)
    fully_shard(net, mesh=TWO)
    x = sw.distribute_tensor(torch.randn(4, 4), TWO, [S(0)])
    sw.parallel.register_fsdp_forward_method(net, "twice")
    whole = net.weight.full_tensor()
    torch.testing.assert_close(net.twice(x).full_tensor(), x.full_tensor() @ whole.T @ whole.T)
    assert net.weight.placements == (S(0),)


def test_unshard_and_reshard() -> None:
    net = fully_shard(nn.Linear(4, 4), mesh=TWO)
    whole = net.weight.full_tensor()
    net.unshard()
    torch.testing.assert_close(net.weight.as_subclass(Tensor), whole)
    net.reshard()
    assert net.weight.placements == (S(0),) and gathered_bytes(net) == 0
    handle = net.unshard(async_op=True)
    handle.wait()
    with CommDebugMode() as comms:
        net(sw.distribute_tensor(torch.randn(4, 4), TWO, [S(0)]))
    assert comms.get_comm_counts()["all_gather"] == 0
    net.reshard()


@WAYS
def test_gradients_may_be_divided_by_another_number(own: bool) -> None:
    plain, net = pair()
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(8.0)
    data = batch()
    (loss_of(plain, *data) / (4 if own else 8)).backward()  # two losses of half a batch each make two of the whole
    loss_on(net, data, TWO, own).backward()
    check(net, plain)


def test_what_is_called_with_sums_of_gradients() -> None:
    plain, net = pair()
    sizes: list[int] = []

    def double(flat: Tensor) -> None:
        sizes.append(flat.numel())
        flat.mul_(2)

    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(double)
    data = batch()
    (2 * loss_of(plain, *data)).backward()
    loss_on(net, data, TWO, False).backward()
    check(net, plain)
    assert sum(sizes) == sum(p.numel() for p in plain.parameters())  # each rank's part, once


def test_names_methods_and_arguments_are_torchs() -> None:
    import torch.distributed.fsdp as theirs

    def facts(function: Any) -> list[tuple[str, Any, str]]:
        return [(p.name, p.kind, str(p.default)) for p in inspect.signature(function).parameters.values()]

    names = ["fully_shard", "register_fsdp_forward_method", "MixedPrecisionPolicy", "CPUOffloadPolicy"]
    names += [name for name in ("share_comm_ctx",) if hasattr(theirs, name)]  # older versions of torch have it not
    for name in names:
        wanted = facts(getattr(theirs, name))  # older versions of torch have fewer at the end
        assert facts(getattr(sw.parallel, name))[: len(wanted)] == wanted
    methods = [name for name in vars(theirs.FSDPModule) if not name.startswith("_")]
    assert len(methods) > 10
    for name in methods:
        assert facts(getattr(FSDPModule, name)) == facts(getattr(theirs.FSDPModule, name)), name


def test_what_torch_chooses_for_its_own_collectives() -> None:
    """Programs that were written for torch ask for it. It changes nothing, or says why it cannot be had."""
    plain, net = pair()
    net.set_force_sum_reduction_for_comms(True)
    net.set_reduce_scatter_max_input_buffers(2)
    net.set_separate_reduce_scatter_group()
    net.set_allocate_memory_from_process_group_for_comm(True)
    net.set_symm_mem_for_comm()
    net.set_reduce_scatter_divide_factor(1.0)
    sw.parallel.share_comm_ctx([net, net.blocks[0]])
    with pytest.raises(ValueError, match="expected a module that fully_shard was called on"):
        sw.parallel.share_comm_ctx([nn.Linear(2, 2)])
    waited: list[int] = []
    net.set_post_optim_event(SimpleNamespace(wait=lambda: waited.append(1)))
    assert waited == [1]
    check_training(plain, net, TWO, False)
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(NotImplementedError, match="by the process group of the mesh: choose its backend"):
            getattr(net, name)(None)


def test_policies_of_torchs_are_taken_and_what_is_none_is_refused() -> None:
    import torch.distributed.fsdp as theirs

    net = nn.Linear(4, 4)
    for options in ({"mp_policy": torch.bfloat16}, {"offload_policy": True}):
        with pytest.raises(TypeError, match=r"fully_shard takes a policy of (MixedPrecision|Offload)Policy, not"):
            fully_shard(net, mesh=TWO, **options)
        assert type(net) is nn.Linear and type(net.weight) is nn.Parameter
    policy = theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    fully_shard(net, mesh=TWO, mp_policy=policy, offload_policy=theirs.CPUOffloadPolicy(pin_memory=False))
    assert net._group.options.policy == MixedPrecisionPolicy(torch.bfloat16, None, torch.float64)
    assert policy_of(theirs.CPUOffloadPolicy(False), CPUOffloadPolicy, OffloadPolicy) == CPUOffloadPolicy(False)
    assert net(sw.distribute_tensor(torch.randn(6, 4), TWO, [S(0)])).dtype == torch.float64


@pytest.mark.parametrize(
    ("dims", "placements"),
    [(DataParallelMeshDims("dp"), (S(0), R)), (DataParallelMeshDims(shard=("tp",), replicate="dp"), (R, S(0)))],
    ids=str,
)
def test_axes_of_data_parallelism_by_their_names(dims: DataParallelMeshDims, placements: tuple) -> None:
    plain = nn.Linear(4, 6)
    net = sw.distribute_module(copy.deepcopy(plain), GRID)
    fully_shard(net, mesh=GRID, dp_mesh_dims=dims)
    assert net.weight.placements == placements
    x = torch.randn(4, 4)
    plain(x).square().sum().backward()
    net(sw.distribute_tensor(x, GRID, [S(0), S(0)])).square().sum().backward()
    check(net, plain)
    for wrong in (DataParallelMeshDims(replicate="dp"), DataParallelMeshDims(shard=("dp", "tp"))):
        with pytest.raises(sw.errors.MeshError, match="shards along one axis, and replicates along one or none"):
            fully_shard(nn.Linear(2, 2), mesh=GRID, dp_mesh_dims=wrong)


def test_memory_of_parameters_that_were_changed_is_given_back() -> None:
    _, net = pair()
    with torch.no_grad():
        loss_on(net, batch(), TWO, True)
        assert gathered_bytes(net) > 0  # the outermost module's
        net.head.weight.mul_(2)
        net._group.start()
        assert gathered_bytes(net) == 0


def test_kept_after_backward_until_parameters_change() -> None:
    _, net = pair()
    net.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    counts = []
    for step in (False, False, True, False):
        with CommDebugMode() as comms:
            loss_on(net, batch(), TWO, True).backward()
        counts.append(comms.get_comm_counts()["all_gather"])
        if step:
            optimizer.step()
    assert counts == [7, 3, 3, 7]


# What is refused, before anything is sharded


def test_bad_input() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(sw.errors.MeshError, match="takes a mesh of one axis, or of two"):
        fully_shard(net, mesh=sw.simulate((1, 2, 2), ("a", "b", "c")))
    with pytest.raises(sw.errors.MeshError, match="no mesh was given"):
        fully_shard(net)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module"):
        fully_shard(torch.ones(2), mesh=TWO)
    with pytest.raises(ValueError, match="has no forward to gather for"):
        fully_shard(nn.ModuleList([net]), mesh=TWO)
    with pytest.raises(ValueError, match="each of them once"):
        fully_shard([net, net], mesh=TWO)
    with pytest.raises(ValueError, match="True, False or None"):
        fully_shard(net, mesh=TWO, reshard_after_forward=2)
    with pytest.raises(
        sw.errors.PlacementError, match=r"S\(1\) names dim 1 of Sequential\.0\.bias, which has the shape \[4\]"
    ):
        fully_shard(net, mesh=TWO, shard_placement_fn=lambda p: Shard(1))
    net[1].weight = nn.Parameter(sw.distribute_tensor(net[1].weight, TWO, [S(1)]))
    with pytest.raises(
        sw.errors.PlacementError, match=r"Sequential\.1\.weight is \[4,4\] S\(1\)@dp; it must be replicated"
    ):
        fully_shard(net, mesh=TWO)
    net[1].weight = nn.Parameter(sw.distribute_tensor(torch.ones(4, 4), FOUR, [R]))
    with pytest.raises(sw.errors.MeshError, match="not part of the same mesh"):
        fully_shard(net, mesh=TWO)
    net[1].weight = nn.Parameter(torch.ones(()))
    with pytest.raises(sw.errors.PlacementError, match=r"a parameter of no dims has nothing to shard"):
        fully_shard(net, mesh=TWO)
    assert not any(isinstance(p, sw.DTensor) for p in net.parameters())
    assert not net._forward_hooks and not isinstance(net, FSDPModule)


def test_a_module_is_sharded_once_and_tied_parameters_together() -> None:
    plain = Tied()
    fully_shard(plain.tokens, mesh=TWO)
    with pytest.raises(RuntimeError, match="already called on this FSDPEmbedding"):
        fully_shard(plain.tokens, mesh=TWO)
    with pytest.raises(sw.errors.PlacementError, match=r"Tied\.head\.weight is tied .* fully_shard\(\[a, b\]\)"):
        fully_shard(plain, mesh=TWO)


def test_the_class_of_a_sharded_module() -> None:
    net = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), mesh=TWO)
    assert isinstance(net, FSDPModule) and isinstance(net, nn.Sequential) and type(net).__name__ == "FSDPSequential"
    assert type(net[:1]) is nn.Sequential
    with pytest.raises(NotImplementedError, match="load its state_dict"):
        copy.deepcopy(net)
    with pytest.raises(ValueError, match="expected a module that fully_shard was called on"):
        net.set_modules_to_forward_prefetch([nn.Linear(2, 2)])


STYLES = {"up": sw.parallel.ColwiseParallel(), "down": sw.parallel.RowwiseParallel()}


def test_styles_before_or_after() -> None:
    """Either order gives the same shards, and the same training."""
    torch.manual_seed(0)
    plain = Model().double()
    nets = [copy.deepcopy(plain) for _ in range(2)]
    for net, styles_first in zip(nets, (True, False), strict=True):
        if not styles_first:
            shard(net, fully_shard, mesh=GRID["dp"])
        for block in net.blocks:
            sw.parallel.parallelize_module(block, GRID["tp"], STYLES)
        if styles_first:
            shard(net, fully_shard, mesh=GRID["dp"])
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        assert p.layout_on_mesh is q.layout_on_mesh and torch.equal(p.full_tensor(), q.full_tensor())
    assert str(nets[1].blocks[0].up.weight.layout_on_mesh) == "[18,6] S(0)@tp,dp"
    for net in nets:
        check_training_on_grid(copy.deepcopy(plain), net, [S(0), R], own=True)


def test_shards_that_were_moved_elsewhere_are_refused() -> None:
    net = fully_shard(nn.Linear(4, 4), mesh=TWO)
    net.weight = nn.Parameter(net.weight.detach().redistribute(placements=[R]))
    with pytest.raises(sw.errors.PlacementError, match=r"Linear.weight was sharded on 'dp', and is now \[4,4\] R"):
        net(sw.distribute_tensor(torch.randn(4, 4), TWO, [S(0)]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_run_the_hooks_as_they_are(backend: str) -> None:
    plain, net = pair()
    compiled = torch.compile(net, backend=backend)
    data = batch()
    loss_of(plain, *data).backward()
    loss_on(compiled, data, TWO, False).backward()
    check(net, plain)
