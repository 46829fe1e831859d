"""Where a parameter is read from: keys of files under other names, and what is to be made of what they hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from shardwise.errors import PlanError


class From:
    """The keys that a parameter is read from, and what is made of the tensors there.

    `make` is a function of torch of these tensors. Where it only takes them apart and puts them together (transposes,
    slices, `view`, `unflatten`, and at the end `cat`, `stack`, `reshape` or `flatten`), only what this rank needs is
    read. Whatever else it does is done with the whole of the stored tensors, for one parameter at a time.

    >>> import torch
    >>> From("c_attn.weight", make=lambda w: w.T[:768])  # the queries of a fused weight that is stored transposed
    From('c_attn.weight', make=...)
    >>> From("q.weight", "k.weight", "v.weight", make=lambda q, k, v: torch.cat([q, k, v]))
    From('q.weight', 'k.weight', 'v.weight', make=...)
    """

    __slots__ = ("keys", "make")

    def __init__(self, *keys: str, make: Callable[..., Tensor] | None = None) -> None:
        if not keys or not all(isinstance(key, str) for key in keys):
            raise TypeError("From takes the keys that a parameter is read from, as text")
        if len(keys) > 1 and make is None:
            raise TypeError(f"From({', '.join(map(repr, keys))}): say what is made of several tensors, with make=")
        self.keys, self.make = keys, make

    def __repr__(self) -> str:
        return f"From({', '.join([*map(repr, self.keys), *['make=...'] * (self.make is not None)])})"


KeyMap = Mapping[str, str | From | None] | Callable[[str], str | From | None]
"""Where parameters and buffers are read from, by their names; None: nowhere, they stay as they are. In a mapping, `*`
in a name stands for one part of it and `**` for any number; in the keys they stand for the same, in their order."""


def resolved(names: Sequence[str], keys: KeyMap | None) -> dict[str, From | None]:
    """For every name what it is read from: its own key, unless it is said otherwise."""
    if keys is None:
        return {name: From(name) for name in names}
    if not isinstance(keys, Mapping):
        if not callable(keys):
            raise TypeError(f"keys is a mapping from names, or a function of them: not a {type(keys).__name__}")
        return {name: _as_from(keys(name)) for name in names}
    sources = {pattern: _as_from(source) for pattern, source in keys.items()}
    order = {pattern: at for at, pattern in enumerate(sources)}
    wild = [(pattern, _regex(pattern)) for pattern in sources if "*" in pattern]
    found: dict[str, From | None] = {}
    used: set[str] = set()
    for name in names:
        last = order.get(name, len(order))  # the first that fits counts
        fits = ((one, fit.groups()) for one, regex in wild if order[one] < last and (fit := regex.fullmatch(name)))
        pattern, values = next(fits, (name, ()))
        source = sources.get(pattern, From(name))
        found[name] = _filled(source, values, pattern) if source is not None and pattern in sources else source
        used.add(pattern)
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

    return From(*map(fill, source.keys), make=source.make)
