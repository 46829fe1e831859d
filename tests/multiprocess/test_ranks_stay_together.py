"""On real ranks: whatever a call comes to, it comes to the same on all of them, and none communicates alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardwise as sw
from launch import run_ranks

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def second(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad((first**3).sum(), x)
    return found


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
