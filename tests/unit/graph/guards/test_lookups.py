"""What a function asks for by names, while it is captured."""

from __future__ import annotations

import builtins
from threading import Thread

import pytest

from shardwise.graph.guards.lookups import Lookups
from shardwise.graph.guards.reached import Reached


class Scales:
    by_0, by_1, by_2 = 1.0, 2.0, 3.0


def test_names_are_noted_in_one_thread_and_python_has_its_functions_back() -> None:
    scales, before = Scales(), (builtins.getattr, builtins.hasattr)
    outer, inner = (Lookups(Reached.by(lambda: scales, [])) for _ in range(2))

    def ask(number: int) -> bool:
        return hasattr(scales, f"by_{number}")

    with pytest.raises(ValueError, match="within"), outer:
        with inner:
            assert ask(0)
        assert ask(1)
        other = Thread(target=ask, args=(2,))
        other.start()
        other.join()
        raise ValueError("within")
    assert outer.names == {"by_0", "by_1"} and inner.names == {"by_0"}
    assert (builtins.getattr, builtins.hasattr) == before
