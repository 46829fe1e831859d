"""What is saved for the backward pass, and the peak, are plain torch's on the shards plus what the schedule needs.

A program runs as one rank of four, on a fake process group, and as plain torch on tensors of that rank's sizes. What
collectives move is part of neither, so where a schedule gathers, the plain program is given what was gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from saved import Memory, fake_mesh, measure, on_cpu, saved_by
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import DTensor, Placement, Replicate, Shard
from shardwise.rules.rows import row_passes

NUM_RANKS = 4
R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(NUM_RANKS, names=("x",), rank=1) as mesh:
        yield mesh


Laid = tuple[tuple[int, ...], Placement]
"""A shape, and how a tensor of it lies."""


def inputs(mesh: DeviceMesh, laid: list[Laid]) -> tuple[list[DTensor], list[Tensor]]:
    """Leaves that require gradients, and plain ones of this rank's sizes."""
    made = [sw.distribute_tensor(torch.randn(shape), mesh, [where]) for shape, where in laid]
    plain = [d.to_local().clone().requires_grad_() for d in made]
    return [d.requires_grad_() for d in made], plain


def both(mesh: DeviceMesh, program: Callable[..., Tensor], laid: list[Laid]) -> tuple[Memory, Memory]:
    ours, plain = inputs(mesh, laid)
    return measure(lambda: program(*ours)), measure(lambda: program(*plain))


# Blocks of a transformer

BATCH, TIME, WIDTH, HEADS, CLASSES = 4, 8, 32, 8, 64


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias)


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), weight)


def mlp(norm: Callable[..., Tensor], dropout: float, x: Tensor, *weights: Tensor) -> Tensor:
    scale, shift, up, up_bias, down, down_bias = weights
    hidden = F.gelu(F.linear(norm(x, scale, shift), up, up_bias))
    return x + F.dropout(F.linear(hidden, down, down_bias), dropout)


def attention(norm: Callable[..., Tensor], dropout: float, x: Tensor, *weights: Tensor) -> Tensor:
    scale, shift, *projections, out = weights
    hidden = norm(x, scale, shift)
    heads = [F.linear(hidden, w).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in projections]
    found = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
    return x + F.dropout(F.linear(found, out), dropout)


NORM: list[Laid] = [((WIDTH,), R), ((WIDTH,), R)]
X: Laid = ((BATCH, TIME, WIDTH), R)
TENSOR_PARALLEL: dict[Callable[..., Tensor], list[Laid]] = {
    mlp: [
        *(X, *NORM),
        *(((4 * WIDTH, WIDTH), S0), ((4 * WIDTH,), S0), ((WIDTH, 4 * WIDTH), S1), ((WIDTH,), R)),
    ],
    attention: [X, *NORM, *[((WIDTH, WIDTH), S0)] * 3, ((WIDTH, WIDTH), S1)],
}


def data_parallel(laid: list[Laid]) -> list[Laid]:
    """The batch sharded, everything else replicated."""
    (_, *sizes), _ = laid[0]
    return [((BATCH * NUM_RANKS, *sizes), S0), *((shape, R) for shape, _ in laid[1:])]


norms = pytest.mark.parametrize("norm", [layer_norm, rms_norm])
blocks = pytest.mark.parametrize("block", [mlp, attention])


@norms
@blocks
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_tensor_parallel_blocks_save_what_the_shards_do(
    norm: Callable, block: Callable, dropout: float, mesh: DeviceMesh
) -> None:
    """Megatron's schedule needs nothing: what it reduces is reduced before anybody saves it."""
    ours, plain = both(mesh, partial(block, norm, dropout), TENSOR_PARALLEL[block])
    assert ours.saved == plain.saved
    assert ours.kept == plain.kept, "nobody else holds on to anything"
    assert ours.peak == plain.peak


@norms
@blocks
def test_data_parallel_blocks_save_what_the_shards_do(norm: Callable, block: Callable, mesh: DeviceMesh) -> None:
    ours, plain = both(mesh, partial(block, norm, 0.1), data_parallel(TENSOR_PARALLEL[block]))
    assert ours.saved == plain.saved
    assert ours.kept == plain.kept


def test_sequence_parallel_saves_what_it_gathers(mesh: DeviceMesh) -> None:
    """The schedule needs the gathered output of the norm, which the projection saves; all else is a part."""

    def program(gather: Callable, scatter: Callable, x: Tensor, *weights: Tensor) -> Tensor:
        scale, shift, up, down = weights
        hidden = F.gelu(F.linear(gather(layer_norm(x, scale, shift)), up))
        return x + scatter(F.linear(hidden, down))

    laid = [((BATCH, TIME, WIDTH), S1), *NORM, ((4 * WIDTH, WIDTH), S0), ((WIDTH, 4 * WIDTH), S1)]
    ours, plain = inputs(mesh, laid)

    def gathered(x: Tensor) -> Tensor:
        return Gathered.apply(x)

    theirs = measure(lambda: program(gathered, lambda y: y.narrow(1, 0, TIME // NUM_RANKS).clone(), *plain))
    mine = measure(
        lambda: program(lambda x: x.redistribute(placements=[R]), lambda y: y.redistribute(placements=[S1]), *ours)
    )
    assert mine.saved == theirs.saved
    assert mine.kept == theirs.kept


class Gathered(torch.autograd.Function):
    """As large as what all ranks have along dim 1; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.repeat(1, NUM_RANKS, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.narrow(1, 0, TIME // NUM_RANKS).clone()


def test_embedding_of_a_sharded_vocabulary(mesh: DeviceMesh) -> None:
    """The schedule needs to know which rows are here: a byte for each token, beside the rows' numbers in this part."""
    tokens = torch.randint(CLASSES // NUM_RANKS, (BATCH, TIME))
    (table,), (plain,) = inputs(mesh, [((CLASSES, WIDTH), S0)])
    whole = sw.distribute_tensor(tokens, mesh, [R])
    ours = measure(lambda: F.embedding(whole, table))
    theirs = measure(lambda: F.embedding(tokens, plain))
    assert ours.saved == theirs.saved + Counter({tokens.numel(): 1})
    assert ours.kept == theirs.kept + tokens.numel() * (8 + 1)


PLACE = Counter({4: 1})
"""The place of the logits in the graph, for gradients of gradients: a number that stands for all of them."""


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_over_sharded_classes(smoothing: float, mesh: DeviceMesh) -> None:
    """As on one device one tensor as large as the logits is saved, and a few numbers for each row: the target, the
    largest logit, what the exponentials are divided by, the gradient at the target and, with smoothing, what
    probabilities are multiplied by, and the logarithm of the sum. In the backward pass the gradient takes the
    exponentials' place."""
    rows, numbers = BATCH * TIME, 5 if smoothing else 3
    target = torch.randint(CLASSES // NUM_RANKS, (rows,))
    (logits,), (plain,) = inputs(mesh, [((rows, CLASSES), S1)])
    whole = sw.distribute_tensor(target, mesh, [R])
    ours = measure(lambda: F.cross_entropy(logits, whole, label_smoothing=smoothing))
    theirs = measure(lambda: F.cross_entropy(plain, target, label_smoothing=smoothing))
    for_rows = Counter({size: count for size, count in ours.saved.items() if size >= rows})
    assert for_rows == Counter([plain.nbytes, rows * 8, rows * 4 * numbers])
    assert ours.kept <= ours.saved_bytes + 32, "not the logits: they are the caller's"
    assert ours.peak <= theirs.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [F.cross_entropy, F.softmax, F.log_softmax], ids=lambda f: f.__name__)
def test_nothing_as_large_as_the_logits_but_results(
    function: Callable, dtype: torch.dtype, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a softmax, and beside the gradient, there are never more than two blocks of the logits."""
    monkeypatch.setattr(row_passes, "CACHED", 1 << 16)
    rows, classes = 1024, 1024
    logits = sw.distribute_tensor(torch.randn(rows, classes * NUM_RANKS, dtype=dtype), mesh, [S1]).requires_grad_()
    target = sw.distribute_tensor(torch.randint(classes, (rows,)), mesh, [R])
    results = 1 if function is F.cross_entropy else 3  # it, its gradient, and that of the logits
    found = measure(lambda: function(logits, target if function is F.cross_entropy else 1))
    assert found.peak <= results * rows * classes * dtype.itemsize + 2 * 4 * row_passes.CACHED + 32 * rows * 4
    assert found.peak < (results + 1) * rows * classes * dtype.itemsize


@pytest.mark.parametrize("where", [R, S0], ids=["rows replicated", "rows sharded"])
def test_a_head_and_its_loss_take_the_memory_of_gradients_and_of_a_chunk(where: Placement, mesh: DeviceMesh) -> None:
    """However many rows there are: beside gradients a few numbers for each."""
    classes, chunk = 1024, 64
    for rows in (256, 2048):
        (x, layer), _ = inputs(mesh, [((rows, WIDTH), where), ((classes * NUM_RANKS, WIDTH), S0)])
        target = sw.distribute_tensor(torch.randint(classes, (rows,)), mesh, [where])
        found = measure(partial(sw.parallel.linear_cross_entropy, x, layer, target, chunk_size=chunk))
        gradients = x.to_local().nbytes + layer.to_local().nbytes
        of_chunk = chunk * (classes + WIDTH) * 4
        assert found.kept <= gradients + 64 * rows
        assert found.peak <= gradients + 2 * of_chunk + 64 * rows, "logits of one chunk, and a block of them"


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_over_a_sharded_dim_keeps_its_result(function: Callable, mesh: DeviceMesh) -> None:
    rows = BATCH * TIME
    ours, plain = both(mesh, lambda x: function(x, 1), [((rows, CLASSES), S1)])
    assert ours.saved == plain.saved
    assert ours.kept == plain.kept
    assert ours.peak <= plain.peak + plain.kept + 2 * rows * 4, "in the backward pass: one factor, and the rows' sums"


def test_cosine_similarity_runs_op_by_op(mesh: DeviceMesh) -> None:
    """What it writes in place inside is written to copies: the two norms of each row, and the least they may be."""
    rows = 8 * NUM_RANKS
    ours, plain = both(mesh, partial(F.cosine_similarity, dim=1), [((rows, WIDTH), S0), ((rows, WIDTH), S0)])
    assert ours.saved == plain.saved + Counter({rows // NUM_RANKS * 4: 2, 4: 1})


LAYER = [*TENSOR_PARALLEL[attention][3:], *TENSOR_PARALLEL[mlp][3:]]


def language_model(norm: Callable[..., Tensor], tokens: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
    """Two layers; the table is the head as well."""
    table, positions, scale, shift, *layers = weights
    x = F.embedding(tokens, table) + positions
    for i in range(0, len(layers), len(LAYER)):
        x = attention(norm, 0.0, x, scale, shift, *layers[i : i + 4])
        x = mlp(norm, 0.0, x, scale, shift, *layers[i + 4 : i + len(LAYER)])
    return F.cross_entropy(F.linear(norm(x, scale, shift), table).flatten(0, 1), target.flatten())


@norms
def test_a_whole_model_saves_no_more_than_its_parts(norm: Callable, mesh: DeviceMesh) -> None:
    """Beside what its shards save: what the embedding and the loss keep for each token, as above."""
    ours, plain = inputs(mesh, [((CLASSES, WIDTH), S0), ((TIME, WIDTH), R), *NORM, *LAYER * 2])
    tokens, target = torch.randint(CLASSES // NUM_RANKS, (2, BATCH, TIME)).unbind()
    whole = [sw.distribute_tensor(x, mesh, [R]) for x in (tokens, target)]
    mine = measure(lambda: language_model(norm, *whole, *ours))
    theirs = measure(lambda: language_model(norm, tokens, target, *plain))
    rows = tokens.numel()
    for_embedding, for_loss = Counter([rows, rows * 8]), Counter([rows * 8, rows * 4 * 3])
    named = Counter([tokens.untyped_storage().nbytes()])  # tokens and targets, which are here named by other numbers
    large = Counter({size: count for size, count in mine.saved.items() if size >= rows})
    assert large == Counter({s: n for s, n in theirs.saved.items() if s >= rows}) - named + for_embedding + for_loss
    passing = 5 * rows * 8  # where the targets' logits lie, while that is computed
    assert mine.peak <= theirs.peak + mine.saved_bytes - theirs.saved_bytes + passing


# Functions, replicated and on a sharded batch


@dataclass(frozen=True)
class Case:
    run: Callable[..., Tensor]
    batch: tuple[tuple[int, ...], ...] = ((8, 6),)
    weights: tuple[tuple[int, ...], ...] = ()


IMAGES = ((8, 4, 6, 6),)
ROWS = ((8, 6), (8, 6))
HEADED = ((8, 2, 6, 4),) * 3

CASES: dict[str, Case] = {
    **{
        name: Case(getattr(F, name))
        for name in (
            *("relu", "relu6", "elu", "selu", "celu", "leaky_relu", "gelu", "silu", "mish", "softplus", "softsign"),
            *("sigmoid", "tanh", "logsigmoid", "hardtanh", "hardswish", "hardsigmoid", "tanhshrink", "softshrink"),
            *("hardshrink", "normalize", "dropout", "alpha_dropout", "feature_alpha_dropout"),
        )
    },
    "threshold": Case(lambda x: F.threshold(x, 0.1, 0.0)),
    "softmax": Case(lambda x: F.softmax(x, 1)),
    "log_softmax": Case(lambda x: F.log_softmax(x, 1)),
    "softmin": Case(lambda x: F.softmin(x, 1)),
    "glu": Case(lambda x: F.glu(x, 1)),
    "dropout1d": Case(F.dropout1d, ((8, 4, 6),)),
    "dropout2d": Case(F.dropout2d, IMAGES),
    "linear": Case(F.linear, weights=((5, 6), (5,))),
    "bilinear": Case(F.bilinear, ROWS, ((5, 6, 6), (5,))),
    "prelu": Case(F.prelu, weights=((6,),)),
    "layer_norm": Case(lambda x, w, b: F.layer_norm(x, (6,), w, b), weights=((6,), (6,))),
    "rms_norm": Case(lambda x, w: F.rms_norm(x, (6,), w), weights=((6,),)),
    "group_norm": Case(lambda x, w, b: F.group_norm(x, 2, w, b), IMAGES, ((4,), (4,))),
    "instance_norm": Case(F.instance_norm, IMAGES),
    "local_response_norm": Case(lambda x: F.local_response_norm(x, 2), IMAGES),
    "conv1d": Case(F.conv1d, ((8, 4, 6),), ((3, 4, 2), (3,))),
    "conv2d": Case(F.conv2d, IMAGES, ((3, 4, 2, 2), (3,))),
    "conv_transpose2d": Case(F.conv_transpose2d, IMAGES, ((4, 3, 2, 2), (3,))),
    "max_pool2d": Case(lambda x: F.max_pool2d(x, 2), IMAGES),
    "avg_pool2d": Case(lambda x: F.avg_pool2d(x, 2), IMAGES),
    "adaptive_avg_pool2d": Case(lambda x: F.adaptive_avg_pool2d(x, 3), IMAGES),
    "adaptive_max_pool2d": Case(lambda x: F.adaptive_max_pool2d(x, 3), IMAGES),
    "interpolate": Case(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES),
    "pixel_shuffle": Case(lambda x: F.pixel_shuffle(x, 2), IMAGES),
    "pad": Case(lambda x: F.pad(x, (1, 1)), IMAGES),
    "unfold": Case(lambda x: F.unfold(x, 2), IMAGES),
    "mse_loss": Case(lambda x, y: F.mse_loss(x, y, reduction="none"), ROWS),
    "l1_loss": Case(lambda x, y: F.l1_loss(x, y, reduction="none"), ROWS),
    "smooth_l1_loss": Case(lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), ROWS),
    "huber_loss": Case(lambda x, y: F.huber_loss(x, y, reduction="none"), ROWS),
    "binary_cross_entropy_with_logits": Case(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"), ROWS
    ),
    "kl_div": Case(lambda x, y: F.kl_div(x, y, reduction="none"), ROWS),
    "pairwise_distance": Case(F.pairwise_distance, ROWS),
    "scaled_dot_product_attention": Case(F.scaled_dot_product_attention, HEADED),
    "causal attention": Case(partial(F.scaled_dot_product_attention, is_causal=True), HEADED),
}


def programs(mesh: DeviceMesh, case: Case, where: Placement) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    laid = [*((shape, where) for shape in case.batch), *((shape, R) for shape in case.weights)]
    ours, plain = inputs(mesh, laid)
    return lambda: case.run(*ours), lambda: case.run(*plain)


@pytest.mark.parametrize("where", [R, S0], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_functions_save_what_they_do_on_the_shards(name: str, where: Placement, mesh: DeviceMesh) -> None:
    ours, plain = programs(mesh, CASES[name], where)
    ours()  # planned
    assert saved_by(ours) == saved_by(plain)


@pytest.mark.parametrize("where", [R, S0], ids=str)
def test_functions_keep_nothing_else(where: Placement, mesh: DeviceMesh) -> None:
    """All at once: the profiler takes its time."""
    made = [programs(mesh, case, where) for case in CASES.values()]
    ours, plain = zip(*made, strict=True)
    for program in ours:
        program()
    assert on_cpu(lambda: [program() for program in ours]) == on_cpu(lambda: [program() for program in plain])
