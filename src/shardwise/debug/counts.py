"""Numbers for each kind of collective, by our names or by torch's ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_OPS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
_NAMESPACES = ("c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
_NAMES = {f"{space}::{op}": kind for space in _NAMESPACES for op, kind in _OPS.items()}
"""Ours for the names of torch's ops, overloads left out."""


class Counts(dict[Any, int]):
    """A number for each kind of collective, looked up by our name for it or by torch's op. Kinds that did not run are
    not in it, and looked up are 0, as ops of other kinds are.

    >>> import torch, torch.distributed._functional_collectives
    >>> counts = Counts([("all_gather", 2)])
    >>> counts["all_gather"], counts[torch.ops.c10d_functional.all_gather_into_tensor], counts["all_reduce"]
    (2, 2, 0)
    >>> counts == {"all_gather": 2}, counts == {torch.ops.c10d_functional.all_gather_into_tensor: 2}
    (True, True)
    """

    def __init__(self, numbers: Iterable[tuple[str, int]] = ()) -> None:
        super().__init__()
        for kind, number in numbers:
            self[kind] = self.get(kind, 0) + number

    def __missing__(self, key: Any) -> int:
        kind = _kind(key)
        if isinstance(kind, str) and kind not in _KINDS:
            raise KeyError(f"no collective is called {kind!r}; they are {', '.join(_KINDS)}, or torch's ops")
        return dict.get(self, kind, 0)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_kind(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_kind(key), default)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == {_kind(key): number for key, number in other.items()}

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


def _kind(key: Any) -> Any:
    """Our name for one of torch's ops, or for an overload of one; anything else as it is."""
    packet = getattr(key, "overloadpacket", key)
    return _NAMES.get(getattr(packet, "_qualified_op_name", ""), key)
