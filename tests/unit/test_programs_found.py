"""Programs that once went wrong: sequences, aliasing and second derivatives that no sample of an operator shows."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import full
from sweep import place
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import shardwise as sw
from launch import run_ranks
from shardwise.errors import InPlaceError
from shardwise.experimental import implicit_replication

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


# Whether a reshape is a view


def transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.t().sin()
    z = y.reshape(-1)  # a copy: the whole does not lie in one piece, whatever a thin shard looks like
    y.mul_(2)
    return y, z


def transposed_in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    z = x.t().reshape(-1)
    z.add_(1)
    return x, z


def with_channels_last(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.to(memory_format=torch.channels_last).relu()
    z = y.flatten(1)
    y.mul_(2)
    return y, z


@pytest.mark.parametrize(
    ("program", "shape", "mesh", "placements"),
    [
        pytest.param(transposed, (2, 3), (4,), [S(0)], id="sin-2x3"),
        pytest.param(transposed, (4, 2), (2,), [S(1)], id="sin-4x2"),
        pytest.param(transposed_in_place, (2, 3), (3, 2), [S(1), S(0)], id="t-2x3"),
        pytest.param(with_channels_last, (3, 2, 4, 4), (3,), [S(1)], id="channels_last"),
    ],
)
def test_a_reshape_is_a_view_where_it_is_one_on_one_device(
    program: Callable[[Tensor], tuple[Tensor, ...]], shape: tuple[int, ...], mesh: tuple[int, ...], placements: Any
) -> None:
    x = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    for expected, found in zip(program(x.clone()), program(place(x, *placements, mesh=mesh)), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)


# Writes to views that had to be copies


def strided(x: sw.DTensor) -> sw.DTensor:
    with warnings.catch_warnings(action="ignore", category=sw.errors.FallbackWarning):
        return x.as_strided((2, 3), (1, 2))  # type: ignore[return-value]


def test_a_refused_write_has_written_nothing() -> None:
    view = strided(place(torch.randn(5, 3), S(1), mesh=(3,)))
    before = view.full_tensor().clone()
    with pytest.raises(InPlaceError):
        view.add_(1)
    assert torch.equal(view.full_tensor(), before)


def test_views_are_still_watched_after_a_refused_write() -> None:
    x = place(torch.randn(5, 3), S(1), mesh=(3,))
    first, second = strided(x), x.reshape(3, 5)
    with pytest.raises(InPlaceError):
        first.add_(1)
    x.zero_()
    assert not second.full_tensor().any()


# Numbers in plans


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: x // s,
        lambda x, s: 1 / torch.where(x > 0, x, s),
        lambda x, s: 1 / F.pad(x, (1, 1), value=s),
    ],
    ids=["floor_divide", "where", "pad"],
)
def test_zeros_have_a_sign(function: Callable[[Tensor, float], Tensor]) -> None:
    x = torch.tensor([1.0, -1.0])
    d = place(x, S(0))
    for zero in (-0.0, 0.0, -0.0):
        assert torch.equal(function(d, zero).full_tensor(), function(x, zero))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 1e300,
        lambda x: x / 1e-50,
        lambda x: torch.sub(x, 1, alpha=float("inf")),
    ],
    ids=["overflow", "underflow", "alpha"],
)
def test_infinite_numbers_meet_the_sum_and_not_its_terms(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.tensor([1.0, -1.0])
    assert torch.equal(function(place(x, P())).full_tensor(), function(x))


def test_labels_are_not_smoothed_by_a_negative_number() -> None:
    x, target = torch.randn(4, 6), torch.randint(6, (4,))
    found = F.cross_entropy(place(x, S(1)), place(target, R), label_smoothing=-1.0)
    torch.testing.assert_close(found.full_tensor(), F.cross_entropy(x, target, label_smoothing=-1.0))


# Second derivatives


def second(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad((first**3).sum(), x)
    return found


def with_zeros() -> Tensor:
    x = torch.randn(4, 3, dtype=torch.float64)
    x[:2] = 0
    return x


SECOND: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor], int]] = {
    "halves swapped": (lambda t: torch.cat([t[3:], t[:3]]), lambda: torch.randn(6).double(), 2),
    "sums of a part": (lambda t: t[3:].cumsum(0), lambda: torch.randn(6).double(), 2),
    "norm of zeros": (lambda t: t.norm(), with_zeros, 2),
    "norm of nothing": (lambda t: t.norm(3), lambda: torch.randn(2, 3).double(), 4),
}


@pytest.mark.parametrize(
    "name",
    [
        *("halves swapped", "sums of a part"),
        "norm of zeros",
        "norm of nothing",
    ],
)
def test_second_derivatives(name: str) -> None:
    function, make, ranks = SECOND[name]
    x = make()
    found = second(function, place(x, S(0), mesh=(ranks,)).requires_grad_())
    torch.testing.assert_close(found.full_tensor(), second(function, x.clone().requires_grad_()))


# torch's own code around DTensors


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("name", ["spectral_norm", "orthogonal"])
def test_a_sharded_weight_is_parametrised(name: str) -> None:
    torch.manual_seed(0)
    plain, dist_ = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()
    dist_.load_state_dict(plain.state_dict())
    dist_.weight = nn.Parameter(place(dist_.weight.detach(), S(0)))
    for module in (plain, dist_):
        torch.manual_seed(1)
        with implicit_replication():  # the identity that one of them makes is alike on all ranks
            getattr(parametrizations, name)(module)
    torch.testing.assert_close(full(dist_.weight.detach()), plain.weight.detach())
    parametrize.remove_parametrizations(dist_, "weight")


def test_loss_parallel_takes_a_plain_target() -> None:
    logits, target = torch.randn(4, 16), torch.randint(16, (4,))
    with sw.parallel.loss_parallel():
        loss = F.cross_entropy(place(logits, S(1)), target)
    torch.testing.assert_close(loss.full_tensor(), F.cross_entropy(logits, target))


# On real ranks: what each of them says, case by case; none of the cases communicates after it has gone wrong


def outcome(case: Callable[[], Any]) -> str:
    try:
        return str(case())
    except Exception as error:
        return type(error).__name__


def on_ranks(rank: int, world_size: int, folder: str) -> None:
    mesh = sw.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    x = torch.tensor([0.1, -0.7, 2.0, 0.4], dtype=torch.float64)

    def laid(value: Tensor, *placements: sw.Placement) -> sw.DTensor:
        return sw.distribute_tensor(value, mesh, placements)

    def constant_gradient() -> bool:
        d = laid(x.view(2, 2), R).requires_grad_()
        (first,) = torch.autograd.grad(F.linear(laid(x.view(2, 2), S(0)), d).sum(), d, create_graph=True)
        return torch.allclose(first.full_tensor(), x.view(2, 2).sum(0).expand(2, 2))

    def joined_twice() -> bool:
        found = second(lambda t: torch.cat([t, t.exp()]), laid(x, S(0)).requires_grad_())
        return torch.allclose(
            found.full_tensor(), second(lambda t: torch.cat([t, t.exp()]), x.clone().requires_grad_())
        )

    def expanded() -> Any:
        return laid(torch.ones(1, 3), S(0)).unsqueeze(0).expand(2, 1, 3).add_(1)

    def overlapping() -> Any:
        y = laid(torch.ones(3, 1), S(1))
        return y[1:].copy_(y[:-1])

    def overlapping_sums() -> Any:
        y = laid(torch.ones(4, 1), S(1))
        return y[2:].add_(y[1:3], alpha=2)

    def side_by_side() -> bool:
        y = laid(torch.ones(4, 1), S(1))
        return y[2:].copy_(y[:2]) is not None and y[1:].mul_(y[1:]) is not None

    def a_copy_of_computed() -> bool:
        y = laid(torch.arange(12.0).view(3, 4), S(0)).t().sin()
        z = y.reshape(-1)
        y.mul_(2)
        return z.to_local() is not None

    def a_view_of_chunks() -> bool:
        chunks = torch.arange(9.0).view(3, 3).chunk(world_size, 1)
        y = sw.DTensor.from_local(chunks[rank], mesh, [S(1)], run_check=True)
        z = y.flatten()
        y.mul_(2)
        return z.to_local() is not None

    def a_view_of_a_norm() -> bool:
        y = F.layer_norm(laid(torch.arange(6.0).view(3, 2), S(0)).t(), (3,))
        z = y.reshape(-1)
        y.mul_(2)
        return z.to_local() is not None

    def computed_where_empty() -> bool:
        y = laid(torch.arange(3.0).view(3, 1), S(1)).t() + 1
        return y.mul_(2) is y

    cases = (
        *(constant_gradient, joined_twice, expanded, overlapping, overlapping_sums, side_by_side, computed_where_empty),
        *(a_copy_of_computed, a_view_of_chunks, a_view_of_a_norm),
    )
    said: list[Any] = [None] * world_size
    dist.all_gather_object(said, {case.__name__: outcome(case) for case in cases})
    if rank == 0:
        Path(folder, "said").write_bytes(pickle.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(on_ranks, 2, str(folder))
    return pickle.loads(Path(folder, "said").read_bytes())


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant_gradient", "True"),
        ("joined_twice", "True"),
        ("expanded", "RuntimeError"),
        ("overlapping", "RuntimeError"),
        ("overlapping_sums", "RuntimeError"),
        ("side_by_side", "True"),
        ("a_copy_of_computed", "True"),
        ("a_view_of_chunks", None),
        ("a_view_of_a_norm", None),
        ("computed_where_empty", "True"),
    ],
)
def test_ranks_stay_together(said: list[dict[str, str]], name: str, expected: str | None) -> None:
    found = {of_rank[name] for of_rank in said}
    assert len(found) == 1
    assert expected is None or found == {expected}
