"""Linear algebra: batches and right-hand sides are sharded, matrices whole."""

import pytest
import torch
from sweep import normal, place, sweep
from torch import Tensor, linalg

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def definite(*shape: int) -> Tensor:
    x = normal(*shape)
    return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)


def symmetric(x: Tensor) -> Tensor:
    return x + x.mT


FACTORISATIONS = {
    "cholesky": lambda a: linalg.cholesky(a),
    "cholesky upper": lambda a: linalg.cholesky(a, upper=True),
    "cholesky_ex": lambda a: linalg.cholesky_ex(a),
    "cholesky_ex checked": lambda a: linalg.cholesky_ex(a, check_errors=True),
    "old cholesky": lambda a: torch.cholesky(a, upper=True),
    "cholesky_inverse": lambda a: torch.cholesky_inverse(a.tril()),
    "inv": linalg.inv,
    "inv_ex": linalg.inv_ex,
    "inverse": torch.inverse,
    "det": linalg.det,
    "logdet": torch.logdet,
    "slogdet": linalg.slogdet,
    "eigh": lambda a: linalg.eigh(symmetric(a)),
    "eigh upper": lambda a: linalg.eigh(symmetric(a), "U"),
    "eigvalsh": linalg.eigvalsh,
    "eig": lambda a: [part.abs() for part in linalg.eig(a)],
    "eigvals": lambda a: linalg.eigvals(a).abs(),
    "matrix_exp": lambda a: linalg.matrix_exp(a / 5),
    "matrix_power": lambda a: linalg.matrix_power(a, 3),
    "inverse power": lambda a: linalg.matrix_power(a, -2),
    "lu": linalg.lu,
    "lu_factor_ex": linalg.lu_factor_ex,
    "lu_factor": lambda a: linalg.lu_factor(a),
    "lu_unpack": lambda a: torch.lu_unpack(*linalg.lu_factor(a)),
    "lu_unpack only pivots": lambda a: torch.lu_unpack(*linalg.lu_factor(a), unpack_data=False)[0],
    "ldl_factor": lambda a: linalg.ldl_factor(a)[0].detach(),
    "cond": linalg.cond,
    "matrix_rank": lambda a: linalg.matrix_rank(a),
    "matrix_rank hermitian": lambda a: linalg.matrix_rank(a, hermitian=True),
    "nuclear": lambda a: linalg.matrix_norm(a, "nuc"),
    "spectral": lambda a: linalg.matrix_norm(a, 2),
    "hermitian pinv": lambda a: linalg.pinv(a, hermitian=True),
}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize("op", FACTORISATIONS.values(), ids=FACTORISATIONS)
def test_square_matrices(op):
    sweep(op, definite(5, 3, 3), rtol=1e-6, atol=1e-7)


def test_power_of_zero():
    sweep(lambda a: linalg.matrix_power(a, 0), definite(5, 3, 3))


RECTANGULAR = {
    "svd": lambda a: linalg.svd(a, full_matrices=False),
    "svdvals": linalg.svdvals,
    "svd full": lambda a: linalg.svd(a.detach()),
    "qr": linalg.qr,
    "qr r": lambda a: linalg.qr(a.detach(), mode="r")[1],
    "qr complete": lambda a: linalg.qr(a.detach(), mode="complete"),
    "pinv": linalg.pinv,
    "pinv with tolerances": lambda a: linalg.pinv(a, atol=torch.tensor(0.1, dtype=a.dtype)),
    "lu": linalg.lu,
    "householder_product": lambda a: linalg.householder_product(a, a[..., 0, :] / 4),
    "ormqr": lambda a: torch.ormqr(a, a[..., 0, :] / 4, a * 2),
    "ormqr right": lambda a: torch.ormqr(a, a[..., 0, :] / 4, a.mT, left=False, transpose=True),
}


@pytest.mark.parametrize("op", RECTANGULAR.values(), ids=RECTANGULAR)
def test_rectangular_matrices(op):
    sweep(op, normal(3, 4, 2), rtol=1e-6, atol=1e-7)


def test_reflections_of_nothing():
    """Each argument has its gradient on every rank, also where there is no matrix."""
    sweep(torch.ormqr, normal(3, 4, 2), normal(3, 2) / 4, normal(3, 4, 1), rtol=1e-6, atol=1e-7)
    sweep(linalg.householder_product, normal(3, 4, 2), normal(3, 2) / 4, rtol=1e-6, atol=1e-7)


def test_determinants_of_nothing():
    """Without matrices there are none, but a gradient on every rank; that of an empty matrix is one, and has none."""
    sweep(linalg.det, definite(3, 2, 2), rtol=1e-6, atol=1e-7)
    sweep(linalg.det, normal(3, 0, 0), backward=False)
    sweep(linalg.det, normal(0, 2, 2), backward=False)


def test_geqrf():
    sweep(lambda a: torch.geqrf(a.detach()), normal(3, 4, 2), partial=False, rtol=1e-6, atol=1e-7)


SOLVES = {
    "solve": linalg.solve,
    "solve_ex": linalg.solve_ex,
    "solve right": lambda a, b: linalg.solve(a, b.mT, left=False),
    "solve_triangular": lambda a, b: linalg.solve_triangular(a, b, upper=True),
    "solve_triangular right": lambda a, b: linalg.solve_triangular(a, b.mT, upper=False, left=False),
    "triangular_solve": lambda a, b: torch.triangular_solve(b, a, transpose=True),
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, a.tril()),
    "lu_solve": lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b),
    "lu_solve right": lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b.mT, left=False, adjoint=True),
    "ldl_solve": lambda a, b: linalg.ldl_solve(*linalg.ldl_factor(a.detach()), b.detach()),
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("op", SOLVES.values(), ids=SOLVES)
def test_solves(op):
    sweep(op, definite(3, 2, 2), normal(3, 2, 5), rtol=1e-6, atol=1e-7)


SHAPES = {"one matrix": ((2, 2), (5, 2, 3)), "one side": ((3, 1, 2, 2), (2, 2, 3)), "flat": ((2, 2), (2, 5))}


@pytest.mark.parametrize(("matrix", "side"), SHAPES.values(), ids=SHAPES)
def test_batches_broadcast(matrix, side):
    sweep(linalg.solve, definite(*matrix), normal(*side), rtol=1e-6, atol=1e-7)
    sweep(lambda a, b: linalg.solve_triangular(a, b, upper=False), definite(*matrix), normal(*side), rtol=1e-6)


@pytest.mark.parametrize(("matrix", "side"), [((2, 2), (2,)), ((5, 2, 2), (5, 2))], ids=str)
def test_solving_for_vectors(matrix, side):
    sweep(linalg.solve, definite(*matrix), normal(*side), rtol=1e-6, atol=1e-7)


OTHERS = {
    "cross": (linalg.cross, (5, 3), (5, 3)),
    "cross broadcast": (lambda a, b: linalg.cross(a, b, dim=0), (3, 1), (3, 5)),
    "cross of old": (torch.cross, (6, 3), (6, 3)),
    "kron": (torch.kron, (2, 3), (3, 2)),
    "multi_dot": (lambda a, b, c: linalg.multi_dot([a, b, c]), (5, 3), (3, 2), (2, 4)),
    "tensorinv": (lambda a: linalg.tensorinv(a, ind=1), (4, 2, 2)),
    "tensorsolve": (linalg.tensorsolve, (2, 2, 4), (2, 2)),
    "inner": (torch.inner, (5, 3), (4, 3)),
}


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim")
@pytest.mark.parametrize(("op", "shapes"), [(op, shapes) for op, *shapes in OTHERS.values()], ids=OTHERS)
def test_other_products(op, shapes):
    sweep(op, *(normal(*shape) for shape in shapes), rtol=1e-6, atol=1e-7)


def test_complex_matrices():
    x = torch.complex(normal(5, 3, 3), normal(3, 3, 5).permute(2, 0, 1))
    for op in (linalg.inv, linalg.det, lambda a: linalg.solve(a, a.mH), lambda a: linalg.eigvals(a), torch.matrix_exp):
        for where in (R, S(0), S(1), S(2), P()):
            torch.testing.assert_close(op(place(x, where, mesh=(4,))).full_tensor(), op(x))


NOTHING_GATHERED = {
    "cholesky": (lambda a, b: linalg.cholesky_ex(a)[0], S(0), R, S(0)),
    "inv": (lambda a, b: linalg.inv_ex(a)[0], S(0), R, S(0)),
    "solve": (lambda a, b: linalg.solve_ex(a, b)[0], S(0), S(0), S(0)),
    "columns": (lambda a, b: linalg.solve_ex(a, b)[0], R, S(2), S(2)),
    "triangular columns": (lambda a, b: linalg.solve_triangular(a, b, upper=True), R, S(2), S(2)),
    "det": (lambda a, b: linalg.det(a), S(0), R, S(0)),
    "qr": (lambda a, b: linalg.qr(a)[0], S(0), R, S(0)),
    "matrix_exp": (lambda a, b: linalg.matrix_exp(a), S(0), R, S(0)),
}


@pytest.mark.parametrize(("op", "left", "right", "out"), NOTHING_GATHERED.values(), ids=NOTHING_GATHERED)
def test_nothing_moves(op, left, right, out):
    a, b = place(definite(6, 4, 4), left), place(normal(6, 4, 8), right)
    with CommDebugMode() as comm:
        result = op(a, b)
    assert result.placements == (out,) and not comm.get_comm_counts()


@pytest.mark.parametrize(
    "op", [linalg.cholesky, linalg.inv, linalg.eigvalsh, linalg.svdvals, linalg.eigvals, linalg.pinv]
)
def test_only_the_verdict_travels(op):
    """Whether some rank failed is a few numbers; the matrices stay where they are."""
    x = place(definite(6, 4, 4), S(0))
    with CommDebugMode() as comm:
        result = op(x)
    assert result.placements == (S(0),)
    assert max(comm.bytes for comm in comm.comms) <= 6 * 4


BAD = {
    "cholesky": (linalg.cholesky, -1.0),
    "old cholesky": (torch.cholesky, -1.0),
    "cholesky_ex": (lambda a: linalg.cholesky_ex(a, check_errors=True), -1.0),
    "inv": (linalg.inv, 0.0),
    "inv_ex": (lambda a: linalg.inv_ex(a, check_errors=True), 0.0),
    "solve": (lambda a: linalg.solve(a, a), 0.0),
    "eigh": (linalg.eigh, float("nan")),
    "eig": (linalg.eig, float("nan")),
    "svd": (linalg.svd, float("nan")),
    "pinv": (linalg.pinv, float("nan")),
}


@pytest.mark.filterwarnings("ignore:torch.cholesky is deprecated")
@pytest.mark.parametrize(("op", "value"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("placements", [(S(0), R), (S(0), S(0)), (S(0), S(1)), (R, S(1)), (R, R)], ids=str)
def test_all_ranks_raise(op, value, placements):
    """One bad matrix, held by some ranks only."""
    x = definite(3, 2, 3, 3)
    x[2, 1] = value * torch.eye(3, dtype=x.dtype)
    with pytest.raises(RuntimeError):
        op(x)
    with pytest.raises(RuntimeError):
        op(place(x, *placements, mesh=(2, 2)))
