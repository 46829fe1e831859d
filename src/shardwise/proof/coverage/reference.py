"""One sample of an operator, written in some form, with plain torch's answer to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import InPlaceError
from shardwise.proof.coverage.forms import Form, Unusable
from shardwise.proof.kit.compare import Wrong, largest, near, same, whole
from shardwise.proof.kit.samples import SPARSE, Sample, counting_draws, flatten, mapped, replaced, seeded, tensors_in

DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Reference:
    """One sample of one form of an operator, with plain torch's results and gradients."""

    def __init__(self, form: Form, given: Sample, *, valueless: bool = False, seed: int = 0) -> None:
        sample = form.sample(given)
        self.form, self.given, self.sample, self.seed = form, given, sample, seed
        if any(_unshardable(x) for x in sample.tensors):
            raise Unusable(SPARSE)
        if form.in_place and (sample.broadcasts or not isinstance(sample.args[0], (Tensor, list))):
            raise Unusable("has no in-place form")
        self.leaves = [_leaf(x) for x in sample.tensors]
        returned = self._try(self.leaves)
        self.outputs, self.structure = flatten(returned), structure(returned)
        if any(isinstance(x, Tensor) and _unshardable(x) for x in self.outputs):
            raise Unusable(SPARSE)
        if form.has_out and not self._is_written():
            raise Unusable("torch itself does not write to out=")
        self.written = [i for i, (x, y) in enumerate(zip(sample.tensors, self.leaves)) if not same(x, y)]
        self.valueless = valueless
        self.random = valueless or self._draws()
        self.weights = self._weights()
        self.gradients = self._gradients()

    def run(self, images: Sequence[Tensor], sample: Sample | None = None) -> Any:
        """What the call returns, with other tensors in place of the sample's (or those of another). In place: what it
        wrote to, and which of that it returns."""
        sample = sample or self.sample
        by_id = {id(x): image for x, image in zip(sample.tensors, images, strict=True)}
        args, kwargs = replaced(sample.args, by_id), replaced(sample.kwargs, by_id)
        if not self.form.in_place:
            return self.form.function(*args, **kwargs)
        given = tensors_in(args[0])
        targets = [x.clone() for x in given]
        try:
            returned = self.form.function(targets if isinstance(args[0], list) else targets[0], *args[1:], **kwargs)
        except InPlaceError:
            if not all(same(whole(x), whole(y)) for x, y in zip(targets, given, strict=True)):
                raise Wrong("refused after having written") from None
            raise
        at = {id(x): i for i, x in enumerate(targets)}
        return targets, [at.get(id(x), "none of its targets") for x in flatten(returned)]

    def _is_written(self) -> bool:
        """Whether the results of a call with `out=` are those without it."""
        given = {name: arg for name, arg in self.sample.kwargs.items() if name != "out"}
        with seeded("call", self.seed):
            others = [_leaf(x) for x in self.sample.tensors[: -self.num_outs]]
            results = flatten(self.run(others, replace(self.sample, kwargs=given)))
        written = self.leaves[-self.num_outs :]
        return all(near(x, y) for x, y in zip(written, results, strict=True))

    def _try(self, images: Sequence[Tensor]) -> Any:
        try:
            with seeded("call", self.seed):
                return self.run(images)
        except Exception as error:
            raise Unusable("torch refuses it") from error

    def _draws(self) -> bool:
        with seeded("call", self.seed), counting_draws() as drawn:
            self.run([_leaf(x) for x in self.sample.tensors])
            return drawn()

    def _weights(self) -> list[Tensor | None]:
        with seeded("weights", self.seed):
            return [torch.randn_like(x.detach()) if _differentiable(x) else None for x in self.outputs]

    def _gradients(self) -> list[Tensor | None] | None:
        """Gradients of the leaves, or None where torch has none."""
        pairs = [(x, w) for x, w in zip(self.outputs, self.weights, strict=True) if w is not None]
        if not pairs:
            return None
        try:
            torch.autograd.backward([x for x, _ in pairs], [w for _, w in pairs])
        except Exception:  # torch itself has no gradient here
            return None
        return [x.grad for x in self.leaves]

    @property
    def num_outs(self) -> int:
        """How many of its tensors, the last ones, are given as `out=`."""
        return len(tensors_in(self.sample.kwargs.get("out"))) if self.form.has_out else 0

    @property
    def reshapes(self) -> bool:
        """Whether it changes, in place, the shape of what it writes to."""
        return any(x.shape != y.shape for x, y in zip(tensors_in(self.sample.args[0]), self.outputs, strict=False))

    @property
    def has_gradients(self) -> str:
        """Whether there are gradients to compare, and if not, why."""
        if self.gradients is not None:
            return "without values" if self.random else "compared"
        return "none" if all(w is None for w in self.weights) else "refused by torch"

    @property
    def scale(self) -> float:
        """The largest number in it."""
        return max(map(largest, tensors_in([self.leaves, self.outputs, self.gradients])), default=0.0)

    @cached_property
    def in_double(self) -> Reference | None:
        """The same call in double precision; None if it is, or torch refuses that."""
        images: dict[int, Tensor] = {}

        def double(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype):
                return DOUBLE.get(leaf, leaf)
            if isinstance(leaf, Tensor) and id(leaf) not in images:
                wide = leaf.detach().to(DOUBLE.get(leaf.dtype, leaf.dtype), copy=True)
                images[id(leaf)] = wide.requires_grad_(leaf.requires_grad)
            return images.get(id(leaf), leaf)

        if not any(x.dtype in DOUBLE for x in self.given.tensors):
            return None
        sample = replace(self.given, args=mapped(self.given.args, double), kwargs=mapped(self.given.kwargs, double))
        try:
            return Reference(self.form, sample, valueless=self.valueless, seed=self.seed)
        except Unusable:
            return None


def structure(tree: Any) -> str:
    """How what a call returned is nested, in words: `tuple[_, _]`."""
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__}[{', '.join(map(structure, tree))}]"
    return f"dict[{', '.join(map(structure, tree.values()))}]" if isinstance(tree, dict) else "_"


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _unshardable(x: Tensor) -> bool:
    return x.layout is not torch.strided or x.is_nested or x.is_quantized


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
