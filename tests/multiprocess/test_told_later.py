"""What the ranks of data parallelism must have alike, or have found to be bad, is told with their loss: in few
messages, and to all of them, whatever one does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardwise as sw
from launch import Case
from shardwise.comm.told_later import windows
from shardwise.errors import IndexRangeError, ReplicaError, ShardShapeError

ROWS, WORDS, WIDTH = 4, 7, 3


class Model(nn.Module):
    """`fails`: on this rank alone, before anything is communicated."""

    def __init__(self, *, has_loss: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.has_loss = has_loss
        self.fails = False

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("here")
        out = self.head(self.words(words))
        return F.cross_entropy(out, targets) if self.has_loss else out


def model(*, has_loss: bool = True) -> Any:
    torch.manual_seed(0)
    return Model(has_loss=has_loss)


def line(size: int) -> Any:
    return sw.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def part(mesh: Any, words: list[int]) -> sw.DTensor:
    return sw.DTensor.from_local(torch.tensor(words), mesh, [sw.Shard(0)])


def batch_of(mesh: Any, step: int) -> tuple[sw.DTensor, sw.DTensor]:
    start = mesh.get_local_rank() * ROWS + step
    return tuple(part(mesh, [(start + more + i) % WORDS for i in range(ROWS)]) for more in (0, 2))  # type: ignore


def num_messages(mesh: Any, call: Callable[[], object]) -> int:
    """The collectives that the group has run meanwhile."""
    count = mesh.get_group()._get_sequence_number_for_group
    before = count()
    call()
    return int(count() - before)


def few_messages(rank: int, size: int) -> None:
    """The first call compares what it is called with; later ones tell with the loss."""
    mesh = line(size)
    replicated, plain = sw.distribute_module(model(), mesh), model()

    def step(number: int) -> Tensor:
        loss = replicated(*batch_of(mesh, number))
        loss.backward()
        return loss

    assert num_messages(mesh, partial(step, 0)) == 3  # batches; indices and loss; gradients
    for number in (1, 2):
        replicated.zero_grad()
        plain.zero_grad()
        assert num_messages(mesh, partial(step, number)) == 2
        whole = [x.full_tensor() for x in batch_of(mesh, number)]
        expected = plain(*whole)
        expected.backward()
        torch.testing.assert_close(replicated(*batch_of(mesh, number)).full_tensor(), expected)
        for ours, theirs in zip(replicated.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]
    with sw.debug.CommDebugMode() as comms:
        step(1)
    assert [(comm.function, comm.bytes) for comm in comms.comms][:2] == [("F.embedding", 8), ("F.cross_entropy", 12)]


def all_raise(rank: int, size: int) -> None:
    """And go on, since all have sent and received as much."""
    mesh = line(size)
    for has_loss in (True, False):
        net = sw.distribute_module(model(has_loss=has_loss), mesh)
        for known in (False, True):
            bad = part(mesh, [1, 2, (3, WORDS + 1)[rank == size - 1], 4])
            with pytest.raises(IndexRangeError, match=rf"^index {WORDS + 1} is out of bounds: it must be from 0 to 6$"):
                net(bad, batch_of(mesh, 0)[1])
            net(*batch_of(mesh, 0)).sum().backward()
            long = part(mesh, [1] * (ROWS + rank))
            with pytest.raises(ShardShapeError, match=r"^Model: the ranks of Mesh\(dp=\d\) call it with tensors of"):
                net(long, long)
            net(*batch_of(mesh, 1)).sum().backward()
            if known:
                fails_alone(net, mesh, rank)
            assert not windows
            dist.barrier()


def fails_alone(net: Any, mesh: Any, rank: int) -> None:
    """Where the others tell that they have agreed, they hear that one has not."""
    net.fails = rank == 0
    if net.fails:
        with pytest.raises(ArithmeticError, match="here"), pytest.warns(match="do not communicate the same"):
            net(*batch_of(mesh, 0))
    else:
        with pytest.raises(
            ReplicaError, match=r"^Model: the ranks of Mesh\(dp=\d\) do not communicate the same in it;"
        ):
            net(*batch_of(mesh, 0))
    net.fails = False


class Sliced(Model):
    """`is_recomputed`: all of it, but for slices, which are kept."""

    is_recomputed = False

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        if not self.is_recomputed:
            return self.of_some(words)
        keeps = partial(create_selective_checkpoint_contexts, [torch.ops.aten.slice.Tensor])
        return checkpoint(self.of_some, words, use_reentrant=False, context_fn=keeps)  # type: ignore[no-any-return]

    def of_some(self, words: Tensor) -> Tensor:
        return self.head(self.words(words))[:, 1:].square().sum()


def in_a_selective_checkpoint(rank: int, size: int) -> None:
    """What is told is not among what the checkpoint keeps."""
    mesh, found = line(size), []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        net: Any = sw.distribute_module(Sliced(has_loss=True), mesh)
        net.is_recomputed = is_recomputed
        for step in range(3):
            net(*batch_of(mesh, step)).backward()
        found.append([x.grad.full_tensor() for x in net.parameters()])
    torch.testing.assert_close(*found)


BODIES = few_messages, all_raise, in_a_selective_checkpoint
CASES = [Case(f"told-{size}-{run.__name__}", size, run) for size in (2, 4) for run in BODIES]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_processes(case: Case, on_ranks: Callable[[Case], Any]) -> None:
    on_ranks(case)
