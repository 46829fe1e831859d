"""Triton programs, launched without asking Triton again what it has found out of such arguments before."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch import Tensor

MOST = 4096
"""Ways to be called that are remembered."""

_current_device = torch._C._cuda_getDevice if torch.cuda.is_available() else lambda: -1
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Program:
    """A Triton function. Triton compiles it anew for other types, for addresses that are or are not multiples of 16,
    and for some integers, and looks at each argument of each launch for that, which takes longer than small kernels
    run. Here it is asked once for all launches with the same key: of these all that Triton looks at must be the same,
    and the grid."""

    def __init__(self, function: Any) -> None:
        self.function, self.name = function, function.__name__
        self._known: dict[tuple[int, Hashable], Callable[..., None]] = {}

    def __call__(self, key: Hashable, grid: tuple[int, int], num_warps: int, *args: Any, **options: bool) -> None:
        device = args[0].get_device()
        if device == _current_device():
            self._launch(device, key, grid, num_warps, args, options)
        else:
            with torch.cuda.device(device):
                self._launch(device, key, grid, num_warps, args, options)

    def _launch(
        self,
        device: int,
        key: Hashable,
        grid: tuple[int, int],
        num_warps: int,
        args: tuple[Any, ...],
        options: dict[str, bool],
    ) -> None:
        launch = self._known.get((device, key))
        if launch is not None:
            launch(*args, stream=_current_stream(device))  # type: ignore[misc]
            return
        compiled = self.function[grid](*args, num_warps=num_warps, **options)
        if compiled is not None:  # not interpreted
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[device, key] = compiled[(*grid, 1)]


def kinds(*given: Tensor | None) -> tuple[Any, ...]:
    """What Triton looks at of tensors that others have made."""
    return tuple([None if x is None else (x.dtype, x.data_ptr() % 16) for x in given])


def program(**options: Any) -> Any:
    """A decorator, as `triton.jit` is."""
    return lambda function: Program(triton.jit(function, **options))
