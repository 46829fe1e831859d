"""How often a DTensor has become another kind of tensor in place: of other data, another shape, or with another
`requires_grad`. Whoever relies on tensors to stay what they are looks at one number, and not at each of them."""

from __future__ import annotations


class Refits:
    """Counts."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


refits = Refits()
