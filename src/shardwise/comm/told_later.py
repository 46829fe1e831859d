"""Checks that wait for company. To reduce a few numbers costs ranks on CPUs more than to compute most ops, so while a
module runs, what ranks must have alike, or have found to be bad, goes with the next small sum along the same axes.

If anything else is about to be communicated, or the module ends, it goes alone. Either way the message is of one form,
so ranks that do different things find out by it, and do not wait for each other. It is a sum, so numbers that must be
alike go with their squares: they are if the squares' sum times the ranks is the square of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from threading import get_ident

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm.captured import noters
from shardwise.comm.port import communicating
from shardwise.comm.record import off_the_record
from shardwise.errors import ReplicaError
from shardwise.layout import Mesh

PIECES, ROOM = 8, 14
"""Numbers of 0 to 255 that must be alike, the last for what a message carries; and how many it may carry."""
MOST_RANKS = 256
"""With more the sum of squares would be rounded."""
_COUNT, _BAD, _CARRIED = 2 * PIECES, 2 * PIECES + 1, 2 * PIECES + 2
_NOTHING = torch.iinfo(torch.int64).max

_numel = torch._C.TensorBase.numel

Refuse = Callable[[int], None]
"""Raises for the least of the bad numbers that ranks have found."""


class Window:
    """While it is open, checks of the ranks along some axes wait."""

    def __init__(self, mesh: Mesh, axes: tuple[int, ...], who: str) -> None:
        self.mesh, self.axes, self.who = mesh, axes, who
        self._thread = get_ident()
        self._alike: tuple[int, Callable[[], Exception]] | None = None
        self._found: list[tuple[int | None, Refuse]] = []
        self._reduce = mesh.port.reducer(mesh, axes, "sum")

    def have_alike(self, number: int, unlike: Callable[[], Exception]) -> None:
        """All ranks must have a number of seven bytes, or all raise."""
        self._alike = number, unlike

    def tell(self, bad: int | None, refuse: Refuse) -> None:
        """All ranks `refuse` the least number that one of them has found, if any has."""
        self._found.append((bad, refuse))

    def takes(self, mesh: Mesh, axes: tuple[int, ...]) -> bool:
        """Whether checks of these ranks may wait here."""
        return self._is_of_this_thread() and mesh is self.mesh and communicating(mesh, axes) == self.axes

    def settle(self) -> None:
        """Tell what waits, if anything does."""
        if self._is_waiting():
            self._send(None)

    def carry(self, x: Tensor, mesh: Mesh, axes: tuple[int, ...], op: str) -> bool:
        """Something is about to be reduced in place: tell what waits, with it if it fits. Whether it is reduced now."""
        if not self._is_waiting():
            return False
        fits = op == "sum" and x.dtype == torch.float32 and _numel(x) <= ROOM
        carried = x if fits and (mesh, axes) == (self.mesh, self.axes) else None
        self._send(carried)
        return carried is not None

    def _is_waiting(self) -> bool:
        return self._is_of_this_thread() and (self._alike is not None or bool(self._found))

    def _is_of_this_thread(self) -> bool:
        return self._thread == get_ident()

    def _send(self, carried: Tensor | None) -> None:
        alike, found = self._alike, self._found
        self._alike, self._found = None, []
        number, unlike = alike or (0, None)
        numel = 0 if carried is None else _numel(carried)
        pieces = [*number.to_bytes(PIECES - 1, "big"), 16 * (len(found) % 16) + numel]
        bad = any(worst is not None for worst, _ in found)
        unseen = _disable_current_modes if torch._C._len_torch_dispatch_stack() else nullcontext
        with off_the_record(), unseen(), torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            own = [*pieces, *(piece * piece for piece in pieces), 1, bad, *(0,) * ROOM]
            message = torch.tensor(own, dtype=torch.float32, device="cpu")
            part = message[_CARRIED : _CARRIED + numel]
            data = None if carried is None else carried.data.view(-1)
            if data is not None:
                part.copy_(data)
            self._reduce(message)
            self._read(message[:_CARRIED].tolist(), unlike)
            if message[_BAD].item():
                self._refuse(found)
            if data is not None:
                data.copy_(part)

    def _read(self, sums: list[float], unlike: Callable[[], Exception] | None) -> None:
        ranks = sums[_COUNT]
        differ = [ranks * sums[PIECES + i] != sums[i] ** 2 for i in range(PIECES)]
        if unlike is not None and any(differ[:-1]):
            raise unlike()
        if any(differ):
            raise ReplicaError(
                f"{self.who}: the ranks of {self.mesh} do not communicate the same in it; if another one has raised an "
                f"error of its own, it is to be read there"
            )

    def _refuse(self, found: list[tuple[int | None, Refuse]]) -> None:
        for worst, refuse in found:
            number = torch.tensor(_NOTHING if worst is None else worst, device="cpu")
            (least,) = self.mesh.port.all_reduce([number], self.mesh, self.axes, "min")
            if (number_of := int(least.item())) != _NOTHING:
                refuse(number_of)


windows: list[Window] = []
"""Those that are open. Ranks may be threads: each looks at its own."""


def open_window(mesh: Mesh, who: str) -> Window | None:
    """A window for the ranks of a mesh; none where checks cannot wait, or another one is open."""
    axes = communicating(mesh, tuple(range(mesh.ndim)))
    if (
        not axes
        or mesh.size() > MOST_RANKS
        or mesh.device_type != "cpu"
        or not hasattr(mesh.port, "reducer")
        or noters
        or torch._C._len_torch_dispatch_stack()
        or any(True for _ in _own())
    ):
        return None
    window = Window(mesh, axes, who)
    windows.append(window)
    return window


def close_window(window: Window) -> None:
    try:
        window.settle()
    finally:
        windows.remove(window)


def window_of(mesh: Mesh, axes: tuple[int, ...]) -> Window | None:
    """Where a check of these ranks may wait."""
    if torch._C._current_graph_task_id() != -1 or noters or torch._C._len_torch_dispatch_stack():
        return None
    return next((window for window in windows if window.takes(mesh, axes)), None)


def settle_all() -> None:
    """Something is about to be communicated: tell what waits."""
    for window in list(_own()):
        window.settle()


def _own() -> Iterator[Window]:
    return (window for window in windows if window._is_of_this_thread())


def carried(x: Tensor, mesh: Mesh, axes: tuple[int, ...], op: str) -> bool:
    """The same before something is reduced in place, which may go with it: whether it has."""
    return any(window.carry(x, mesh, axes, op) for window in list(_own()))  # there is one at most
