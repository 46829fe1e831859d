"""Losses over a sharded vocabulary on a CUDA device, by Triton's programs: against plain torch there, on a simulated
mesh and among several ranks that share the device over Gloo. Skipped where there is no such device."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from launch import run_ranks
from shardwise.parallel import cross_entropy, linear_cross_entropy
from shardwise.rules.rows import device_kernels, row_passes

sys.path.append(str(Path(__file__).parents[1] / "support"))  # the ranks import this file without pytest's settings
from compare import beside, compare
from losses import with_logits, with_slopes, written_out
from saved import fake_mesh, on_cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]

R, S = sw.Replicate(), sw.Shard
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
over_reductions = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to("cuda", dtype)


def mesh_of(*shape: int) -> Any:
    return sw.simulate(shape, ("a", "b")[: len(shape)], device="cuda")


def test_kernels_are_offered() -> None:
    assert row_passes.keeps_logits("cuda")
    assert sum(map(len, device_kernels.WRITTEN_IN_TRITON.values())) == 9


@over_reductions
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("width", [75, 40000], ids=["short rows", "long rows"])
def test_losses_of_every_option(reduction: str, smoothing: float, width: int) -> None:
    """Value, gradient and second gradient."""
    x, class_weights = normal(5, width), normal(width).abs()
    target = torch.tensor([1, width - 1, 0, 2, 1], device="cuda")
    for (mesh, where), ignore, weight, z_loss in itertools.product(
        (((2,), [S(1)]), ((4,), [S(1)]), ((2, 2), [S(0), S(1)])), (-100, 1), (None, R, S(0)), (0.0, 0.3)
    ):
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore, "z_loss": z_loss}

        def loss(x: Tensor, target: Tensor, options: Any = options, weight: Any = weight) -> Tensor:
            sharded = isinstance(x, sw.DTensor)
            spread = [weight if weight is not None and p == S(1) else R for p in x.placements] if sharded else []
            given = None if weight is None else beside(x, class_weights, *spread)
            return (cross_entropy if sharded else written_out)(x, target, given, **options)

        rows = [p if p == S(0) else R for p in where]
        compare(with_slopes(loss), [x, target], mesh_of(*mesh), [where, rows], **TOLERANCE)


@pytest.mark.parametrize("shape", [(3, 70, 4), (2, 300, 3, 5), (33,), (7, 1)], ids=str)
def test_rows_of_any_dims(shape: tuple[int, ...]) -> None:
    dim = min(1, len(shape) - 1)
    rows = shape[:dim] + shape[dim + 1 :]
    target = (torch.arange(torch.Size(rows).numel(), device="cuda") % shape[dim]).view(rows)
    loss = with_slopes(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1))
    compare(loss, [normal(*shape), target], mesh_of(2), [[S(dim)], [R]], **TOLERANCE)
    for function in (F.softmax, F.log_softmax):
        both = with_slopes(lambda x, function=function: function(x, dim))
        compare(both, [normal(*shape)], mesh_of(2), [[S(dim)]], atol=2e-3, rtol=2e-3)


def test_logits_of_any_strides() -> None:
    target = torch.tensor([1, 70, 0], device="cuda")
    for view in (lambda x: x[::2], lambda x: x[:3, 11:86], lambda x: x.t().contiguous().t()[:3]):
        whole = normal(6, 90).requires_grad_()
        d = sw.DTensor.from_local(whole, mesh_of(1), [R]).requires_grad_()
        expected = F.cross_entropy(view(whole), target)
        found = cross_entropy(view(d), sw.distribute_tensor(target, mesh_of(1)), z_loss=1e-30)
        torch.testing.assert_close(found.full_tensor(), expected)
        (of_plain,), (ours,) = torch.autograd.grad(expected, whole), torch.autograd.grad(found, d)
        torch.testing.assert_close(ours.full_tensor(), of_plain)


@over_reductions
def test_a_head_and_its_loss(reduction: str) -> None:
    target = (torch.arange(80, device="cuda") % 75).view(2, 40)
    x, layer, rows = normal(2, 40, 16) * 0.3, normal(75, 16) * 0.3, {"none": 10, "sum": 80, "mean": 1}[reduction]

    def loss(x: Tensor, layer: Tensor, target: Tensor) -> Tensor:
        options = {"label_smoothing": 0.1, "ignore_index": 8, "z_loss": 0.1, "reduction": reduction}
        if not isinstance(x, sw.DTensor):
            return with_logits(x, layer, target, **options) / rows
        return linear_cross_entropy(x, layer, target, chunk_size=12, **options) / rows

    for mesh, *where in (
        ((2,), [R], [S(0)], [R]),
        ((2,), [S(1)], [S(0)], [S(1)]),
        ((2, 2), [S(0), S(1)], [R, S(0)], [S(0), S(1)]),
    ):
        compare(with_slopes(loss, 2), [x, layer, target], mesh_of(*mesh), where, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_errors_in_half_precision_are_no_larger_than_torch_s(dtype: torch.dtype) -> None:
    x, target = (normal(256, 4000) * 4).to(dtype), torch.arange(256, device="cuda")
    x[torch.arange(64), target[:64]] += 30  # rows that are sure of their target
    exact, plain = x.double().requires_grad_(), x.clone().requires_grad_()
    losses = [F.cross_entropy(leaf, target, reduction="sum") for leaf in (exact, plain)]
    for loss in losses:
        loss.backward()
    d = sw.distribute_tensor(x, mesh_of(2), [S(1)]).requires_grad_()
    ours = F.cross_entropy(d, sw.distribute_tensor(target, mesh_of(2)), reduction="sum")
    ours.backward()
    assert (ours.full_tensor() - losses[0]).abs() <= (losses[1] - losses[0]).abs() + torch.finfo(dtype).eps * losses[0]
    errors = [(g.double() - exact.grad).abs() for g in (d.grad.full_tensor(), plain.grad)]
    assert errors[0].max() <= errors[1].max() and errors[0].mean() <= errors[1].mean()


def test_layers_gradients_added_up_in_single_precision() -> None:
    x, layer, target = normal(512, 64), normal(48, 64), torch.arange(512, device="cuda") % 48
    found = []
    for dtype, options in ((torch.float64, {}), (torch.bfloat16, {}), (torch.bfloat16, {"acc_dtype": torch.float32})):
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (x, layer)]
        linear_cross_entropy(*leaves, target, chunk_size=32, **options).backward()
        found.append(leaves[1].grad.double())
    errors = [(ours - found[0]).norm() / found[0].norm() for ours in found[1:]]
    assert errors[1] < errors[0] and errors[1] < 8e-3


def test_targets_out_of_bounds_are_asserted_on_the_device() -> None:
    """In a process of its own: the device is of no more use to it."""
    with pytest.raises(AssertionError, match=r"device-side assert|Assertion"):
        run_ranks(out_of_bounds, 1, timeout=120)


def out_of_bounds(rank: int, size: int) -> None:
    x = sw.distribute_tensor(normal(4, 10), mesh_of(2), [S(1)])
    F.cross_entropy(x, sw.distribute_tensor(torch.full((4,), 10, device="cuda"), mesh_of(2)))
    torch.cuda.synchronize()


# Memory


@pytest.fixture
def share() -> Iterator[Any]:
    with fake_mesh(8, names=("tp",), device="cuda", rank=1) as mesh:
        yield mesh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extra_memory_is_the_gradient_or_nothing(dtype: torch.dtype, share: Any) -> None:
    rows, classes = 2048, 8 * 8192
    leaf = torch.randn(rows, classes // 8, device="cuda").to(dtype).requires_grad_()
    target = sw.DTensor.from_local(torch.randint(classes, (rows,), device="cuda"), share, [R])
    for inplace, limit in ((False, 1.05), (True, 0.05)):

        def step(inplace: bool = inplace) -> None:
            logits = sw.DTensor.from_local(Result.apply(leaf), share, [S(1)], shape=(rows, classes))
            cross_entropy(logits, target, inplace_backward=inplace).backward()

        for _ in range(2):
            leaf.grad = None
            step()
        leaf.grad = None
        _, peak = on_cuda(step)
        assert peak <= limit * leaf.nbytes, f"{peak / leaf.nbytes:.3f} times the logits"


class Result(torch.autograd.Function):
    """The same memory as a result that nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# Several ranks on one device


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
def test_among_ranks(shape: tuple[int, ...]) -> None:
    run_ranks(among_ranks, torch.Size(shape).numel(), shape, timeout=300)


def among_ranks(rank: int, size: int, shape: tuple[int, ...]) -> None:
    """Every option, on meshes of real ranks: values, gradients, and that replicas are equal to the last bit."""
    torch.cuda.set_device(0)
    mesh = sw.init_device_mesh("cuda", shape, mesh_dim_names=("a", "b")[: len(shape)])
    where = [S(1)] if len(shape) == 1 else [S(0), S(1)]
    rows = [p if p == S(0) else R for p in where]
    x, weight = normal(6, 75), normal(75).abs()
    target = torch.tensor([1, 74, 0, 2, 1, 40], device="cuda")
    for reduction, smoothing, z_loss, weighted in itertools.product(
        ("none", "mean", "sum"), (0.0, 0.1), (0.0, 0.3), (False, True)
    ):
        options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 2, "z_loss": z_loss}
        plain, d = x.clone().requires_grad_(), sw.distribute_tensor(x, mesh, where).requires_grad_()
        expected = written_out(plain, target, weight if weighted else None, **options)
        given = sw.distribute_tensor(weight, mesh) if weighted else None
        found = cross_entropy(d, sw.distribute_tensor(target, mesh, rows), given, **options)
        torch.testing.assert_close(found.full_tensor(), expected, **TOLERANCE)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(d.grad.full_tensor(), plain.grad, **TOLERANCE)
    hidden, layer = normal(6, 8).requires_grad_(), normal(75, 8).requires_grad_()
    ours = [
        sw.distribute_tensor(hidden.detach(), mesh, rows).requires_grad_(),
        sw.distribute_tensor(layer.detach(), mesh, [S(0) if p == S(1) else R for p in where]).requires_grad_(),
    ]
    linear_cross_entropy(*ours, sw.distribute_tensor(target, mesh, rows), chunk_size=2).backward()
    with_logits(hidden, layer, target).backward()
    for a, b in zip(ours, (hidden, layer), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, **TOLERANCE)
