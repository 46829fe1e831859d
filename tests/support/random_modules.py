"""Random models, sharded at random places with random options, trained beside one device."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.parallel import FSDPModule, fully_shard, no_sync

WIDTH = 5


class Node(nn.Module):
    """A module of parts in sequence, each of which may be called twice, skipped, checkpointed, or have its result
    detached; and of parameters of its own."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.leaf = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7)
        parts = [Node(draw, depth - 1) for _ in range(draw.randint(1, 3))] if depth else []
        self.parts = nn.ModuleList(parts)
        self.kinds = [draw.choice(["once", "once", "twice", "checkpoint", "skipped", "detached"]) for _ in parts]
        for p in self.leaf.parameters():
            p.requires_grad_(draw.random() < 0.8)
        if draw.random() < 0.3:
            self.leaf.weight.requires_grad_(False)
            self.scale.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.leaf(x)) * self.scale
        for part, kind in zip(self.parts, self.kinds, strict=True):
            if kind == "twice":
                x = part(x) + part(x)
            elif kind == "checkpoint":
                x = x + checkpoint(part, x, use_reentrant=False)
            elif kind == "detached":
                x = x + part(x).detach()
            elif kind == "once":
                x = part(x)
        return x


def without_checkpoints_in_checkpoints(node: Node, inside: bool = False) -> None:
    """The simulator's local tensors know none (tests/multiprocess/test_fully_sharded.py has some)."""
    node.kinds = ["once" if inside and kind == "checkpoint" else kind for kind in node.kinds]
    for part, kind in zip(node.parts, node.kinds, strict=True):
        without_checkpoints_in_checkpoints(part, inside or kind == "checkpoint")


def shard_at_random(net: nn.Module, draw: random.Random, mesh: Any) -> None:
    def place(p: nn.Parameter) -> sw.Shard | None:
        return sw.Shard(p.dim() - 1) if last else None

    last = draw.random() < 0.3
    for module in reversed(list(net.modules())):
        if module is net or (isinstance(module, Node) and draw.random() < 0.6):
            freed = draw.choice([None, True, False])
            fully_shard(module, mesh=mesh, reshard_after_forward=freed, shard_placement_fn=place)


def train(seed: int, mesh: Any, own: bool, is_simulated: bool = True) -> None:
    """Three steps of a random model, of one to three backward passes each."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    plain = Node(draw, depth=draw.randint(1, 3)).double()
    plain.scale.requires_grad_()
    if own and is_simulated:
        without_checkpoints_in_checkpoints(plain)
    net = copy.deepcopy(plain)
    shard_at_random(net, draw, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, net)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        num_passes, by_flag = draw.randint(1, 3), draw.random() < 0.5
        for i in range(num_passes):
            x, is_last = torch.randn(12, WIDTH).double(), i == num_passes - 1
            plain(x).square().mean().backward()
            data = sw.distribute_tensor(x, mesh, [sw.Shard(0)] * mesh.ndim)
            if by_flag:
                net.set_requires_gradient_sync(is_last)
            with nullcontext() if by_flag else no_sync(enabled=not is_last):
                net(data.to_local() if own else data).square().mean().backward()
        check(net, plain, seed)
        for optimizer in optimizers:
            optimizer.step()


def check(net: nn.Module, plain: nn.Module, seed: int) -> None:
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), (seed, name)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=lambda m, n=name: f"{seed}, {n}: {m}")
    groups = {module._group for module in net.modules() if isinstance(module, FSDPModule)}
    assert not any(x.untyped_storage().size() for g in groups for entry in g.entries for x in entry.wholes), seed
