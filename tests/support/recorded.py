"""Programs of two mesh axes whose communication must be the same on every port, and what a port records of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from programs import facts
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.comm import as_mesh
from shardwise.debug import CommDebugMode

R, S = sw.Replicate(), sw.Shard
PROGRAMS: dict[str, Callable[[Any], None]] = {}


def program(function: Callable[[Any], None]) -> Callable[[Any], None]:
    PROGRAMS[function.__name__] = function
    return function


def recorded(name: str, mesh: Any) -> list[tuple[Any, ...]]:
    """What a program communicates on a mesh."""
    torch.manual_seed(0)
    with CommDebugMode() as comm, torch.device(as_mesh(mesh).device_type):
        PROGRAMS[name](mesh)
    return list(map(facts, comm.comms))


def lay(model: nn.Module, mesh: Any, *ways: tuple[str, list[sw.Placement]]) -> nn.Module:
    """The parameters in the placements of the first name that they end with, else replicated."""

    def place(_: str, module: nn.Module, mesh: Any) -> None:
        prefix = next(name for name, other in model.named_modules() if other is module)
        for name, p in list(module.named_parameters(recurse=False)):
            found = next((where for end, where in ways if f"{prefix}.{name}".endswith(end)), [R, R])
            module.register_parameter(name, nn.Parameter(sw.distribute_tensor(p.detach(), mesh, found)))

    return sw.distribute_module(model, mesh, place)


def batch(mesh: Any, *shape: int) -> Tensor:
    return sw.distribute_tensor(torch.randn(shape), mesh, [S(0), R])


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.after = nn.RMSNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        size, tokens, width = x.shape
        h = self.before(x)
        q, k, v = (f(h).view(size, tokens, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        x = x + F.dropout(self.out(mixed.view(size, tokens, width)), self.dropout)
        return x + self.down(F.gelu(self.up(self.after(x))))


MEGATRON: list[tuple[str, list[sw.Placement]]] = [
    *((f"{name}.{kind}", [R, S(0)]) for name in ("q", "k", "v", "up") for kind in ("weight", "bias")),
    *((f"{name}.weight", [R, S(1)]) for name in ("out", "down")),
]


@program
def a_block_with_one_head_per_rank(mesh: Any) -> None:
    model = lay(Block(8, 2), mesh, *MEGATRON)
    model(batch(mesh, 4, 6, 8)).square().mean().backward()


@program
def dropout_and_checkpoints(mesh: Any) -> None:
    model = lay(Block(8, 4, dropout=0.1), mesh, *MEGATRON)
    x = batch(mesh, 4, 6, 8).requires_grad_()
    for reentrant in (True, False):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()


@program
def a_step_of_adamw(mesh: Any) -> None:
    model = lay(Block(8, 4), mesh, *MEGATRON)
    optimizer = optim.AdamW(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch(mesh, 4, 6, 8)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.device("cpu"):  # where the steps are counted: before torch 2.13, on the default device
            optimizer.step()


@program
def attention(mesh: Any) -> None:
    model = lay(nn.MultiheadAttention(8, 2, batch_first=True), mesh, ("out_proj.weight", [R, S(1)]))
    x = batch(mesh, 4, 6, 8).requires_grad_()
    model(x, x, x, need_weights=False)[0].square().sum().backward()


@program
def an_encoder(mesh: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = lay(layer, mesh, ("linear1.weight", [R, S(0)]), ("linear1.bias", [R, S(0)]), ("linear2.weight", [R, S(1)]))
    model(batch(mesh, 4, 6, 8)).square().sum().backward()


@program
def a_convolutional_net(mesh: Any) -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 5)),
    )
    lay(model, mesh, ("0.weight", [R, S(0)]), ("0.bias", [R, S(0)]), ("7.weight", [R, S(1)]))
    x = sw.distribute_tensor(torch.randn(5, 3, 8, 8), mesh, [S(0), R])  # uneven: three and two
    F.cross_entropy(model(x), sw.distribute_tensor(torch.arange(5), mesh, [S(0), R])).backward()


@program
def a_sharded_vocabulary(mesh: Any) -> None:
    model = nn.Sequential(nn.Embedding(11, 8), nn.RMSNorm(8), nn.Linear(8, 11, bias=False))
    lay(model, mesh, ("0.weight", [R, S(0)]), ("2.weight", [R, S(0)]))
    tokens = sw.distribute_tensor(torch.arange(24).view(4, 6) % 11, mesh, [S(0), R])
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), label_smoothing=0.1).backward()


@program
def every_transition(mesh: Any) -> None:
    x = sw.distribute_tensor(torch.randn(5, 7), mesh, [S(0), S(1)]).requires_grad_()
    for where in ([R, S(0)], [S(1), S(0)], {0: ("tp", "dp")}, [R, R], [S(0), S(0)]):
        x.redistribute(placements=where).square().sum().backward()
    for op in ("sum", "avg", "max"):
        terms = sw.DTensor.from_local(torch.randn(6, 4), mesh, [sw.Partial(op), sw.Partial(op)])
        for where in ([R, R], [S(0), R], [S(1), S(0)]):
            terms.redistribute(placements=where)
