"""One rank alone takes the short cuts that ranks of process groups take, and the simulator's many do not: shards go to
torch's functions as they are, and plans serve all calls that look alike. Here calls that look alike and are not follow
one another: other numbers, other dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import shardwise as sw
from shardwise.proof.kit.samples import Operator, all_operators

ALONE = sw.simulate((1,), ("tp",))
NUM_PARTS = 4
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.float32)
RANDOM = ("rand", "dropout", "empty", "rrelu", "fractional", "multi_head", "dot_product", "_like", "svd_lowrank", "pca")
DRAWN = ("bernoulli", "multinomial", "normal", "uniform", "exponential", "cauchy", "geometric", "log_normal")
OTHERS = ("as_strided", "sparse", "resize_", "_foreach")  # by memory, without shards, of other shapes, of lists

OPERATORS = [
    op for op in all_operators() if not any(word in op.name for word in (*RANDOM, *OTHERS)) and op.name not in DRAWN
]

Call = tuple[Callable, tuple, dict[str, Any]]


def is_number(x: Any) -> bool:
    return isinstance(x, (float, complex)) and not isinstance(x, bool)


def samples_of(op: Operator, dtype: torch.dtype, number: int) -> list[Any]:
    """Made in a thread of its own: torch looks at the whole stack for each sample, and pytest's is deep."""
    return _aside.submit(lambda: list(islice(op.info.sample_inputs("cpu", dtype), number))).result()


_aside = ThreadPoolExecutor(1)


def with_other_numbers(op: Operator) -> Iterator[Call]:
    """A sample that has numbers, with three of them in turn."""
    if not op.info.supports_dtype(torch.float64, "cpu"):
        return
    samples = samples_of(op, torch.float64, 30)
    for sample in [s for s in samples if any(map(is_number, tree_leaves((s.args, s.kwargs))))][:1]:
        for change in (lambda x: x, lambda x: x * 0.5 + 0.1, lambda x: abs(x) * 0.25 + 0.05):
            changed = tree_map(lambda x, change=change: change(x) if is_number(x) else x, (sample.args, sample.kwargs))
            yield op.function, (sample.input, *changed[0]), changed[1]


def with_other_dtypes(op: Operator) -> Iterator[Call]:
    """The first sample in one dtype after the other."""
    dtypes = [dtype for dtype in DTYPES if op.info.supports_dtype(dtype, "cpu")]
    for dtype in (*dtypes, *dtypes[:1]):
        for sample in samples_of(op, dtype, 1):
            yield op.function, (sample.input, *sample.args), sample.kwargs


def laid(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return sw.distribute_tensor(x.detach(), ALONE, [sw.Shard(0) if x.ndim else sw.Replicate()])


def own(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def outcome(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    try:
        return [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
    except Exception as error:
        return error


@pytest.mark.parametrize("calls_of", [with_other_numbers, with_other_dtypes])
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_calls_that_only_look_alike(part: int, calls_of: Callable[[Operator], Iterator[Call]]) -> None:
    wrong, compared = [], 0
    for op in OPERATORS[part::NUM_PARTS]:
        with warnings.catch_warnings(action="ignore"):
            for function, args, kwargs in calls_of(op):
                expected = outcome(function, tree_map(own, args), tree_map(own, kwargs))
                if isinstance(expected, Exception):
                    continue
                found = outcome(function, tree_map(laid, args), tree_map(laid, kwargs))
                compared += 1
                if isinstance(found, Exception) or not all(map(same, found, expected)):
                    wrong.append(f"{op.name} {args[1:]} {kwargs}: {found}")
    assert not wrong and compared > 30


def same(found: Tensor, expected: Tensor) -> bool:
    whole = found.full_tensor() if isinstance(found, sw.DTensor) else found
    if whole.dtype != expected.dtype or not expected.is_floating_point():
        return whole.dtype == expected.dtype and torch.allclose(whole, expected, equal_nan=True)
    size = expected.detach().abs().nan_to_num(0, 0, 0).amax().item() if expected.numel() else 0.0
    rounding = 8 * torch.finfo(expected.dtype).eps * size  # a difference of large numbers may be small
    return torch.allclose(whole, expected, atol=max(rounding, 1e-8), equal_nan=True)
