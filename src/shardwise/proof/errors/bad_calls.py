"""Calls that torch refuses: its own (`error_inputs` of `op_db`), samples with one thing spoilt, and bad data."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.proof.errors.bad_data import BAD_DATA
from shardwise.proof.errors.spoiling import spoilt
from shardwise.proof.kit.samples import Operator, Sample, operator, replaced, seeded

DATA = "data: "
"""What the names of calls with bad data begin with."""

TRIED = 8
"""Samples of an operator that are spoilt at most until torch refuses some."""


@dataclass(frozen=True)
class Bad:
    """A call that torch refuses: what it says, and whether the data is to blame, or already shapes and numbers are."""

    function: Callable[..., Any]
    sample: Sample
    error: Exception
    of_data: bool
    writes: bool  # before it refuses


def bad_calls(name: str, samples: int, seed: int) -> Iterator[Bad]:
    """The bad calls of an operator: torch's own, and spoilt samples; of these, one for each error."""
    if name.startswith(DATA):
        function, tensors = BAD_DATA[name.removeprefix(DATA)]
        if (bad := refused(function, Sample(0, tensors))) is not None:  # older versions of torch do not look at all
            yield replace(bad, of_data=True)
        return
    op = operator(name)
    for sample in _given(op, seed):
        if (bad := refused(op.function, sample)) is not None:
            yield bad
    yield from _spoilt(op, samples, seed)


def _given(op: Operator, seed: int) -> list[Sample]:
    if op.info.error_inputs_func is None:
        return []
    with seeded(op.name, seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = [bad.sample_input for bad in op.info.error_inputs("cpu", set_seed=False)]
    return [Sample(i, (bad.input, *bad.args), dict(bad.kwargs)) for i, bad in enumerate(given)]


def _spoilt(op: Operator, wanted: int, seed: int) -> Iterator[Bad]:
    """What torch refuses of as many spoilt samples as are wanted; those of which it refuses nothing do not count."""
    seen: set[str] = set()
    for sample in op.samples(max(wanted, TRIED), seed):
        if not _can_shard(sample):
            continue
        found = [bad for other in spoilt(sample) if (bad := refused(op.function, other)) is not None]
        for bad in found:
            if (text := re.sub(r"\d+", "#", str(bad.error))) not in seen:
                seen.add(text)
                yield bad
        wanted -= bool(found)
        if not wanted:
            return


def _can_shard(sample: Sample) -> bool:
    return bool(sample.tensors) and all(
        x.layout is torch.strided and x.device.type == "cpu" and not x.is_quantized for x in sample.tensors
    )


def refused(function: Callable[..., Any], sample: Sample) -> Bad | None:
    """A call that torch refuses, if it does, in the same words each time."""
    if not _can_shard(sample):
        return None
    images = [_copy(x) for x in sample.tensors]
    first, again = _error(function, sample, images), _error(function, sample, [_copy(x) for x in sample.tensors])
    if first is None or str(first) != str(again):
        return None
    others = [
        _error(function, sample, [image(x).requires_grad_(x.requires_grad) for x in sample.tensors])
        for image in (torch.zeros_like, torch.ones_like, _noise)
    ]
    of_data = any(str(other) != str(first) for other in others)
    return Bad(function, sample, first, of_data, writes=not all(map(same_values, sample.tensors, images)))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _noise(x: Tensor) -> Tensor:
    """Other numbers; as matrices they are regular."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros_like(x)
    return torch.linspace(0.1, 0.9, x.numel(), dtype=torch.float64).reshape(x.shape).cos().pow(9).to(x.dtype)


def _error(function: Callable[..., Any], sample: Sample, images: Sequence[Tensor]) -> Exception | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(function, sample, images)
    except Exception as error:
        return error.with_traceback(None)
    return None


def call(function: Callable[..., Any], sample: Sample, images: Sequence[Tensor]) -> Any:
    by_id = {id(x): image for x, image in zip(sample.tensors, images, strict=True)}
    with seeded("call", 0):
        return function(*replaced(sample.args, by_id), **replaced(sample.kwargs, by_id))


def same_values(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)  # torch compares no more than 64 dims
    return bool(((a == b) | ((a != a) & (b != b))).all())
