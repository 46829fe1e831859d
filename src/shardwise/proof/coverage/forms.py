"""The ways to write an operator: as a function, as a method, in place, and with `out=`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.proof.kit.samples import Operator, Sample, flatten, replaced

OUT = "out="

RESHAPING = ("as_strided", "as_strided.partial_views", "resize_")
"""Operators that write another shape in place, which DTensors refuse."""


class Unusable(Exception):
    """Plain torch does not give a sample an answer to compare with."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to write an operator."""

    name: str
    function: Callable
    in_place: bool = False
    reshapes: bool = False  # what it writes to, and may therefore be refused

    @property
    def has_out(self) -> bool:
        return self.name == OUT

    def sample(self, given: Sample) -> Sample:
        """The call of a sample, written so."""
        return _with_out(self, given) if self.has_out else given


def forms(op: Operator) -> Iterator[tuple[Form, int]]:
    """The ways to write an operator, and by how much fewer layouts suffice for each."""
    yield Form("function", op.function, reshapes=op.name == "resize_"), 1
    if op.method is not None and op.method is not op.function:
        yield Form("method", op.method, reshapes=op.name == "resize_"), 6
    if op.in_place is not None:
        yield Form("in-place", op.in_place, in_place=True, reshapes=op.name in RESHAPING), 3
    if op.takes_out:
        yield Form(OUT, op.function), 3


def _with_out(form: Form, given: Sample) -> Sample:
    """The sample without gradients, which `out=` does not have, and with tensors that torch's results fit into."""
    images = {id(x): x.detach() for x in given.tensors}
    args, kwargs = replaced(given.args, images), replaced(given.kwargs, images)
    try:
        results = form.function(*replaced(args, _copies(images)), **replaced(kwargs, _copies(images)))
    except Exception as error:
        raise Unusable("torch refuses it") from error
    leaves = flatten(results)
    if not leaves or not all(isinstance(x, Tensor) and x.layout is torch.strided for x in leaves):
        raise Unusable("has no tensors to write to")
    outs = [_filling(x) for x in leaves]
    out = outs[0] if isinstance(results, Tensor) else type(results)(outs) if type(results) is list else tuple(outs)
    return replace(given, args=args, kwargs={**kwargs, "out": out})


def _filling(x: Tensor) -> Tensor:
    """What a result is written over: nowhere the result itself, so that it shows what was not written."""
    return (x.detach() != 1).to(x.dtype)


def _copies(images: dict[int, Tensor]) -> dict[int, Tensor]:
    return {id(x): x.clone() for x in images.values()}
