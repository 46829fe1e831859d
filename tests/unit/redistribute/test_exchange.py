"""Windows, gathers and scatters of a dim, with their gradients, against the same on the whole tensor."""

import pytest
import torch
from torch import Tensor

from shardwise import simulate
from shardwise.comm.ranked import ranked, shards_of
from shardwise.debug import CommDebugMode
from shardwise.redistribute import Group

SIZES = (3, 0, 4, 2)
HAVE = [(0, 3), (3, 3), (3, 7), (7, 9)]
WINDOWS = {
    "halo of one": [(0, 4), (3, 3), (2, 8), (6, 9)],
    "everything to everyone": [(0, 9)] * 4,
    "nothing to some": [(0, 0), (0, 9), (5, 5), (8, 9)],
    "rolled": [(6, 9), (9, 9), (0, 4), (4, 6)],
    "parts of their own": [(1, 3), (0, 0), (4, 5), (7, 9)],
}
ROWS = 2


def one_axis() -> Group:
    return Group(simulate((4,)), (0,), ())


def cut(x: Tensor) -> Tensor:
    return ranked([part.clone() for part in x.split(SIZES)])


@pytest.mark.parametrize("want", WINDOWS.values(), ids=WINDOWS)
def test_a_window_is_the_slices_of_the_whole_to_any_order(want):
    group, x = one_axis(), torch.randn(9, ROWS, dtype=torch.float64, requires_grad=True)
    wanted = torch.cat([x[start:stop] for start, stop in want])
    weight = torch.randn_like(wanted, requires_grad=True)

    out = group.window(cut(x), 0, HAVE, want)
    got = torch.cat([shard.as_subclass(Tensor) for shard in shards_of(out)])

    torch.testing.assert_close(got, wanted)
    (grad,) = torch.autograd.grad((got * weight).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad((wanted * weight).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, expected)
    (second,) = torch.autograd.grad(grad.pow(2).sum(), weight)
    (expected,) = torch.autograd.grad(expected.pow(2).sum(), weight)
    torch.testing.assert_close(second, expected)


def test_nothing_is_exchanged_where_all_have_what_they_want():
    group, x = one_axis(), torch.randn(9, ROWS, requires_grad=True)
    with CommDebugMode() as comm:
        group.window(cut(x), 0, HAVE, WINDOWS["parts of their own"]).sum().backward()
    assert comm.get_total_counts() == 0


def test_a_gather_joins_the_parts_and_its_gradient_is_summed_and_scattered():
    group, x = one_axis(), torch.randn(9, ROWS, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(9, ROWS, dtype=torch.float64) for _ in SIZES]
    whole = group.gather(cut(x), 0, SIZES)
    for shard in shards_of(whole):
        torch.testing.assert_close(shard.as_subclass(Tensor), x)
    loss = sum((shard.as_subclass(Tensor) * w).sum() for shard, w in zip(shards_of(whole), weights, strict=True))
    (grad,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(grad, sum(weights))


def test_a_scatter_sums_and_keeps_a_part_and_its_gradient_is_gathered():
    group = one_axis()
    terms = [torch.randn(9, ROWS, dtype=torch.float64, requires_grad=True) for _ in SIZES]
    weight = torch.randn(9, ROWS, dtype=torch.float64)
    parts = shards_of(group.scatter(ranked([term * 1 for term in terms]), 0, SIZES))
    got = torch.cat([part.as_subclass(Tensor) for part in parts])
    torch.testing.assert_close(got, sum(terms))
    for grad in torch.autograd.grad((got * weight).sum(), terms):
        torch.testing.assert_close(grad, weight)


def test_merged_axes_count_their_members_in_the_order_of_the_axes():
    mesh = simulate((2, 2), ("a", "b"))
    group = Group(mesh, (1, 0), ())
    parts = torch.arange(4.0).split(1)  # member b * 2 + a
    held = ranked([parts[b * 2 + a].clone() for a, b in mesh.held])
    rolled = group.window(held, 0, [(i, i + 1) for i in range(4)], [((i + 1) % 4, (i + 1) % 4 + 1) for i in range(4)])
    expected = {(a, b): (b * 2 + a + 1) % 4 for a, b in mesh.held}
    assert {at: int(x.as_subclass(Tensor)) for at, x in zip(mesh.held, shards_of(rolled), strict=True)} == expected
