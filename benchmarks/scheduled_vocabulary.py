"""Programs from tokens to a loss, with the vocabulary split: embeddings, heads, losses, and a small GPT."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from scheduled import Program, Size
from scheduled_blocks import BOTH, SIZES, data_parallel, megatron, sequence_parallel
from transformer import COLUMN, GPT, MEGATRON, VOCABULARY, Variant, token_ids
from wire import Schedule, all_gather, all_reduce, reduce_scatter


def vocabulary(size: Size) -> Schedule:
    """Each rank looks up what it has of the embedding, and the rest is zero; backward, each has a part of the classes,
    and so of the gradient of what the head takes. Small: the loss takes the greatest logit and two sums of each row."""
    stream, row = all_reduce(size.activation, size.tp), all_reduce(size.tokens, size.tp)
    return Schedule((stream, row, row, row), (stream,))


def split_sequence(size: Size, *, num_blocks: int, norm_vectors: int) -> Schedule:
    """With sequence parallelism: the embedding's sum is scattered, and what the head takes is gathered."""
    gather, scatter = all_gather(size.activation, size.tp), reduce_scatter(size.activation, size.tp)
    row, vector = all_reduce(size.tokens, size.tp), all_reduce(size.width, size.tp)
    ends = Schedule((scatter, gather, row, row, row), (scatter, gather, *(vector,) * norm_vectors))
    return ends + sequence_parallel(size, norm_vectors=2 * norm_vectors) * num_blocks


def gpt(variant: Variant, *, num_blocks: int, tied: bool = False) -> partial[nn.Module]:
    return partial(GPT, variant=variant, num_blocks=num_blocks, tied=tied)


def of_tokens(name: str, variant: Variant, *, num_blocks: int, tied: bool = False) -> Program:
    return Program(
        name,
        gpt(variant, num_blocks=num_blocks, tied=tied),
        token_ids,
        lambda size: vocabulary(size) + megatron(size) * num_blocks,
        SIZES,
        MEGATRON | VOCABULARY,
    )


def of_tokens_batched(name: str, variant: Variant, *, num_blocks: int) -> Program:
    make = gpt(variant, num_blocks=num_blocks)
    splits = MEGATRON | VOCABULARY

    def schedule(size: Size) -> Schedule:
        return vocabulary(size) + megatron(size) * num_blocks + data_parallel(make, splits, size)

    return Program(name, make, token_ids, schedule, BOTH, splits, ({"dp": 0}, {"dp": 0}))


def of_tokens_scattered(name: str, variant: Variant, *, num_blocks: int, norm_vectors: int) -> Program:
    return Program(
        name,
        gpt(variant, num_blocks=num_blocks),
        token_ids,
        partial(split_sequence, num_blocks=num_blocks, norm_vectors=norm_vectors),
        SIZES,
        MEGATRON | VOCABULARY,
    )


# --- A norm that works in float32 ---


class UpcastingNorm(nn.Module):
    """As in Hugging Face's Llama: statistics in float32, whatever comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class EmbeddingIntoNorm(nn.Module):
    """The first lines of a decoder in half precision: both the norm and the residual stream take the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.norm = UpcastingNorm(size.width)
        self.to(torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return (x + self.norm(x)).float().square().mean()


def embedding_into_norm(size: Size) -> Schedule:
    """The sum is made once, before the norm converts it; nothing backward, as every rank has the whole gradient."""
    return Schedule((all_reduce(size.activation, size.tp, itemsize=2),))


LAYER, RMS = Variant(), Variant(norm=nn.RMSNorm, bias=False, gated=True)
SEQUENCE = Variant(sequence_parallel=True)

PROGRAMS = (
    of_tokens("vocabulary: embedding, norm, head, loss", LAYER, num_blocks=0),
    of_tokens("vocabulary, tied", LAYER, num_blocks=0, tied=True),
    Program(
        "vocabulary: embedding into an upcasting norm",
        EmbeddingIntoNorm,
        lambda size: token_ids(size)[:1],
        embedding_into_norm,
        SIZES,
        {"tokens.weight": COLUMN},
        tolerance=1e-2,
    ),
    of_tokens("GPT of two blocks", LAYER, num_blocks=2),
    of_tokens("GPT of two blocks, RMSNorm, gated", RMS, num_blocks=2),
    of_tokens("GPT of two blocks, tied", LAYER, num_blocks=2, tied=True),
    of_tokens_scattered("GPT of two blocks, sequence parallel", SEQUENCE, num_blocks=2, norm_vectors=2),
    of_tokens_batched("GPT of two blocks, dp × tp", LAYER, num_blocks=2),
)
