"""Rules as data: which dims of inputs and outputs correspond, in the manner of einsum.

Each dim of each tensor carries a factor or None (a dim that must not be sharded). Sharding a factor shards every dim
that carries it; an output without it is then a pending reduction. Everything else is derived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.layout import Partial
from shardwise.rules.kit.types import PENDING, SUM, AxisPlacement, Call, Pending, Rule, Strategy

Factor = str | int | None
LINEAR = (SUM, Partial("avg"))


@dataclass(frozen=True, slots=True)
class Factors:
    """The correspondence of dims in one call.

    `reduce` names the reduction of factors that the outputs lack (by default a sum; a factor that must not be sharded
    maps to None). `linear` lists sets of inputs in which the outputs are jointly linear: one of the reductions
    `pass_through` may be pending on these together, and then is on the outputs. `addends` are inputs added to a
    contraction: where the contraction is split into terms, they must be split too, so that they count once.
    """

    ins: Sequence[Sequence[Factor]]
    outs: Sequence[Sequence[Factor]]
    reduce: Mapping[Factor, Partial | None] = field(default_factory=dict)
    linear: Sequence[frozenset[int]] = ()
    pass_through: Sequence[Partial | Pending] = LINEAR
    addends: frozenset[int] = frozenset()

    def strategies(self) -> list[Strategy]:
        found = [Strategy((None,) * len(self.ins), (None,) * len(self.outs))]
        for factor in dict.fromkeys(f for dims in (*self.ins, *self.outs) for f in dims if f is not None):
            reduction = self.reduce.get(factor, SUM)
            ins: list[AxisPlacement] = [_dim_of(factor, dims) for dims in self.ins]
            outs: list[AxisPlacement] = [_dim_of(factor, dims) for dims in self.outs]
            if None in outs:
                if reduction is None:
                    continue
                outs = [reduction if dim is None else dim for dim in outs]
                ins = [SUM if i in self.addends else dim for i, dim in enumerate(ins)]
            found.append(Strategy(tuple(ins), tuple(outs)))
        for together in self.linear:
            for pending in self.pass_through:
                terms = tuple(pending if i in together else None for i in range(len(self.ins)))
                found.append(Strategy(terms, (pending,) * len(self.outs)))
        return found


def moved(ins: Sequence[Sequence[Factor]], outs: Sequence[Sequence[Factor]]) -> Factors:
    """Of an op that only moves elements: whatever reduction is pending on all inputs passes through."""
    together = [frozenset(range(len(ins)))] if ins else []
    return Factors(ins, outs, linear=together, pass_through=[PENDING])


def _dim_of(factor: Factor, dims: Sequence[Factor]) -> int | None:
    for dim, carried in enumerate(dims):
        if carried == factor:
            return dim
    return None


def einsum(notation: str, *, linear: Sequence[set[int]] = ()) -> Rule:
    """A rule in einsum's notation: `einsum("ik,kj->ij", linear=[{0}, {1}])`. Capital letters are not sharded."""
    left, right = notation.replace(" ", "").split("->")
    ins = [_letters(term) for term in left.split(",")]
    outs = [_letters(term) for term in right.split(",")]
    factors = Factors(ins, outs, linear=[frozenset(group) for group in linear])
    strategies = factors.strategies()
    return Rule(lambda call: strategies)


def _letters(term: str) -> tuple[Factor, ...]:
    return tuple(None if letter.isupper() else letter for letter in term)


def factor_rule(factors: Callable[[Call], Factors], local: Callable | None = None) -> Rule:
    """A rule whose correspondence depends on the call."""
    return Rule(lambda call: factors(call).strategies(), local)


def dims_of(ndim: int, prefix: str = "") -> tuple[str, ...]:
    """Factors for all dims of a tensor, by position."""
    return tuple(f"{prefix}{dim}" for dim in range(ndim))


def dims_but(ndim: int, unsharded: Collection[int]) -> list[Factor]:
    """Factors for all dims of a tensor, by position, but for those that must not be sharded."""
    return [None if dim in unsharded else name for dim, name in enumerate(dims_of(ndim))]


def broadcast(shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[Factor, ...]:
    """The factors of an operand that broadcasts to `out`: dims counted from the right, stretched ones carry none."""
    lead = len(out) - len(shape)
    return tuple(None if size == 1 and out[lead + d] != 1 else lead + d for d, size in enumerate(shape))


def other_dims(call: Call, unsharded: Collection[int] = ()) -> Factors:
    """All dims but some may be sharded, in a call whose input and outputs have the same dims."""
    names = dims_but(call.inputs[0].ndim, unsharded)
    return Factors([names], [names] * len(call.outputs))


def moved_along(call: Call, dims: Collection[int] = ()) -> Factors:
    """The same, in a call that only moves elements, along some dims."""
    names = dims_but(call.inputs[0].ndim, dims)
    return moved([names], [names] * len(call.outputs))
