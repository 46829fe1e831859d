"""Moves that several uses of one tensor share.

Whether a use shares an earlier move decides whether a rank communicates, so it must be decided alike on all ranks: by
the program, never by what one rank happens to keep alive. A moved copy is therefore held strongly: by the tensor it was
made from, or, for a leaf, by the window here (a leaf that held it would never be freed: copy → graph → leaf). The
window is bounded, and emptied by every backward pass and every move without gradients.
"""

from __future__ import annotations

import itertools

from torch import Tensor

WINDOW = 64

_stamps = itertools.count()
_window: dict[int, Tensor] = {}


def remember(moved: Tensor) -> int:
    """Keep a moved copy of a leaf for a while; the stamp finds it again."""
    stamp = next(_stamps)
    _window[stamp] = moved
    if len(_window) > WINDOW:
        del _window[next(iter(_window))]
    return stamp


def recall(stamp: int) -> Tensor | None:
    return _window.get(stamp)


def forget() -> None:
    """Start afresh: uses from here on share nothing with those before."""
    if _window:
        _window.clear()
