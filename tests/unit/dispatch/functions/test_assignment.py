"""`x[index] = value` with every kind of index: as on one device, or an error and nothing written."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from bad_calls import FAMILY
from sweep import mesh_of, place
from torch import Tensor

import shardwise as sw

R, S = sw.Replicate(), sw.Shard
WAYS = [((2,), (R,)), ((2,), (S(0),)), ((3,), (S(1),)), ((2,), (S(2),)), ((2, 2), (S(0), S(2))), ((2, 2), (S(1), S(1)))]
ROWS = torch.tensor([True, False, True])

INDICES: dict[str, Any] = {
    "int": 1,
    "last": -1,
    "slice": slice(1, None),
    "step": slice(None, None, 2),
    "ellipsis": ...,
    "nothing": (),
    "ints and slices": (1, slice(None), 2),
    "new dim": (..., None),
    "true": True,
    "false": False,
    "numpy int": numpy.int64(1),
    "numpy array": numpy.array([0, 2]),
    "numpy mask": numpy.array([True, False, True]),
    "range": range(2),
    "list": [2, 0],
    "empty list": [],
    "list of bools": [True, False, True],
    "list of slices": [slice(0, 2)],
    "lists in a tuple": ([0, 1], [1, 2]),
    "lists in a list": [[0, 1], [1, 2]],
    "number in a tensor": torch.tensor(1),
    "tensor": torch.tensor([2, 0]),
    "negative": torch.tensor([-1, -2]),
    "two": (torch.tensor([0, 1]), torch.tensor([1, 2])),
    "two that broadcast": (torch.tensor([[0], [1]]), torch.tensor([1, 2])),
    "apart": (torch.tensor([0, 1]), slice(None), torch.tensor([1, 2])),
    "after a new dim": (None, torch.tensor([0, 2])),
    "beside an int": (1, torch.tensor([0, 2])),
    "an int between": (torch.tensor([0, 2]), 1, torch.tensor([3, 0])),
    "in slices": (slice(0, 2), torch.tensor([1, 3]), slice(None, None, 2)),
    "mask": ROWS,
    "mask of all": torch.arange(60).view(3, 4, 5) % 7 == 0,
    "mask of inner dims": (slice(None), torch.arange(20).view(4, 5) % 3 == 0),
    "mask and int": (ROWS, 1),
    "mask and indices": (ROWS, torch.tensor([0, 3])),
    "bytes": (ROWS.byte(), torch.tensor([1])),
    "true in a byte": torch.tensor(1, dtype=torch.uint8),
    "false in a tensor": (torch.tensor(False), 1),
    "two ellipses for nothing": (0, ..., slice(1, 3), ..., 2),
}


def whole() -> Tensor:
    return torch.arange(60.0).view(3, 4, 5).clone()


def values(shape: torch.Size) -> list[Any]:
    full = torch.arange(1.0, 1 + shape.numel()).view(shape)
    return [7.5, torch.tensor(5.0), full, full[..., :1], full[None, None]]


def placed(item: Any, mesh: Any) -> Any:
    if isinstance(item, tuple):
        return tuple(placed(one, mesh) for one in item)
    return sw.distribute_tensor(item, mesh) if isinstance(item, Tensor) else item


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("mesh, placements", WAYS, ids=lambda value: "".join(map(str, value)))
def test_every_kind_of_index(mesh: tuple[int, ...], placements: tuple[sw.Placement, ...]) -> None:
    for name, index in INDICES.items():
        for value in values(whole()[index].shape):
            expected, d = whole(), place(whole(), *placements, mesh=mesh)
            expected[index] = value
            d[placed(index, d.device_mesh)] = placed(value, d.device_mesh)
            assert torch.equal(d.full_tensor(), expected), (name, value)


WRONG: dict[str, tuple[Any, Any]] = {
    "too many": ((0, 0, 0, 0), 1.0),
    "out of range": (7, 1.0),
    "no index": (1.5, 1.0),
    "mask of another shape": (torch.tensor([True, False]), 1.0),
    "indices that do not go together": (([0, 1], [0, 1, 2]), 1.0),
    "value of another shape": (slice(1, None), torch.ones(17)),
    "value for indices": (torch.tensor([0, 2]), torch.ones(17)),
    "no value": (0, "one"),
    "value for a mask": (ROWS, torch.ones(3, 4, 5)),
    "value for a mask and a true": ((torch.tensor(True), ROWS), torch.ones(3, 4, 5)),
    "value of another dtype for a mask": (ROWS, torch.ones(2, 4, 5, dtype=torch.float64)),
    "number in a tensor of floats": (torch.tensor(1.0), 1.0),
    "one value for bytes": (ROWS.byte(), 1.0),
    "two ellipses": ((..., ..., 0), 1.0),
    "numpy bool": (numpy.bool_(True), 1.0),
    "letters": ("rows", 1.0),
    "step back": (slice(None, None, -1), 1.0),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_a_wrong_assignment_raises_and_writes_nothing(case: str, placement: sw.Placement) -> None:
    index, value = WRONG[case]
    d = place(whole(), placement)
    with pytest.raises(FAMILY):
        whole()[index] = value
    with pytest.raises(FAMILY):
        d[placed(index, d.device_mesh)] = placed(value, d.device_mesh)
    assert torch.equal(d.full_tensor(), whole())


MORE_WAYS = [*WAYS, ((4,), (S(1),)), ((2, 2), (S(0), S(0)))]


@pytest.mark.parametrize("mesh, placements", MORE_WAYS, ids=str)
def test_a_part_may_be_set_to_itself(mesh: tuple[int, ...], placements: tuple[sw.Placement, ...]) -> None:
    """As `x[index] *= 2` does, after the part was written to."""
    one_element = (slice(0, 1), 1, slice(0, 3, 3))
    for index in (1, slice(1, 3), (slice(None), slice(1, 3)), (0, slice(None), 2), (..., -1), one_element):
        expected, d = whole(), place(whole(), *placements, mesh=mesh)
        expected[index] *= 2
        d[index] *= 2
        assert torch.equal(d.full_tensor(), expected), index


@pytest.mark.parametrize("mesh, placements", MORE_WAYS, ids=str)
def test_a_part_may_be_set_to_one_that_overlaps_it(mesh: tuple[int, ...], placements: tuple[sw.Placement, ...]) -> None:
    """torch refuses it. Here ranks without elements would not, so all of them take a copy first."""
    for to, of in (
        (slice(1, None), slice(None, -1)),
        ((..., slice(1, None)), (..., slice(None, -1))),
        (torch.tensor([2, 0]), slice(None, 2)),
    ):
        expected, d = whole(), place(whole(), *placements, mesh=mesh)
        expected[to] = expected[of].clone()
        d[placed(to, d.device_mesh)] = d[of]
        assert torch.equal(d.full_tensor(), expected), to


def test_one_number_in_another_dtype_for_a_mask() -> None:
    for value in (torch.tensor([2]), torch.tensor([[True]]), torch.tensor(3, dtype=torch.int32)):
        expected, d = whole(), place(whole(), S(1))
        expected[ROWS] = value
        d[place(ROWS, S(0))] = place(value, R)
        assert torch.equal(d.full_tensor(), expected), value


def test_numbers_of_the_program_are_not_sent() -> None:
    d = place(whole(), S(1))
    with sw.debug.CommDebugMode() as mode:
        d[[0, 2]] = 1.0
        d[True, [True, False, True]] = 2.0
        d[numpy.array([1, 0]), 3] = 3.0
    assert mode.get_total_counts() == 0


def test_indices_apart_from_each_other_but_for_an_int() -> None:
    """The dims of the indices stay in place if nothing but ints lies between them."""
    x = torch.arange(81.0).view(3, 3, 3, 3)
    index, value = (slice(None), torch.tensor([0, 2, 1]), slice(None), 1), torch.arange(27.0).view(3, 3, 3)
    for placements in ((S(0), R), (S(1), S(3)), (S(3), S(2))):
        expected, d = x.clone(), place(x, *placements, mesh=(2, 2))
        expected[index] = value
        d[placed(index, mesh_of((2, 2)))] = placed(value, mesh_of((2, 2)))
        assert torch.equal(d.full_tensor(), expected), placements


@pytest.mark.parametrize("index", [1, (slice(None), torch.tensor([0, 2])), (ROWS, 1)], ids=["int", "indices", "mask"])
def test_gradients_of_assignments(index: Any) -> None:
    x, v = whole().requires_grad_(), torch.rand_like(whole()[index]).requires_grad_()
    for placements in ((S(0),), (S(1),)):
        d, w = place(whole(), *placements).requires_grad_(), place(v.detach(), R).requires_grad_()
        for t, value in ((x, v), (d, w)):
            t.grad = value.grad = None
            y = t * 2
            y[placed(index, d.device_mesh) if t is d else index] = value * 3
            (y * y).sum().backward()
        torch.testing.assert_close(d.grad.full_tensor(), x.grad)
        torch.testing.assert_close(w.grad.full_tensor(), v.grad)


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_an_expanded_part_is_refused(placement: sw.Placement) -> None:
    d = place(whole(), placement)
    for value in (7.5, placed(torch.tensor(5.0), d.device_mesh), placed(torch.ones(6), d.device_mesh)):
        for index in (slice(1, None), [2, 0], ([1, 0], slice(1, 3))):
            with pytest.raises(sw.errors.InPlaceError, match="refers to a single memory location"):
                d[:, :, :1].expand(3, 4, 6)[index] = value
    assert torch.equal(d.full_tensor(), whole())


@pytest.mark.parametrize("placement", [R, S(0), S(1), sw.Partial()], ids=str)
def test_a_part_of_a_parameter_is_scaled_under_no_grad(placement: sw.Placement) -> None:
    """Of the part, which is a view that was written to, torch does not say whether it is a leaf."""
    expected, d = whole().requires_grad_(), place(whole(), placement).requires_grad_()
    for x in (expected, d):
        with torch.no_grad():
            x[1:] *= 0.5
            x[:, 1::2] += x[:, :1]
            part = x[1:]
            part.mul_(2)
            x[:2].add_(part + 1)
        x.sum().backward()
    assert torch.equal(d.detach().full_tensor(), expected.detach())
    assert expected.grad is not None and d.grad is not None
    assert torch.equal(d.grad.full_tensor(), expected.grad)
