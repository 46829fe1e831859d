"""Kernels for a device: they run in the place of functions and of steps of rules, there and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from saved import fake_mesh
from sweep import normal, place
from torch import Tensor, nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.experimental import register_kernel
from shardwise.rules.losses.class_losses import class_parallel_loss

R, S = sw.Replicate(), sw.Shard
TARGET = torch.tensor([1, 3, 0, 6, -100, 5])


class Rows(torch.autograd.Function):
    """The losses of rows, of which the logarithm of the sum of all exponentials is known."""

    ran: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def forward(ctx: Any, x: Tensor, losses: Tensor, log_sum: Tensor, index: Tensor, counts: Tensor) -> Tensor:
        Rows.ran["forward"] += 1
        ctx.save_for_backward(x, log_sum, index, counts)
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Rows.ran["backward"] += 1
        with torch._C.DisableTorchFunctionSubclass():  # in the simulator
            x, log_sum, index, counts = ctx.saved_tensors
            named = (index[:, None] == torch.arange(x.shape[1])).to(x.dtype)
            return ((x - log_sum[:, None]).exp() - named) * (grads[0] * counts)[:, None], None, None, None, None


def local_rows(x: Tensor, target: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the classes held here: the maximum, the sum of exponentials, and the logit that the target names."""
    x, index = x.detach(), target - offset
    mine = (index >= 0) & (index < x.shape[1])
    picked = x.gather(1, index.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    largest = x.amax(1)
    return largest, (x - largest[:, None]).exp().sum(1), torch.where(mine, picked, 0)


def toy_rows(shards: Any, x: Tensor, target: Tensor, weight: Tensor | None, of: Any) -> Tensor:
    """One look at the logits forward, one backward, and nothing sent there."""
    if of.probabilities or weight is not None or of.smoothing:
        return class_parallel_loss(shards, x, target, weight, of)
    offset = shards.offset(0, of.dim)
    largest, total, picked = shards.map(local_rows, x, target, offset)
    most = shards.reduce(largest, "max")
    total, picked = shards.reduce(torch.stack([total * (largest - most).exp(), picked]), "sum").unbind()
    log_sum, counts = total.log() + most, (target != of.ignore).to(x.dtype)
    index = shards.map(lambda target, offset: target - offset, target, offset)
    rows = shards.map(Rows.apply, x, (log_sum - picked) * counts, log_sum, index, counts)
    return rows if of.reduction == "none" else rows.sum() / (counts.sum() if of.reduction == "mean" else 1)


@pytest.fixture
def ran() -> Counter[str]:
    Rows.ran.clear()
    return Rows.ran


def losses(**options: Any) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    return {
        "function": lambda x, target: F.cross_entropy(x, target, **options),
        "module": lambda x, target: nn.CrossEntropyLoss(**options)(x, target),
    }


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", losses())
def test_a_step_of_a_rule_runs_as_its_kernel_backward_too(name: str, reduction: str, ran: Counter[str]) -> None:
    loss, x, target = losses(reduction=reduction)[name], normal(6, 7), place(TARGET, R)
    plain = x.clone().requires_grad_()
    expected = loss(plain, TARGET)
    expected.sum().backward()
    register_kernel(class_parallel_loss, "cpu")(toy_rows)
    mine = place(x, S(1)).requires_grad_()
    found = loss(mine, target)
    with CommDebugMode() as backward:
        found.sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(mine.grad.full_tensor(), plain.grad)
    assert ran == {"forward": 2, "backward": 2}  # once for each rank of the mesh
    assert backward.get_total_counts() == 0


def test_what_a_kernel_does_not_take_it_leaves_to_the_function(ran: Counter[str]) -> None:
    register_kernel(class_parallel_loss, "cpu")(toy_rows)
    x = normal(6, 7)
    found = F.cross_entropy(place(x, S(1)), place(TARGET, R), label_smoothing=0.1)
    torch.testing.assert_close(found.full_tensor(), F.cross_entropy(x, TARGET, label_smoothing=0.1))
    assert not ran


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_other_devices_have_other_kernels(device: str, ran: Counter[str]) -> None:
    register_kernel(class_parallel_loss, device)(toy_rows)
    x = normal(6, 7)
    found = F.cross_entropy(place(x, S(1)), place(TARGET, R))
    torch.testing.assert_close(found.full_tensor(), F.cross_entropy(x, TARGET))
    assert not ran


def test_a_mesh_without_data_records_what_the_function_communicates(ran: Counter[str]) -> None:
    mesh = sw.recording((4,))
    x = sw.distribute_tensor(torch.empty(6, 8, device="meta"), mesh, [S(1)])
    target = sw.distribute_tensor(torch.empty(6, dtype=torch.long, device="meta"), mesh, [R])
    with CommDebugMode() as before:
        F.cross_entropy(x, target)
    register_kernel(class_parallel_loss, "cpu")(toy_rows)
    with CommDebugMode() as after:
        F.cross_entropy(x, target)
    assert [(c.kind, c.bytes) for c in after.comms] == [(c.kind, c.bytes) for c in before.comms]
    assert not ran


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        assert [type(x) for x in ctx.saved_tensors] == [Tensor]
        return grads[0] * 3


def doubled(x: Tensor, inplace: bool = False) -> Tensor:
    assert type(x) is Tensor
    return Doubled.apply(x)


@pytest.mark.parametrize("simulated", [True, False])
def test_a_function_that_shards_run_as_it_is_runs_as_its_kernel(simulated: bool) -> None:
    register_kernel(F.silu, "cpu")(doubled)
    with fake_mesh(2, names=("a",)) as mesh:
        x = place(normal(4, 3), S(0)) if simulated else sw.distribute_tensor(normal(4, 3), mesh, [S(0)])
        found = F.silu(x.requires_grad_())
        found.sum().backward()
        assert found.placements == (S(0),)
        for shard, result, grad in zip(shards_of(x), shards_of(found), shards_of(x.grad), strict=True):
            assert torch.equal(result, shard * 2)
            assert torch.equal(grad, torch.full_like(shard, 3))


def shards_of(x: sw.DTensor) -> list[Tensor]:
    local = x.detach().to_local()
    return [shard.as_subclass(Tensor) for shard in (local, *getattr(local, "_peers", ()))]


def test_plans_made_before_are_forgotten() -> None:
    x = place(normal(4, 3), S(0))
    before = F.silu(x).full_tensor()
    assert torch.equal(before, F.silu(x.full_tensor()))
    register_kernel(F.silu, "cpu")(doubled)
    assert torch.equal(F.silu(x).full_tensor(), x.full_tensor() * 2)


def test_a_kernel_stands_for_a_function_on_a_device() -> None:
    with pytest.raises(TypeError, match="a kernel stands for a function"):
        register_kernel("silu", "cpu")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
        register_kernel(F.silu, "abacus")
