"""Ways to run a call, forced: choice would take others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from shardwise.dispatch.call import clear_cache
from shardwise.dispatch.planning.choose import Chooser, NoStrategyError
from shardwise.rules import Strategy

Force = tuple[dict[int, int], list[Strategy]]


def forced_ways(monkeypatch: pytest.MonkeyPatch, is_it: Callable[[Any], bool]) -> Iterator[Force]:
    """The numbers of the strategies that the last call of a trace of which `is_it` holds takes along each axis, to be
    set; and all its strategies, once such a call was made."""
    ways: dict[int, int] = {}
    seen: list[Strategy] = []
    choose = Chooser.choose

    def forced(self: Chooser, position: int, have: Any, banned: Any) -> Sequence[Strategy]:
        calls = [i for i, call in enumerate(self.trace.calls) if is_it(call)]
        if not ways or not calls or position != calls[-1]:
            return choose(self, position, have, banned)
        seen[:] = self.options[position]
        found = [seen[ways[axis]] for axis in range(self.mesh.ndim)]
        if any((axis, way) in banned for axis, way in enumerate(found)):
            raise NoStrategyError(self.trace.calls[position])
        return found

    monkeypatch.setattr(Chooser, "choose", forced)
    yield ways, seen
    clear_cache()
