"""The GPT of examples/gpt.py gives one device's losses and gradient norms however its ranks are used, and communicates
what a person would have written."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

import shardwise as sw
from factorisations import AXES, TOLERANCE, Shape, differences, factorisations, gpt, on_mesh, one_device
from shardwise.debug import CommDebugMode

STEPS = 6  # benchmarks/factorisations.py makes 50
SMALL = 4096
"""Bytes of what is small, at most."""


@pytest.mark.parametrize("shape", list(factorisations(8)), ids=str)
def test_eight_ranks(shape: Shape) -> None:
    found, _ = on_mesh(sw.simulate(shape, AXES), STEPS)
    assert max(differences(found, one_device(STEPS))) <= TOLERANCE


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 1, 2), (1, 4, 2)], ids=str)
def test_its_step_is_captured(shape: Shape) -> None:
    """Bit for bit, with no more collectives."""
    expected, of_eager = on_mesh(sw.simulate(shape, AXES), STEPS)
    found, counts = on_mesh(sw.simulate(shape, AXES), STEPS, partial(sw.compile, backend="fx"))
    assert found == expected
    assert all(counts[kind] <= of_eager[kind] for kind in counts)


def schedule(shape: Shape) -> Counter[tuple[Any, ...]]:
    """What is sent in a step, by kind, axes, and whether in the backward pass."""
    (dp, shard, tp), sent = shape, Counter[tuple[Any, ...]]()
    groups = gpt.LAYERS + 1  # each block, and what is around them
    if tp > 1:  # activations go to the sequence after two embeddings and two halves of each block, and come back before
        halves = 2 * gpt.LAYERS
        for kind, dual in ("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather"):
            count = halves + (1 if kind == "all_gather" else 2)
            sent[kind, ("tp",), False] += count
            sent[dual, ("tp",), True] += count
    if shard > 1:  # what is around the blocks is not gathered again
        sent["all_gather", ("shard",), False] = groups
        sent["all_gather", ("shard",), True] = groups - 1
        sent["reduce_scatter", ("shard",), True] = groups
    if dp > 1:  # all gradients in one bucket, or those of each group
        sent["all_reduce", ("dp",), True] = groups if shard > 1 else 1
    return sent


def numbers(shape: Shape) -> Counter[tuple[Any, ...]]:
    """What is small: reductions of numbers, and of the gradients of layer norms."""
    (dp, shard, tp), sent = shape, Counter[tuple[Any, ...]]()
    data = tuple(name for name, size in (("dp", dp), ("shard", shard)) if size > 1)
    tensor = ("tp",) if tp > 1 else ()
    sent["all_reduce", data, False] += 4  # for two embeddings whether indices fit, for the loss its sum and count
    if tp > 1:  # of the logits of each token, the largest, and the sum
        sent["all_reduce", tensor, False] += 2
    if shard > 1:  # the norm, which is clipped by, and read
        sent["all_reduce", ("shard", *tensor), False] += 2
        norms = 2 * (2 * gpt.LAYERS + 1)
        sent["all_reduce", tensor, True] += norms if tp > 1 else 0
    else:
        sent["all_reduce", tensor, False] += 1 if tp > 1 else 0
        sent["all_reduce", (*data, *tensor), True] += 1
    return +sent


@pytest.mark.parametrize("shape", [shape for shape in factorisations(8) if gpt.HEADS % shape[2] == 0], ids=str)
def test_its_schedule(shape: Shape) -> None:
    mesh, rows = sw.simulate(shape, AXES), [sw.Shard(0), sw.Shard(0), sw.Replicate()]
    torch.manual_seed(0)
    model = gpt.parallelize(gpt.GPT(), mesh)

    def lay(x: torch.Tensor) -> sw.DTensor:
        return sw.distribute_tensor(x, mesh, rows, src_data_rank=None)

    positions = lay(torch.arange(gpt.TOKENS).expand(gpt.BATCH, -1))
    with CommDebugMode() as comm:
        gpt.train(model, gpt.batches(1), positions, lay)
    found = [
        Counter((c.kind, c.axes, c.backward) for c in comm.comms if (c.bytes <= SMALL) == s) for s in (False, True)
    ]
    assert found == [schedule(shape), numbers(shape)]
