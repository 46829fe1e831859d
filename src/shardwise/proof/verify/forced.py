"""A strategy, forced: run a call by one way its rule lists, through the machinery that runs real calls, and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import ranked
from shardwise.dispatch.planning.build import build
from shardwise.dispatch.planning.choose import Chooser
from shardwise.dispatch.planning.lower import lower_calls
from shardwise.dispatch.planning.realise import CannotRealise
from shardwise.dispatch.planning.trace import flat_tensors
from shardwise.layout import Layout, Mesh, Partial
from shardwise.proof.kit.compare import Wrong, check, check_shards, whole
from shardwise.proof.kit.placing import mesh_of, shards_of_whole, terms
from shardwise.proof.verify.case import Case, Run
from shardwise.rules import PENDING, AxisPlacement, Strategy, Value, rule_for
from shardwise.tensor import DTensor, wrap

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
    """What is written to keeps its placement; dispatch drops other ways."""
    return not (case.call.outputs and way.outs) or all(way.ins[i] in way.outs for i in case.call.mutated)


def has_terms(case: Case, way: Strategy) -> bool:
    """Whether there are terms of every input that is pending: there is no largest of complex numbers, for instance."""
    pairs = zip(case.tensors, way.ins, strict=True)
    return all(terms(x, [(p.reduce_op, 2)]) is not None for x, p in pairs if isinstance(p, Partial))


def trials(case: Case) -> Iterator[Trial]:
    """Every strategy on one axis of 2 and of 3 ranks, evenly cut and with an empty shard; on 2×2 ranks, along both axes
    and next to its neighbour in the list."""
    ways = concrete(case)
    for position, way in enumerate(ways):
        sharded = any(isinstance(p, int) for p in (*way.ins, *way.outs))
        yield Trial(mesh_of((2,)), (way,))
        if sharded:
            yield Trial(mesh_of((3,)), (way,))
            yield Trial(mesh_of((2,)), (way,), position % 2)
        yield Trial(mesh_of((2, 2)), (way, way))
        other = ways[(position + 1) % len(ways)]
        if other is not way:
            yield Trial(mesh_of((2, 2)), (way, other))


def failure(case: Case, trial: Trial) -> str | None:
    """What goes wrong in a trial; None if nothing does."""
    return _failure(case, trial, case.expected)


def misfit(case: Case, trial: Trial, *, replicas: bool) -> str | None:
    """What is wrong in a trial with the shapes of results that have no value to compare, or, if that is asked for, with
    their replicas."""
    return _failure(case, trial, None, replicas=replicas)


def _failure(case: Case, trial: Trial, expected: Run | None, *, replicas: bool = True) -> str | None:
    layouts = [_layout(trial, i, value) for i, value in enumerate(case.call.inputs)]
    leaves = [_distributed(x, layout) for x, layout in zip(case.tensors, layouts, strict=True)]
    pending = [p for layout in layouts for p in layout.pending if p is not None]
    with_gradient = expected is not None and expected.gradients is not None
    with_gradient = with_gradient and all(p.divides_gradients for p in pending)
    for position, leaf in enumerate(leaves):
        leaf.requires_grad_(with_gradient and case.wants_gradient(position))
    try:
        with torch.set_grad_enabled(with_gradient):
            results = _run(case, trial, layouts, leaves)
            _check_results(results, expected, replicas)
            if with_gradient:
                _check_gradients(case, results, leaves)
    except Impossible:
        raise
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return None


def _layout(trial: Trial, position: int, value: Value) -> Layout:
    """The layout of an input under the strategies of a trial."""
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
        raise Impossible
    sizes: list[tuple[int, ...] | None] = [None] * value.ndim
    if trial.lean is not None:
        for dim, axes in enumerate(splits):
            if axes:
                sizes[dim] = (0, value.shape[dim]) if trial.lean == 0 else (value.shape[dim], 0)
    return Layout(mesh, value.shape, splits, pending, sizes)


def _distributed(x: Tensor, layout: Layout) -> DTensor:
    shards = shards_of_whole(x, layout, x.numel())
    if shards is None:
        raise Impossible
    return wrap(ranked(shards), layout)


class _Forced(Chooser):
    """Chooses what it is told to, whatever speaks for something else."""

    def __init__(self, case: Case, trial: Trial) -> None:
        super().__init__(case.trace, trial.mesh, [list(trial.chosen)])
        self.chosen = trial.chosen

    def choose(self, *_: Any) -> Sequence[Strategy]:
        return self.chosen

    def deferred(self, *_: Any) -> Sequence[Strategy]:
        return self.chosen

    def follow(self, *_: Any) -> None:
        pass


def _run(case: Case, trial: Trial, layouts: Sequence[Layout], leaves: Sequence[DTensor]) -> list[DTensor]:
    try:
        lowered = lower_calls(_Forced(case, trial), layouts)
    except CannotRealise as error:  # dispatch would not combine them
        raise Impossible from error
    used = case.targets_copied(leaves)
    args, kwargs = case.arguments(used)
    out = flat_tensors(build(case.call.op, lowered, args, kwargs)(args, kwargs))
    return out or [used[i] for i in case.call.mutated]  # type: ignore[return-value]


def _check_results(results: Sequence[DTensor], expected: Run | None, replicas: bool) -> None:
    wanted = [None] * len(results) if expected is None else expected.results
    for i, (got, want) in enumerate(zip(results, wanted, strict=True)):
        if want is None:
            check_shards(f"result {i}", got, replicas=replicas)
        else:
            check(f"result {i}", got, want)


def _check_gradients(case: Case, results: Sequence[DTensor], leaves: Sequence[DTensor]) -> None:
    wanted = case.expected.gradients
    assert wanted is not None
    pairs = [(x, _gradient_for(x, w)) for x, w in zip(results, case.weights, strict=True) if x.requires_grad]
    if pairs:
        torch.autograd.backward([x for x, _ in pairs], [w for _, w in pairs])
    elif any(g is not None and g.any() for g in wanted):
        raise Wrong("no gradient flows")
    for i, (want, leaf) in enumerate(zip(wanted, leaves, strict=True)):
        if want is not None and leaf.grad is not None:
            check(f"gradient of input {i}", leaf.grad, want)
        elif any(there is not None and whole(there).any() for there in (want, leaf.grad)):
            raise Wrong(f"gradient of input {i} is {'missing' if leaf.grad is None else 'not zero'}")


def _gradient_for(x: DTensor, weight: Tensor) -> DTensor:
    """The weight as a gradient that flows into a result: replicated, and dispatch brings it where it belongs."""
    mesh = x._layout.mesh
    return wrap(ranked([weight.clone() for _ in mesh.held]), Layout(mesh, tuple(weight.shape)))
