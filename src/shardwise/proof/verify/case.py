"""A recorded call with its single-device answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.proof.verify.calls import Recorded, filled, runs
from shardwise.proof.verify.parts import noise


class Case:
    """A recorded call with its single-device answer."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self.call = recorded.call

    @cached_property
    def on_other_data(self) -> list[Case]:
        """The same call on other data: what is true of one by accident is hardly true of all. Integers stay, unless the
        op is element-wise: they may be indices, and not every kernel checks them."""
        tensors = self.recorded.tensors
        others = [tuple(map(turn, tensors)) for turn in _OTHERS]
        if torch.Tag.pointwise in self.call.op.tags:
            others.append(tuple(_anew(x, seed) for seed, x in enumerate(tensors)))
        cases = [Case(replace(self.recorded, tensors=other)) for other in others]
        return [case for case in cases if case.is_answered]

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer to compare with: of nothing, or of what is no number, anything is true."""
        try:
            results = self.expected.results
        except Exception:  # data that the op refuses
            return False
        return all(value.numel for value in self.call.inputs) and all(map(_says_something, results))

    def wants_gradient(self, position: int) -> bool:
        dtype = self.call.inputs[position].dtype
        return dtype.is_floating_point or dtype.is_complex

    @cached_property
    def expected(self) -> Run:
        """What one device gets. Made without gradients where torch cannot differentiate the op."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
            try:
                return self.run(self.recorded.tensors, self.weights)
            except (RuntimeError, NotImplementedError, UserWarning):
                return self.run(self.recorded.tensors, None)

    @cached_property
    def weights(self) -> list[Tensor]:
        """The gradient that flows into each result: random, the same each time."""
        generator = torch.Generator().manual_seed(len(self.call.outputs) + 7)
        with torch.no_grad():
            results = self.run(self.recorded.tensors, None).results
        return [noise(x.shape, x.dtype, generator) for x in results]

    def run(self, tensors: Sequence[Tensor], weights: Sequence[Tensor | None] | None, sizes: Any = None) -> Run:
        """Run the op on some tensors; with weights, backward of the weighted sum of its results too."""
        leaves = [tensor.detach().clone() for tensor in tensors]
        if weights is not None:
            for position, leaf in enumerate(leaves):
                leaf.requires_grad_(self.wants_gradient(position))
        used = [
            leaf.clone() if i in self.call.mutated and leaf.requires_grad else leaf for i, leaf in enumerate(leaves)
        ]
        with torch.set_grad_enabled(weights is not None):
            results = self._call(used, sizes or {})
        if weights is None:
            return Run([x.detach() for x in results], None)
        roots = [(x, w) for x, w in zip(results, weights, strict=True) if x.requires_grad and w is not None]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not roots or not wanted:
            return Run([x.detach() for x in results], None)
        grads = iter(torch.autograd.grad([x for x, _ in roots], wanted, [w for _, w in roots], allow_unused=True))
        found = [next(grads) if leaf.requires_grad else None for leaf in leaves]
        return Run([x.detach() for x in results], found)

    def _call(self, tensors: Sequence[Tensor], sizes: dict[Any, Any]) -> list[Tensor]:
        """The outputs; for an op that returns nothing, what it wrote to."""
        held = {value.index: tensor for value, tensor in zip(self.call.inputs, tensors, strict=True)}
        args = [filled(sizes.get(i, arg), held) for i, arg in enumerate(self.call.args)]
        kwargs = {name: filled(sizes.get(name, arg), held) for name, arg in self.call.kwargs.items()}
        out = flat_tensors(runs(self.call.op)(*args, **kwargs))
        return out or [tensors[i] for i in self.call.mutated]


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a run and the gradients of its inputs (None: no gradient was asked for, or none flows)."""

    results: list[Tensor]
    gradients: list[Tensor | None] | None


# Other data


def _says_something(x: Tensor) -> bool:
    """Not nothing, no NaNs, and not so small a number that any other is as near."""
    if x.is_floating_point() or x.is_complex():
        return x.numel() > 0 and not bool(x.isnan().any()) and bool((x.abs() > 1e-4).any())
    return x.numel() > 0


def _is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _first_only(x: Tensor) -> Tensor:
    """The first element, and zeros (or False) after it."""
    made = torch.zeros_like(x, memory_format=torch.contiguous_format)
    made.view(-1)[:1] = x.reshape(-1)[:1] if _is_number(x) else True
    return made if _is_number(x) or x.dtype == torch.bool else x


def _without_first(x: Tensor) -> Tensor:
    made = (x if _is_number(x) else torch.ones_like(x)).clone(memory_format=torch.contiguous_format)
    made.view(-1)[:1] = 0
    return made if _is_number(x) or x.dtype == torch.bool else x


def _anew(x: Tensor, seed: int) -> Tensor:
    """Other numbers altogether; integers that differ from their neighbours, whatever they were."""
    if _is_number(x) or x.dtype == torch.bool:
        return noise(x.shape, x.dtype, torch.Generator().manual_seed(seed))
    return x + torch.arange(x.numel()).remainder(5).to(x.dtype).view(x.shape)


_OTHERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.flip(list(range(x.dim()))) if _is_number(x) else x,
    lambda x: x.roll(1) if _is_number(x) else x,
    _first_only,
    _without_first,
)
