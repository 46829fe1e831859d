"""The transformer block that the benchmarks run: one model, the same code for every system.

`Block` holds no parallelism. `plain` builds it with the sizes that one rank computes, `by_hand`
with parameters distributed in Megatron's way, `by_styles` through a library's module styles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a block and its input; tensor parallelism splits `heads` and `hidden`."""

    batch: int = 2
    tokens: int = 8
    width: int = 64
    heads: int = 4
    head_dim: int = 16
    hidden: int = 256

    def of_one_rank(self, num_ranks: int) -> Sizes:
        """What one of `num_ranks` tensor-parallel ranks computes."""
        return dataclasses.replace(self, heads=self.heads // num_ranks, hidden=self.hidden // num_ranks)


def keep(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    """Pre-norm attention and MLP, with the attention written out.

    `reduce` is applied to what the two row-split projections give; a library that sees by itself
    that a sum is pending there needs none.
    """

    def __init__(self, sizes: Sizes, *, reduce: Callable[[Tensor], Tensor] = keep) -> None:
        super().__init__()
        inner = sizes.heads * sizes.head_dim
        self.heads = sizes.heads
        self.head_dim = sizes.head_dim
        self.reduce = reduce
        self.attention_norm = nn.LayerNorm(sizes.width)
        self.query = nn.Linear(sizes.width, inner)
        self.key = nn.Linear(sizes.width, inner)
        self.value = nn.Linear(sizes.width, inner)
        self.output = nn.Linear(inner, sizes.width)
        self.mlp_norm = nn.LayerNorm(sizes.width)
        self.up = nn.Linear(sizes.width, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.reduce(self.attention(self.attention_norm(x)))
        return x + self.reduce(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = (batch, tokens, self.heads, self.head_dim)
        q = self.query(x).view(heads).transpose(1, 2)
        k = self.key(x).view(heads).transpose(1, 2)
        v = self.value(x).view(heads).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        mixed = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, self.heads * self.head_dim))


# How Megatron splits it: these by output features, those by input features, the rest not at all.
COLUMN_SPLIT = ("query", "key", "value", "up")
ROW_SPLIT = ("output", "down")


def megatron_dim(parameter_name: str) -> int | None:
    """The dim on which Megatron splits a parameter of `Block`; None when every rank holds it whole.

    >>> megatron_dim("query.bias"), megatron_dim("down.weight"), megatron_dim("down.bias")
    (0, 1, None)
    """
    module, kind = parameter_name.split(".")
    if module in COLUMN_SPLIT:
        return 0
    if module in ROW_SPLIT and kind == "weight":
        return 1
    return None


Model = tuple[Block, Tensor]  # with the input it is run on


def plain(sizes: Sizes, num_ranks: int) -> Model:
    """The block at the sizes of one rank, on ordinary tensors: what no library can beat."""
    local = sizes.of_one_rank(num_ranks)
    return Block(local), torch.randn(local.batch, local.tokens, local.width)


def by_hand(
    tensors: ModuleType,
    mesh: DeviceMesh,
    sizes: Sizes,
    *,
    reduce: Callable[[Tensor], Tensor] = keep,
) -> Model:
    """The block with every parameter distributed by `tensors.distribute_tensor`."""
    block = Block(sizes, reduce=reduce)
    for name, parameter in list(block.named_parameters()):
        dim = megatron_dim(name)
        placement = tensors.Replicate() if dim is None else tensors.Shard(dim)
        sharded = tensors.distribute_tensor(parameter.detach(), mesh, [placement])
        module, kind = name.split(".")
        setattr(block.get_submodule(module), kind, nn.Parameter(sharded))
    return block, replicated_input(tensors, mesh, sizes)


def by_styles(tensors: ModuleType, parallel: ModuleType, mesh: DeviceMesh, sizes: Sizes) -> Model:
    """The block through `parallel.parallelize_module`.

    Outputs stay distributed and the norms are replicated on the mesh, so that all parameters are of
    one kind, as the foreach optimizers demand.
    """
    block = Block(sizes)
    parallel.parallelize_module(
        block,
        mesh,
        {name: parallel.ColwiseParallel(use_local_output=False) for name in COLUMN_SPLIT}
        | {name: parallel.RowwiseParallel(use_local_output=False) for name in ROW_SPLIT},
    )
    tensors.distribute_module(block.attention_norm, mesh)
    tensors.distribute_module(block.mlp_norm, mesh)
    return block, replicated_input(tensors, mesh, sizes)


def replicated_input(tensors: ModuleType, mesh: DeviceMesh, sizes: Sizes) -> Tensor:
    x = torch.randn(sizes.batch, sizes.tokens, sizes.width)
    return tensors.distribute_tensor(x, mesh, [tensors.Replicate()])


@dataclasses.dataclass(frozen=True)
class Training:
    """A block with what one step of its training needs."""

    block: Block
    x: Tensor
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    @staticmethod
    def of(model: Model) -> Training:
        block, x = model
        parameters = list(block.parameters())
        # So small a rate that thousands of steps leave the numbers, and so their cost, as they were.
        optimizer = torch.optim.AdamW(parameters, lr=1e-6, foreach=True)
        return Training(block, x, parameters, optimizer)

    def forward(self) -> Tensor:
        return self.block(self.x)

    def loss(self) -> Tensor:
        return self.block(self.x).square().mean()

    def forward_backward(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.loss().backward()

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()
