"""Places that are looked at before every run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.graph.guards.whereabouts import unchanged


def test_each_place_counts() -> None:
    values = [torch.zeros(()), torch.zeros(()), 300, "text", True]
    containers = [{"a": values[0]}, {torch.float32: values[1]}, [values[2]], {"b": values[3]}, {"training": True}]
    keys = ["a", torch.float32, 0, "b", "training"]
    look = unchanged(list(zip(containers, keys, strict=True)), values)
    assert look()
    others = [torch.zeros(()), torch.zeros(()), 301, "texts", False]
    for container, key, value, other in zip(containers, keys, values, others, strict=True):
        container[key] = other  # type: ignore[index]
        assert not look()
        container[key] = value  # type: ignore[index]
        assert look()


def test_what_is_gone_is_said() -> None:
    kept = {"a": torch.zeros(())}
    look = unchanged([(kept, "a")], [kept["a"]])
    del kept["a"]
    with pytest.raises(KeyError):
        look()


def test_what_was_absent_must_stay_so() -> None:
    kept: dict[str, Any] = {}
    look = unchanged([], [], absent=[(kept, "forward")])
    assert look()
    kept["forward"] = None
    assert not look()


def test_there_may_be_many() -> None:
    kept = {i: object() for i in range(20_000)}
    look = unchanged([(kept, i) for i in kept], list(kept.values()))
    assert look()
    kept[19_999] = object()
    assert not look()


def test_there_may_be_none() -> None:
    assert unchanged([], [])()
