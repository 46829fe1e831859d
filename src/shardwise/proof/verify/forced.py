"""A strategy, forced: run a call by one way its rule lists, through the machinery that runs real calls, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import ranked, simulate
from shardwise.dispatch.planning.build import build
from shardwise.dispatch.planning.lower import Banned, lower_calls
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.layout import Layout, Mesh, Partial
from shardwise.proof.verify.calls import filled
from shardwise.proof.verify.case import Case
from shardwise.proof.verify.parts import close, terms
from shardwise.rules import PENDING, AxisPlacement, Strategy, Value, rule_for
from shardwise.tensor import DTensor, wrap

Judged = Callable[[list[DTensor], list[DTensor]], str | None]
"""What is wrong with results, given the leaves they were made of."""

_disabled = torch._C.DisableTorchFunctionSubclass
FILLED = tuple(map(Partial, ("sum", "avg", "max", "min", "product")))
"""What PENDING may stand for."""


class Impossible(Exception):
    """A trial that says nothing: its strategies do not go together, or no terms make up such an input."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One strategy per axis of a mesh, and how sharded dims are cut: by `torch.chunk`, or into the explicit pieces that
    leave the `lean`-th rank with nothing."""

    mesh: Mesh
    chosen: tuple[Strategy, ...]
    lean: int | None = None

    def __str__(self) -> str:
        ways = " | ".join(f"{show_ins(way.ins)} -> {show_ins(way.outs)}" for way in self.chosen)
        return f"{'x'.join(map(str, self.mesh.shape))}{'' if self.lean is None else f' rank {self.lean} empty'}: {ways}"


def show(placement: AxisPlacement) -> str:
    return "R" if placement is None else f"S({placement})" if isinstance(placement, int) else str(placement)


def show_ins(placements: Sequence[AxisPlacement]) -> str:
    return ", ".join(map(show, placements)) or "nothing"


@lru_cache
def mesh_of(*shape: int) -> Mesh:
    return simulate(shape, ("a", "b")[: len(shape)])


def concrete(case: Case) -> list[Strategy]:
    """The strategies of a call, with PENDING spelled out, that dispatch would consider."""
    rule = rule_for(case.call.op)
    found: list[Strategy] = []
    for way in rule.strategies(case.call) if rule is not None else []:
        if PENDING in way.ins or PENDING in way.outs:
            for pending in FILLED:
                fill = lambda p, pending=pending: pending if p is PENDING else p  # noqa: E731
                found.append(replace(way, ins=tuple(map(fill, way.ins)), outs=tuple(map(fill, way.outs))))
        else:
            found.append(way)
    return [way for way in dict.fromkeys(found) if _keeps_targets(case, way)]


def _keeps_targets(case: Case, way: Strategy) -> bool:
    """What is written to stays as it lies; dispatch drops other ways."""
    return not (case.call.outputs and way.outs) or all(way.ins[i] in way.outs for i in case.call.mutated)


def has_terms(case: Case, way: Strategy) -> bool:
    """Whether there are terms of every input that is pending: there is no largest of complex numbers, for instance."""
    pairs = zip(case.recorded.tensors, way.ins, strict=True)
    return all(terms(x, p, 2) is not None for x, p in pairs if isinstance(p, Partial))


def trials(case: Case) -> Iterator[Trial]:
    """Every strategy on one axis of 2 and of 3 ranks, evenly cut and with an empty shard; on 2×2 ranks, along both axes
    and next to its neighbour in the list."""
    ways = concrete(case)
    for position, way in enumerate(ways):
        sharded = any(isinstance(p, int) for p in (*way.ins, *way.outs))
        yield Trial(mesh_of(2), (way,))
        if sharded:
            yield Trial(mesh_of(3), (way,))
            yield Trial(mesh_of(2), (way,), position % 2)
        yield Trial(mesh_of(2, 2), (way, way))
        other = ways[(position + 1) % len(ways)]
        if other is not way:
            yield Trial(mesh_of(2, 2), (way, other))


def failure(case: Case, trial: Trial) -> str | None:
    """What goes wrong in a trial; None if nothing does."""
    expected = case.expected
    return _failure(
        *(case, trial, expected.gradients is not None),
        lambda results, leaves: _wrong_value(expected.results, results) or _wrong_gradient(case, results, leaves),
    )


def misfit(case: Case, trial: Trial, *, replicas: bool) -> str | None:
    """What is wrong in a trial with the shapes of results that have no value to compare, or, if that is asked for, with
    their replicas."""
    return _failure(case, trial, False, lambda results, leaves: _misfit(results, replicas=replicas))


def _misfit(results: Sequence[DTensor], *, replicas: bool) -> str | None:
    found = (inconsistent(x, replicas=replicas) for x in results)
    return next((f"result {i}: {problem}" for i, problem in enumerate(found) if problem is not None), None)


def _failure(case: Case, trial: Trial, with_gradient: bool, judged: Judged) -> str | None:
    placed = [_layout(trial, i, value) for i, value in enumerate(case.call.inputs)]
    if any(layout is None for layout in placed):
        raise Impossible
    layouts = [layout for layout in placed if layout is not None]
    inputs = [_distributed(x, layout) for x, layout in zip(case.recorded.tensors, layouts, strict=True)]
    leaves = [x for x in inputs if x is not None]
    if len(leaves) < len(inputs):
        raise Impossible
    pending = [p for layout in layouts for p in layout.pending if p is not None]
    with_gradient = with_gradient and all(p.divides_gradients for p in pending)
    for position, leaf in enumerate(leaves):
        leaf.requires_grad_(with_gradient and case.wants_gradient(position))
    try:
        with torch.set_grad_enabled(with_gradient):
            return judged(_run(case, trial, layouts, leaves), leaves)
    except Impossible:
        raise
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"


def _layout(trial: Trial, position: int, value: Value) -> Layout | None:
    """How an input lies under the strategies of a trial."""
    mesh = trial.mesh
    splits: list[tuple[int, ...]] = [()] * value.ndim
    pending: list[Partial | None] = [None] * mesh.ndim
    for axis, way in enumerate(trial.chosen):
        placement = way.ins[position]
        if isinstance(placement, int):
            splits[placement] += (axis,)
        elif isinstance(placement, Partial):
            pending[axis] = placement
    kinds = {"sum" if p.reduce_op == "avg" else p.reduce_op for p in pending if p is not None}
    if len(kinds) > 1:
        return None
    sizes: list[tuple[int, ...] | None] = [None] * value.ndim
    if trial.lean is not None:
        for dim, axes in enumerate(splits):
            if axes:
                sizes[dim] = (0, value.shape[dim]) if trial.lean == 0 else (value.shape[dim], 0)
    return Layout(mesh, value.shape, splits, pending, sizes)


def _distributed(x: Tensor, layout: Layout) -> DTensor | None:
    """A tensor in a layout, cut and split into terms here, so that nothing of redistribution is taken on trust."""
    parts: dict[tuple[int, ...], Tensor] = {(): x}
    for axis, extent in enumerate(layout.mesh.shape):
        further: dict[tuple[int, ...], Tensor] = {}
        pending = layout.pending[axis]
        for at, part in parts.items():
            split = [part] * extent if pending is None else terms(part, pending, extent, seed=len(at))
            if split is None:
                return None
            further.update(((*at, i), piece) for i, piece in enumerate(split))
        parts = further
    shards = []
    for coordinate in layout.mesh.held:
        part = parts[coordinate]
        for dim, (start, extent) in enumerate(zip(*layout.box(coordinate), strict=True)):
            part = part.narrow(dim, start, extent)
        shards.append(part.clone(memory_format=torch.contiguous_format))
    with _disabled():
        return wrap(ranked(shards), layout)


class _Forced:
    """Chooses what it is told to, whatever speaks for something else."""

    def __init__(self, chosen: Sequence[Strategy]) -> None:
        self.chosen = chosen

    def choose(self, *_: Any) -> Sequence[Strategy]:
        return self.chosen

    def deferred(self, *_: Any) -> Sequence[Strategy]:
        return self.chosen

    def follow(self, *_: Any) -> None:
        pass


def _run(case: Case, trial: Trial, layouts: Sequence[Layout], leaves: Sequence[DTensor]) -> list[DTensor]:
    recorded = case.recorded
    try:
        lowered = lower_calls(recorded.trace, trial.mesh, layouts, [list(trial.chosen)], _Forced(trial.chosen))
    except Banned as error:  # dispatch would not combine them
        raise Impossible from error
    used = [x.clone() if i in case.call.mutated and x.requires_grad else x for i, x in enumerate(leaves)]
    held = {value.index: x for value, x in zip(case.call.inputs, used, strict=True)}
    args = tuple(filled(arg, held) for arg in case.call.args)
    kwargs = {name: filled(arg, held) for name, arg in case.call.kwargs.items()}
    plan = build(case.call.op, lowered, args, kwargs)
    out = flat_tensors(plan(args, kwargs))
    return out or [used[i] for i in case.call.mutated]  # type: ignore[return-value]


def _wrong_value(expected: Sequence[Tensor], results: Sequence[DTensor]) -> str | None:
    for i, (want, got) in enumerate(zip(expected, results, strict=True)):
        if not isinstance(got, DTensor):
            return f"result {i} is no DTensor"
        problem = inconsistent(got)
        if problem is not None:
            return f"result {i}: {problem}"
        if not close(got.detach().full_tensor(), want):
            return f"result {i} is wrong, as {got._layout}"
    return None


def inconsistent(x: DTensor, *, replicas: bool = True) -> str | None:
    """How the shards contradict their layout: shapes that do not fit it, or replicas that differ."""
    layout = x._layout
    with _disabled():
        shards = [s.detach().as_subclass(Tensor) for s in (x, *x.__dict__.get("_peers", ()))]
    shapes = [tuple(shard.shape) for shard in shards]
    if shapes != list(layout.held_shapes):
        return f"shards {shapes} do not fit {layout}"
    if not replicas:
        return None
    seen: dict[Any, Tensor] = {}
    for coordinate, shard in zip(layout.mesh.held, shards, strict=True):
        key = (layout.box(coordinate), tuple(c for c, p in zip(coordinate, layout.pending, strict=True) if p))
        if not close(shard, seen.setdefault(key, shard)):
            return f"replicas differ, as {layout}"
    return None


def _wrong_gradient(case: Case, results: Sequence[DTensor], leaves: Sequence[DTensor]) -> str | None:
    wanted = case.expected.gradients
    if wanted is None or not torch.is_grad_enabled():
        return None
    roots, weights = [], []
    for x, w in zip(results, case.weights, strict=True):
        if x.requires_grad:
            roots.append(x)
            weights.append(_gradient_for(x, w))
    if not roots:
        return "no gradient flows" if any(g is not None and g.any() for g in wanted) else None
    torch.autograd.backward(roots, weights)
    for i, (want, leaf) in enumerate(zip(wanted, leaves, strict=True)):
        got = leaf.grad
        if want is None or got is None:
            there = want if got is None else got.full_tensor()
            if there is not None and there.any():
                return f"gradient of input {i} is {'missing' if got is None else 'not zero'}"
            continue
        problem = inconsistent(got)
        if problem is not None:
            return f"gradient of input {i}: {problem}"
        if not close(got.full_tensor(), want):
            return f"gradient of input {i} is wrong, as {leaf._layout}"
    return None


def _gradient_for(x: DTensor, weight: Tensor) -> DTensor:
    """The weight as a gradient that flows into a result: whole, and dispatch brings it where it belongs."""
    mesh = x._layout.mesh
    with _disabled():
        return wrap(ranked([weight.clone() for _ in mesh.held]), Layout(mesh, tuple(weight.shape)))
