"""Complex numbers, their parts and their conjugates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sweep import mesh_of, normal, place
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
