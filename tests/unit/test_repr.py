"""What is printed of a DTensor: a part of it is called so, and nothing is communicated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from saved import fake_mesh

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1 = Replicate(), Shard(0), Shard(1)

SHOWN: dict[str, Callable[[], DTensor]] = {
    "DTensor(tensor([0., 1.]), shape=[2], {dp: R, tp: R})": lambda: place(torch.arange(2.0), R, R),
    "DTensor(shard at dp=0: tensor([0., 1.]), shape=[4], {dp: S(0), tp: R})": lambda: place(torch.arange(4.0), S0, R),
    "DTensor(shard at dp=0, tp=0: tensor([0]), shape=[4], {dp: S(0), tp: S(0)})": lambda: place(
        torch.arange(4), S0, S0
    ),
    "DTensor(shard at dp=0: tensor([[0, 1],\n"
    "                               [2, 3]]), shape=[4, 2], {dp: S(0), tp: R})": lambda: place(
        torch.arange(8).view(4, 2), S0, R
    ),
    "DTensor(pending term at tp=0: tensor([0., 1.]), shape=[2], {dp: R, tp: P(sum)})": lambda: place(
        torch.arange(2.0), R, Partial()
    ),
    "DTensor(pending term of the shard at dp=0, tp=0: tensor([0.]), shape=[2], {dp: S(0), tp: P(max)})": lambda: place(
        torch.arange(2.0), S0, Partial("max")
    ),
    "DTensor(pending term at dp=0: tensor(1.), shape=[], {dp: P(sum), tp: R})": lambda: place(
        torch.arange(4.0), S0, R
    ).sum(),
    "DTensor(shard at tp=0: tensor(..., device='meta', size=(2, 3)), shape=[4, 3], {dp: R, tp: S(0)})": lambda: place(
        torch.empty(4, 3, device="meta"), R, S0
    ),
    "DTensor(shard at dp=0: tensor([1.]), shape=[2], {dp: S(0), tp: R}, requires_grad=True)": lambda: place(
        torch.ones(2), S0, R
    ).requires_grad_(),
    "DTensor(pending term at dp=0: tensor(1.), shape=[], {dp: P(sum), tp: R}, grad_fn=<SumBackward0>)": lambda: (
        place(torch.ones(2), S0, R).requires_grad_().sum()
    ),
}


def place(plain: torch.Tensor, *placements: sw.Placement) -> DTensor:
    return sw.distribute_tensor(plain, MESH, placements)


@pytest.mark.parametrize("text", SHOWN, ids=lambda text: text[8:40])
def test_a_part_is_called_so(text: str) -> None:
    d = SHOWN[text]()
    with CommDebugMode() as comm:
        assert repr(d) == str(d) == f"{d!s}" == f"{d!r}" == text
        assert str([d]) == f"[{text}]"
    assert comm.get_comm_counts() == {}


def test_a_rank_says_which_one_it_is() -> None:
    with fake_mesh(2, 2, names=("dp", "tp"), rank=2) as mesh:
        d = sw.distribute_tensor(torch.arange(4.0), mesh, [S0, Partial()])
        assert repr(d).startswith("DTensor(pending term of the shard at dp=1, tp=0: tensor([2., 3.]), shape=[4]")


@pytest.mark.parametrize("placements", [(R, R), (Partial(), R), (Partial("max"), R)], ids=str)
def test_a_number_is_formatted_by_its_value(placements: tuple) -> None:
    """As `item()` does, which all ranks call together."""
    d = DTensor.from_local(torch.tensor(2.5), MESH, placements)
    value = d.item()
    assert value in (2.5, 5.0)
    assert (f"{d}", f"{d:.3f}", f"{d:>8.2e}") == (f"{value}", f"{value:.3f}", f"{value:>8.2e}")
    assert f"{d:.3f}" == "%.3f" % d  # noqa: UP031


def test_other_tensors_take_no_format() -> None:
    d = place(torch.arange(4.0), S0, R)
    assert f"{d}" == repr(d)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{d:.3f}"
    empty = place(torch.empty((), device="meta"), R, R)
    assert f"{empty}" == repr(empty) == "DTensor(tensor(..., device='meta', size=()), shape=[], {dp: R, tp: R})"
