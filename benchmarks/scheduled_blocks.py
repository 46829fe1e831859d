"""Transformer blocks: tensor, sequence and data parallelism, and what Megatron communicates for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from scheduled import Program, Size, Split
from transformer import MEGATRON, Block, Loss, Variant, hidden_states
from wire import Schedule, all_gather, all_reduce, reduce_scatter

SIZES = (
    Size(1, 4, 64, tp=2),
    Size(1, 4, 64, tp=4),
    Size(2, 16, 64, tp=4),
    Size(2, 16, 64, tp=8),
    Size(1, 512, 1024, tp=4),
    Size(4, 256, 1024, tp=8),
    Size(8, 512, 512, tp=8),
    Size(1, 2048, 4096, tp=8),
    Size(8, 8192, 8192, tp=8),
)
BATCHED = (  # with the batch over dp, tp left out or not: one sequence for each rank, or several
    Size(2, 4, 64, dp=2),
    Size(8, 16, 64, dp=4),
    Size(8, 512, 512, dp=8),
    Size(4, 512, 1024, dp=4),
    Size(8, 2048, 4096, dp=8),
    Size(8, 8192, 8192, dp=8),
)
BOTH = (
    Size(2, 4, 64, dp=2, tp=2),
    Size(8, 16, 64, dp=2, tp=4),
    Size(4, 256, 1024, dp=4, tp=8),
    Size(8, 512, 512, dp=4, tp=8),
    Size(4, 2048, 4096, dp=4, tp=8),
    Size(8, 8192, 8192, dp=4, tp=8),
)


def build(variant: Variant, size: Size) -> nn.Module:
    return Loss(Block(size, variant))


def megatron(size: Size) -> Schedule:
    """Each half of the block: what the row-split weight gives is summed; backward, the gradient of what the
    column-split ones take."""
    stream = all_reduce(size.activation, size.tp)
    return Schedule((stream,) * 2, (stream,) * 2)


def sequence_parallel(size: Size, *, norm_vectors: int) -> Schedule:
    """Each of Megatron's sums in two: scattered, so that norms see a part of the sequence each, and gathered again.
    Small: the norms' weights are replicated and see a part each."""
    gather, scatter = all_gather(size.activation, size.tp), reduce_scatter(size.activation, size.tp)
    vectors = (all_reduce(size.width, size.tp),) * norm_vectors
    return Schedule((gather, scatter) * 2, (scatter, gather) * 2 + vectors)


def of_parameters(build: Callable[[Size], nn.Module], splits: Mapping[str, Split], size: Size) -> list[int]:
    """Numbers that one rank of tp holds of each parameter."""
    layout = Program("", build, hidden_states, lambda _: Schedule(), (), splits)
    with torch.device("meta"):
        named = build(size).named_parameters()
    return [x.numel() // (size.tp if "tp" in layout.split_of(name) else 1) for name, x in named]


def data_parallel(build: Callable[[Size], nn.Module], splits: Mapping[str, Split], size: Size) -> Schedule:
    """The gradient of each parameter is summed. Small: the loss."""
    sums = (all_reduce(numbers, size.dp) for numbers in of_parameters(build, splits, size))
    return Schedule((all_reduce(1, size.dp),), tuple(sums))


def zero_3(build: Callable[[Size], nn.Module], size: Size) -> Schedule:
    """Each parameter is gathered once, and kept for the backward pass; its gradient is scattered."""
    numbers = of_parameters(build, {}, size)
    gathers = (all_gather(count, size.dp) for count in numbers)
    scatters = (reduce_scatter(count, size.dp) for count in numbers)
    return Schedule((*gathers, all_reduce(1, size.dp)), tuple(scatters))


VARIANTS = {
    "LayerNorm": Variant(),
    "RMSNorm": Variant(norm=nn.RMSNorm),
    "no biases": Variant(bias=False),
    "gated": Variant(norm=nn.RMSNorm, bias=False, gated=True),
    "attention written out": Variant(written_out=True),
}


def tensor_parallel(name: str, variant: Variant, sizes: tuple[Size, ...] = SIZES) -> Program:
    return Program(f"Megatron, {name}", partial(build, variant), hidden_states, megatron, sizes, MEGATRON)


def sequence(name: str, variant: Variant, *, norm_vectors: int) -> Program:
    return Program(
        f"sequence parallel, {name}",
        partial(build, variant),
        hidden_states,
        partial(sequence_parallel, norm_vectors=norm_vectors),
        tuple(size for size in SIZES if size.seq % size.tp == 0),
        MEGATRON,
        ({"tp": 1},),
    )


def batched(name: str, variant: Variant) -> Program:
    make = partial(build, variant)
    schedule = partial(data_parallel, make, {})
    return Program(f"data parallel, {name}", make, hidden_states, schedule, BATCHED, {}, ({"dp": 0},))


def both(name: str, variant: Variant) -> Program:
    make = partial(build, variant)

    def schedule(size: Size) -> Schedule:
        return megatron(size) + data_parallel(make, MEGATRON, size)

    return Program(f"dp × tp, {name}", make, hidden_states, schedule, BOTH, MEGATRON, ({"dp": 0},))


def both_sequence(name: str, variant: Variant) -> Program:
    make = partial(build, variant)

    def schedule(size: Size) -> Schedule:
        """The sums of the norms' vectors go over both axes at once: those over tp are not made apart."""
        return sequence_parallel(size, norm_vectors=0) + data_parallel(make, MEGATRON, size)

    splits = ({"dp": 0, "tp": 1},)
    return Program(f"dp × sequence parallel, {name}", make, hidden_states, schedule, BOTH, MEGATRON, splits)


def sharded_weights(name: str, variant: Variant) -> Program:
    make = partial(build, variant)
    schedule = partial(zero_3, make)
    return Program(f"ZeRO-3, {name}", make, hidden_states, schedule, BATCHED, {"*": {"dp": 0}}, ({"dp": 0},))


GROUPED = Variant(norm=nn.RMSNorm, bias=False, gated=True, queries_per_key=4)
GROUPED_SIZES = tuple(size for size in SIZES if size.heads // 4 % size.tp == 0)
LAYER, RMS = Variant(sequence_parallel=True), Variant(norm=nn.RMSNorm, bias=False, gated=True, sequence_parallel=True)

PROGRAMS = (
    *(tensor_parallel(name, variant) for name, variant in VARIANTS.items()),
    tensor_parallel("grouped queries", GROUPED, GROUPED_SIZES),
    sequence("LayerNorm", LAYER, norm_vectors=4),
    sequence("RMSNorm, gated", RMS, norm_vectors=2),
    batched("LayerNorm", VARIANTS["LayerNorm"]),
    batched("RMSNorm, gated", VARIANTS["gated"]),
    both("LayerNorm", VARIANTS["LayerNorm"]),
    both("RMSNorm, gated", VARIANTS["gated"]),
    both_sequence("LayerNorm", LAYER),
    sharded_weights("LayerNorm", VARIANTS["LayerNorm"]),
    sharded_weights("RMSNorm, gated", VARIANTS["gated"]),
)
