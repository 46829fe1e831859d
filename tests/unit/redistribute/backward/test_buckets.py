"""Data parallelism: gradients of replicated parameters are reduced together, while the backward pass goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.redistribute.backward import buckets

R, S = sw.Replicate(), sw.Shard


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), nn.Linear(6, 3)).double()


def batch(rows: int = 8) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, 6, dtype=torch.float64)


def data_parallel(mesh: Any) -> tuple[nn.Module, Any]:
    module = sw.distribute_module(model(), mesh)
    return module, sw.distribute_tensor(batch(), mesh, [S(0)] + [R] * (mesh.ndim - 1))


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.full_tensor() if isinstance(p.grad, sw.DTensor) else p.grad for p in module.parameters()]  # type: ignore[misc]


def same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for mine, theirs in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_one_collective_for_all_parameters() -> None:
    ours, x = data_parallel(sw.simulate((4,)))
    with CommDebugMode() as comms:
        loss = ours(x).square().mean()
        loss.backward()
    plain = model()
    plain(batch()).square().mean().backward()
    same_gradients(ours, plain)
    (comm,) = [c for c in comms.comms if c.backward]
    assert (comm.kind, comm.bytes) == ("all_reduce", sum(p.nbytes for p in plain.parameters()))
    assert comm.function == "F.linear" and comm.argument == "argument 2 (bias) and 13 others"
    assert comm.why == "gradient of a replicated tensor used on shards"


def test_a_full_bucket_does_not_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST", 600)
    monkeypatch.setattr(buckets, "LARGEST", 1200)
    ours, x = data_parallel(sw.simulate((2,)))
    with CommDebugMode() as comms:
        hidden = ours[0](x)  # type: ignore[index]
        loss = ours[1:](hidden).square().mean()  # type: ignore[index]
        forward, by_then = len(comms.comms), []
        hidden.register_hook(lambda grad: by_then.append(len(comms.comms) - forward))
        loss.backward()
    assert 0 < by_then[0] < len(comms.comms) - forward
    plain = model()
    plain(batch()).square().mean().backward()
    same_gradients(ours, plain)


def test_buckets_are_of_one_dtype_and_one_group() -> None:
    mesh = sw.simulate((2, 2), ("dp", "tp"))
    wide = nn.Parameter(sw.distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, [R, R]))
    narrow = nn.Parameter(sw.distribute_tensor(torch.ones(4), mesh, [R, R]))
    both = nn.Parameter(sw.distribute_tensor(torch.ones(4), mesh, [R, R]))
    x = sw.distribute_tensor(torch.ones(8, 4), mesh, [S(0), R])
    y = sw.distribute_tensor(torch.ones(8, 4), mesh, [S(0), S(0)])
    with CommDebugMode() as comms:
        ((x * narrow).sum() + (x.double() * wide).sum() + (y * both).sum()).backward()
    reduced = sorted((c.axes, c.bytes) for c in comms.comms if c.backward)
    assert reduced == [(("dp",), 16), (("dp",), 32), (("dp", "tp"), 16)]


Use = Callable[[nn.Module, Any], Tensor]


def _used_otherwise_too(module: Any, x: Any) -> Tensor:
    return module(x).square().mean() + module[0].up.weight.square().sum()  # needs no reduction


def _used_twice(module: Any, x: Any) -> Tensor:
    return module(module[0](x)).square().mean()


def _recomputed(module: Any, x: Any) -> Tensor:
    return checkpoint(module, x, use_reentrant=False).square().mean()  # type: ignore[union-attr]


def _recomputed_in_a_pass_of_its_own(module: Any, x: Any) -> Tensor:
    return checkpoint(module, x.requires_grad_(), use_reentrant=True).square().mean()  # type: ignore[union-attr]


def _not_reached(module: Any, x: Any) -> Tensor:
    return module[2](module[0](x)).square().mean()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    "use", [_used_otherwise_too, _used_twice, _recomputed, _recomputed_in_a_pass_of_its_own, _not_reached]
)
def test_two_steps(use: Use, to_none: bool) -> None:
    ours, x = data_parallel(sw.simulate((4,)))
    plain = model()
    for module, rows in ((ours, x), (plain, batch())):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=to_none)
            use(module, rows).backward()
            optimizer.step()
        use(module, rows).backward()  # adds to what there is
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        torch.testing.assert_close(mine.full_tensor(), theirs.data)  # type: ignore[attr-defined]
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]


def _on_the_tensor(p: nn.Parameter, seen: list) -> None:
    p.register_hook(lambda grad: seen.append(grad))


def _after_accumulation(p: nn.Parameter, seen: list) -> None:
    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))


@pytest.mark.parametrize("watch", [_on_the_tensor, _after_accumulation])
def test_who_looks_at_a_gradient_sees_the_finished_one(watch: Callable) -> None:
    ours, x = data_parallel(sw.simulate((2,)))
    plain = model()
    found: list[list[Tensor]] = [[], []]
    for module, rows, seen in ((ours, x, found[0]), (plain, batch(), found[1])):
        watch(module[0].up.weight, seen)  # type: ignore[index, union-attr]
        module(rows).square().mean().backward()
    assert len(found[0]) == len(found[1]) == 1
    mine = found[0][0]
    torch.testing.assert_close(mine.full_tensor() if isinstance(mine, sw.DTensor) else mine, found[1][0])
    same_gradients(ours, plain)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("in the middle")


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    ours, x = data_parallel(sw.simulate((2,)))
    with pytest.raises(RuntimeError, match="in the middle"):
        ours[1:](_Failing.apply(ours[0](x))).square().mean().backward()  # type: ignore[index]
    assert all(p.grad is None for p in ours.parameters()) and not buckets._passes
    ours(x).square().mean().backward()
    plain = model()
    plain(batch()).square().mean().backward()
    same_gradients(ours, plain)


def test_a_loss_that_is_plain() -> None:
    ours, x = data_parallel(sw.simulate((2,)))
    ours(x).square().mean().full_tensor().backward()  # type: ignore[attr-defined]
    plain = copy.deepcopy(model())
    plain(batch()).square().mean().backward()
    same_gradients(ours, plain)


def test_weights_and_batch_sharded_on_one_axis() -> None:
    mesh = sw.simulate((2,))
    ours, plain = model(), model()
    for part in ours.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            part.register_parameter(name, nn.Parameter(sw.distribute_tensor(p.data, mesh, [S(0)])))
    ours(sw.distribute_tensor(batch(), mesh, [S(0)])).square().mean().backward()
    plain(batch()).square().mean().backward()
    same_gradients(ours, plain)
    assert {p.grad.placements for p in ours.parameters()} == {(S(0),)}  # type: ignore[union-attr]
