"""Lowering: calls that cannot run on their shards, arguments that do not fit, results of several kinds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import compare
from custom_ops import positives
from features import differentiates
from sweep import mesh_of, normal, place, sweep
from torch import Tensor, linalg

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch.planning import fallback

R, S, P = sw.Replicate(), sw.Shard, sw.Partial()


def definite(*shape: int) -> Tensor:
    x = normal(*shape)
    return x @ x.mT + torch.eye(shape[-1], dtype=x.dtype)


# Fallbacks


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_reported", set())


FALLBACKS: dict[str, tuple[Callable[[Tensor], Any], tuple[Tensor, sw.Placement], str]] = {
    "a rule, but not for this dim": (
        linalg.cholesky,
        (definite(4, 4), S(1)),
        "aten.linalg_cholesky_ex(f64[4,4] S(1)@a)",
    ),
    "inside a function": (linalg.cond, (definite(4, 4), S(0)), "aten._linalg_svd(f64[4,4] S(0)@a)"),
    "results depend on data": (
        positives,
        (normal(5, 3), S(1)),
        "positives(f64[5,3] S(1)@a)",
    ),
    "no rule": (torch.linalg.eigvals, (normal(4, 4), S(0)), "aten.linalg_eig(f64[4,4] S(0)@a)"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_fallback_says_what_and_where_and_is_counted(name: str) -> None:
    function, (x, placement), text = FALLBACKS[name]
    d = place(x, placement)
    with warnings.catch_warnings(record=True) as caught, CommDebugMode() as comm:
        warnings.simplefilter("always")
        found = [function(d) for _ in range(3)]
    torch.testing.assert_close(found[2].full_tensor(), function(x))
    assert [str(warning.message) for warning in caught] == [
        f"{text} cannot run on these shards: they were gathered and it ran replicated"
    ]
    assert caught[0].filename == __file__
    assert comm.get_fallback_counts() == {text.split("(")[0]: 3}
    with sw.strict(), CommDebugMode() as comm, pytest.raises(sw.errors.StrictModeError) as error:
        function(d)
    assert str(error.value) == (
        f"strict mode: {text} cannot run on these shards and would gather them. Redistribute them to Replicate() "
        f"yourself, or leave strict mode"
    )
    assert not comm.get_fallback_counts() and "all_gather" not in comm.get_comm_counts()


@pytest.mark.parametrize(
    ("function", "x", "placement"),
    [
        (linalg.cholesky, definite(2, 4, 4), S(0)),
        (linalg.cholesky, definite(2, 4, 4), R),
        (torch.exp, normal(5, 3), P),  # a reduction is no gather
        (lambda x: x.sort(0)[0], normal(5, 3), S(0)),
        (lambda x: x.cumsum(0), normal(5, 3), S(0)),
    ],
)
def test_what_is_no_fallback(function: Callable[[Tensor], Tensor], x: Tensor, placement: sw.Placement) -> None:
    with sw.strict(), CommDebugMode() as comm:
        torch.testing.assert_close(function(place(x, placement)).full_tensor(), function(x))
    assert not comm.get_fallback_counts()


# Bad arguments: torch's own errors for the global shapes, before anything is communicated

BAD: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda x: x.view(7),
    "mm": lambda x: torch.mm(x, x),
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x.t()),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "add": lambda x: x + x[:2],
    "expand": lambda x: x.expand(3, 2),
    "cat": lambda x: torch.cat([x, x[:, :2]]),
    "stack": lambda x: torch.stack([x, x[:2]]),
    "split": lambda x: x.split([1, 2]),
    "index": lambda x: x[9],
    "select": lambda x: x.select(0, 9),
    "sum": lambda x: x.sum(3),
    "cumsum": lambda x: x.cumsum(2),
    "log_softmax": lambda x: x.log_softmax(2),
    "topk": lambda x: x.topk(9, 0),
    "kthvalue": lambda x: x.kthvalue(9, 0),
    "unfold": lambda x: x.unfold(0, 9, 1),
    "flip": lambda x: x.flip(5),
    "conv1d": lambda x: F.conv1d(x[None], x[None, :3]),
    "max_pool1d": lambda x: F.max_pool1d(x, 9),
    "pad": lambda x: F.pad(x, (9, 9), mode="reflect"),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "batch_norm": lambda x: F.batch_norm(x[:1], None, None, training=True),
    "embedding": lambda x: F.embedding(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, x[:2]),
    "inv": lambda x: linalg.inv(x),
    "fft": lambda x: torch.fft.fft(x, dim=2),
}

UNSEEN: dict[str, tuple[Callable[[Tensor], Any], sw.Placement]] = {
    "softmax": (lambda x: x.softmax(2), S(0)),
    "slice_scatter": (lambda x: x.slice_scatter(x[:1], 0, 1), S(0)),
    "slice_scatter dim": (lambda x: x.slice_scatter(x, 2), S(0)),
    "select_scatter": (lambda x: x.select_scatter(x[:2, 0], 1, 0), S(0)),
    "sort": (lambda x: x.sort(2), S(0)),
    "dtype": (lambda x: x & x, P),
}
"""What torch's kernels for meta tensors let pass, so that the trace does not see it."""


def check_bad(function: Callable[[Tensor], Any], placement: sw.Placement) -> None:
    x = normal(6, 5)
    with pytest.raises(Exception) as expected:
        function(x)
    d = place(x, placement)
    with CommDebugMode() as comm, pytest.raises(expected.type) as raised:
        function(d)
    assert raised.type is expected.type
    assert str(raised.value) == str(expected.value)
    assert comm.get_total_counts() == 0


@pytest.mark.parametrize("placement", [S(0), S(1), P], ids=str)
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, placement: sw.Placement) -> None:
    check_bad(BAD[name], placement)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("name", UNSEEN)
def test_bad_arguments_that_meta_tensors_let_pass(name: str) -> None:
    check_bad(*UNSEEN[name])


# Memory


STRIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, i: torch.einsum("bij,bij->bi", x.permute(2, 1, 0), x.permute(2, 1, 0) + 1),
    "nll_loss": lambda x, i: F.nll_loss(x.mT, i),
}


@pytest.mark.parametrize("name", STRIDED)
def test_functions_that_copy_what_is_not_contiguous(name: str) -> None:
    """They reshape what they are given, or make it contiguous. On tensors that are contiguous that does nothing."""
    for placement in (R, S(0), S(1)):
        compare(STRIDED[name], [normal(3, 4, 2), torch.tensor([[0, 1, 1, 0]] * 3)], mesh_of((2,)), [[placement], [R]])


# Results of several kinds


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
def test_outputs_that_lie_differently_have_their_own_gradients() -> None:
    """Of an input that ranks use alike for one output and differently for another, what they send back counts once."""
    sweep(torch.triangular_solve, normal(4, 3, 2), normal(3, 3) + 3 * torch.eye(3, dtype=torch.float64))
    sweep(torch.triangular_solve, normal(3, 2), normal(4, 3, 3) + 3 * torch.eye(3, dtype=torch.float64))
    sweep(lambda x: (x.sum(0), x * 2, x.mean()), normal(5, 3))
    sweep(lambda x: torch.std_mean(x, 0), normal(5, 3))
    extrema = lambda x: torch.aminmax(x, dim=0)  # noqa: E731
    sweep(extrema, normal(5, 3), backward=differentiates(extrema, normal(5, 3)))
