"""Random programs whose gradients have replicas. These must be equal to the last bit: what one rank rounds otherwise
than another stays different from then on, and parameters drift apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from bodies import P, R, S, per_rank

STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: torch.tanh(a) * b,
    lambda a, b: a @ b,
    lambda a, b: a.t() @ b,
    lambda a, b: a @ a + b,
    lambda a, b: F.linear(a, b, b[0]),
    lambda a, b: F.normalize(a, dim=0) + b,
    lambda a, b: a.softmax(1) * b,
    lambda a, b: F.layer_norm(a, (8,)) + b.sin(),
    lambda a, b: F.rms_norm(a, (8,), b[0]),
    lambda a, b: a.cumsum(0) * b.mean(),
    lambda a, b: a.norm() * b,
    lambda a, b: a.logsumexp(1, keepdim=True) + b,
    lambda a, b: torch.cat([a, b])[4:12],
    lambda a, b: F.gelu(a) - b.std(0),
]


def drawn(seed: int, mesh: Any) -> list[sw.DTensor]:
    """The gradients of the leaves of a program, which is the same for the same seed."""
    chance = random.Random(seed)
    num_axes = mesh.ndim
    leaves = []
    for at in range(3):
        value = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * seed + at))
        placements = [chance.choice((R, R, S(0), S(1), P)) for _ in range(num_axes)]
        leaves.append(sw.distribute_tensor(value, mesh, placements).requires_grad_())
    values: list[Any] = list(leaves)
    for _ in range(chance.randint(3, 8)):
        made = chance.choice(STEPS)(chance.choice(values), chance.choice(values))
        if chance.random() < 0.2:
            made = made.redistribute(placements=[chance.choice((R, S(0), S(1))) for _ in range(num_axes)])
        values.append(made)
    losses = [(value * value.detach().cos()).mean() for value in values[-3:]]
    torch.autograd.backward(losses)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def leaf(mesh: Any, seed: int, shape: tuple[int, ...], placement: sw.Placement) -> Any:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return sw.distribute_tensor(value, mesh, [placement] * mesh.ndim).requires_grad_()


def biases(mesh: Any) -> list[sw.DTensor]:
    """A bias of two row-parallel layers, used by itself in between. It counts once, on one rank, and the graphs of the
    others must be like that rank's."""
    x, weight, bias = leaf(mesh, 0, (64, 8), S(1)), leaf(mesh, 1, (8, 8), S(1)), leaf(mesh, 2, (8,), R)
    first = F.linear(x, weight, bias)
    between = bias.sin()
    second = F.linear(x * 3, weight, bias)
    torch.autograd.backward([(y * y.detach().cos()).sum() for y in (first, between, second)])
    return [bias.grad]


def wide_bias(mesh: Any) -> list[sw.DTensor]:
    """A bias too long for zeros to be written lightly, with a gradient that is transposed: however the ranks that do
    not count it are given one, they must add its gradient up in the same order."""
    x, weight, bias = leaf(mesh, 0, (7, 2, 4), S(2)), leaf(mesh, 1, (66_000, 4), S(1)), leaf(mesh, 2, (66_000,), R)
    out = F.linear(x, weight, bias).transpose(0, 1).contiguous()
    (out * out.detach().cos()).sum().backward()
    return [bias.grad]


def strided_bias(mesh: Any) -> list[sw.DTensor]:
    """The same of one that is not contiguous where it counts."""
    x, weight, pairs = leaf(mesh, 0, (7, 2, 4), S(2)), leaf(mesh, 1, (6, 4), S(1)), leaf(mesh, 2, (6, 2), R)
    out = F.linear(x, weight, pairs.unbind(1)[0]).transpose(0, 1).contiguous()
    (out * out.detach().cos()).sum().backward()
    return [pairs.grad]


def bias_of_a_convolution(mesh: Any) -> list[sw.DTensor]:
    """Of two channels: where there are more ranks, some have no filters, and only add the bias."""
    x, weight, bias = leaf(mesh, 0, (9, 2, 7, 5), R), leaf(mesh, 1, (3, 2, 2, 2), S(1)), leaf(mesh, 2, (3,), R)
    F.conv2d(x, weight, bias, padding=1, dilation=2).tanh().sum().backward()
    return [bias.grad]


def bias_on_thin_inputs(mesh: Any) -> list[sw.DTensor]:
    """Inputs are strided where there is something of them, and contiguous on ranks that hold nothing."""

    def part(*shape: int) -> Tensor:
        whole = torch.randn(*shape, 4, generator=torch.Generator().manual_seed(3))
        return per_rank(mesh, lambda at: whole[..., : 4 * (sum(at) == 1)].clone())

    x, weight = (sw.DTensor.from_local(y, mesh, [S(y.dim() - 1)], run_check=True) for y in (part(5, 7), part(6)))
    bias = leaf(mesh, 2, (6,), R)
    out = F.linear(x.transpose(0, 1), weight, bias).permute(1, 2, 0).contiguous()
    (out * out.detach().cos()).sum().backward()
    return [bias.grad]


def replicas(found: sw.DTensor, held: Sequence[Tensor], everywhere: Sequence[tuple[int, ...]]) -> list[list[Tensor]]:
    """The shards of a tensor, those that are replicas of each other together."""
    layout, groups = found.layout_on_mesh, {}
    for coordinate, shard in zip(everywhere, held, strict=True):
        groups.setdefault(layout.box(coordinate), []).append(shard)
    return list(groups.values())
