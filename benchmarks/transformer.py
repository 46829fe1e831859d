"""The transformer that most programs are made of, in the variants people use. It holds no parallelism, but for the two
places where sequence parallelism asks for a layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduled import Size, asked

Norm = Callable[[int], nn.Module]


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a block is built."""

    norm: Norm = nn.LayerNorm
    bias: bool = True
    gated: bool = False
    queries_per_key: int = 1
    written_out: bool = False
    """Attention as matrix products and a softmax, instead of torch's one function."""
    sequence_parallel: bool = False

    def gathered(self, x: Tensor) -> Tensor:
        return asked(x, dp=0) if self.sequence_parallel else x

    def scattered(self, x: Tensor) -> Tensor:
        return asked(x, dp=0, tp=1) if self.sequence_parallel else x


class Attention(nn.Module):
    def __init__(self, size: Size, variant: Variant) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.written_out = variant.written_out
        keys = size.width // variant.queries_per_key
        self.query = nn.Linear(size.width, size.width, bias=variant.bias)
        self.key = nn.Linear(size.width, keys, bias=variant.bias)
        self.value = nn.Linear(size.width, keys, bias=variant.bias)
        self.output = nn.Linear(size.width, size.width, bias=variant.bias)

    def by_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.written_out:
            scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
            return torch.matmul(torch.softmax(scores, dim=-1), v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attend(self.by_heads(self.query(x)), self.by_heads(self.key(x)), self.by_heads(self.value(x)))
        return self.output(mixed.transpose(1, 2).contiguous().view(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, size: Size, variant: Variant) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=variant.bias) if variant.gated else None
        self.up = nn.Linear(size.width, size.hidden, bias=variant.bias)
        self.down = nn.Linear(size.hidden, size.width, bias=variant.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, size: Size, variant: Variant) -> None:
        super().__init__()
        self.variant = variant
        self.attention_norm = variant.norm(size.width)
        self.attention = Attention(size, variant)
        self.mlp_norm = variant.norm(size.width)
        self.mlp = MLP(size, variant)

    def forward(self, x: Tensor) -> Tensor:
        gathered, scattered = self.variant.gathered, self.variant.scattered
        x = x + scattered(self.attention(gathered(self.attention_norm(x))))
        return x + scattered(self.mlp(gathered(self.mlp_norm(x))))


class Loss(nn.Module):
    """A module and a loss of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs).square().mean()


class GPT(nn.Module):
    """Tokens to the loss of the next ones. `tied`: the head's weight is the embedding's."""

    def __init__(self, size: Size, variant: Variant, *, num_blocks: int, tied: bool = False) -> None:
        super().__init__()
        self.variant = variant
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.seq, size.width)
        self.blocks = nn.ModuleList(Block(size, variant) for _ in range(num_blocks))
        self.norm = variant.norm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.variant.scattered(self.tokens(tokens) + self.positions.weight)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.variant.gathered(self.norm(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# How Megatron splits the weights: by what they put out, or by what they take in.
COLUMN, ROW = {"tp": 0}, {"tp": 1}
MEGATRON = {
    "*.query.*": COLUMN,
    "*.key.*": COLUMN,
    "*.value.*": COLUMN,
    "*.gate.*": COLUMN,
    "*.up.*": COLUMN,
    "*.output.weight": ROW,
    "*.down.weight": ROW,
}
VOCABULARY = {"tokens.weight": COLUMN, "head.weight": COLUMN}


def hidden_states(size: Size) -> tuple[Tensor, ...]:
    return (torch.randn(size.batch, size.seq, size.width),)


def token_ids(size: Size) -> tuple[Tensor, ...]:
    """Tokens and the ones to predict."""
    shape = (size.batch, size.seq)
    return torch.randint(size.vocab, shape), torch.randint(size.vocab, shape)
