"""The transition table, and every move along one axis: value, gradient and gradient of the gradient."""

import pytest
import torch
from compare import check_shards
from torch import Tensor

import shardwise as sw
from shardwise import DTensor, Layout, Partial, Replicate, Shard
from shardwise.comm import ranked
from shardwise.redistribute import TABLE, Move, Typed, plan_moves, run_path
from shardwise.redistribute.kernels import KERNELS, STARTS
from shardwise.redistribute.transitions import COMMUNICATES, DUAL

RANKS = 3
SHAPE = (5, 4)  # neither dim divides by 3
LINEAR = [Replicate(), Shard(0), Shard(1), Partial()]
INF = float("inf")


def mesh() -> sw.Mesh:
    return sw.simulate((RANKS,), ("tp",))


# The table


def test_the_table_is_closed_under_duality() -> None:
    assert all(DUAL[DUAL[kind]] == kind for kind in DUAL)
    for before, after in TABLE:
        assert (DUAL[after], DUAL[before]) in TABLE


def test_every_kind_in_the_table_is_known() -> None:
    assert set(TABLE.values()) == set(KERNELS) | set(STARTS)
    assert set(STARTS) == COMMUNICATES


def test_what_each_move_does_and_what_its_backward_does() -> None:
    pairs = {(move, TABLE[move], TABLE[DUAL[move[1]], DUAL[move[0]]]) for move in TABLE}
    assert pairs >= {
        (("R", "V"), "nothing", "all_reduce"),
        (("R", "S"), "slice", "all_gather"),
        (("R", "P"), "mask", "nothing"),
        (("S", "R"), "all_gather", "slice"),
        (("S", "V"), "all_gather", "reduce_scatter"),
        (("S", "S"), "all_to_all", "all_to_all"),
        (("S", "P"), "pad", "slice"),
        (("P", "R"), "all_reduce", "nothing"),
        (("P", "S"), "reduce_scatter", "all_gather"),
    }


def test_the_dual_of_the_dual_is_the_move() -> None:
    kinds = {
        "R": Typed(Layout.of(mesh(), SHAPE, [Replicate()])),
        "V": Typed(Layout.of(mesh(), SHAPE, [Replicate()]), frozenset({0})),
        "S": Typed(Layout.of(mesh(), SHAPE, [Shard(0)])),
        "P": Typed(Layout.of(mesh(), SHAPE, [Partial()])),
    }
    for before, after in TABLE:
        move = Move(kinds[before], kinds[after], (0,))
        assert move.kind == TABLE[before, after]
        assert move.dual.dual == move
        assert (move.dual.source.at(0), move.dual.target.at(0)) == (DUAL[after], DUAL[before])
        assert str(move).startswith(f"{move.kind}(tp): ")


# Linear moves: the global value stays, so the gradient of any function of it stays


@pytest.mark.parametrize("before", LINEAR, ids=str)
@pytest.mark.parametrize("after", LINEAR, ids=str)
@pytest.mark.parametrize("shape", [SHAPE, (1, 3), (3, 0), (0, 2)], ids=str)
def test_value_and_gradient(before, after, shape) -> None:
    plain = torch.randn(shape, dtype=torch.float64)
    weight = torch.randn(shape, dtype=torch.float64)
    x = sw.distribute_tensor(plain, mesh(), [before]).requires_grad_()
    y = x.redistribute(placements=[after])
    assert y.placements == (after,)
    check_shards(y)
    assert torch.equal(y.full_tensor(), plain)
    (y**3 * sw.distribute_tensor(weight, mesh())).sum().backward()
    assert x.grad._layout is x._layout.gradient
    check_shards(x.grad)
    torch.testing.assert_close(x.grad.full_tensor(), 3 * plain**2 * weight)


@pytest.mark.parametrize("before", LINEAR, ids=str)
@pytest.mark.parametrize("after", LINEAR, ids=str)
def test_second_gradient(before, after) -> None:
    plain = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((plain**3).sum(), plain, create_graph=True)
    (expected,) = torch.autograd.grad((expected**2).sum(), plain)

    x = sw.distribute_tensor(plain.detach(), mesh(), [before]).requires_grad_()
    (gradient,) = torch.autograd.grad((x.redistribute(placements=[after]) ** 3).sum(), x, create_graph=True)
    (gradient,) = torch.autograd.grad((gradient**2).sum(), x)
    torch.testing.assert_close(gradient.full_tensor(), expected)


@pytest.mark.parametrize("source", [Replicate(), Shard(0), Partial()], ids=str)
def test_a_value_used_as_varying_gathers_its_terms(source) -> None:
    """Every rank multiplies the whole value by a number of its own: the gradient is the sum of the numbers."""
    layout = Layout.of(mesh(), SHAPE, [source])
    plain = torch.randn(SHAPE, dtype=torch.float64)
    x = sw.distribute_tensor(plain, mesh(), [source]).requires_grad_()
    local = run_path(x.to_local(), plan_moves(layout, Layout(mesh(), SHAPE), frozenset({0})))
    scale = ranked([torch.tensor(float(10**rank), dtype=torch.float64) for rank in range(RANKS)])
    (local * scale).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full(SHAPE, 111.0, dtype=torch.float64))


# Reductions over the ranks, against the same reduction of the stacked shards on one device


def reduced(op: Partial, stack: Tensor) -> Tensor:
    match op.reduce_op:
        case "sum":
            return stack.sum(0)
        case "avg":
            return stack.mean(0)
        case "max":
            return stack.amax(0)
        case "min":
            return stack.amin(0)
        case "product":
            return stack.prod(0)
    return torch.linalg.vector_norm(stack, op.p, 0)


REDUCTIONS = [Partial(op) for op in ("sum", "avg", "max", "min", "product")]
REDUCTIONS += [Partial("norm", p) for p in (1.0, 2.0, 3.0, INF)]


def stacks() -> dict[str, Tensor]:
    signed = torch.randn(RANKS, 5, 4, dtype=torch.float64)
    tied = torch.randint(-1, 2, (RANKS, 5, 4)).double()
    tied[:, 0] = 2.0  # all ranks tie
    tied[:, 1] = 0.0  # all zero
    tied[:2, 2] = 0.0  # two zeros: the product's gradient vanishes everywhere
    return {"signed": signed, "tied": tied}


@pytest.mark.parametrize("target", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("data", ["signed", "tied"])
@pytest.mark.parametrize("op", REDUCTIONS, ids=str)
def test_reductions(op: Partial, data: str, target) -> None:
    stack = stacks()[data].requires_grad_()
    weight = torch.randn(5, 4, dtype=torch.float64)
    expected = reduced(op, stack)
    (expected * weight).sum().backward()

    locals_ = [piece.detach().clone().requires_grad_() for piece in stack]
    shards = ranked([piece.view_as(piece) for piece in locals_])
    x = DTensor.from_local(shards, mesh(), [op])
    y = x.redistribute(placements=[target])
    torch.testing.assert_close(y.full_tensor(), expected)
    (y * sw.distribute_tensor(weight, mesh())).sum().backward()
    torch.testing.assert_close(torch.stack([piece.grad for piece in locals_]), stack.grad)


@pytest.mark.parametrize("op", REDUCTIONS, ids=str)
@pytest.mark.parametrize("target", [Replicate(), Shard(0)], ids=str)
def test_second_gradients_of_reductions(op: Partial, target) -> None:
    stack = stacks()["signed"].requires_grad_()
    (first,) = torch.autograd.grad((reduced(op, stack) ** 2).sum(), stack, create_graph=True)
    (first**2).sum().backward()

    locals_ = [piece.detach().clone().requires_grad_() for piece in stack]
    x = DTensor.from_local(ranked([piece.view_as(piece) for piece in locals_]), mesh(), [op])
    loss = (x.redistribute(placements=[target]).full_tensor() ** 2).sum()
    firsts = torch.autograd.grad(loss, locals_, create_graph=True)
    torch.testing.assert_close(torch.stack(firsts), first)
    torch.autograd.backward([(piece**2).sum() for piece in firsts])
    torch.testing.assert_close(torch.stack([piece.grad for piece in locals_]), stack.grad)


@pytest.mark.parametrize(
    "op",
    [
        *(Partial(op) for op in ("sum", "avg", "product")),
        Partial("norm", 2.0),
        Partial("max"),
        Partial("norm", INF),
    ],
    ids=str,
)
def test_a_reduced_value_used_as_varying(op: Partial) -> None:
    """The result of the reduction goes straight into something that differs between the ranks."""
    stack = stacks()["signed"].requires_grad_()
    (111 * reduced(op, stack)).sum().backward()

    locals_ = [piece.detach().clone().requires_grad_() for piece in stack]
    source = Layout.of(mesh(), SHAPE, [op])
    moves = plan_moves(source, Layout(mesh(), SHAPE), frozenset({0}))
    local = run_path(ranked([piece.view_as(piece) for piece in locals_]), moves)
    scale = ranked([torch.tensor(float(10**rank), dtype=torch.float64) for rank in range(RANKS)])
    (local * scale).sum().backward()
    torch.testing.assert_close(torch.stack([piece.grad for piece in locals_]), stack.grad)


@pytest.mark.parametrize("op", [Partial("avg"), Partial("max"), Partial("min")], ids=str)
@pytest.mark.parametrize("source", [Replicate(), Shard(0), Partial()], ids=str)
def test_making_a_pending_average_or_extremum(op: Partial, source) -> None:
    plain = torch.randn(SHAPE, dtype=torch.float64)
    x = sw.distribute_tensor(plain, mesh(), [source]).requires_grad_()
    y = x.redistribute(placements=[op])
    torch.testing.assert_close(y.full_tensor(), plain)
    (y.redistribute(placements=[Replicate()]) ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), 2 * plain)
