"""Rules are for one test."""

from collections.abc import Iterator

import pytest

import shardwise as sw
from shardwise.rules.kit import registry


@pytest.fixture(autouse=True)
def forget_rules() -> Iterator[None]:
    """Rules registered by a test go with it."""
    with registry.restored():
        yield
    sw.clear_cache()
