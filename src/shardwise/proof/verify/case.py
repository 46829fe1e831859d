"""One aten call with the data it got, and its answer on a single device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.planning.trace import Trace, flat_tensors
from shardwise.proof.kit.samples import show
from shardwise.rules import Call, Value
from shardwise.rules.kit.treatments import treatment_of

Sizes = dict[Any, Any]
"""Arguments to replace, by position or name."""


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a run and the gradients of its inputs (None: no gradient was asked for, or none flows)."""

    results: list[Tensor]
    gradients: list[Tensor | None] | None


@dataclass(frozen=True, eq=False)
class Case:
    """One aten call: `tensors[i]` is what its i-th input was. `trace` is the call alone, as dispatch would see it."""

    call: Call
    tensors: tuple[Tensor, ...]
    trace: Trace
    origin: str

    @property
    def op(self) -> str:
        return self.call.op._schema.name

    def __str__(self) -> str:
        parts = [show(arg) for arg in self.call.args]
        parts += [f"{name}={show(arg)}" for name, arg in self.call.kwargs.items()]
        return f"{self.call.op}({', '.join(parts)})"

    @property
    def key(self) -> tuple[str, str]:
        """What makes two calls the same to a rule: op, shapes, dtypes, static arguments."""
        return str(self.call.op), str(self)

    def portable(self) -> tuple[str, tuple, dict[str, Any], str]:
        """The call as `pickle` can write it; `made_again` makes it again."""
        args, kwargs = self.arguments(self.tensors)
        return str(self.call.op), args, kwargs, self.origin

    def arguments(self, tensors: Sequence[Any], sizes: Sizes | None = None) -> tuple[tuple, dict[str, Any]]:
        """The arguments of the call, with these tensors for its inputs."""
        held = {value.index: tensor for value, tensor in zip(self.call.inputs, tensors, strict=True)}
        sizes = sizes or {}
        args = tuple(filled(sizes.get(i, arg), held) for i, arg in enumerate(self.call.args))
        return args, {name: filled(sizes.get(name, arg), held) for name, arg in self.call.kwargs.items()}

    @cached_property
    def on_other_data(self) -> list[Case]:
        """The same call on other data: what is true of one by accident is hardly true of all. Integers stay, unless the
        op is element-wise: they may be indices, and not every kernel checks them."""
        others = [tuple(map(turn, self.tensors)) for turn in _OTHERS]
        if torch.Tag.pointwise in self.call.op.tags:
            others.append(tuple(_anew(x, seed) for seed, x in enumerate(self.tensors)))
        cases = [replace(self, tensors=other) for other in others]
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
        return _is_number(self.tensors[position])

    @cached_property
    def expected(self) -> Run:
        """What one device gets. Made without gradients where torch cannot differentiate the op."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".*an autograd kernel was not registered")
            try:
                return self.run(self.tensors, self.weights)
            except (RuntimeError, NotImplementedError, UserWarning):
                return self.run(self.tensors, None)

    @cached_property
    def weights(self) -> list[Tensor]:
        """The gradient that flows into each result: random, the same each time."""
        generator = torch.Generator().manual_seed(len(self.call.outputs) + 7)
        with torch.no_grad():
            results = self.run(self.tensors, None).results
        return [noise(x.shape, x.dtype, generator) for x in results]

    def run(
        self, tensors: Sequence[Tensor], weights: Sequence[Tensor | None] | None, sizes: Sizes | None = None
    ) -> Run:
        """Run the op on some tensors; with weights, backward of the weighted sum of its results too."""
        leaves = [tensor.detach().clone() for tensor in tensors]
        for position, leaf in enumerate(leaves):
            leaf.requires_grad_(weights is not None and self.wants_gradient(position))
        used = self.targets_copied(leaves)
        args, kwargs = self.arguments(used, sizes)
        with torch.set_grad_enabled(weights is not None):
            results = flat_tensors(runs(self.call.op)(*args, **kwargs)) or [used[i] for i in self.call.mutated]
        found = [x.detach() for x in results]
        pairs = [(x, w) for x, w in zip(results, weights or [], strict=False) if x.requires_grad and w is not None]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not pairs or not wanted:
            return Run(found, None)
        grads = iter(torch.autograd.grad([x for x, _ in pairs], wanted, [w for _, w in pairs], allow_unused=True))
        return Run(found, [next(grads) if leaf.requires_grad else None for leaf in leaves])

    def targets_copied(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, with copies of those that the op writes to and that need a gradient."""
        return [x.clone() if i in self.call.mutated and x.requires_grad else x for i, x in enumerate(leaves)]


def filled(template: Any, held: dict[int, Any]) -> Any:
    """An argument of a call with tensors in place of its values."""
    if isinstance(template, Value):
        return held[template.index]
    if isinstance(template, (list, tuple)):
        return [filled(item, held) for item in template]
    return template


def runs(op: Any) -> Callable:
    """What runs an op on real tensors: itself, or the Python function that it stands for."""
    return treatment_of(op).function or op


def noise(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype, generator=generator)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    return torch.randint(-3, 4, tuple(shape), generator=generator).to(dtype)


# Other data


def _says_something(x: Tensor) -> bool:
    """Not nothing, no NaNs, and not so small a number that any other is as near."""
    if _is_number(x):
        return x.numel() > 0 and not bool(x.isnan().any()) and bool((x.abs() > 1e-4).any())
    return x.numel() > 0


def _is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _only(x: Tensor, first: bool) -> Tensor:
    """The first element alone, or all but it; zeros (or False) in the place of the others."""
    if not _is_number(x) and x.dtype != torch.bool:
        return x
    here = (torch.arange(x.numel()).view(x.shape) == 0) == first
    return torch.where(here, x if _is_number(x) else True, 0).to(x.dtype).contiguous()


def _anew(x: Tensor, seed: int) -> Tensor:
    """Other numbers altogether; integers that differ from their neighbours, whatever they were."""
    if _is_number(x) or x.dtype == torch.bool:
        return noise(x.shape, x.dtype, torch.Generator().manual_seed(seed))
    return x + torch.arange(x.numel()).remainder(5).to(x.dtype).view(x.shape)


_OTHERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.flip(list(range(x.dim()))) if _is_number(x) else x,
    lambda x: x.roll(1) if _is_number(x) else x,
    lambda x: _only(x, True),
    lambda x: _only(x, False),
)
