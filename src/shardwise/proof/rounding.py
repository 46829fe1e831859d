"""How far rounding may bring two right answers of one call apart: measured, not guessed.

The call is run in double precision as it is, and a few times with every number that goes into or comes out of an op
moved by as much as single precision rounds (Monte Carlo arithmetic), forward and backward; torch's kernels that do
several steps at once are taken apart first. How far the results move is what rounding can do to them: next to nothing
in most, a lot where large numbers cancel or something nearly zero is divided by.

What does not become smaller when the perturbation does is no rounding but a jump: another branch, a tie broken. It
excuses nothing. Neither does anything where single precision does something else than double precision would do.
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

UNIT = 2.0**-24
"""What rounding to single precision changes a number by at most, relatively."""

SMALLER = 1 / 16
"""The second size of perturbation: results that follow from the first must move less than half as far."""

RUNS = 8
FACTOR = 8.0
"""How much farther than in all these runs a result may be off: sums of many terms round at each, in another order."""

DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}

Answer = list[Tensor | None]
"""Results of a run, then gradients, as numbers; None where there is none to compare."""

Run = Callable[[], Answer]


@dataclass(frozen=True, slots=True)
class Spread:
    """How far each number of an answer may be off, and that answer in double precision."""

    truth: Answer
    reach: Answer


def doubled(tree: Any, images: dict[int, Tensor]) -> Any:
    """A tree of arguments in double precision; `images` gets the tensors by the ids of those they stand for."""
    if isinstance(tree, Tensor):
        if id(tree) not in images:
            wide = tree.detach().to(DOUBLE.get(tree.dtype, tree.dtype), copy=True)
            images[id(tree)] = wide.requires_grad_(tree.requires_grad)
        return images[id(tree)]
    if isinstance(tree, torch.dtype):
        return DOUBLE.get(tree, tree)
    if isinstance(tree, list):
        return [doubled(item, images) for item in tree]
    if type(tree) is tuple:
        return tuple(doubled(item, images) for item in tree)
    if isinstance(tree, dict):
        return {name: doubled(item, images) for name, item in tree.items()}
    return tree


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
    return Spread(truth, [_reach(a, b) for a, b in zip(far, near, strict=True)])


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


def _reach(far: Tensor | None, near: Tensor | None) -> Tensor | None:
    if far is None or near is None:
        return None
    reach = torch.where(near <= far / 2, far * FACTOR, torch.zeros_like(far))
    return reach.nan_to_num(nan=0.0, posinf=0.0)


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
