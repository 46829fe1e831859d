"""Torch's samples import much else where it is installed, such as numba; what that warns of is none of our business."""

import warnings

import pytest


@pytest.fixture(scope="session", autouse=True)
def samples_imported() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.testing._internal.common_methods_invocations  # noqa: F401
