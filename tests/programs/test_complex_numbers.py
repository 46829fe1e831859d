"""Complex numbers, their parts and their conjugates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sweep import mesh_of, normal, place, same
from torch import Tensor

import shardwise as sw

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
X, W = normal(4, 4), normal(5, 4)[:4]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_parts_of_conjugates(mode: Any) -> None:
    x = torch.complex(normal(4, 3), normal(3, 4).t())
    with mode():
        for part in (lambda t: t.imag, lambda t: t.real, torch.imag, torch.real):
            for placement in (R, S(0), P()):
                torch.testing.assert_close(part(place(x, placement).conj()).full_tensor(), part(x.conj()))


@pytest.mark.parametrize("name", ["real", "conj", "conj_physical", "H", "adjoint", "resolve_conj", "abs", "sgn"])
@pytest.mark.parametrize("first", [torch.float64, torch.complex128])
def test_reals_and_complex_numbers(name: str, first: torch.dtype) -> None:
    sw.clear_cache()
    numbers = {torch.float64: X, torch.complex128: torch.complex(X, W)}
    for dtype in (first, *(other for other in numbers if other != first)):

        def call(x: Any) -> Tensor:
            found = getattr(x, name)
            return found() if callable(found) else found

        found = call(sw.distribute_tensor(numbers[dtype], mesh_of((2,)), [S(0)]))
        torch.testing.assert_close(found.full_tensor(), call(numbers[dtype]).resolve_conj())


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view_as_real": lambda z: torch.view_as_real(z),
    "view_as_real of a conjugate": lambda z: torch.view_as_real(z.conj().resolve_conj()),
    "conj": lambda z: z.conj(),
    "mH": lambda z: z.mH,
    "imag": lambda z: z.imag,
    "imag of a conjugate": lambda z: z.conj().imag,
}


@pytest.mark.parametrize("placement", [S(0), S(1), R], ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_copied_views_of_what_strides_do_not_describe(name: str, placement: sw.Placement) -> None:
    """They are taken again of what torch took: numbers of another dtype, conjugates and negatives."""

    def program(x: Tensor) -> tuple[Any, ...]:
        z = torch.complex(x, x * -2)
        seen = VIEWS[name](z)
        flat, row = seen.flatten(), seen[1]
        row.mul_(3)
        z.mul_(2)
        sums = [torch.view_as_real(part.resolve_conj()) if part.is_complex() else part for part in (flat, row, seen)]
        sum(part.sin().sum() for part in sums).backward()  # type: ignore[union-attr]
        return (*sums, x.grad)

    for mesh in ((2,), (3,)):
        same(program, normal(3, 4), placement, mesh=mesh)
