"""Optimizers in programs: their learning rates are numbers that every run is given."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx, optim

from shardwise.errors import CaptureError


def are_floats(value: Any) -> bool:
    """Whether a setting is a float, or a tuple of some."""
    return isinstance(value, float) or (
        type(value) is tuple and bool(value) and all(isinstance(x, float) for x in value)
    )


class Groups:
    """The groups of the optimizers that step in a program. Their learning rates, and `varying` settings beside them,
    are its inputs meanwhile."""

    def __init__(self, varying: Collection[str] = ()) -> None:
        self.names = dict.fromkeys(("lr", *sorted(varying)))
        self.sources: dict[fx.Node, tuple[optim.Optimizer, int, str, int | None]] = {}
        self._before: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._seen: set[int] = set()

    def take(self, optimizer: optim.Optimizer, number: Callable[[float, str], tuple[Any, fx.Node]]) -> None:
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        for index, group in enumerate(optimizer.param_groups):
            for name in self.names:
                value: Any = group.get(name)
                if not are_floats(value):
                    continue
                numbers = [(None, value)] if isinstance(value, float) else enumerate(value)
                found = []
                for position, one in numbers:
                    given, node = number(one, f"{name}{len(self.sources)}")
                    self.sources[node] = optimizer, index, name, position
                    found.append(given)
                put: Any = found[0] if isinstance(value, float) else tuple(found)
                if group.get("fused") and name == "lr":  # those kernels take a number, or a tensor of one
                    put = torch.scalar_tensor(put, dtype=torch.float64)
                self._before.append((group, name, value, put))
                group[name] = put

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
