"""Where a parameter is read from: keys of files under other names, and what is to be made of what they hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from shardwise.errors import PlanError


class From:
    """What a parameter is made of: keys of the files, what is made of each, and how several are joined.

    `view` is a function of a tensor. Where it only looks at it otherwise (transposes, slices, `unflatten` …), only what
    is needed of the result is read. It need not put dims together again: a result of `[heads, 2, n, width]` fits a
    parameter of `[heads * 2 * n, width]`. Whatever else it does is computed from the whole of the stored tensor, one
    parameter at a time. `join` is the dim along which what is made of several keys is put together; without it, `view`
    is given the tensors of all keys.

    >>> From("c_attn.weight", view=lambda w: w.T[:768])  # the queries of a fused, transposed weight
    From('c_attn.weight', view=...)
    >>> From("q.weight", "k.weight", "v.weight", join=0)
    From('q.weight', 'k.weight', 'v.weight', join=0)
    """

    __slots__ = ("join", "keys", "view")

    def __init__(self, *keys: str, view: Callable[..., Tensor] | None = None, join: int | None = None) -> None:
        if not keys or not all(isinstance(key, str) for key in keys):
            raise TypeError("From takes the keys that a parameter is read from, as text")
        if len(keys) > 1 and join is None and view is None:
            raise TypeError(f"From({', '.join(map(repr, keys))}): say along which dim they are joined, with join=")
        self.keys, self.view, self.join = keys, view, join

    def __repr__(self) -> str:
        options = ["view=..."] * (self.view is not None) + [f"join={self.join}"] * (self.join is not None)
        return f"From({', '.join([*map(repr, self.keys), *options])})"


KeyMap = Mapping[str, str | From | None] | Callable[[str], str | From | None]
"""Where parameters and buffers are read from, by their names; None: nowhere, they stay as they are. In a mapping, `*`
in a name stands for one part of it and `**` for any number; in the keys they stand for the same, in their order."""


def resolved(names: Sequence[str], keys: KeyMap | None) -> dict[str, From | None]:
    """For every name what it is read from: its own key, unless it is said otherwise."""
    if keys is None:
        return {name: From(name) for name in names}
    if not isinstance(keys, Mapping):
        return {name: _as_from(keys(name)) for name in names}
    patterns = [(pattern, _regex(pattern), _as_from(source)) for pattern, source in keys.items()]
    found: dict[str, From | None] = {}
    used: set[str] = set()
    for name in names:
        found[name] = From(name)
        for pattern, regex, source in patterns:
            if (match := regex.fullmatch(name)) is not None:
                found[name] = None if source is None else _filled(source, match.groups(), pattern)
                used.add(pattern)
                break
    if unused := [pattern for pattern in keys if pattern not in used]:
        raise PlanError(f"keys names {unused[0]!r}, but no parameter or buffer that is left for it is called so")
    return found


def _as_from(source: str | From | None) -> From | None:
    if isinstance(source, str):
        return From(source)
    if source is None or isinstance(source, From):
        return source
    raise TypeError(f"a parameter is read from a key, or From(…) several, or None: not from a {type(source).__name__}")


_WILD = re.compile(r"(\*\*?)")


def _regex(pattern: str) -> re.Pattern[str]:
    parts = {"*": r"([^.]*)", "**": r"(.*)"}
    return re.compile("".join(parts.get(piece) or re.escape(piece) for piece in _WILD.split(pattern)), re.DOTALL)


def _filled(source: From, values: Sequence[str], pattern: str) -> From:
    """The keys with what their wildcards stand for."""

    def fill(key: str) -> str:
        left = iter(values)
        pieces = _WILD.split(key)
        if len(pieces) // 2 > len(values):
            raise PlanError(f"the key {key!r} has more wildcards than the name {pattern!r} that it is for")
        return "".join(next(left) if _WILD.fullmatch(piece) else piece for piece in pieces)

    return From(*map(fill, source.keys), view=source.view, join=source.join)
