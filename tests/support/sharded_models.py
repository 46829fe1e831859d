"""A small language model to be fully sharded: blocks of their own groups, and a root with the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, NUM_BLOCKS = 11, 6, 3


class Block(nn.Module):
    """`reentrant`: None, or the kind of checkpoint around a part of it."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.reentrant is None:
            return x + self.mlp(y)
        return x + checkpoint(self.mlp, y, use_reentrant=self.reentrant)


class Model(nn.Module):
    """`inner`, `outer`: the kind of checkpoint inside of blocks, and around them."""

    def __init__(self, inner: bool | None = None, outer: bool | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.outer = outer

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if self.outer is None else checkpoint(block, x, use_reentrant=self.outer)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) * self.scale
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


class Tied(Model):
    """The table is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.tokens.weight


class Twice(Model):
    """Blocks run twice, side by side, and one of them a third time."""

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) + block(x * 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.head(self.blocks[0](self.tokens(tokens)))


class Skipping(Model):
    """`skipped`: a block that is left out."""

    skipped = -1

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return x if block is self.blocks[self.skipped] and self.skipped >= 0 else block(x)


def shard(model: Any, fully_shard: Callable[..., Any], **options: Any) -> Any:
    """Blocks first, then the model."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (8, 4)), torch.randint(VOCABULARY, (8, 4))


def loss_of(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
