"""Triton programs, launched without asking Triton again what it has found out of such arguments before."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
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
    run. Here it is asked once for all launches with the same key: in these all that Triton looks at must be the same
    but for the tensors, and the grid. What listens for Triton's launches hears of none but these."""

    def __init__(self, function: Any) -> None:
        self.function, self.name = function, function.__name__
        self._known: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int],
        num_warps: int,
        tensors: Sequence[Tensor],
        others: tuple[Any, ...],
        **options: bool,
    ) -> None:
        """`others` are what the function takes after tensors."""
        device = tensors[0].get_device()
        if device == _current_device():
            self._launch(device, key, grid, num_warps, tensors, others, options)
        else:
            with torch.cuda.device(device):
                self._launch(device, key, grid, num_warps, tensors, others, options)

    def _launch(
        self,
        device: int,
        key: Hashable,
        grid: tuple[int, int],
        num_warps: int,
        tensors: Sequence[Tensor],
        others: tuple[Any, ...],
        options: dict[str, bool],
    ) -> None:
        places = [x.data_ptr() for x in tensors]  # Triton would ask for it, and CUDA whose it is
        kind = (device, key, *[x.dtype for x in tensors], *[place % 16 for place in places])
        launch = self._known.get(kind)
        if launch is not None:
            launch(_current_stream(device), *places, *others)  # type: ignore[misc]
            return
        compiled = self.function[grid](*tensors, *others, num_warps=num_warps, **options)
        if compiled is not None:  # not interpreted
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[kind] = _launcher(compiled, grid)


def _launcher(compiled: Any, grid: tuple[int, int]) -> Callable[..., None]:
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    return lambda stream, *args: run(*grid, 1, stream, function, metadata, None, None, None, *args)


def program(**options: Any) -> Any:
    """A decorator, as `triton.jit` is."""
    return lambda function: Program(triton.jit(function, **options))
