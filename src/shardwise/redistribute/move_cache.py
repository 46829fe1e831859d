"""Moves that several uses of one tensor share.

Whether a use shares an earlier move decides whether a rank communicates, so it must be decided alike on all ranks: by
the program, never by what one rank happens to keep alive. A moved copy is therefore held strongly: by the tensor it was
made from, or, for a leaf, by the window here (a leaf that held it would never be freed: copy → graph → leaf). The
window is bounded, and emptied by every backward pass and every move without gradients. Each mesh has its own, because
ranks of one submesh may do what others do not: what happens on a mesh happens on all of its ranks, so it empties the
windows of that mesh and of those within it.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from shardwise.layout import Mesh

WINDOW = 64

_stamps = itertools.count()
windows: dict[Mesh, dict[int, Tensor]] = {}  # those that are not empty


def remember(moved: Tensor, mesh: Mesh) -> int:
    """Keep a moved copy of a leaf for a while; the stamp finds it again."""
    stamp = next(_stamps)
    window = windows.get(mesh)
    if window is None:
        window = windows[mesh] = {}
    window[stamp] = moved
    if len(window) > WINDOW:
        del window[next(iter(window))]
    return stamp


def recall(stamp: int, mesh: Mesh) -> Tensor | None:
    window = windows.get(mesh)
    return None if window is None else window.get(stamp)


def forget(mesh: Mesh) -> None:
    """Start afresh: uses on a mesh from here on share nothing with those before."""
    if windows:
        windows.pop(mesh, None)
        for other in [other for other in tuple(windows) if other.is_within(mesh)] if windows else ():
            windows.pop(other, None)  # ranks may be threads
