"""Whether torch makes a view or a copy depends on how the whole lies in memory, not on how the shards do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from sweep import place
from torch import Tensor

import shardwise as sw
from shardwise.comm import shards_of
from shardwise.dispatch.aliasing import global_strides as memory
from shardwise.dispatch.aliasing import views

R, S = sw.Replicate(), sw.Shard
Take = Callable[[Tensor], Tensor]
ONE = [((ranks,), (placement,)) for ranks in (2, 3, 4) for placement in (R, S(0), S(1), S(2))]
TWO = [((2, 2), pair) for pair in ((S(1), S(1)), (S(0), S(2)), (S(2), S(2)), (S(1), S(2)))]


def whole() -> Tensor:
    return torch.arange(48.0, dtype=torch.float64).view(2, 4, 6).clone()


PARTS: dict[str, Take] = {
    "all": lambda x: x,
    "every other of dim 0": lambda x: x[::2],
    "every other of dim 1": lambda x: x[:, ::2],
    "every third of dim 2": lambda x: x[..., ::3],
    "first of dim 1": lambda x: x[:, :1],
    "half of dim 1": lambda x: x[:, :2],
    "middle of dim 1": lambda x: x.narrow(1, 1, 2),
    "split of dim 2": lambda x: x.split([2, 4], 2)[1],
    "turned": lambda x: x.transpose(0, 1),
    "turned inside": lambda x: x.mT,
    "half, turned": lambda x: x[:, :2].transpose(0, 1),
    "turned, half, back": lambda x: x.transpose(0, 1)[:2].transpose(0, 1),
    "one, repeated": lambda x: x[:1].expand(2, 4, 6),
    "diagonal, outer dims": lambda x: x.diagonal(0, 0, 1),
    "diagonal, across dim 1": lambda x: x.diagonal(1, 2, 0),
}
RESULTS: dict[str, Take] = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(-1),
    "flatten first": lambda x: x.flatten(0, 1),
    "flatten last": lambda x: torch.flatten(x, 1),
    "turned and merged": lambda x: x.transpose(0, 1).reshape(-1, x.shape[-1]),
    "reshape_as": lambda x: x.reshape_as(x),
    "ravel": torch.ravel,
    "module": torch.nn.Flatten(0),
    "einsum": lambda x: torch.einsum("ijk->kij", x),
    "to": lambda x: x.to(x.dtype),
    "expand_as": lambda x: x.expand_as(x),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "row": lambda x: x[0],
    "squeeze": lambda x: x.squeeze(),
}


def storages(x: sw.DTensor) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return [shard.untyped_storage()._cdata for shard in (x, *x._peers)]


def outcome(take: Take, x: Tensor, *, write_to_result: bool) -> tuple[Tensor, Tensor]:
    """What there is after a write to the result, or to the source: the source and the result."""
    result = take(x)
    (result if write_to_result else x).add_(1)
    return x, result


@pytest.mark.parametrize("mesh, placements", ONE + TWO, ids=lambda value: "".join(map(str, value)))
def test_a_write_is_seen_where_it_is_on_one_device(mesh: tuple[int, ...], placements: tuple[sw.Placement, ...]) -> None:
    """Or refused: a view that had to be a copy says so."""
    seen = refused = 0
    for (part, a), (result, b), to_result in product(PARTS.items(), RESULTS.items(), (True, False)):
        context = f"{part}, {result}, write to {'result' if to_result else 'source'}"
        try:
            expected = outcome(lambda x, a=a, b=b: b(a(x)), whole(), write_to_result=to_result)
        except RuntimeError:
            continue  # elements that share memory cannot be written to
        d = place(whole(), *placements, mesh=mesh)
        try:
            found = outcome(lambda x, a=a, b=b: b(a(x)), d, write_to_result=to_result)
            values = [x.full_tensor() for x in found]
        except sw.errors.InPlaceError:
            refused += 1
            continue
        seen += 1
        assert torch.equal(values[0], expected[0]), f"source: {context}"
        assert torch.equal(values[1], expected[1]), f"result: {context}"
    assert seen > 3 * refused
    if all(placement == R for placement in placements):
        assert not refused


@pytest.mark.parametrize("mesh, placements", ONE + TWO, ids=lambda value: "".join(map(str, value)))
def test_strides_are_those_of_the_whole(mesh: tuple[int, ...], placements: tuple[sw.Placement, ...]) -> None:
    """On every rank, whatever it holds of the tensor."""
    for name, take in PARTS.items():
        expected, d = take(whole()), take(place(whole(), *placements, mesh=mesh))
        if d.__class__ is views.CopiedView:
            continue  # it lies in memory of its own
        assert_strides(d, expected, name)
        assert d.is_contiguous() == expected.is_contiguous(), name


def assert_strides(d: sw.DTensor, expected: Tensor, name: str = "") -> None:
    wide = [dim for dim, size in enumerate(expected.shape) if size > 1]
    assert [d.stride(dim) for dim in wide] == [expected.stride(dim) for dim in wide], name
    if "_strides" not in d.__dict__:
        with torch._C.DisableTorchFunctionSubclass():
            for shard in (d, *d._peers):
                shown = memory.inferred_strides(d._layout.shape, torch._C.TensorBase.size(shard), shard.stride())
                assert [shown[dim] for dim in wide] == [expected.stride(dim) for dim in wide], name


def test_strides_of_what_is_computed_from_thin_shards() -> None:
    """Of the channels of the second some ranks hold one and others none."""
    x, y = whole(), torch.arange(6.0, dtype=torch.float64).view(1, 3, 2)
    weight, other = torch.ones(6, 2, 1, dtype=torch.float64), torch.ones(4, 6, dtype=torch.float64)
    for take, given, dim in (
        (lambda y, w: F.conv1d(y.permute(0, 2, 1), w, stride=2), (y, weight), 2),
        (lambda x, w: torch.einsum("ijk,jk->kj", x, w)[1], (x, other), 1),
    ):
        dist = [place(given[0], S(dim), mesh=(3,)), place(given[1], R, mesh=(3,))]
        assert_strides(take(*dist), take(*given))


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_strides_of_what_is_computed_from_one_index_of_a_sharded_dim(order: tuple[int, ...]) -> None:
    """Ranks that do not have it, or nothing at all, contribute zeros that are strided as it is."""
    for dim, ranks in product(range(3), (2, 4)):
        at, plain = order.index(dim), whole().permute(order)
        turned = place(whole(), S(dim), mesh=(ranks,)).permute(order)
        for index in (0, -1):
            made = [1.5 - x.select(at, index) for x in (turned, plain)]
            with torch._C.DisableTorchFunctionSubclass():
                strides = {shard.stride() for shard in shards_of(made[0])}
            assert strides == {made[1].stride()}


@pytest.mark.parametrize("create_graph", [True, False])
@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)], ids=str)
def test_gradients_are_strided_as_their_tensors(order: tuple[int, ...], create_graph: bool) -> None:
    for dim in range(3):
        x, d = whole().requires_grad_(), place(whole(), S(dim), mesh=(4,)).requires_grad_()
        for inside in (lambda y: y, lambda y: y.mT):
            found = []
            for t in (x, d):
                y = t.permute(order)
                loss = inside(y).tanh().square().sum()
                found.append(torch.autograd.grad(loss, [t, y], create_graph=create_graph))
            for plain, dist in zip(*found, strict=True):
                assert_strides(dist, plain)
                torch.testing.assert_close(dist.full_tensor(), plain)


def test_a_copy_of_a_copy_shows_what_is_written_to_the_source() -> None:
    x = place(whole(), S(0), mesh=(2,))
    row = x[:1].squeeze(0)[0]
    x.add_(1)
    assert torch.equal(row.full_tensor(), (whole() + 1)[0, 0])


def test_a_write_to_a_copy_of_a_copy_reaches_the_source() -> None:
    x, expected = place(whole(), S(0), mesh=(2,)), whole()
    for t in (x, expected):
        row = t[:1].squeeze(0)[0]
        row.mul_(2)
        row.add_(1)
    assert torch.equal(x.full_tensor(), expected)


def test_what_torch_makes_a_view_costs_no_copy() -> None:
    x = place(whole(), S(0), mesh=(2,))  # one index of dim 0 on every rank
    assert x.contiguous() is x
    for view in (x.reshape(8, 6), x.flatten(1), x[:, :2].reshape(2, 2, 2, 3), x.reshape(48)):
        assert all(a == b for a, b in zip(storages(view), storages(x), strict=True))


def test_gradients_pass_through_what_is_copied() -> None:
    x, d = whole().requires_grad_(), place(whole(), S(1), mesh=(4,)).requires_grad_()
    for t in (x, d):
        y = (t * 2).transpose(0, 1)
        z = y.reshape(-1, 6)
        z.mul_(t.transpose(0, 1).reshape(8, 6))
        (z.sum() + (y * y).sum()).backward()
    torch.testing.assert_close(d.grad.full_tensor(), x.grad)


@pytest.mark.parametrize("mesh, placements", [*ONE, *TWO], ids=lambda value: "".join(map(str, value)))
def test_views_that_torch_refuses(mesh: tuple[int, ...], placements: tuple[sw.Placement, ...]) -> None:
    """Of shards that would have to move, or are so thin that they would allow it."""
    refused = 0
    for (part, take), shape in product(PARTS.items(), [(8, 6), (48,), (2, 24), (4, 12), (12,), (4, 6), (2, 2, 12)]):
        plain, dist = take(whole()), take(place(whole(), *placements, mesh=mesh))
        if plain.numel() != torch.Size(shape).numel():
            continue
        if not (dist._layout.thinness or _moves(dist, shape)):
            continue
        said = []
        for x in (plain, dist):
            try:
                said.append(list(x.view(shape).shape))
            except RuntimeError as error:
                said.append(str(error))
        assert said[0] == said[1], (part, shape)
        refused += isinstance(said[0], str)
    assert refused or R in placements


def _moves(x: sw.DTensor, shape: tuple[int, ...]) -> bool:
    """Whether `reshape` gives a copy that torch would make a view."""
    return isinstance(x.contiguous().reshape(shape), views.CopiedView)


@pytest.mark.parametrize("placement", [R, S(0)], ids=str)
def test_strides_are_those_of_kernels_not_of_meta_tensors(placement: sw.Placement) -> None:
    """`batch_norm` of a transposed tensor is contiguous on the CPU, and not on meta."""
    x, ones = torch.arange(4.0, dtype=torch.float64).view(2, 2), torch.ones(2, dtype=torch.float64)
    results = []
    for on in (lambda t, p: t.clone(), lambda t, p: place(t, p, mesh=(2,))):
        given = [on(ones, R), on(ones, R), on(ones, R), on(ones, placement)]
        y = F.batch_norm(on(x, R).permute(1, 0), *given)
        y.flatten(0, 1)[0].add_(1)
        results.append(y)
    assert results[1].stride() == results[0].stride()
    assert torch.equal(results[1].full_tensor(), results[0])


OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "add": torch.add,
    "add to": lambda x, y: torch.add(y, x),
    "sub": lambda x, y: torch.sub(y, x),
    "maximum": torch.maximum,
    "repeated": lambda x, y: x + y.sum(0, keepdim=True),
}


@pytest.mark.parametrize("of_two", OF_TWO.values(), ids=OF_TWO)
@pytest.mark.parametrize("trained", [False, True], ids=["constant", "trained"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_moved_keeps_the_order_of_its_dims(ranks: int, trained: bool, of_two: Callable[..., Tensor]) -> None:
    """One operand is turned and the other is not: the result is strided as the first is, whichever was moved."""
    mesh, x, y = sw.simulate((ranks,)), torch.randn(6, 4), torch.randn(4, 6)
    wanted = of_two(x.t(), y)
    for mine, theirs in product((R, S(0), S(1), sw.Partial()), repeat=2):
        a = sw.distribute_tensor(x, mesh, [R]).redistribute(placements=[mine]).detach().requires_grad_(trained)
        b = sw.distribute_tensor(y, mesh, [R]).redistribute(placements=[theirs]).detach().requires_grad_(trained)
        found = of_two(a.t(), b)
        assert found.stride() == wanted.stride(), (mine, theirs)
        found.contiguous().detach().mul_(-1)
        torch.testing.assert_close(found.full_tensor(), -wanted if wanted.is_contiguous() else wanted)
