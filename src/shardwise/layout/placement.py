"""How a tensor is distributed along one mesh axis, as users write it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import PlacementError

REDUCTIONS = ("sum", "avg", "max", "min", "product", "norm")


class Placement:
    """Base of the closed set `Replicate`, `Shard`, `Partial`: one value per mesh axis."""

    __slots__ = ()

    def is_replicate(self) -> bool:
        return isinstance(self, Replicate)

    def is_shard(self, dim: int | None = None) -> bool:
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return isinstance(self, Partial) and (reduce_op is None or self.reduce_op == reduce_op)


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank along the axis holds the whole value.

    >>> Replicate()
    Replicate()
    """

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The tensor dimension `dim` is cut into pieces along the axis; negative dims count from the end.

    >>> Shard(0), Shard(-1).is_shard()
    (Shard(dim=0), True)
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise PlacementError(f"Shard takes one tensor dimension as an int, got {self.dim!r}")

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank holds a term of the value; `reduce_op` over the axis gives it.

    >>> Partial(), Partial("norm", 2.0)
    (Partial('sum'), Partial('norm', 2.0))
    """

    reduce_op: str = "sum"
    p: float | None = None

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCTIONS:
            raise PlacementError(f"Partial({self.reduce_op!r}): the reduction must be one of {', '.join(REDUCTIONS)}")
        if (self.reduce_op == "norm") != (self.p is not None):
            raise PlacementError("Partial('norm', p) needs its order p; the other reductions take none")

    @property
    def divides_gradients(self) -> bool:
        """Whether the gradients of the terms are a gradient of the whole: they are not where terms are multiplied, or
        are norms, since what one gets then depends on the others."""
        return self.reduce_op not in ("product", "norm")

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op!r})" if self.p is None else f"Partial({self.reduce_op!r}, {self.p})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})" if self.p is None else f"P({self.reduce_op} {self.p:g})"


SUM = Partial("sum")
