"""What users choose for a group of fully sharded parameters: precision, and where shards rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

_P = TypeVar("_P")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes a fully sharded module computes and communicates in. Its parameters rest in their own.

    Parameters are gathered and used in `param_dtype`; gradients are reduced in `reduce_dtype` (else in that of the
    gradients); floating-point inputs of the module are converted to `param_dtype` if `cast_forward_inputs`, its outputs
    to `output_dtype`. None changes nothing.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def gathered(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of another is used."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a gradient of another is reduced."""
        return self.reduce_dtype or dtype


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards rest on the device of their mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state rest in the CPU's memory; what is gathered is on the device
    of the mesh. Pinned memory is copied faster, beside computation."""

    pin_memory: bool = True


def policy_of(given: Any, *kinds: type[_P]) -> _P:
    """A policy of one of some kinds. torch's own, of the same names, have the same fields."""
    for kind in kinds:
        if isinstance(given, kind):
            return given
        if type(given).__name__ == kind.__name__ and type(given).__module__.startswith("torch."):
            return kind(**vars(given))
    raise TypeError(f"fully_shard takes a policy of {kinds[-1].__name__}, not {given!r}")
