"""Torch's own samples of its operators (`op_db`): for every operator, calls that torch tests itself with.

They are deterministic: the same operator and seed give the same calls, whatever else was asked for before.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.dispatch.modes import implicit_replication
from shardwise.errors import ShardwiseError
from shardwise.proof.kit.results import CannotRun

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
"""The dtypes to try an operator in, first choice first: in double precision a wrong answer is no rounding error."""

NO_TENSOR = "takes no tensor: there is nothing to shard"
SPARSE = "takes or returns sparse or nested tensors, which have no shards"

VALUELESS = ("empty_like", "new_empty", "new_empty_strided")
"""Operators whose results are memory that nobody has written: there is no value to compare."""

MIXING = ("masked.mean", "masked.std", "masked.var")
"""Functions in Python that count elements in plain tensors of their own: a program says that these are the same on all
ranks."""

LISTS = ("unary", "binary", "pointwise", "reduce", "other")
"""Kinds of operators on lists of tensors: each has samples of its own."""


class NoSamplesError(CannotRun, ShardwiseError, ImportError):
    """Torch's samples cannot be imported here."""


@dataclass(frozen=True)
class Sample:
    """One call of an operator on plain tensors: `function(*args, **kwargs)`."""

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    broadcasts: bool = False  # the first argument is smaller than the result, so the in-place form cannot take it

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, each once, in the order of the call."""
        return list({id(x): x for x in tensors_in((self.args, self.kwargs))}.values())

    def __str__(self) -> str:
        parts = [show(arg) for arg in self.args] + [f"{name}={show(arg)}" for name, arg in self.kwargs.items()]
        return f"({', '.join(parts)})"


@dataclass(frozen=True)
class Operator:
    """An operator of `op_db`: its function, its method and in-place forms if it has any, and its samples."""

    name: str
    info: Any = field(repr=False, compare=False)
    dtype: torch.dtype | None

    @cached_property
    def function(self) -> Callable:
        return implicit_replication()(self.info.op) if self.name in MIXING else self.info.op

    @property
    def method(self) -> Callable | None:
        return self.info.get_method()

    @property
    def in_place(self) -> Callable | None:
        return self.info.get_inplace()

    @property
    def takes_out(self) -> bool:
        return self.info.supports_out and not self.is_list

    @property
    def is_list(self) -> bool:
        """Whether it works on lists of tensors, each element on its own."""
        return self.name.startswith("_foreach_")

    @property
    def differentiable(self) -> bool:
        return self.info.supports_autograd and self.dtype in self.info.supported_backward_dtypes("cpu")

    def samples(self, limit: int | None = None, seed: int = 0) -> list[Sample]:
        """All samples, or `limit` of them spread over all. The same arguments give the same samples."""
        if self.dtype is None:
            return []
        with seeded(self.name, seed), warnings.catch_warnings(action="ignore"):
            given = list(self.info.sample_inputs("cpu", self.dtype, self.differentiable, set_seed=False))
        count = len(given) if limit is None else min(limit, len(given))
        return [
            Sample(i, (given[i].input, *given[i].args), dict(given[i].kwargs), given[i].broadcasts_input)
            for i in spread(len(given), count)
        ]


def spread(total: int, count: int) -> list[int]:
    """`count` of the numbers below `total`, evenly spread, the first and the last among them."""
    if count >= total:
        return list(range(total))
    return [0] if count == 1 else sorted({round(i * (total - 1) / (count - 1)) for i in range(count)})


@lru_cache(maxsize=1)
def all_operators() -> tuple[Operator, ...]:
    """Every operator of `op_db`, in its order, and every one that works on lists."""
    try:
        with _nothing_changed():
            import torch.testing._internal.common_methods_invocations as torchs
    except ImportError as error:
        raise NoSamplesError(
            f"torch's samples of its operators need a package that is not installed ({error}); "
            f"install them with: pip install 'shardwise[proof]'"
        ) from error
    lists = [info for name in LISTS for info in getattr(torchs, f"foreach_{name}_op_db", ())]
    return tuple(Operator(info.full_name, info, _dtype(info)) for info in (*torchs.op_db, *lists))


@contextmanager
def _nothing_changed() -> Iterator[None]:
    """Importing torch's tests warns, forbids changing backend flags, and switches Hypothesis to settings of their own;
    afterwards all is as before."""
    hypothesis = sys.modules.get("hypothesis")
    profile = hypothesis.settings.get_current_profile_name() if hypothesis is not None else ""
    try:
        with warnings.catch_warnings(action="ignore"), torch.backends.__allow_nonbracketed_mutation():
            yield
    finally:
        if hypothesis is not None:
            hypothesis.settings.load_profile(profile)


def _dtype(info: Any) -> torch.dtype | None:
    supported = info.supported_dtypes("cpu")
    return next((dtype for dtype in DTYPES if dtype in supported), None)


def operators(pattern: str | None = None) -> list[Operator]:
    """The operators whose whole name matches a regular expression."""
    found = [op for op in all_operators() if pattern is None or re.fullmatch(pattern, op.name)]
    if not found:
        raise CannotRun(f"no operator is called {pattern}")
    return found


def operator(name: str, dtype: str = "float64") -> Operator:
    """The operator of that name, in a floating dtype, or the complex one of that precision, if it takes it."""
    op = next(op for op in all_operators() if op.name == name)
    wanted = getattr(torch, dtype)
    supported = op.info.supported_dtypes("cpu")
    return replace(op, dtype=next((d for d in (wanted, wanted.to_complex()) if d in supported), op.dtype))


@contextmanager
def seeded(name: str, seed: int) -> Iterator[random.Random]:
    """Inside, all random numbers follow from a name and a seed; afterwards the generators are as before."""
    import numpy

    number = zlib.crc32(f"{name}/{seed}".encode())
    before = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(number)
        numpy.random.seed(number)
        torch.manual_seed(number)
        try:
            yield random.Random(number)
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])


@contextmanager
def counting_draws() -> Iterator[Callable[[], bool]]:
    """Inside, the function it gives says whether random numbers were drawn since the beginning.

    `op_db` seeds random operators anew at each call and hides that they draw; inside, it does not.
    """
    from torch.testing._internal import common_methods_invocations as torchs

    hiding = torchs.wrapper_set_seed
    before = _random_states()
    torchs.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    try:
        yield lambda: not all(map(torch.equal, before, _random_states()))
    finally:
        torchs.wrapper_set_seed = hiding


def _random_states() -> list[Tensor]:
    """Of every device that a sample may name."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


# Trees of arguments


def flatten(tree: Any) -> list[Any]:
    """What is in nested lists, tuples and dicts, in order: tensors and other values."""
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in flatten(item)]
    if isinstance(tree, dict):
        return [leaf for item in tree.values() for leaf in flatten(item)]
    return [tree]


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    return [leaf for leaf in flatten(tree) if isinstance(leaf, Tensor)]


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree with everything in it changed that is no list, tuple or dict."""
    if isinstance(tree, list):
        return [mapped(item, change) for item in tree]
    if isinstance(tree, tuple):
        items = [mapped(item, change) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        return {name: mapped(item, change) for name, item in tree.items()}
    return change(tree)


def replaced(tree: Any, images: dict[int, Any]) -> Any:
    """A tree with other things in place of its tensors, by their ids."""
    return mapped(tree, lambda leaf: images[id(leaf)] if isinstance(leaf, Tensor) else leaf)


def show(value: Any) -> str:
    """An argument in a few letters: `f64[5,3]`, `[i64[2], 3]`, `dim=1`."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        name = str(value.dtype).removeprefix("torch.")
        short = name.replace("float", "f").replace("complex", "c").replace("int", "i")
        return f"{short}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    return getattr(value, "__name__", None) or (repr(value) if isinstance(value, str) else str(value))
