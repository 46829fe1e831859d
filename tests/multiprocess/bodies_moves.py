"""Bodies about moving data: every transition, uneven and empty shards, ordered axes, dtypes, bad input."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from bodies import P, R, S, assert_close, body, check_move, doubles, everywhere, held, leaf, per_rank
from shardwise.comm import as_mesh
from shardwise.debug import CommDebugMode
from shardwise.errors import PlacementError, ReplicaError, ShardShapeError

SHAPES = [(5, 3), (4, 4), (1, 2), (0, 3), (3, 1)]


@body(2)
def every_transition_on_one_axis(mesh: Any) -> None:
    targets = [R, S(0), S(1), S(-1), P, sw.Partial("avg"), sw.Partial("max"), sw.Partial("min")]
    for shape in SHAPES:
        whole = doubles(*shape)
        for source, target in product([R, S(0), S(1), P], targets):
            check_move(leaf(whole, mesh, [source]), whole, [target])


@body(2, 2)
def every_transition_on_two_axes(mesh: Any) -> None:
    layouts: list[Any] = [list(pair) for pair in product([R, S(0), S(1), P], repeat=2)]
    layouts += [{0: ("tp", "dp")}, {1: ("tp", "dp")}, {0: "tp", 1: "dp"}]
    whole = doubles(5, 3)
    # Each source meets every fourth target, each time others; the simulator's tests try them all.
    for number, (source, target) in enumerate(product(layouts, layouts)):
        if number % 4 == 0:
            check_move(leaf(whole, mesh, source), whole, target)


@body(2, 2)
def empty_shards_on_two_axes(mesh: Any) -> None:
    layouts: list[Any] = [[R, R], [S(0), S(0)], [S(1), S(0)], {0: ("tp", "dp")}, [P, S(0)], [S(1), P]]
    for shape in [(1, 1), (2, 3), (0, 2)]:
        whole = doubles(*shape)
        for source, target in product(layouts, layouts):
            check_move(leaf(whole, mesh, source), whole, target)


@body(2, 2)
def merged_axes_are_one_collective(mesh: Any) -> None:
    for source, kind in [([S(0), S(0)], "all_gather"), ({0: ("tp", "dp")}, "all_gather"), ([P, P], "all_reduce")]:
        whole = doubles(5, 3)
        x = leaf(whole, mesh, source)
        with CommDebugMode() as comm:
            moved = x.redistribute(placements=[R, R])
        assert comm.get_comm_counts() == {kind: 1}
        assert_close(moved, whole, source)


@body(2, 1, 2)
def three_axes_merge_two(mesh: Any) -> None:
    """A group over some but not all axes is made when it is first needed."""
    whole = doubles(7, 2)
    for source in ([S(0), R, S(0)], {0: ("tp", "pp")}, [P, R, P], [S(0), S(1), S(0)]):
        for target in ([R, R, R], [S(1), R, S(0)], {0: ("tp", "dp", "pp")}):
            check_move(leaf(whole, mesh, source), whole, target)


@body(2, 2, same_record=False)  # processes must exchange their shapes, the simulator sees them
def explicit_sizes(mesh: Any) -> None:
    sizes, whole = (1, 0, 4, 2), doubles(7, 3)
    pieces = whole.split(sizes)
    for source in ([S(0), S(0)], {0: ("tp", "dp")}):
        major_tp = isinstance(source, dict)
        local = per_rank(mesh, lambda at: pieces[at[1] * 2 + at[0] if major_tp else at[0] * 2 + at[1]].clone())  # noqa: B023
        x = sw.DTensor.from_local(local, mesh, source, run_check=True).requires_grad_()
        assert x.shape == whole.shape
        for target in ([R, R], [S(0), S(0)], [S(1), S(0)], {0: ("tp", "dp")}, [R, S(0)], [P, S(1)]):
            check_move(x, whole, target)
        other = leaf(whole, mesh, [S(0), S(0)])  # the same rows, cut otherwise
        assert_close(x * other + x, whole * whole + whole)


@body(2, same_record=False)
def uneven_columns_concatenate(mesh: Any) -> None:
    whole = doubles(4, 5)
    pieces = whole.split((2, 3), 1)
    x = sw.DTensor.from_local(per_rank(mesh, lambda at: pieces[at[0]].clone()), mesh, [S(1)], run_check=True)
    assert_close(x, whole)
    assert_close(x.sum(1), whole.sum(1))


REDUCE = {
    "sum": lambda terms: terms.sum(0),
    "avg": lambda terms: terms.mean(0),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
    "product": lambda terms: terms.prod(0),
}


def check_reduction(mesh: Any, terms: Tensor, pending: sw.Partial, target: Any, reduce: Any) -> None:
    """Each rank brings one term; value and the gradient of each rank's own term."""
    plain = terms.clone().requires_grad_()
    whole = reduce(plain)
    weight = doubles(*whole.shape)
    (whole * weight).sum().backward()
    leaves: dict[tuple[int, ...], Tensor] = {}

    def term(at: tuple[int, ...]) -> Tensor:
        leaves[at] = terms[at[0]].clone().requires_grad_()
        return leaves[at] * 1

    x = sw.DTensor.from_local(per_rank(mesh, term), mesh, [pending])
    moved = x.redistribute(placements=target)
    assert_close(moved, whole, f"{pending} → {target}")
    (moved * sw.distribute_tensor(weight, mesh)).sum().backward()
    for (at,), own in leaves.items():
        torch.testing.assert_close(own.grad, plain.grad[at], msg=lambda m: f"{pending} → {target}\n{m}")


@body(2)
def every_pending_reduction(mesh: Any) -> None:
    terms = doubles(2, 3, 2)
    terms[:, 0, 0] = 1.5  # a tie
    terms[0, 1, 1] = 0.0  # a zero factor
    for target in ([R], [S(0)], [S(1)]):
        for op, reduce in REDUCE.items():
            check_reduction(mesh, terms, sw.Partial(op), target, reduce)
        for p in (2.0, 3.0, 1.0, float("inf"), float("-inf")):
            reduce = lambda t, p=p: torch.linalg.vector_norm(t, p, dim=0)  # noqa: E731
            check_reduction(mesh, terms.abs() if p == float("-inf") else terms, sw.Partial("norm", p), target, reduce)


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.complex64]


@body(2)
def dtypes_survive_every_collective(mesh: Any) -> None:
    for dtype in DTYPES:
        whole = (torch.arange(15).view(5, 3) % 3).to(dtype)
        if dtype.is_complex:
            whole = whole * (1 - 2j)
        for source, target in product([R, S(0), S(1)], repeat=2):
            moved = sw.distribute_tensor(whole, mesh, [source]).redistribute(placements=[target])
            assert moved.dtype == dtype
            assert torch.equal(moved.full_tensor(), whole), f"{dtype} {source} → {target}"
        for op in ("sum", "max", "min", "product"):
            if dtype.is_complex and op in ("max", "min"):
                continue
            terms = torch.stack([whole, whole.flip(0)])
            expected = _fold(terms, op)
            for target in (R, S(0), S(1)):
                x = sw.DTensor.from_local(per_rank(mesh, lambda at: terms[at[0]].clone()), mesh, [sw.Partial(op)])  # noqa: B023
                reduced = x.redistribute(placements=[target])
                assert reduced.dtype == dtype, (dtype, op, reduced.dtype)
                assert torch.equal(reduced.full_tensor(), expected), f"{dtype} {op} → {target}"


def _fold(terms: Tensor, op: str) -> Tensor:
    combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}[op]
    return combine(*terms)


@body(2)
def strided_conjugate_and_negative_shards(mesh: Any) -> None:
    """What lies in memory is not always what is meant."""
    base = torch.view_as_complex(doubles(4, 6, 2))
    for whole in (base.conj(), torch._neg_view(doubles(4, 6)), doubles(6, 4).t(), doubles(8, 6)[::2], base.conj().imag):
        for source, target in product([R, S(0), S(1)], [R, S(0), S(1)]):
            local = sw.distribute_tensor(whole.resolve_conj().resolve_neg(), mesh, [source])
            if whole.is_conj():
                local = local.conj().resolve_conj().conj()
            moved = local.redistribute(placements=[target])
            assert torch.equal(moved.full_tensor(), whole), f"{source} → {target}"
        shard = per_rank(mesh, lambda at: whole)  # noqa: B023
        summed = sw.DTensor.from_local(shard, mesh, [P]).redistribute(placements=[S(0)])
        assert torch.equal(summed.full_tensor(), whole + whole)
        gathered = sw.DTensor.from_local(shard, mesh, [S(0)]).redistribute(placements=[R])
        assert torch.equal(gathered.full_tensor(), torch.cat([whole, whole]))
        assert torch.equal(sw.distribute_tensor(whole, mesh, [S(1)]).full_tensor(), whole)


def held_one(mesh: Any) -> bool:
    return len(as_mesh(mesh).held) == 1


# distribute_tensor and from_local


@body(2, 2)
def the_source_rank_has_the_values(mesh: Any) -> None:
    truth = doubles(4, 4)
    if held_one(mesh):  # the other processes hold something else
        mine = truth if as_mesh(mesh).held[0] == (0, 0) else doubles(4, 4) + 100
    else:
        mine = truth
    for placements in ([R, R], [S(0), S(1)], [S(0), S(0)], [R, S(1)], [P, R]):
        assert_close(sw.distribute_tensor(mine, mesh, placements), truth)


@body(2, 2, same_record=False)
def wrong_shards_are_refused_by_every_rank(mesh: Any) -> None:
    one_off = per_rank(mesh, lambda at: torch.ones(3 if at == (1, 1) else 2, 2))
    with pytest.raises(ShardShapeError, match=r"the shard at dp=1, tp=1 has shape \[3, 2\], but .* wants \[2, 2\]"):
        sw.DTensor.from_local(one_off, mesh, [R, S(1)], run_check=True)
    differing = per_rank(mesh, lambda at: torch.full((2, 2), float(at == (1, 0))))
    with pytest.raises(ReplicaError, match="along 'dp' hold the same values, but they differ"):
        sw.DTensor.from_local(differing, mesh, [R, S(1)], run_check=True)
    with pytest.raises(ReplicaError, match="along 'tp'"):
        sw.DTensor.from_local(differing, mesh, [S(0), R], run_check=True)
    assert sw.DTensor.from_local(differing, mesh, [S(0), S(0)], run_check=True).shape == (8, 2)
    with pytest.raises(PlacementError):
        sw.distribute_tensor(torch.ones(2, 2), mesh, [R, S(2)])
    assert_close(sw.distribute_tensor(torch.ones(2), mesh, [R, S(0)]).sum(), torch.tensor(2.0))  # all ranks go on


@body(2, 2, same_record=False)  # a submesh of torch's mesh is not numbered within it, as one of the simulator's is
def submeshes(mesh: Any) -> None:
    whole = doubles(5, 4)
    for name in ("dp", "tp"):
        sub = mesh[name]
        for source, target in product([R, S(0), S(1), P], repeat=2):
            check_move(leaf(whole, sub, [source]), whole, [target])
        x = sw.distribute_tensor(whole, sub, [S(0)])
        assert x.device_mesh.mesh_dim_names == (name,)
        assert as_mesh(mesh[name]) is as_mesh(sub), "asking twice gives one mesh"
    # Along the other axis each submesh is a world of its own: only its two ranks add up.
    ones = per_rank(mesh["tp"], lambda at: torch.ones(2))
    assert_close(sw.DTensor.from_local(ones, mesh["tp"], [P]), torch.full((2,), 2.0))


@body(2)
def gradient_neutral_round_trip(mesh: Any) -> None:
    """P → to_local → from_local(P) changes no gradient."""
    whole, weight = doubles(3, 2), doubles(3, 2)
    x = leaf(whole, mesh, [S(0)])
    pending = x.redistribute(placements=[P])
    again = sw.DTensor.from_local(pending.to_local(), mesh, [P])
    assert_close(again, whole)
    (again * sw.distribute_tensor(weight, mesh)).sum().backward()
    assert_close(x.grad, weight)


@body(2)
def precision_of_the_wire(mesh: Any) -> None:
    whole = torch.randn(4, 2)
    x = leaf(whole, mesh, [S(0)])
    moved = x.redistribute(placements=[R], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    assert moved.dtype == torch.bfloat16
    assert torch.equal(moved.full_tensor(), whole.bfloat16())
    moved.sum().backward()
    assert_close(x.grad, torch.ones(4, 2))


@body(2, 2)
def uneven_shards_are_all_accounted_for(mesh: Any) -> None:
    """No row lost, none invented."""
    whole = torch.arange(15.0).view(5, 3)
    for placements in ([S(0), S(0)], {0: ("tp", "dp")}):
        x = sw.distribute_tensor(whole, mesh, placements)
        shards = everywhere(held(x))
        rows = sorted(value for shard in shards.values() for value in shard[:, 0].tolist())
        assert rows == [0.0, 3.0, 6.0, 9.0, 12.0]
        assert sorted(len(shard) for shard in shards.values()) == [1, 1, 1, 2]


# Shards that do not go together: each rank's own, the placements, and the error that all ranks raise.
UNFIT = [
    (
        (torch.ones(2), torch.ones(2, 2)),
        [S(0)],
        "shards have one dtype and number of dims on all ranks, but the one at tp=0 is float32 with 1 dim "
        "and the one at tp=1 is float32 with 2 dims",
    ),
    (
        (torch.ones(2), torch.ones(2, 2)),
        [S(1)],
        "shards have one dtype and number of dims on all ranks, but the one at tp=0 is float32 with 1 dim "
        "and the one at tp=1 is float32 with 2 dims",
    ),
    (
        (torch.ones(()), torch.ones(1)),
        [R],
        "shards have one dtype and number of dims on all ranks, but the one at tp=0 is float32 with 0 dims "
        "and the one at tp=1 is float32 with 1 dim",
    ),
    (
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        [R],
        "shards have one dtype and number of dims on all ranks, but the one at tp=0 is float32 with 1 dim "
        "and the one at tp=1 is float64 with 1 dim",
    ),
    (
        (torch.ones(2, 3), torch.ones(2, 4)),
        [S(0)],
        "the shard at tp=1 has shape [2, 4], but [4,3] S(0)@tp wants [2, 3] there",
    ),
    (
        (torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0])),
        [R],
        "from_local: [2] R says that the ranks along 'tp' hold the same values, but they differ; use Shard or Partial "
        "there, or make them equal first",
    ),
]


@body(2, same_record=False)
def unfit_shards_are_refused_on_all_ranks(mesh: Any) -> None:
    for shards, placements, text in UNFIT:
        with pytest.raises((ShardShapeError, ReplicaError)) as error:
            sw.DTensor.from_local(per_rank(mesh, lambda at: shards[at[0]].clone()), mesh, placements, run_check=True)  # noqa: B023
        assert str(error.value) == text


@body(2, same_record=False)
def replicas_may_hold_nans(mesh: Any) -> None:
    for values in ([torch.nan, 2.0], [1 + 2j, complex(torch.nan, 1)], torch.nan):
        whole = torch.tensor(values)
        x = sw.DTensor.from_local(per_rank(mesh, lambda at: whole.clone()), mesh, [R], run_check=True)  # noqa: B023
        assert x.shape == whole.shape and x.full_tensor().isnan().any()


@body(2)
def extrema_keep_nans_infinities_and_signs(mesh: Any) -> None:
    """Backends disagree about NaNs in maxima and minima; torch on one device lets them win."""
    nan, inf = float("nan"), float("inf")
    rows = torch.tensor(
        [[1.0, nan, -inf, -0.5, nan, -inf, 3.0, -1e-30], [2.0, 0.0, -2.0, -0.25, nan, inf, nan, 1e-30]],
        dtype=torch.float64,
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = rows.to(dtype)
        d = sw.distribute_tensor(x, mesh, [S(0)])
        for function in (lambda t: t.amax(0), lambda t: t.amin(0), lambda t: t.max(), lambda t: t.min(0).values):
            found, expected = function(d).full_tensor(), function(x)
            assert found.dtype == dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        for op in ("max", "min"):
            spread = sw.DTensor.from_local(d.to_local(), mesh, [sw.Partial(op)], run_check=False)
            expected = (torch.amax if op == "max" else torch.amin)(x, 0, keepdim=True)
            torch.testing.assert_close(spread.full_tensor(), expected, rtol=0, atol=0, equal_nan=True)


@body(2)
def gradients_of_what_counts_once_share_no_memory(mesh: Any) -> None:
    for edge in (4, 300):  # large ones share memory on the way there
        one, two = (leaf(doubles(edge, edge), mesh, [R]) for _ in range(2))
        (one.redistribute(placements=[P]) + two.redistribute(placements=[P])).square().sum().backward()
        assert one.grad is not None and two.grad is not None
        before = two.grad.full_tensor().clone()
        one.grad.mul_(3)
        assert torch.equal(two.grad.full_tensor(), before)
