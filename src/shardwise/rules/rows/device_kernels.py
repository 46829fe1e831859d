"""The kernels that come with the rules, where what they are written in is there."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from shardwise.errors import KernelWarning
from shardwise.rules.kit.kernels import kernels, provides
from shardwise.rules.rows import row_numbers, row_passes

OLDEST_TRITON = (3, 6)

WRITTEN_IN_TRITON = {
    "triton_rows": (row_passes.row_sums, row_passes.row_gradient, row_passes.scale_by),
    "triton_softmax": (row_passes.row_softmax, row_passes.row_products, row_passes.row_softmax_gradient),
    "triton_numbers": (row_numbers.row_terms, row_numbers.row_losses, row_numbers.row_loss),
}
"""The steps that run as Triton programs on CUDA devices, by the module that has these."""


@provides("cuda")
def offer_triton() -> None:
    if (missing := _missing()) is not None:
        warnings.warn(
            f"{missing}: losses over a sharded vocabulary, and softmax over a sharded dim, run as several of torch's "
            f"functions, at a few times the time and memory. Install triton {_dotted(OLDEST_TRITON)} or newer",
            KernelWarning,
            stacklevel=2,
        )
        return
    for module, steps in WRITTEN_IN_TRITON.items():
        programs = importlib.import_module(f"shardwise.rules.rows.{module}")
        kernels.update({(step, "cuda"): getattr(programs, step.name) for step in steps})


def _missing() -> str | None:
    try:
        triton: Any = importlib.import_module("triton")
    except ImportError:
        return "Triton is not installed"
    numbers = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return None if numbers >= OLDEST_TRITON else f"Triton {triton.__version__} is too old"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
