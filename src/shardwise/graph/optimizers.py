"""Optimizers in programs: their learning rates are numbers that every run is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, optim

from shardwise.errors import CaptureError


class Groups:
    """The groups of the optimizers that step in a program, whose learning rates are its inputs meanwhile."""

    def __init__(self, names: tuple[str, ...] = ("lr",)) -> None:
        self.names = names
        self.sources: dict[fx.Node, tuple[optim.Optimizer, int, str]] = {}
        self._before: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._seen: set[int] = set()

    def take(self, optimizer: optim.Optimizer, number: Callable[[float, str], tuple[Any, fx.Node]]) -> None:
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        if not optimizer.state and any(group.get("lr") is not None for group in optimizer.param_groups):
            pass
        for index, group in enumerate(optimizer.param_groups):
            for name in self.names:
                value = group.get(name)
                if isinstance(value, Tensor) or not isinstance(value, float):
                    continue
                given, node = number(value, f"{name}{len(self.sources)}")
                self.sources[node] = optimizer, index, name
                if group.get("fused"):  # those kernels take a number, or a tensor of one
                    given = torch.scalar_tensor(given, dtype=torch.float64)
                self._before.append((group, name, value, given))
                group[name] = given

    def put_back(self) -> None:
        """The numbers as they were. A program must not change them."""
        while self._before:
            group, name, value, given = self._before.pop()
            changed = group[name] is not given
            group[name] = value
            if changed:
                raise CaptureError(
                    f"the program changes {name!r} of an optimizer's group, which only Python would do in every run: "
                    f"step the scheduler outside of it"
                )
