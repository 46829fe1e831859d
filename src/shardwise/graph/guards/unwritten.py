"""Whether dicts have been written to, without a look at what they hold: CPython counts writes, and C++ reads the counts
of hundreds of dicts in the time in which Python would look into a few."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

Check = Callable[[tuple[Any, ...]], bool]


class Unwritten:
    """Dicts that a train step leaves as they are, those of modules say.

    To read the counts is one call, to make what reads them takes as long as some hundred looks into the dicts. So if
    dicts are written to between calls (models that go from training to evaluation and back), it is made again after
    twice as many looks as the last time. It is Dynamo's, and only used where that is imported, as it is by Inductor.
    """

    def __init__(self, dicts: Sequence[Any]) -> None:
        self._dicts = tuple({id(one): one for one in dicts}.values())
        self._check: Check = _never
        self._looks, self._due = 0, 1

    def holds(self) -> bool:
        """Whether nobody has written to one of them since they were looked into. If not, they are to be looked at."""
        return self._check(self._dicts)

    def looked(self, look: Callable[[], bool]) -> bool:
        """Look into them: whether they hold what they did. Counts are taken before, since other threads may write."""
        self._looks += 1
        if self._looks < self._due:
            return look()
        counts = _counts(self._dicts)
        if not look():
            return False
        self._check, self._due = counts, 2 * self._looks
        return True


def _never(_: tuple[Any, ...]) -> bool:
    return False


def _counts(dicts: tuple[Any, ...]) -> Check:
    """What says whether all counts are what they are now."""
    if "torch._dynamo.guards" not in sys.modules:  # which C++ would import
        return _never
    try:
        root: Any = torch._C._dynamo.guards.RootGuardManager()
        for number, one in enumerate(dicts):
            root.tuple_getitem_manager(number, "", None, None).add_dict_version_guard(one, [], None)
    except (AttributeError, TypeError):  # another version of torch
        return _never
    check: Check = root.check
    return check
