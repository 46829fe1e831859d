"""Calls: which of them share a plan, and who sees how they are planned."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardwise as sw

LINE = sw.simulate((2,), ("tp",))
S0 = sw.Shard(0)
NUMBERS = {
    torch.float64: torch.tensor([0.5, -1.5, 2.5]),
    torch.complex128: torch.tensor([0.5 + 1j, -1.5 - 2j, 2.5 + 0.5j]),
    torch.int64: torch.tensor([1, -2, 3]),
    torch.bool: torch.tensor([True, False, True]),
}
FUNCTIONS = {
    "real": lambda x: x.real,
    "conj": torch.conj,
    "conj_physical": torch.conj_physical,
    "adjoint": lambda x: x.view(3, 1).mH,
    "resolve": lambda x: x.conj().resolve_conj(),
    "abs": torch.abs,
    "sgn": torch.sgn,
    "round": lambda x: x.round() if not x.is_complex() else x,
    "to": lambda x: x.to(torch.complex64),
    "contiguous": lambda x: x.contiguous(),
    "isreal": torch.isreal,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_plan_for_another_dtype(name: str) -> None:
    """What does nothing to some numbers does something to others; in whatever order they come."""
    for order in itertools.permutations((torch.float64, torch.complex128, torch.int64), 2):
        sw.clear_cache()
        for dtype in order:
            whole = NUMBERS[dtype].to(dtype)
            expected = FUNCTIONS[name](whole)
            found = FUNCTIONS[name](sw.distribute_tensor(whole, LINE, [S0]))
            torch.testing.assert_close(found.full_tensor(), expected, msg=f"{name} {order}")
            assert found.is_conj() == expected.is_conj()


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.metas = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.metas += isinstance(out, Tensor) and out.is_meta
        return out


def test_modes_of_users_see_no_planning() -> None:
    x = sw.distribute_tensor(torch.randn(4, 3), LINE, [S0])
    sw.clear_cache()
    with _Seen() as seen:
        thin = (x.t()[:1].softmax(0) + 1).reshape(-1)
        torch.masked_select(x, x > 0)
        (thin.clone().add_(2.0) * 1.5).sum()
    assert seen.metas == 0


def test_selective_checkpoints() -> None:
    whole = torch.randn(4, 3, dtype=torch.float64)

    def grad_of(x: Tensor, weight: Tensor) -> Tensor:
        saved = [torch.ops.aten.mm.default]
        contexts = lambda: create_selective_checkpoint_contexts(saved)  # noqa: E731
        y = checkpoint(lambda x: (x @ weight).relu().square(), x, use_reentrant=False, context_fn=contexts)
        y.sum().backward()
        return x.grad  # type: ignore[return-value]

    weight = torch.randn(3, 3, dtype=torch.float64)
    expected = grad_of(whole.clone().requires_grad_(), weight)
    for placement in (S0, sw.Shard(1), sw.Replicate()):
        sw.clear_cache()
        x = sw.distribute_tensor(whole, LINE, [placement]).requires_grad_()
        found = grad_of(x, sw.distribute_tensor(weight, LINE, [S0]))
        torch.testing.assert_close(found.full_tensor(), expected)  # type: ignore[attr-defined]


class _Other:
    def __radd__(self, other: Any) -> str:
        return "mine"

    __rmatmul__ = __rmul__ = __rsub__ = __rtruediv__ = __radd__


def test_operators_leave_what_they_do_not_know_to_the_other() -> None:
    x = sw.distribute_tensor(torch.ones(4), LINE, [S0])
    other: Any = _Other()
    assert (x + other, x - other, x * other, x / other, x @ other) == ("mine",) * 5
    with pytest.raises(TypeError, match="unsupported operand"):
        x + object()  # type: ignore[operator]
    with pytest.raises(sw.errors.MixedTensorError):
        x + torch.ones(4)
    assert type(x + np.float32(1)) is sw.DTensor
