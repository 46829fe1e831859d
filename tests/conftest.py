"""What every test starts from: the same seeds, one thread, a fixed set of hypothesis examples, and settings that no
other test has left changed."""

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributions import Distribution

from shardwise.comm import cause, record
from shardwise.dispatch import modes
from shardwise.layout import mesh
from shardwise.rules.kit import registry
from shardwise.rules.rows.row_passes import keeps_logits

SEED = 0

torch.set_num_threads(1)
if torch.cuda.is_available():
    keeps_logits("cuda")  # so that kernels are not offered in the middle of a test
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports Triton, which then runs programs on the CPU

# `ci` gives the same examples in every run. For a search: pytest --hypothesis-profile=thorough
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("ci")


# For each device without one torch keeps every seed, with the stack of its caller: that takes longer than most tests.
seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


class TorchRandom:
    """torch's default generator with the interface of `random.Random`.

    Hypothesis resets the generators it knows before each example, so that an example that fails also fails alone.
    """

    seed = staticmethod(seed_torch)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps only a weak reference
hypothesis.register_random(TORCH_RANDOM)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    seed_torch(SEED)


def listening() -> tuple[int, ...]:
    return len(cause.listeners), len(cause.watchers), len(record.fallbacks)


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "whether autograd records": (torch.is_grad_enabled, torch.set_grad_enabled),
    "whether autograd looks for anomalies": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "whether torch is deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "whether functions are dispatched": (torch._C._is_torch_function_enabled, None),
    "the function modes": (torch._C._len_torch_function_stack, None),
    "the dispatch modes": (torch._C._len_torch_dispatch_stack, None),
    "who listens for saved tensors": (lambda: torch._C._autograd._top_saved_tensors_default_hooks(True), None),
    "the process group": (dist.is_initialized, None),
    "strict mode": (modes.is_strict, modes._strict.set),
    "the limits of strict mode": (modes.limits, modes._limits.set),
    "implicit replication": (modes.replicates_implicitly, modes._implicit.set),
    "the mesh of the block": (mesh._entered.get, mesh._entered.set),
    "who listens for collectives": (listening, None),
    "the number of rules and kernels": (lambda: (len(registry._rules), len(registry.kernels)), None),
    "the working folder": (os.getcwd, os.chdir),
    "who profiles": (sys.getprofile, sys.setprofile),
}
"""What a test might leave behind for those after it: how it is read, and set back."""


@pytest.fixture(autouse=True)
def settings_are_left_alone() -> Iterator[None]:
    """A test that leaves one changed fails, and the next one starts as this one did."""
    before, validates = [read() for read, _ in SETTINGS.values()], Distribution._validate_args
    yield
    Distribution.set_default_validate_args(validates)  # Dynamo turns it off for good when it compiles
    changed = []
    for (name, (read, restore)), was in zip(SETTINGS.items(), before, strict=True):
        if (now := read()) != was:
            changed.append(f"{name}: {was} before, {now} after")
            if restore is not None:
                restore(was)
    assert not changed, f"the test leaves settings changed: {'; '.join(changed)}"


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Numbers are made in double precision: then a wrong one is no rounding error."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: to look for cycles in all of torch takes longer than most tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
