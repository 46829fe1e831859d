"""torch's own attention modules, and decoding with a cache of keys and values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduled import Program, Size
from scheduled_blocks import BATCHED, SIZES, data_parallel
from transformer import COLUMN, MEGATRON, ROW, VOCABULARY, Block, Loss, Variant, hidden_states
from wire import Schedule, all_gather, all_reduce, all_to_all

# --- nn.MultiheadAttention ---


class SelfAttention(nn.Module):
    """The half of a block, with torch's module."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.attention = nn.MultiheadAttention(size.width, size.heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed, need_weights=False)[0]


class CrossAttention(nn.Module):
    """Attention to a memory of another width: torch's module then holds a weight each for queries, keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        wide = 2 * size.width
        self.norm = nn.LayerNorm(size.width)
        self.attention = nn.MultiheadAttention(
            size.width, size.heads, bias=False, kdim=wide, vdim=wide, batch_first=True
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), memory, memory, need_weights=False)[0]


def packed_attention(size: Size) -> Schedule:
    """The packed weight's rows are all queries', then all keys', then all values'. Split into equal parts they are not
    split by heads, which no layout can say, so queries, keys and values are exchanged for heads of each, at once."""
    stream, heads = all_reduce(size.activation, size.tp), all_to_all(3 * size.activation, size.tp)
    return Schedule((heads, stream), (heads, stream))


def cross_attention(size: Size) -> Schedule:
    """Backward, keys and values share the sum of the memory's gradient."""
    stream, memory = all_reduce(size.activation, size.tp), all_reduce(2 * size.activation, size.tp)
    return Schedule((stream,), (stream, memory))


def with_memory(size: Size) -> tuple[Tensor, ...]:
    return (*hidden_states(size), torch.randn(size.batch, size.seq, 2 * size.width))


# --- nn.TransformerEncoderLayer ---


def encoder_layer(size: Size, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(size.width, size.heads, size.hidden, dropout=0.0, **options)
    return Loss(layer)


def encoder(name: str, **options: Any) -> Program:
    make = partial(encoder_layer, **options)
    batch_dim = 0 if options.get("batch_first") else 1

    def inputs(size: Size) -> tuple[Tensor, ...]:
        shape = (size.batch, size.seq) if options.get("batch_first") else (size.seq, size.batch)
        return (torch.randn(*shape, size.width),)

    return Program(
        f"nn.TransformerEncoderLayer{name}, batch split",
        make,
        inputs,
        partial(data_parallel, make, {}),
        BATCHED,
        {},
        ({"dp": batch_dim},),
    )


# --- Experts ---

NUM_EXPERTS, TOP_K = 8, 2


class Experts(nn.Module):
    """A layer of experts, each of which runs on all tokens: batched products, and most of the weights that tokens are
    routed by are zero."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        scale = size.width**-0.5
        self.norm = nn.LayerNorm(size.width)
        self.router = nn.Linear(size.width, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, size.width, size.hidden) * scale)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, size.hidden, size.width) * scale)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        best, chosen = self.router(rows).softmax(-1).topk(TOP_K, dim=-1)
        weights = torch.zeros_like(rows[:, :NUM_EXPERTS]).scatter(1, chosen, best)
        outputs = torch.matmul(F.gelu(torch.matmul(rows, self.up)), self.down)
        return x + (outputs * weights.t().unsqueeze(-1)).sum(0).view(x.shape)


def experts(size: Size) -> Schedule:
    """As the MLP. Small: the gradient of the weights that tokens are routed by, of which each rank has its experts'."""
    stream, routed = all_reduce(size.activation, size.tp), all_gather(NUM_EXPERTS * size.tokens, size.tp)
    return Schedule((stream,), (stream, routed))


# --- Decoding ---

PAST = 32  # tokens in the cache
GATED = Variant(norm=nn.RMSNorm, bias=False, gated=True)


class Decoder(nn.Module):
    """One token for each sequence, given the keys and values of those before it: the next one.

    `in_place`: the cache has room, and the new token's keys are written into it; else they are appended.
    """

    def __init__(self, size: Size, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size, GATED) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def extended(self, cache: Tensor, new: Tensor) -> Tensor:
        if not self.in_place:
            return torch.cat([cache, new], dim=2)
        cache[:, :, -1:] = new
        return cache

    def attention(self, block: Block, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        own = block.attention
        q, k, v = (own.by_heads(project(x)) for project in (own.query, own.key, own.value))
        mixed = F.scaled_dot_product_attention(q, self.extended(keys, k), self.extended(values, v))
        return own.output(mixed.transpose(1, 2).contiguous().view(x.shape))

    def forward(self, tokens: Tensor, *caches: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for number, block in enumerate(self.blocks):
            x = x + self.attention(block, block.attention_norm(x), *caches[2 * number : 2 * number + 2])
            x = x + block.mlp(block.mlp_norm(x))
        return self.head(self.norm(x)).argmax(-1)


def decoding_inputs(size: Size) -> tuple[Tensor, ...]:
    cache = (size.batch, size.heads, PAST, size.head_dim)
    return (torch.randint(size.vocab, (size.batch, 1)), *(torch.randn(cache) for _ in range(2 * size.layers)))


def decoding(size: Size) -> Schedule:
    """The embedding and two halves of each block. Small: the greatest logit of each rank, and where it is."""
    stream, found = all_reduce(size.activation, size.tp), all_reduce(size.tokens, size.tp)
    return Schedule((stream,) * (1 + 2 * size.layers) + (found,) * 2)


CACHES = ({}, *[{"tp": 1}] * 4)  # by heads
DECODING_SIZES = (
    Size(1, 1, 64, tp=2),
    Size(4, 1, 64, tp=4),
    Size(1, 1, 1024, tp=8),
    Size(16, 1, 1024, tp=8),
    Size(1, 1, 8192, tp=8),
    Size(256, 1, 8192, tp=8),
)


def decoder(name: str, *, in_place: bool) -> Program:
    return Program(
        f"decoding, {name}",
        partial(Decoder, in_place=in_place),
        decoding_inputs,
        decoding,
        DECODING_SIZES,
        MEGATRON | VOCABULARY,
        CACHES,
        trains=False,
    )


PROGRAMS = (
    Program(
        "nn.MultiheadAttention, packed",
        lambda size: Loss(SelfAttention(size)),
        hidden_states,
        packed_attention,
        SIZES,
        {"*.in_proj_*": COLUMN, "*.out_proj.weight": ROW},
    ),
    Program(
        "nn.MultiheadAttention, to a memory",
        lambda size: Loss(CrossAttention(size)),
        with_memory,
        cross_attention,
        SIZES,
        {"*_proj_weight": COLUMN, "*.out_proj.weight": ROW},
    ),
    encoder("", batch_first=True),
    encoder(" (seq first)"),
    encoder(" (norm first, gelu)", batch_first=True, norm_first=True, activation="gelu"),
    Program(
        "experts split, as batched products",
        lambda size: Loss(Experts(size)),
        hidden_states,
        experts,
        SIZES,
        {"*.up": COLUMN, "*.down": COLUMN},
    ),
    decoder("appending to the cache", in_place=False),
    decoder("writing to the cache", in_place=True),
)
