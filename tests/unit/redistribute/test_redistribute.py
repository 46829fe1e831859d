"""`DTensor.redistribute`: what is communicated forward and backward, dtypes, ordered axes, storage."""

import pytest
import torch
from compare import check_shards

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.comm import ranked
from shardwise.debug import CommDebugMode

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


@pytest.fixture
def mesh() -> sw.Mesh:
    return sw.simulate((2, 2), ("dp", "tp"))


def make(mesh: sw.Mesh, placements, shape=(5, 6)) -> tuple[torch.Tensor, DTensor]:
    plain = torch.randn(shape, dtype=torch.float64)
    return plain, sw.distribute_tensor(plain, mesh, placements).requires_grad_()


# A backward pass that starts at uneven shards. The seed of rank 0 reaches the moves as a `Ranked`, with functions of
# it mapping over all ranks, where plain shards are meant.


# What is communicated


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        ([P, P], [R, R], {"all_reduce": 1}, {}),
        ([S0, S0], [R, R], {"all_gather": 1}, {}),
        pytest.param([P, R], [S0, R], {"reduce_scatter": 1}, {"all_gather": 1}),
        pytest.param([P, P], [S0, S0], {"reduce_scatter": 1}, {"all_gather": 1}),
        ([S0, R], [S1, R], {"all_to_all": 1}, {"all_to_all": 1}),
        pytest.param([S0, S0], {0: ("tp", "dp")}, {"all_to_all": 1}, {"all_to_all": 1}),
        pytest.param([R, R], [S0, S1], {}, {"all_gather": 1}),
        ([R, R], [P, R], {}, {}),
        ([S0, R], [P, R], {}, {}),
        ([S0, R], [S0, R], {}, {}),
    ],
)
def test_counts(mesh, source, target, forward, backward) -> None:
    plain, x = make(mesh, source)
    with CommDebugMode() as comm:
        y = x.redistribute(placements=target)
    assert comm.get_comm_counts() == forward
    assert torch.equal(y.full_tensor().detach(), plain)
    gradient = sw.distribute_tensor(plain, mesh, y._layout.gradient.placements)
    gradient = sw.tensor.as_layout(gradient, y._layout.gradient, "gradient")
    with CommDebugMode() as comm:
        y.backward(gradient)
    assert comm.get_comm_counts() == backward
    assert all(c.backward for c in comm.comms)
    torch.testing.assert_close(x.grad.full_tensor(), plain)


def test_a_gather_made_for_a_product_reduce_scatters_its_gradient() -> None:
    """Sequence-parallel activations into a column-parallel weight: Megatron's all-gather, reduce-scatter pair."""
    mesh = sw.simulate((4,), ("tp",))
    plain, x = make(mesh, [S0], (64, 16))
    plain_weight, weight = make(mesh, [S1], (16, 1024))
    with CommDebugMode() as comm:
        y = x @ weight
    assert y.placements == (S1,)
    assert comm.get_comm_counts() == {"all_gather": 1}
    with CommDebugMode() as comm:
        y.sum().backward()
    assert comm.get_comm_counts() == {"reduce_scatter": 1}
    plain.requires_grad_(), plain_weight.requires_grad_()
    (plain @ plain_weight).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    torch.testing.assert_close(weight.grad.full_tensor(), plain_weight.grad)


def test_a_replicated_tensor_used_three_times_as_varying_reduces_its_gradient_once() -> None:
    mesh = sw.simulate((2,), ("tp",))
    _, x = make(mesh, [R], (4, 4))
    weights = [make(mesh, [S1], (4, 8)) for _ in range(3)]
    outs = [x @ weight for _, weight in weights]
    with CommDebugMode() as comm:
        sum(out.sum() for out in outs).backward()
    assert [c.kind for c in comm.comms if c.backward] == ["all_reduce"]
    expected = sum(weight.sum(1) for weight, _ in weights).expand(4, 4)
    torch.testing.assert_close(x.grad.full_tensor(), expected)


# Ordered axes and uneven shards


@pytest.mark.parametrize("shape", [(5, 3), (8, 2), (1, 4), (0, 3), (3,)], ids=str)
@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")], ids=str)
def test_no_row_is_lost_or_invented(mesh, shape, order) -> None:
    plain, x = make(mesh, {0: order}, shape)
    assert torch.equal(x.full_tensor(), plain)
    assert x.placements == (S0, S0)


def test_the_major_axis_holds_the_larger_blocks(mesh) -> None:
    x = sw.distribute_tensor(torch.arange(8), mesh, {0: ("tp", "dp")})
    assert x.to_local().tolist().values == ([0, 1], [4, 5], [2, 3], [6, 7])
    x = sw.distribute_tensor(torch.arange(8), mesh, {0: ("dp", "tp")})
    assert x.to_local().tolist().values == ([0, 1], [2, 3], [4, 5], [6, 7])


def test_shards_of_any_sizes_to_the_usual_ones_and_back_to_a_leaf() -> None:
    mesh = sw.simulate((4,), ("tp",))
    leaves = [torch.randn(3, width, dtype=torch.float64, requires_grad=True) for width in (2, 0, 4, 5)]
    x = DTensor.from_local(ranked([leaf.view_as(leaf) for leaf in leaves]), mesh, [S1])
    assert str(x._layout) == "[3,11] S(1=2+0+4+5)@tp"
    y = x.redistribute(placements=[S1])
    assert [tuple(shape) for shape in y.to_local().shape.values] == [(3, 3), (3, 3), (3, 3), (3, 2)]
    whole = torch.cat(leaves, 1)
    assert torch.equal(y.full_tensor(), whole)
    weight = torch.randn(3, 11, dtype=torch.float64)
    (y * sw.distribute_tensor(weight, mesh, [S1])).sum().backward()
    for leaf, part in zip(leaves, weight.split([2, 0, 4, 5], 1), strict=True):
        assert torch.equal(leaf.grad, part)


# Options


def test_forward_dtype_is_that_of_the_wire_and_the_result(mesh) -> None:
    plain, x = make(mesh, [S0, R])
    with CommDebugMode() as comm:
        y = x.redistribute(placements=[R, R], forward_dtype=torch.bfloat16)
    assert [c.bytes for c in comm.comms] == [3 * 6 * 2]
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.full_tensor(), plain.bfloat16())
    y.sum().backward()
    assert x.grad.dtype == torch.float64
    assert torch.equal(x.grad.full_tensor(), torch.ones_like(plain))


def test_backward_dtype_is_that_of_the_wire_only(mesh) -> None:
    plain, x = make(mesh, [P, R])
    y = x.redistribute(placements=[S0, R], backward_dtype=torch.bfloat16)
    assert y.dtype == torch.float64
    assert torch.equal(y.full_tensor(), plain)
    weight = torch.randn_like(plain)
    seed = sw.distribute_tensor(weight, mesh, [S0, R])
    with CommDebugMode() as comm:
        y.backward(seed)
    assert [(c.kind, c.bytes) for c in comm.comms] == [("all_gather", 3 * 6 * 2)]
    assert x.grad.dtype == torch.float64
    assert torch.equal(x.grad.full_tensor(), weight.bfloat16().double())


@pytest.mark.parametrize(
    "op",
    [Partial("sum"), Partial("avg"), Partial("max"), Partial("product"), Partial("norm", 2.0)],
    ids=str,
)
def test_backward_dtype_of_reductions(op) -> None:
    mesh = sw.simulate((2,), ("tp",))

    def gradients(**options) -> torch.Tensor:
        leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([1.0, 5.0], [3.0, 2.0])]
        x = DTensor.from_local(ranked([leaf.view_as(leaf) for leaf in leaves]), mesh, [op])
        x.redistribute(placements=[R], **options).sum().backward()
        return torch.stack([leaf.grad for leaf in leaves])

    assert torch.equal(gradients(backward_dtype=torch.float32), gradients())


def test_both_dtypes(mesh) -> None:
    _, x = make(mesh, [S0, R])
    y = x.redistribute(placements=[S1, R], forward_dtype=torch.float32, backward_dtype=torch.bfloat16)
    assert y.dtype == torch.float32
    with CommDebugMode() as comm:
        y.sum().backward()
    assert [(c.kind, c.bytes) for c in comm.comms if c.kind == "all_to_all"] == [("all_to_all", 5 * 3 * 2)]
    assert x.grad.dtype == torch.float64


def test_async_op_gives_a_result_that_is_ready(mesh) -> None:
    plain, x = make(mesh, [S0, R])
    y = x.redistribute(mesh, [R, R], async_op=True)
    assert torch.equal(y.full_tensor(), plain)


# Storage


SOURCES, TARGETS = [[S0, S1], [P, R], [R, R]], [[S0, R], [S1, S0], [R, R], [P, R]]


@pytest.mark.parametrize(("source", "target"), [(s, t) for s in SOURCES for t in TARGETS if s != t], ids=str)
def test_writing_to_the_result_leaves_the_tensor_alone(mesh, source, target) -> None:
    plain, x = make(mesh, source)
    with torch.no_grad():
        x.redistribute(placements=target).zero_()
        whole = x.redistribute(placements=[R, R])
    check_shards(whole)
    assert torch.equal(whole.full_tensor(), plain)


def test_integers_booleans_and_complex_numbers_move_too(mesh) -> None:
    for plain in (torch.arange(30).view(5, 6), torch.arange(30).view(5, 6) % 3 == 0, torch.randn(5, 6) * 1j):
        for source in ([S0, S0], [S0, S1], [R, R], [P, R]):
            if plain.dtype == torch.bool and P in source:
                continue
            x = sw.distribute_tensor(plain, mesh, source)
            assert x.dtype == plain.dtype
            for target in ([R, R], [S1, S0], {1: ("tp", "dp")}):
                assert torch.equal(x.redistribute(placements=target).full_tensor(), plain)
