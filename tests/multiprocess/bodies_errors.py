"""Bad data on one rank only: every rank raises, and the next collective finds all of them there."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from bad_data import BAD_DATA

import shardwise as sw
from bodies import S, assert_close, body, doubles, everywhere
from shardwise.comm import as_mesh


def raises_alike(mesh: Any, name: str) -> None:
    function, tensors = BAD_DATA[name]
    laid = [sw.distribute_tensor(x, mesh, [S(0)]) for x in tensors]
    found = []
    for arguments in (tensors, laid):
        try:
            with warnings.catch_warnings(action="ignore"):  # some of these are gathered
                function(*arguments)
            found.append("no error")
        except (IndexError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    assert "no error" not in found, name
    assert everywhere(dict.fromkeys(as_mesh(mesh).held, found[1])) == dict.fromkeys(((0,), (1,)), found[1])
    x = doubles(5, 3)
    assert_close(sw.distribute_tensor(x, mesh, [S(0)]).sum(), x.sum(), f"after {name}")


@body(2)
def targets_out_of_range_on_one_rank(mesh: Any) -> None:
    for name in ("multi_margin_loss", "multilabel_margin_loss", "cross_entropy", "embedding", "index_add", "take"):
        raises_alike(mesh, name)


@body(2)
def a_bad_matrix_on_one_rank(mesh: Any) -> None:
    for name in ("linalg.cholesky", "cholesky_inverse", "linalg.solve", "linalg.lu_solve", "lu_unpack", "linalg.svd"):
        raises_alike(mesh, name)


@body(2)
def numbers_out_of_range_on_one_rank(mesh: Any) -> None:
    for name in ("binary_cross_entropy", "multinomial", "bernoulli", "poisson", "floor_divide", "remainder"):
        raises_alike(mesh, name)


@body(2)
def bad_shapes_are_refused_before_anything_moves(mesh: Any) -> None:
    x, weight = sw.distribute_tensor(doubles(4, 3, 8), mesh, [S(2)]), sw.distribute_tensor(doubles(2, 3, 3), mesh)
    bias = sw.distribute_tensor(doubles(3), mesh, [S(0)])
    with sw.debug.CommDebugMode() as comm:
        try:
            torch.conv1d(x, weight, bias)
        except RuntimeError:
            pass
        else:
            raise AssertionError("a bias that does not fit was taken")
    assert not comm.comms


@body(2)
def an_anomaly_on_one_rank(mesh: Any) -> None:
    """Only the first rank's part of the gradient is no number; all ranks raise, whichever way they were asked."""
    whole = torch.cat([torch.zeros(2), torch.ones(3)]).double()
    found = []
    for how in ("backward", "grad", "create_graph"):
        for x in (whole.clone().requires_grad_(), sw.distribute_tensor(whole, mesh, [S(0)]).requires_grad_()):
            with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly():  # which warns of itself
                loss = (x.sqrt() * 0).sum() + x.cumsum(0).sum()
                try:
                    if how == "backward":
                        loss.backward()
                    else:
                        torch.autograd.grad(loss, x, create_graph=how == "create_graph")
                    found.append("no error")
                except RuntimeError as error:
                    found.append("nan values" if "returned nan values" in str(error) else str(error))
    assert found == ["nan values"] * 6, found
    assert_close(sw.distribute_tensor(whole, mesh, [S(0)]).sum(), whole.sum(), "afterwards")


@body(2)
def moves_that_are_not_allowed_are_refused_on_every_rank(mesh: Any) -> None:
    """Also on a rank that holds nothing of the parameter."""
    whole = doubles(2, 3, 3)
    matrices, numbers = (torch.nn.Parameter(sw.distribute_tensor(x, mesh, [S(2)])) for x in (whole, doubles(4, 1, 1)))
    found = []
    for moved in (matrices, numbers.transpose(1, 2)):
        torch.linalg.det(moved.detach())
        with sw.debug.CommDebugMode() as comm, sw.strict(moves="parameters"):
            try:
                torch.linalg.det(moved)
            except sw.errors.StrictModeError as error:
                found.append(str(error).partition(" from ")[0])
        assert not comm.comms
    assert found == ["strict mode: torch.linalg.det would move argument 0 (A)"] * 2
    everywhere(dict.fromkeys(as_mesh(mesh).held, 0))
    assert_close(torch.linalg.det(matrices), torch.linalg.det(whole))
