"""How far rounding may bring two right answers of one call apart: measured, not guessed.

The call is run in double precision as it is, and a few times with every number that goes into or comes out of an op
moved by as much as single precision rounds (Monte Carlo arithmetic), forward and backward; torch's kernels that do
several steps at once are taken apart first. How far the results move is what rounding can do to them: next to nothing
in most, a lot where large numbers cancel or something nearly zero is divided by.

What does not become smaller when the perturbation does is no rounding but a jump: another branch, a tie broken. It
excuses nothing. Neither does anything where single precision does something else than double precision would do.

How many times as far an answer may be off was calibrated on 2026-11-15 (`benchmarks/rounding.py`): of 606 right calls
of 83 functions 8 were beyond the tolerance, and needed at most a factor of 6.02, so 8 leaves a margin of 1.3; of 1278
calls with a fault planted, 8 excused 6. In all 6, and in the right call that needed 6.02, eight times the shake is
more than the largest number of the result: no factor parts such faults from rounding (the smallest was excused by
0.37), nothing can be told in single precision, and `coverage` counts these calls as drowned. Without them right calls
needed at most 1.89, and the least of the faults 630. The drowned were set apart after a first run had shown them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.proof.kit.distance import apart, largest
from shardwise.proof.kit.samples import mapped

UNIT = 2.0**-24
"""What rounding to single precision changes a number by at most, relatively."""

SMALLER = 1 / 16
"""The second size of perturbation: results that follow from the first must move less than half as far."""

RUNS = 8
FACTOR = 8.0
"""How much farther than in all these runs a result may be off: sums of many terms round at each, in another order."""

EXCUSED, DROWNED = "excused as rounding", "drowned in rounding"
"""What becomes of an answer that is off by rounding; where rounding may be all of the result, nothing can be told."""

DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}

Answer = list[Tensor | None]
"""Results of a run, then gradients, as numbers; None where there is none to compare."""

Run = Callable[[], Answer]


@dataclass(frozen=True, slots=True)
class Spread:
    """An answer in double precision, and how far rounding moves each number of it: not at all where it jumps."""

    truth: Answer
    shake: Answer

    def says(self, position: int) -> str:
        """Whether something that is excused at a position is still compared: not if that may be all there is."""
        truth, shake = self.truth[position], self.shake[position]
        assert truth is not None and shake is not None
        return DROWNED if FACTOR * float(shake.max()) > largest(truth) else EXCUSED


def doubled(tree: Any, images: dict[int, Tensor]) -> Any:
    """A tree of arguments in double precision; `images` gets the tensors by the ids of those they stand for."""

    def double(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return DOUBLE.get(leaf, leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in images:
            wide = leaf.detach().to(DOUBLE.get(leaf.dtype, leaf.dtype), copy=True)
            images[id(leaf)] = wide.requires_grad_(leaf.requires_grad)
        return images[id(leaf)]

    return mapped(tree, double)


def spread_of(run: Run) -> Spread | None:
    """How far rounding brings the numbers that `run` gives; None if it does not run in double precision."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            truth = run()
            far = _farthest(truth, [_perturbed(run, UNIT, seed) for seed in range(RUNS)])
            near = _farthest(truth, [_perturbed(run, UNIT * SMALLER, seed) for seed in range(RUNS)])
    except (RuntimeError, NotImplementedError):  # torch refuses: the dtype, or numbers that are a little off
        return None
    return Spread(truth, [_shake(a, b) for a, b in zip(far, near, strict=True)])


def _perturbed(run: Run, size: float, seed: int) -> Answer:
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_Perturb(size, seed))
        return run()


def _farthest(truth: Answer, answers: Sequence[Answer]) -> Answer:
    """Of each number, the largest distance from its true value."""
    found: Answer = []
    for position, exact in enumerate(truth):
        others = [answer[position] for answer in answers]
        if exact is None or any(other is None or other.shape != exact.shape for other in others):
            found.append(None)
        else:
            found.append(torch.stack([(other - exact).abs() for other in others]).amax(0))  # type: ignore[operator]
    return found


def _shake(far: Tensor | None, near: Tensor | None) -> Tensor | None:
    if far is None or near is None:
        return None
    return torch.where(near <= far / 2, far, torch.zeros_like(far)).nan_to_num(nan=0.0, posinf=0.0)


def factor_needed(x: Tensor, position: int, spread: Spread, tolerance: Tensor) -> float:
    """How many times as far as rounding moves the numbers at a position of an answer `x` has them: 0 if none is farther
    off than the tolerance, infinite if one is that does not move."""
    truth, shake = spread.truth[position], spread.shake[position]
    if truth is None or shake is None or truth.shape != x.shape:
        return torch.inf
    far = apart(x, truth)
    beyond = far > tolerance
    return float((far[beyond] / shake[beyond]).max()) if bool(beyond.any()) else 0.0


# Perturbation


@lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Callable]:
    """Torch's own definitions of its larger kernels by smaller ones."""
    from torch._decomp import decomposition_table

    ops = {op: steps for op, steps in decomposition_table.items() if isinstance(op, torch._ops.OpOverload)}
    return {op: steps for op, steps in ops.items() if torch.Tag.pointwise not in op.tags}


class _Perturb(TorchDispatchMode):
    """Inside, every op takes and gives numbers that are off by up to `size` of themselves."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.size = size
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return func(*args, **kwargs)  # a view
        steps = _decompositions().get(func)
        if steps is not None:
            with self:
                out = steps(*args, **kwargs)
            if out is not NotImplemented:
                return out
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        names = [argument.name for argument in schema.arguments]
        args = [x if name in written else self.map(x) for name, x in zip(names, args)]
        kwargs = {name: x if name in written else self.map(x) for name, x in kwargs.items()}
        out = func(*args, **kwargs)
        if not written:
            return self.map(out)
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, Tensor):
                x.copy_(self.off(x))
        return out

    def map(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self.off(tree)
        if isinstance(tree, (list, tuple)):
            return type(tree)(map(self.map, tree))
        return tree

    def off(self, x: Tensor) -> Tensor:
        if x.dtype not in DOUBLE.values():
            return x
        noise = torch.rand(x.shape, dtype=torch.float64, generator=self.generator)
        return x * (1 + self.size * (2 * noise - 1))
