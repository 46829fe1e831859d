"""Choosing: how one call of a trace runs along each mesh axis, given how its inputs are laid out.

The choice is predictable before it is clever: it looks at one call, never at the calls to come, and follows the five
sentences of docs/design.md ("The choice"). 1: `_unmoved`; 2: `_is_open`; 3: `_widens`, `deferred`; 4: `Traffic`; 5:
`Traffic._move`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import product

from shardwise.dispatch.planning.trace import Trace
from shardwise.layout import Layout, Mesh, Partial
from shardwise.redistribute import DUAL, TABLE, wire_bytes
from shardwise.rules import PENDING as ANY_REDUCTION
from shardwise.rules import SUM, AxisPlacement, Call, Strategy, Value, is_inexact, replicated

IMPOSSIBLE = float("inf")

STAY = 1.25
"""An activation is moved from where it was sharded only if that sends a fifth less than to gather a parameter: layouts
should not tip for the size of a bias."""

Ban = tuple[int, Strategy]


class NoStrategyError(Exception):
    """No strategy of a call can be reached, because what it writes to cannot be moved."""

    def __init__(self, call: Call) -> None:
        super().__init__(str(call))
        self.call = call


class Chooser:
    """Chooses strategies for the calls of a trace, one after the other.

    `by_gradient` tells afterwards whether some choice would have been another one if other arguments needed gradients
    or were parameters.
    """

    def __init__(self, trace: Trace, mesh: Mesh, options: Sequence[list[Strategy]]) -> None:
        self.trace = trace
        self.mesh = mesh
        self.options = options
        self.by_gradient = False
        self._needs_grad = set(trace.need_grad)
        # (value, axis): pending there, and an earlier call has reduced it
        self._reduced = {(index, axis) for index in trace.reduced for axis in range(mesh.ndim)}

    def choose(self, position: int, have: Sequence[Layout], banned: Set[Ban]) -> Sequence[Strategy]:
        """One strategy per axis. Axes along which nothing need move are decided first; what the others send depends on
        how the results are sharded along those."""
        call = self.trace.calls[position]
        at = [self._at(call, have, axis) for axis in range(self.mesh.ndim)]
        fixed = self._fixed(call)
        found: list[Strategy | None] = []
        open_to: list[list[Strategy]] = []
        for axis, here in enumerate(at):
            ways = [way for way in self.options[position] if not banned or (axis, way) not in banned]
            open_to.append([way for way in _filled(ways, here) if _is_open(way, call, here, fixed)])
            if not open_to[-1]:
                raise NoStrategyError(call)
            found.append(_unmoved(open_to[-1], call, here))
        for axis, way in enumerate(found):
            if way is None:
                found[axis] = self._cheapest(open_to[axis], call, axis, at[axis], have, found)
        return found  # type: ignore[return-value]

    def deferred(self, position: int, have: Sequence[Layout], chosen: Sequence[Strategy]) -> Sequence[Strategy]:
        """The strategies as chosen; but where a pending sum would be reduced only to be added to replicated operands of
        its size, the result is pending instead, and reduced in its own memory."""
        call = self.trace.calls[position]
        if len(call.outputs) != 1 or len(call.inputs) < 2 or call.is_view or call.mutated:
            return chosen
        terms = Strategy((SUM,) * len(call.inputs), (SUM,))
        if terms not in self.options[position]:
            return chosen
        return [
            terms if way == replicated(call) and self._is_sum_of(call, self._at(call, have, axis)) else way
            for axis, way in enumerate(chosen)
        ]

    def _is_sum_of(self, call: Call, at: Sequence[AxisPlacement]) -> bool:
        sizes = [value.numel for value, now in zip(call.inputs, at, strict=True) if now == SUM]
        return bool(sizes) and all(now in (None, SUM) for now in at) and call.outputs[0].numel <= max(sizes)

    def follow(self, call: Call, have: Sequence[Layout], chosen: Sequence[Strategy]) -> None:
        """Take note of a call that runs as chosen."""
        if call.mutated and self._reduced:
            families = self.trace.written_families
            written = {families.get(index, index) for index in (call.inputs[i].index for i in call.mutated)}
            self._reduced = {(v, axis) for v, axis in self._reduced if families.get(v, v) not in written}
        for axis, way in enumerate(chosen):
            for value, layout, wanted in zip(call.inputs, have, way.ins, strict=True):
                if wanted is None and layout.pending[axis] is not None:
                    self._reduced.add((value.index, axis))
        for value in call.outputs:
            for axis in range(self.mesh.ndim):
                self._reduced.discard((value.index, axis))
            if any(x.index in self._needs_grad for x in call.inputs) and is_inexact(value.dtype):
                self._needs_grad.add(value.index)
            if call.is_view and call.inputs[0].is_parameter:
                value.is_parameter = True

    def _at(self, call: Call, have: Sequence[Layout], axis: int) -> list[AxisPlacement]:
        shown = call.is_view and any(value.index in self.trace.returned for value in call.outputs)
        return [
            None if (value.index, axis) in self._reduced and not shown and i not in call.mutated else layout.along(axis)
            for i, (value, layout) in enumerate(zip(call.inputs, have, strict=True))
        ]

    def _fixed(self, call: Call) -> set[int]:
        """Inputs that must stay where they are: what others see being written to; and what is written to a view of a
        moved copy, or to its base, would be lost."""
        fixed = {i for i in call.mutated if call.inputs[i].index in self.trace.pinned}
        if call.is_view and call.inputs and call.inputs[0].index in self.trace.written_families:
            fixed.add(0)
        return fixed

    def _cheapest(
        self,
        ways: list[Strategy],
        call: Call,
        axis: int,
        at: list[AxisPlacement],
        have: Sequence[Layout],
        chosen: Sequence[Strategy | None],
    ) -> Strategy:
        if len(ways) == 1:
            return ways[0]
        outs = [_local_bytes(value, chosen, self.mesh, i) for i, value in enumerate(call.outputs)]
        ins = [_bytes(value) / _other_cuts(layout, axis) for value, layout in zip(call.inputs, have, strict=True)]
        grads = tuple(value.index in self._needs_grad for value in call.inputs)
        parameters = tuple(value.is_parameter for value in call.inputs)
        traffic = Traffic(self.mesh.shape[axis], tuple(at), tuple(ins), tuple(outs), grads, parameters)
        found = traffic.least(ways)
        self.by_gradient = self.by_gradient or not traffic.whoever_needs_gradients(found, ways)
        return found


def _filled(ways: Sequence[Strategy], at: Sequence[AxisPlacement]) -> Iterator[Strategy]:
    """The strategies, those for whatever reduction is pending once for each that is."""
    for way in ways:
        if ANY_REDUCTION not in way.ins:
            yield way
            continue
        asked = [p for p, wanted in zip(at, way.ins, strict=True) if wanted is ANY_REDUCTION]
        for pending in dict.fromkeys(p for p in asked if isinstance(p, Partial)):
            ins = tuple(pending if p is ANY_REDUCTION else p for p in way.ins)
            outs = tuple(pending if p is ANY_REDUCTION else p for p in way.outs)
            yield Strategy(ins, outs, way.cost, way.resize)


def _is_open(way: Strategy, call: Call, at: Sequence[AxisPlacement], fixed: set[int]) -> bool:
    """Whether a strategy may be taken: what must stay stays, pending values can be made, and nothing is invented."""
    if any(way.outs and way.ins[i] not in way.outs for i in call.mutated):
        return False
    if any(way.ins[i] != at[i] for i in fixed):
        return False
    if any(isinstance(p, Partial) and not _can_begin(p, now) for p, now in zip(way.ins, at, strict=True)):
        return False
    if any(p is not None and p == now for p, now in zip(way.ins, at, strict=True)):
        return True
    return all(p is None for p in way.ins)


def _can_begin(pending: Partial, now: AxisPlacement) -> bool:
    """Whether a value can be made pending: a sum of anything; an average or an extremum of equal terms. A norm has no
    sign, and a product no factors."""
    if pending == now or pending.reduce_op == "sum":
        return True
    return not isinstance(now, int) and pending.reduce_op in ("avg", "max", "min")


def _unmoved(ways: Sequence[Strategy], call: Call, at: Sequence[AxisPlacement]) -> Strategy | None:
    """The first strategy that takes all inputs as they are; else one for which replicated ones are sliced or masked."""
    free = [way for way in ways if all(_is_free(way, call, i, now) for i, now in enumerate(at))]
    free = [way for way in free if not _widens(way, call)]
    return min(free, key=lambda way: (way.cost, sum(p != now for p, now in zip(way.ins, at))), default=None)


def _is_free(way: Strategy, call: Call, i: int, now: AxisPlacement) -> bool:
    wanted = way.ins[i]
    if wanted == now:
        return True
    if now is not None:
        return False
    return not isinstance(wanted, Partial) or _is_bias(way, call, i)


def _widens(way: Strategy, call: Call) -> bool:
    """Whether a strategy converts a pending value to a wider dtype: it had better be reduced before."""
    if call.name != "_to_copy" or not isinstance(way.ins[0], Partial):
        return False
    return any(out.dtype.itemsize > call.inputs[0].dtype.itemsize for out in call.outputs)


def _is_bias(way: Strategy, call: Call, i: int) -> bool:
    """Whether a replicated input that is added to pending terms broadcasts to them, and leaves no more to be reduced.
    With one of their own shape the sum is reduced there (see `Chooser.deferred`)."""
    if any(call.inputs[i].shape == out.shape for out in call.outputs):
        return False
    makes_terms = any(isinstance(p, int) for p in way.ins)
    terms = [x.numel for x, p in zip(call.inputs, way.ins, strict=True) if isinstance(p, Partial)]
    return makes_terms or all(out.numel <= max(terms) for out in call.outputs)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a call's strategies send along an axis of some ranks: `at` is where inputs are, `ins` and `outs` the bytes
    that inputs and outputs would have if replicated along the axis."""

    ranks: int
    at: tuple[AxisPlacement, ...]
    ins: tuple[float, ...]
    outs: tuple[float, ...]
    grads: tuple[bool, ...]
    parameters: tuple[bool, ...]

    def least(self, ways: Sequence[Strategy]) -> Strategy:
        """The strategy that sends least; to compute everything everywhere is the last resort. Among equals one that
        leaves nothing pending, then one that moves parameters rather than activations, and then the first."""
        return min(ways, key=self._rank)

    def _rank(self, way: Strategy) -> tuple[bool, float, bool, bool]:
        sent = self.of(way)
        gathers = any(isinstance(now, int) for now in self.at) and all(p is None for p in way.ins)
        is_last = gathers or sent == IMPOSSIBLE
        return is_last, sent, any(isinstance(p, Partial) for p in way.outs), self._left(way)

    def _left(self, way: Strategy) -> bool:
        """Whether an activation is moved from where it was sharded."""
        return any(
            isinstance(now, int) and wanted != now and not parameter
            for now, wanted, parameter in zip(self.at, way.ins, self.parameters, strict=True)
        )

    def whoever_needs_gradients(self, found: Strategy, ways: Sequence[Strategy]) -> bool:
        """Whether a strategy would be taken whichever inputs needed gradients, or were parameters."""
        several = len(self.at)
        if several > 3:
            return False
        cases = product(product((False, True), repeat=several), ((False,) * several, (True,) * several))
        return all(replace(self, grads=grads, parameters=are).least(ways) is found for grads, are in cases)

    def of(self, way: Strategy) -> float:
        varies = any(p is not None for p in way.outs)
        moved = sum(self._move(i, wanted, varies) for i, wanted in enumerate(way.ins))
        due = sum(self._wire("all_reduce", n) for p, n in zip(way.outs, self.outs) if isinstance(p, Partial))
        return (way.cost + moved + due + self._return(way)) * (STAY if self._left(way) else 1.0)

    def _return(self, way: Strategy) -> float:
        """Bytes sent to bring results back to where an activation was sharded before it was moved: the next call finds
        it there, or in conflict again."""
        if not self._left(way):
            return 0.0
        passes = 1 + any(self.grads)
        return passes * sum(self._wire("all_to_all", n) for p, n in zip(way.outs, self.outs) if isinstance(p, int))

    def _move(self, i: int, wanted: AxisPlacement, varies: bool) -> float:
        """Bytes sent to bring an input where it is wanted, and its gradient back."""
        now = self.at[i]
        if isinstance(wanted, int) and isinstance(now, int) and wanted != now and self.parameters[i]:
            return IMPOSSIBLE
        if isinstance(wanted, Partial) and isinstance(now, Partial) and wanted != now:
            return self._move(i, None, varies=False) + self._wire("mask", self.ins[i])
        source, target = _type(now), "V" if wanted is None and varies else _type(wanted)
        if source == target and wanted == now:
            return 0.0
        forward = TABLE[source, target]
        if forward == "pad":  # what could be gathered would have to be reduced
            return self._wire("all_gather", self.ins[i]) + self._wire("all_reduce", self.ins[i])
        backward = TABLE[DUAL[target], DUAL[source]] if self.grads[i] else "nothing"
        return self._wire(forward, self.ins[i]) + self._wire(backward, self.ins[i])

    def _wire(self, kind: str, size: float) -> float:
        return wire_bytes(kind, size, self.ranks)


def _type(placement: AxisPlacement) -> str:
    return "R" if placement is None else "S" if isinstance(placement, int) else "P"


def _bytes(value: Value) -> int:
    return value.numel * value.dtype.itemsize


def _other_cuts(layout: Layout, axis: int) -> int:
    """Into how many pieces other axes than one cut a value."""
    pieces = 1
    for axes in layout.splits:
        for other in axes:
            if other != axis:
                pieces *= layout.mesh.shape[other]
    return pieces


def _local_bytes(value: Value, chosen: Sequence[Strategy | None], mesh: Mesh, i: int) -> float:
    """The bytes of an output, given how it is sharded along the axes that are chosen already."""
    size = float(_bytes(value))
    for axis, way in enumerate(chosen):
        if way is not None and isinstance(way.outs[i], int):
            size /= mesh.shape[axis]
    return size
