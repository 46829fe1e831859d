"""Programs of one rank, as functions of its shards: to be traced, and to be run as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import shardwise as sw
from shardwise.comm.functional import traceable
from shardwise.parallel import linear_cross_entropy

R, S = sw.Replicate(), sw.Shard
WIDTH, HEADS, TOKENS = 8, 4, 5

Program = Callable[..., Sequence[Tensor]]


def traced(program: Callable[[Any], Program], mesh: Any) -> Program:
    """A program as it can be traced."""

    def run(*shards: Tensor) -> Sequence[Tensor]:
        with traceable(mesh) as own:
            return program(own)(*shards)

    return run


def leaf(shard: Tensor, mesh: Any, placement: sw.Placement, shape: tuple[int, ...] | None = None) -> sw.DTensor:
    return sw.DTensor.from_local(shard, mesh, [placement], shape=shape).requires_grad_()


def block(mesh: Any) -> Program:
    """A tensor-parallel transformer block, forward and backward: two reductions each way."""

    def run(x: Tensor, scale: Tensor, packed: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Sequence[Tensor]:
        leaves = [
            leaf(t, mesh, p) for t, p in ((x, R), (scale, R), (packed, S(1)), (out, S(1)), (up, S(0)), (down, S(1)))
        ]
        x, scale, packed, out, up, down = leaves
        normed = F.rms_norm(x, (WIDTH,), scale)
        q, k, v = (F.linear(normed, w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in packed)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(heads.transpose(1, 2).flatten(2), out)
        x = x + F.linear(F.gelu(F.linear(F.rms_norm(x, (WIDTH,)), up)), down)
        loss = x.square().mean()
        loss.backward()
        return loss.full_tensor(), *(t.grad.to_local() for t in leaves)

    return run


def sequence_parallel(mesh: Any) -> Program:
    """An MLP between tokens that are sharded unevenly: gathered before it, reduce-scattered after it, and back."""

    def run(x: Tensor, up: Tensor, down: Tensor) -> Sequence[Tensor]:
        x = leaf(x, mesh, S(0), (TOKENS, WIDTH))
        up, down = leaf(up, mesh, S(0)), leaf(down, mesh, S(1))
        hidden = F.linear(F.layer_norm(x, (WIDTH,)).redistribute(placements=[R]), up).relu()
        loss = (x + F.linear(hidden, down).redistribute(placements=[S(0)])).square().sum()
        grads = torch.autograd.grad(loss, (x, up, down))
        return loss.full_tensor(), *(grad.to_local() for grad in grads)

    return run


def on_two_axes(mesh: Any) -> Program:
    """A loss over a batch and over features at once: one reduction in a group of both axes."""

    def run(x: Tensor) -> Sequence[Tensor]:
        laid_out = sw.DTensor.from_local(x, mesh, [S(0), S(1)])
        return [laid_out.square().sum().full_tensor()]

    return run


def exchanged(mesh: Any) -> Program:
    """Rows to columns and back; and a maximum over ranks, of the terms that they have."""

    def run(x: Tensor) -> Sequence[Tensor]:
        x = leaf(x, mesh, S(0), (TOKENS, WIDTH))
        columns = x.redistribute(placements=[S(1)]).exp()
        (grad,) = torch.autograd.grad(columns.sum(), x)
        return (
            columns.to_local(),
            grad.to_local(),
            (x > 0).redistribute(placements=[R]).to_local(),
            x.detach().amax().full_tensor(),
        )

    return run


def stepped(mesh: Any) -> Program:
    """A step of momentum, written to the shards in place by functions of lists."""

    def run(x: Tensor, weight: Tensor, momentum: Tensor) -> Sequence[Tensor]:
        weight = leaf(weight, mesh, S(0))
        momentum = sw.DTensor.from_local(momentum, mesh, [S(0)])
        F.linear(sw.DTensor.from_local(x, mesh, [R]), weight).square().sum().backward()
        with torch.no_grad():
            torch._foreach_mul_([momentum], 0.9)
            torch._foreach_add_([momentum], [weight.grad])
            torch._foreach_add_([weight], [momentum], alpha=-0.1)
        return weight.to_local(), momentum.to_local()

    return run


def losses(mesh: Any) -> Program:
    """Losses over a sharded vocabulary: of logits, and of a head in two chunks."""

    def run(x: Tensor, head: Tensor, target: Tensor) -> Sequence[Tensor]:
        x, head = leaf(x, mesh, R), leaf(head, mesh, S(0))
        target = sw.DTensor.from_local(target, mesh, [R])
        options = {"label_smoothing": 0.1, "ignore_index": 1}
        of_logits = F.cross_entropy(F.linear(x, head), target, **options)
        of_head = linear_cross_entropy(x, head, target, z_loss=0.1, chunk_size=TOKENS - 1, **options)
        grads = [*torch.autograd.grad(of_logits, (x, head)), *torch.autograd.grad(of_head, (x, head))]
        return of_logits.full_tensor(), of_head.full_tensor(), *(grad.to_local() for grad in grads)

    return run


PROGRAMS: dict[str, tuple[Callable[[Any], Program], dict[str, int]]] = {
    "block": (block, {"all_reduce": 4}),
    "sequence_parallel": (
        sequence_parallel,
        {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 1},
    ),
    "exchanged": (exchanged, {"all_to_all_single": 2, "all_gather_into_tensor": 1, "all_reduce": 1}),
    "stepped": (stepped, {}),
    "losses": (losses, {"all_reduce": 4, "all_gather_into_tensor": 2}),
}
"""With what each communicates."""


def shards(name: str, rank: int, ranks: int) -> list[Tensor]:
    """What one rank has of a program's arguments."""
    torch.manual_seed(0)
    rows = torch.randn(TOKENS, WIDTH).chunk(ranks)[rank].clone()
    up, down = (
        torch.randn(4 * WIDTH, WIDTH).chunk(ranks)[rank].clone(),
        torch.randn(WIDTH, 4 * WIDTH).chunk(ranks, 1)[rank].clone(),
    )
    if name == "block":
        packed, out = (
            torch.randn(3, WIDTH, WIDTH).chunk(ranks, 1)[rank].clone(),
            torch.randn(WIDTH, WIDTH).chunk(ranks, 1)[rank].clone(),
        )
        return [torch.randn(2, TOKENS, WIDTH), torch.randn(WIDTH), packed, out, up, down]
    if name == "losses":
        return [torch.randn(TOKENS, WIDTH), up, torch.tensor([0, 7, 1, 31, 16])]
    if name == "stepped":
        return [torch.randn(TOKENS, WIDTH), up, torch.randn(4 * WIDTH // ranks, WIDTH)]
    return [rows, up, down] if name == "sequence_parallel" else [rows]


def collectives(graph: GraphModule) -> dict[str, int]:
    names = [node.target.__name__.split(".")[0] for node in graph.graph.nodes if "c10d" in str(node.target)]
    return dict(Counter(name for name in names if name != "wait_tensor"))
