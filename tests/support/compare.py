"""Run a function on plain tensors and on DTensors in many layouts, and compare values and gradients."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import shardwise as sw


def axis_placements(tensor: Tensor, partial: bool = True) -> list[sw.Placement]:
    """Every placement of a tensor along one axis that a user may write."""
    found: list[sw.Placement] = [sw.Replicate(), *(sw.Shard(d) for d in range(tensor.dim()))]
    if partial and tensor.is_floating_point():
        found.append(sw.Partial())
    return found


def all_layouts(
    tensors: Sequence[Tensor], num_axes: int, partial: bool = True
) -> Iterable[tuple[tuple[sw.Placement, ...], ...]]:
    """Every combination of placements of some tensors on a mesh of `num_axes` axes."""
    per_tensor = [itertools.product(axis_placements(t, partial), repeat=num_axes) for t in tensors]
    return itertools.product(*(list(options) for options in per_tensor))


def as_tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [t for item in out for t in as_tensors(item)]
    return []


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, sw.DTensor) else x


def beside(t: Tensor, value: Tensor, *placements: sw.Placement) -> Tensor:
    """`value` as it must be to meet `t` in a call: as it is, or on the mesh of `t`, replicated unless told."""
    return sw.distribute_tensor(value, t.device_mesh, placements or None) if isinstance(t, sw.DTensor) else value


def compare(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    mesh: Any,
    placements: Sequence[Sequence[sw.Placement]],
    *,
    backward: bool = True,
    atol: float = 1e-9,
    rtol: float = 1e-7,
) -> list[Any]:
    """`function` on DTensors must give what it gives on plain tensors; so must the gradients of a weighted sum.

    How it gets there is not judged: what must not gather says so in strict mode.
    """
    plain = [t.detach().clone().requires_grad_(t.is_floating_point() and backward) for t in inputs]
    dist = []
    for t, where in zip(inputs, placements, strict=True):
        d = sw.distribute_tensor(t, mesh, where)
        dist.append(d.requires_grad_(t.is_floating_point() and backward))
    expected = as_tensors(function(*plain))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.errors.FallbackWarning)
        actual = as_tensors(function(*dist))
    context = f"{[str(d._layout) for d in dist]}"
    assert len(expected) == len(actual), context
    for e, a in zip(expected, actual, strict=True):
        assert isinstance(a, sw.DTensor), f"not a DTensor: {type(a)} {context}"
        assert e.shape == a.shape, f"shape {a.shape} != {e.shape} {context}"
        check_shards(a)
        torch.testing.assert_close(
            full(a.detach()),
            e.detach(),
            atol=atol,
            rtol=rtol,
            equal_nan=True,
            msg=lambda m, a=a: f"value: {context} -> {a._layout}\n{m}",
        )
    differentiable = [i for i, e in enumerate(expected) if e.requires_grad]
    if not backward or not differentiable:
        return actual
    weights = [torch.randn_like(expected[i]) for i in differentiable]
    loss = sum((expected[i] * w).sum() for i, w in zip(differentiable, weights, strict=True))
    dist_loss = 0
    for i, w in zip(differentiable, weights, strict=True):
        dist_loss = dist_loss + (actual[i] * sw.distribute_tensor(w, mesh)).sum()
    loss.backward()
    dist_loss.backward()
    for p, d in zip(plain, dist, strict=True):
        if p.grad is None:
            assert d.grad is None or not full(d.grad).any(), context
            continue
        assert d.grad is not None, f"no gradient {context}"
        check_shards(d.grad)
        torch.testing.assert_close(
            full(d.grad), p.grad, atol=atol, rtol=rtol, equal_nan=True, msg=lambda m: f"gradient: {context}\n{m}"
        )
    return actual


def check_shards(x: sw.DTensor) -> None:
    """Every shard has the shape its layout says, and ranks that must agree do."""
    layout = x._layout
    with torch._C.DisableTorchFunctionSubclass():
        shards = (x, *x.__dict__.get("_peers", ()))
        shapes = [tuple(torch._C.TensorBase.size(s)) for s in shards]
        assert shapes == list(layout.held_shapes), f"shards {shapes} do not fit {layout}"
        seen: dict[Any, Tensor] = {}
        for coordinate, shard in zip(layout.mesh.held, shards, strict=True):
            key = (layout.box(coordinate), tuple(c for c, p in zip(coordinate, layout.pending, strict=True) if p))
            if key in seen:
                assert torch.equal(seen[key], shard) or torch.allclose(seen[key], shard, equal_nan=True), (
                    f"replicas differ: {layout}"
                )
            else:
                seen[key] = shard.detach()


def check_grad(x: sw.DTensor, plain: Tensor) -> None:
    """The gradient of a DTensor is that of the plain tensor."""
    check_shards(x.grad)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
