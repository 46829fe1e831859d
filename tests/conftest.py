"""What every test starts from: the same seeds, one thread, and a fixed set of hypothesis examples."""

import random
from collections.abc import Iterator

import hypothesis
import numpy
import pytest
import torch

SEED = 0

torch.set_num_threads(1)

# `ci` gives the same examples in every run. For a search: pytest --hypothesis-profile=thorough
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("ci")


class TorchRandom:
    """torch's default generator with the interface of `random.Random`.

    Hypothesis resets the generators it knows before each example, so that an example that fails also fails alone.
    """

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # hypothesis keeps only a weak reference
hypothesis.register_random(TORCH_RANDOM)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Numbers are made in double precision: then a wrong one is no rounding error."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
